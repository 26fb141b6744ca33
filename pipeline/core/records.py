"""The type of every file that a stage writes, once. `read` and `read_rows` check a file where it is read, so that damage is one
sentence there and not a KeyError an hour later.

They are TypedDicts: a record in memory is the JSON of its file, mypy knows its keys, and a million rows cost no object each.
A key that a file may lack is NotRequired; everything else is written always, null where it is not known.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

T = TypeVar("T")
Options = dict[str, Any]  # what params.yaml gives a quantizer or an engine: its own names, checked by its signature


class Metric(TypedDict):
    """A value with its interval. low, high: null where there is none, and `warnings` (or `reason`) says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    unit: str
    confidence: NotRequired[float | None]
    method: NotRequired[str]
    warnings: NotRequired[list[str]]
    clusters: NotRequired[int | None]
    weight: NotRequired[float | None]
    between: NotRequired[float | None]
    reason: NotRequired[str]


Metrics = dict[str, Metric]


class Outcome(TypedDict):
    """How a stage ended for a variant: `ok`, or `unsupported`, `invalid`, `crashed` with the reason."""

    status: str
    reason: str | None


class File(TypedDict):
    bytes: int
    sha256: str


# ---- manifests: what a folder of artifacts/ holds and how it was made --------------------------------------------------------


class Folder(TypedDict):
    """What all manifests have."""

    status: str
    files: dict[str, File]
    digest: str
    versions: dict[str, str]


class BaseManifest(Folder):
    """artifacts/base/manifest.json. repaired: {file: sha256 as it was given}."""

    source: str
    license: str
    note: str | None
    weights: int
    trust_remote_code: bool
    repairs: list[str]
    repaired: NotRequired[dict[str, str]]
    dequantized_from: NotRequired[str]
    package: NotRequired[str]
    path: NotRequired[str]
    id: NotRequired[str]
    commit: NotRequired[str | None]


class ModelManifest(Folder):
    """artifacts/models/<variant>/manifest.json: all that was asked, and of an `ok` variant what was built."""

    reason: str | None
    variant: str
    quantizer: str
    asked: Options
    options: Options
    engine: str
    engine_options: Options
    base: str
    seed: int
    trust_remote_code: bool
    dequantized_from: NotRequired[str]
    weight_bytes: NotRequired[int]
    bits_per_weight: NotRequired[float]
    quantized_share: NotRequired[float]
    packed_bits: NotRequired[float | None]
    tensor_types: NotRequired[dict[str, int]]
    dtype: NotRequired[str | None]
    warnings: NotRequired[list[str] | None]


class StoreManifest(Folder):
    """artifacts/reference/manifest.json."""

    variant: str
    model: str
    kind: str
    vocab: int
    tokens: int
    windows: int
    skipped: dict[str, int]
    temperature: float
    sets: dict[str, str]
    threads: int


# ---- rows: one a line or a token, and the meta file beside them --------------------------------------------------------------


class RowsMeta(Outcome):
    """What every meta file has: the variant, and the digest of the model that made the rows."""

    variant: str
    model: str


class TokensMeta(RowsMeta):
    reference: str
    versions: dict[str, str]
    tokens: NotRequired[int]
    kernels: NotRequired[dict[str, int]]
    attention: NotRequired[str | None]


class AnswersMeta(RowsMeta):
    """sets: {file: sha256}; once: why the rows hold no second answers in float32."""

    sets: dict[str, str]
    batch_size: int
    seed: int
    versions: dict[str, str]
    once: str | None


class RepliesMeta(RowsMeta):
    reference: str
    versions: dict[str, str]
    tokens: int
    batch: int


class AnswerAgain(TypedDict):
    loglikelihoods: list[float] | None
    prediction: int | str | None
    acc: float | None


class AnswerRow(AnswerAgain):
    """One item of a task. again: the same weights' answer in float32."""

    task: str
    doc_id: int
    item: str | None
    slice: str | None
    cluster: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    filter: str
    kind: str
    first_token_ids: list[int]
    n_tokens: int
    truncated: bool
    target: Any
    empty: bool
    non_finite: int
    bytes: NotRequired[int]
    again: NotRequired[AnswerAgain]


class ReplyRow(TypedDict):
    """A greedy reply to a trajectory prompt. cut: it stopped at the limit; again: the reference's at another batch size."""

    id: str
    domain: str
    prompt: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    cut: bool
    again: NotRequired[list[int]]


class WindowRow(TypedDict):
    """A stretch of text that is scored from token `first` on."""

    window: str
    set: str
    document: str
    domain: str
    token_ids: list[int]
    first: int


# ---- results: what judging stages write into reports/ ------------------------------------------------------------------------


class Floor(TypedDict):
    """reports/floor.json: the reference against itself. store: digest of the reference's store."""

    reference: str
    model: str
    store: str
    runs: dict[str, str]
    windows: list[str]
    threads: int
    metrics: Metrics
    versions: dict[str, str]


class VariantResult(Outcome):
    """reports/metrics/<variant>.json. model, base: digests; inputs: {file: sha256}; bounds: sentences on what bounds each phase."""

    variant: str
    reference: str
    quantizer: str
    asked: Options
    options: Options
    engine: str
    engine_options: Options
    model: str
    base: str
    machine: dict[str, Any] | None
    kernels: dict[str, int] | None
    inputs: dict[str, str]
    versions: dict[str, str]
    metrics: Metrics
    curves: dict[str, Any]
    bounds: dict[str, Any]
    dequantized_from: NotRequired[str]


class ServerReport(Outcome):
    """reports/serving/<variant>.json: metrics of each level of load, and of the whole run."""

    variant: str
    model: str
    asked: dict[str, Any]
    levels: dict[str, Metrics]
    knee: Metric | None
    server_memory_bytes: Metric | None


class RuleVerdict(TypedDict):
    """A rule's verdict of a variant, with the figure that it judged. settle: items that would decide."""

    metric: str
    against: str
    bound: str
    threshold: float
    better: str
    neutral: float | None
    unit: str
    required: bool
    verdict: str
    reason: str
    settle: int | None
    p_fail: float | None
    p_fail_holm: float | None
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    clusters: int | None
    between: float | None


class Family(TypedDict):
    """The required rules of a variant, for Holm's correction."""

    rules: int
    correction: str
    level: float
    sided: str


class VariantVerdict(TypedDict):
    verdict: str
    reason: str
    required: bool
    rules: list[RuleVerdict]
    family: Family


class Verdict(TypedDict):
    """reports/gate.json. floor: the reference's noise floors; inputs: digests of what the verdict depends on."""

    verdict: str
    reference: str
    inconclusive: str
    floor: dict[str, Metric | None]
    variants: dict[str, VariantVerdict]
    inputs: NotRequired[dict[str, str]]
    loosened: NotRequired[list[str]]


# ---- reading -----------------------------------------------------------------------------------------------------------------


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(value: Any, kind: type[T], where: str) -> T:
    """`value` as it is, if it is a record of that kind. Raises `ArtifactError` with the first fault."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ArtifactError(f"{where} is damaged ({place}: {first['msg'].lower()}); delete it and run `dvc repro`") from None
    return value  # type: ignore[no-any-return]


def read(path: Path, kind: type[T]) -> T:
    """The record that a JSON file holds. Raises `ArtifactError` if it is missing or damaged."""
    return checked(artifacts.read_json(path), kind, str(path))


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """The records that a JSONL file holds, one a line."""
    return checked(artifacts.read_jsonl(path), list[kind], str(path))  # type: ignore[valid-type]
