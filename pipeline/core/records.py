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
Json = dict[str, Any]  # not ours: a model's config, a server's reply, a task's rows and config
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


class RunFacts(TypedDict):
    """artifacts/runs/<stage>.json: what a stage cost, outside its outputs. peak_memory_bytes: of its largest process."""

    wall_s: float
    peak_memory_bytes: int
    finished: str


# ---- sets: the texts of evalsets/ ------------------------------------------------------------------------------------------


class TextRow(TypedDict):
    """A document: corpus, calibration text, what prompts are cut from."""

    id: str
    domain: str
    text: str


class PromptRow(TypedDict):
    """A prompt: plain text, or a chat's messages, each with role and content."""

    id: str
    domain: str
    prompt: NotRequired[str]
    messages: NotRequired[list[dict[str, str]]]


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


# ---- servers: one row a request, and what was found of a server --------------------------------------------------------------


class Phases(TypedDict):
    """When the connection and the reply's headers were there."""

    connected: float | None
    headers: float | None


class Exchange(TypedDict):
    """One request to a server and its reply. t_*: seconds of the client's clock.

    t_chunks: arrivals of events with tokens; t_tokens: the same if each had one token; t_last: the last token, or the reply's end
    if that token was not seen; t_due: when an open loop should have sent it.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    counted_by: str
    asked_tokens: int
    forced: bool
    t_submit: float
    t_first: float | None
    t_content: float | None
    t_last: float | None
    t_tokens: list[float] | None
    t_chunks: list[float]
    t_done: float | None
    phases: Phases
    peak_memory_bytes: int | None
    finish: str | None
    ok: bool
    fault: str | None
    status: int | None
    error: str | None
    t_end: float
    t_due: NotRequired[float]


class RequestRow(Exchange):
    """A line of artifacts/serving/<variant>.jsonl. round: null for a warm-up."""

    round: int | None
    scenario: str
    warmup: bool


class ScoreRow(TypedDict):
    """A window that a server scored. logps: in nats, of tokens `first` and later; null for a part of a character."""

    set: str
    document: str
    window: str
    first: int
    token_ids: list[int]
    ok: bool
    error: str | None
    logps: list[float | None] | None
    t_submit: float
    t_end: float


class Finding(TypedDict):
    """Whether a server can do something; value: null if unknown."""

    value: bool | None
    reason: str | None


class Probe(TypedDict):
    """What a server can do. url, models: of a server that was not launched here."""

    url: NotRequired[str]
    model: str
    models: NotRequired[list[str]]
    api: str
    all_fields: NotRequired[Finding]
    stream_usage: Finding
    one_token_an_event: Finding
    ignore_eos: Finding
    seed: Finding
    prefix_cache: Finding
    ppl: Finding
    delta_p: Finding
    prompt_logprobs: Finding
    kld: Finding


class Launch(TypedDict):
    """A server that was launched here. log, model_dir: not in reports, which are in git; peak_memory_bytes, cpu_s: at its end."""

    startup_s: float
    build: str | None
    log: NotRequired[str]
    kind: str
    model_dir: NotRequired[str]
    threads: int
    parallel: int
    context: int
    engine_options: Options
    peak_memory_bytes: NotRequired[int | None]
    cpu_s: NotRequired[float | None]


class ServerMeta(Outcome):
    """artifacts/serving/<variant>.meta.json. asked: all settings that the results depend on; prompts: {file: sha256}."""

    variant: str
    model: str
    asked: Json
    probe: NotRequired[Probe | None]
    plan: NotRequired[Json]
    client: NotRequired[Json]
    launch: NotRequired[Launch | None]
    prompts: NotRequired[dict[str, str]]
    seed: NotRequired[int]
    versions: NotRequired[dict[str, str]]


class ServerReport(ServerMeta):
    """reports/serving/<variant>.json. levels: {scenario: metrics}; inputs: {file: sha256}."""

    levels: dict[str, Metrics]
    knee: Metric | None
    server_memory_bytes: Metric | None
    inputs: dict[str, str]


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
    """reports/metrics/<variant>.json. model, base: digests; inputs: {file: sha256}; bounds: sentences on what bounds each phase;
    client: in memory, the machine that asked the variant's server."""

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
    client: NotRequired[Json | None]


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


class SetRecord(TypedDict):
    """What a shipped set showed. told: {variant: whether its difference to the probe has an interval without 0}."""

    files: dict[str, str]
    n: int
    chance: NotRequired[float]
    reference: NotRequired[float]
    changed: NotRequired[float]
    delta: NotRequired[Metrics]
    half_width: NotRequired[float]
    resolvable: NotRequired[float]
    told: NotRequired[dict[str, bool]]
    tokens: NotRequired[int]
    kld: NotRequired[dict[str, Json]]
    ppl_half_width: NotRequired[float]
    resolvable_ppl: NotRequired[float]


class EvalsetsRecord(TypedDict):
    """reports/evalsets.json. probe: the variant whose difference to the reference each set was measured by."""

    reference: str
    probe: str
    confidence: float
    power: float
    seed: int
    base: str
    versions: dict[str, str]
    variants: dict[str, Json]
    sets: dict[str, SetRecord]


# ---- reading -----------------------------------------------------------------------------------------------------------------


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(value: Any, kind: type[T], where: str, remedy: str = "delete it and run `dvc repro`") -> T:
    """`value` as it is, if it is a record of that kind. Raises `ArtifactError` with the first fault."""
    try:
        _adapter(kind).validate_python(value, strict=True)  # type: ignore[arg-type]  # a class can be hashed
    except ValidationError as e:
        first = e.errors()[0]
        keys = ".".join(map(str, first["loc"])) or "the whole"
        raise ArtifactError(f"{where} is damaged ({keys}: {first['msg'].lower()}); {remedy}") from None
    return value  # type: ignore[no-any-return]


def read(path: Path, kind: type[T]) -> T:
    """The record that a JSON file holds. Raises `ArtifactError` if it is missing or damaged."""
    return checked(artifacts.read_json(path), kind, str(path))


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """The records that a JSONL file holds, one a line."""
    return checked(artifacts.read_jsonl(path), list[kind], str(path))  # type: ignore[valid-type]
