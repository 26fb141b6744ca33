"""The type of every file that a stage writes; a record in memory is its file's JSON. `read` and `read_rows` check it.
A key that a file may lack is NotRequired; every other key is always written, null where its value is unknown."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

T = TypeVar("T")
Json = dict[str, Any]  # another program's format: a model's config, a server's reply, a task's rows and config
Options = dict[str, Any]  # of a quantizer or engine in params.yaml, checked against its signature


class Interval(TypedDict):
    """A value, its interval and its unit. low, high: null where there is no interval."""

    value: float | None
    low: float | None
    high: float | None
    unit: str


class ShortEstimate(TypedDict):
    """A value and its interval; where either is null, `warnings` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    warnings: list[str]


class WholeEstimate(ShortEstimate):
    """The fields of `stats.intervals.Estimate`."""

    clusters: int | None
    weight: float | None
    between: float | None


class Metric(WholeEstimate):
    unit: str
    confidence: float


Metrics = dict[str, Metric]


class Outcome(TypedDict):
    status: str  # `ok`; or `unsupported`, `invalid` or `crashed`, with a reason
    reason: str | None


class File(TypedDict):
    bytes: int
    sha256: str


class RunFacts(TypedDict):
    """artifacts/runs/<stage>.json: what a stage cost. peak_memory_bytes: of its largest process."""

    wall_s: float
    peak_memory_bytes: int
    finished: str


# ---- sets: the texts of evalsets/ ------------------------------------------------------------------------------------------
class TextRow(TypedDict):
    """A document: of the corpus, for calibration, or to cut prompts from."""

    id: str
    domain: str
    text: str


class PromptRow(TypedDict):
    """A prompt: plain text, or chat messages, each with role and content."""

    id: str
    domain: str
    prompt: NotRequired[str]
    messages: NotRequired[list[dict[str, str]]]


# ---- manifests: what a folder of artifacts/ holds, and how it was made -------------------------------------------------------
class Folder(TypedDict):
    status: str
    files: dict[str, File]
    digest: str
    versions: dict[str, str]


class Origin(TypedDict):
    """Where a base came from. given: its files there; repaired: {file: sha256 before the repair}."""

    source: str
    license: NotRequired[str]
    package: NotRequired[str]
    file: NotRequired[str]
    sha256: NotRequired[str]
    path: NotRequired[str]
    given: NotRequired[list[str]]
    id: NotRequired[str]
    revision: NotRequired[str]
    commit: NotRequired[str | None]
    dequantized_from: NotRequired[str]
    repairs: NotRequired[list[str]]
    repaired: NotRequired[dict[str, str]]


class BaseManifest(Folder, Origin):
    """artifacts/base/manifest.json."""

    note: str | None
    weights: int
    trust_remote_code: bool


class CalibrationFacts(TypedDict):
    """What a quantizer was calibrated on. set_files: {file: sha256}."""

    source: str
    set: NotRequired[str]
    set_files: NotRequired[dict[str, str]]
    digest: str
    rows_asked: int
    rows_used: int
    tokens_per_row: int


class BuildFacts(TypedDict, total=False):
    """What a quantizer reports. modules: number of packed matrices; expected_bits: per weight in them; probe: answers of the
    model in memory (quantizers/_probe.py)."""

    library: str
    converter: str
    environment: dict[str, str]
    reproducible: str
    head: str
    kept: list[str]
    modules: int
    expected_bits: float
    probe: Json
    warnings: list[str]
    calibration_rows: int
    underflowed_weights: int
    range_probe_tokens: int
    loss_mean: float
    loss_worst: dict[str, str | float]
    damping: float
    damped_more: dict[str, float]


class Size(TypedDict, total=False):
    """Size of a variant's files. bits_per_weight, quantized_share: of the base's weights; packed_bits: per quantized weight, its
    scales included (null where the format does not separate them); tensor_types: {type: bytes}."""

    weight_bytes: int
    bits_per_weight: float
    quantized_share: float
    packed_bits: float | None
    tensor_types: dict[str, int]


class Build(BuildFacts, Size, total=False):
    calibration: CalibrationFacts | None
    dtype: str | None


class Built(Outcome, Build):
    pass


class Method(TypedDict):
    """How a variant is made and run. asked: options in params.yaml; options: the same with all defaults; base: digest."""

    variant: str
    quantizer: str
    asked: Options
    options: Options
    engine: str
    engine_options: Options
    base: str


class ModelManifest(Folder, Method, Build):
    """artifacts/models/<variant>/manifest.json: what was asked and, if `ok`, what was built."""

    reason: str | None
    seed: int
    trust_remote_code: bool
    dequantized_from: NotRequired[str]


class States(TypedDict):
    """What a reference store holds. kind: `hidden` states, or `logits` with the reason why; key: sha256 of model, seed and tokens;
    shards: {file: indices of its windows}; rounded_otherwise: number of logits that the head by itself rounds to a neighbour."""

    kind: str
    why_not_hidden: str | None
    rows_per_block: int
    windows: int
    tokens: int
    state_bytes: int
    bytes_per_token: float
    rounded_otherwise: int
    head_bytes: int
    shards: dict[str, list[int]]
    model: str
    seed: int
    key: str


class Store(States):
    vocab: int
    files: dict[str, File]
    digest: str


class StoreManifest(Store):
    """artifacts/reference/manifest.json. skipped: {reason: number of texts left out}."""

    status: str
    variant: str
    skipped: dict[str, int]
    trust_remote_code: bool
    temperature: float
    sets: dict[str, str]
    threads: int
    versions: dict[str, str]


# ---- rows: one per line or token, and the meta file beside them --------------------------------------------------------------
class RowsMeta(Outcome):
    variant: str
    model: str  # digest of the model that made the rows


TOKEN_COLUMNS = {  # of artifacts/tokens/<variant>.parquet, one row per scored token: {name: Arrow's name of its type}
    "set": "string", "document": "string", "window": "string", "token_class": "string",
    "position": "int32", "token_id": "int32",
    "kld": "float64", "kld_reverse": "float64", "jsd": "float64", "tv": "float64", "logp_ref": "float64",
    "logp": "float64", "entropy_ref": "float64", "top1_ref": "int32", "top1": "int32", "top5_overlap": "int8",
}  # fmt: skip


class DivergeMeta(RowsMeta):
    reference: str  # digest of the store
    versions: dict[str, str]


class Look(TypedDict):
    """At which of its planned looks a stage stopped. share: of all rows; saved_s: estimated, minus the time that looking took."""

    look: int
    looks: int
    share: float
    saved_s: float


class TokensMeta(DivergeMeta):
    tokens: NotRequired[int]
    kernels: NotRequired[dict[str, int]]
    attention: NotRequired[str | None]
    look: NotRequired[Look]


class AnswersMeta(RowsMeta):
    """sets: {file: sha256}; once: why there are no second answers in float32."""

    sets: dict[str, str]
    batch_size: int
    seed: int
    versions: dict[str, str]
    once: str | None
    look: NotRequired[Look]


class RepliesMeta(DivergeMeta):
    """tokens: a reply's limit; batch: prompts side by side."""

    tokens: int
    batch: int


class GpuMemory(TypedDict):
    """Peak bytes according to torch, and bytes in use on the device according to NVML (null without NVML)."""

    allocated: int
    reserved: int
    nvml: int | None


class LoadFacts(TypedDict):
    load_s: float
    load_memory_bytes: int | None
    load_cuda_memory: GpuMemory | None
    max_length: int
    device: str


class ModelShape(TypedDict):
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    hidden: int | None
    vocab: int | None
    tied: bool | None
    experts: int | None


class TimedModel(TypedDict):
    """dtype: of its matrix products; rate_of: the timed product that stands for them."""

    name: str
    engine: str
    weight_bytes: int
    parameters: float
    dtype: str
    rate_of: str
    shape: ModelShape


class Rates(TypedDict):
    """read, copy: bytes per second; matrix: {dtype: operations per second}; null where unknown."""

    device: str
    read: float | None
    copy: float | None
    matrix: dict[str, float | None]


class Looked(TypedDict):
    planned: int
    taken: int
    bounds: list[float]
    max_rounds: int | None


class Sweep(TypedDict):
    """notes: {scenario: warning for its metrics}; missing: {scenario: why it has no metrics}."""

    output_tokens: int
    repeats: int
    notes: dict[str, str]
    missing: dict[str, str]


class Machine(TypedDict):
    """llamacpp: the instruction sets it was compiled for."""

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    system: str
    python: str
    gpu: str | None
    llamacpp: str | None
    cpu_capability: str


class TimingFacts(TypedDict, total=False):
    """What metrics need besides rows; complete if `ok`. loads, models: by `variant` and `reference`; draft: digest of the draft."""

    loads: dict[str, LoadFacts]
    models: dict[str, TimedModel]
    rates: Rates
    memory_bandwidth: float | None
    looks: Looked
    sweep: Sweep
    machine: Machine
    versions: dict[str, str]
    draft: str


class TimingsMeta(RowsMeta, TimingFacts):
    reference: str


class Guesses(TypedDict, total=False):
    """The draft's tokens of a request with speculation, per pass after the prefill."""

    proposed: list[int]
    accepted: list[int]


class TimedAnswer(Guesses):
    """A request timed by the process that ran it, in seconds of its monotonic clock. A failed one may lack the rest."""

    ok: bool
    error: str | None
    t_submit: float | None
    t_tokens: list[float]
    t_first: NotRequired[float | None]
    output_tokens: NotRequired[int]
    batch: NotRequired[int]
    phases: NotRequired[dict[str, float | list[float] | None]]
    phases_unknown: NotRequired[dict[str, str]]
    kv_bytes_per_token: NotRequired[float | None]
    cache_bytes: NotRequired[int | None]
    cache_tokens: NotRequired[int | None]
    cache_element_bytes: NotRequired[float | None]
    peak_memory_bytes: NotRequired[int | None]
    cuda_memory: NotRequired[GpuMemory | None]
    cold: NotRequired[bool]


class TimingRow(TimedAnswer):
    """A request to `who` (`variant`, `reference`, or `undrafted`: the variant without its draft). scenario: `single` in paired
    rounds, else a sweep's; round: null for a warm-up."""

    round: int | None
    scenario: str
    who: str
    warmup: bool
    prompt_tokens: int


class AnswerAgain(TypedDict):
    loglikelihoods: list[float] | None
    prediction: int | str | None
    acc: float | None


class ItemAnswer(TypedDict):
    """A model's answer to an item. bytes: of a text scored as a whole; again: the answer of the same weights in float32."""

    loglikelihoods: list[float] | None
    bytes: NotRequired[int]
    prediction: int | str | None
    target: Any
    empty: bool
    again: NotRequired[AnswerAgain]


class AnswerRow(ItemAnswer):
    """One item of a task; item, slice, cluster: from the task's row."""

    task: str
    doc_id: int
    item: str | int | None
    slice: str | int | None
    cluster: str | int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    filter: str
    kind: str
    first_token_ids: list[int]
    n_tokens: int
    truncated: bool
    non_finite: int
    acc: float | None


class Undrafted(TypedDict):
    """The reply of a speculating variant without its draft. gaps: at each token, nats between the two likeliest; moved: largest
    change of a gap when tokens are read as many at a time as with the draft."""

    token_ids: list[int]
    gaps: list[float]
    moved: float


class ReplyRow(TypedDict):
    """A greedy reply to a trajectory prompt. cut: it stopped at the limit; again: the reference's reply at another batch size;
    undrafted: only of a variant that speculates."""

    id: str
    domain: str
    prompt: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    cut: bool
    again: NotRequired[list[int]]
    undrafted: NotRequired[Undrafted]


class WindowRow(TypedDict):
    set: str
    window: str
    document: str
    token_ids: list[int]
    first: int  # the first token that is scored
    domain: str


# ---- servers: one row per request, and what a server can do ------------------------------------------------------------------
class Phases(TypedDict):
    connected: float | None
    headers: float | None


class Said(TypedDict):
    """A token of a reply. gap: nats between the two likeliest tokens at its place."""

    token: str
    gap: float


class Exchange(TypedDict):
    """One request to a server and its reply. t_*: seconds of the client's clock; said: if log-probabilities were requested.

    t_chunks: arrival of each event with tokens; t_tokens: the same if each event had one token; t_last: the last token, or the end
    of the reply if no event showed that token; t_due: when an open loop should have sent the request."""

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
    said: NotRequired[list[Said]]


class RequestRow(Exchange):
    round: int | None
    scenario: str
    warmup: bool


class ScoreRow(TypedDict):
    """A window scored by a server. logps: nats, from token `first` on; null for part of a character, and for a token that is not
    among the likeliest if a server gives only those; top: {token id: nats} of the likeliest at each place."""

    set: str
    document: str
    window: str
    first: int
    token_ids: list[int]
    ok: bool
    error: str | None
    logps: list[float | None] | None
    top: list[dict[str, float]] | None
    t_submit: float
    t_end: float


class Finding(TypedDict):
    """Whether a server can do something; value: null if unknown."""

    value: bool | None
    reason: str | None


class Probe(TypedDict):
    """What a server can do. url, models: only of a server that was not launched here."""

    url: NotRequired[str]
    model: str
    models: NotRequired[list[str]]
    api: str
    all_fields: NotRequired[Finding]
    stream_usage: Finding
    one_token_an_event: Finding
    ignore_eos: Finding
    prompt_logprobs: NotRequired[Finding]


class Launch(TypedDict):
    """A server launched here. log, model_dir: left out of reports, which are in git; peak_memory_bytes, cpu_s: at its end."""

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
    """artifacts/serving/<variant>.meta.json. asked: all settings that the results depend on; prompts: {file: sha256}. If the tier
    asks for scores, reference: digest of the store whose windows were scored; tokens: their metrics, in the report only."""

    variant: str
    reference: NotRequired[str]
    tokens: NotRequired[Metrics]
    model: str
    asked: Json
    probe: NotRequired[Probe | None]
    plan: NotRequired[Json]
    client: NotRequired[Machine]
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
# A metric over a range of positions, from and to inclusive.
Span = TypedDict(
    "Span",
    {
        "from": int, "to": int, "n": int, "clusters": int | None, "value": float | None, "low": float | None,
        "high": float | None, "unit": str, "confidence": float, "method": str, "warnings": list[str],
    },
)  # fmt: skip


class Agreement(TypedDict):
    position: int
    free: ShortEstimate  # share of replies still equal to the reference's
    forced: ShortEstimate | None  # share of equal choices from the position before up to this one


class DocumentKld(TypedDict):
    """Scored tokens of one document and the sum of their KLD, for comparing two variants in pairs."""

    tokens: int
    kld: float


class Curves(TypedDict, total=False):
    kld_by_document: dict[str, DocumentKld]
    kld_by_position: dict[str, list[Span]]
    agreement_by_position: list[Agreement]


class Bounds(TypedDict, total=False):
    """Sentences: what bounds each phase of a request, and why a variant is faster or slower than the reference."""

    cliffs: list[str]
    decode: str
    against: str
    prefill: str
    against_prefill: str
    rates: str


class Dequantized(TypedDict, total=False):
    dequantized_from: str


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


class VariantResult(Outcome, Method, Dequantized):
    """reports/metrics/<variant>.json. model: digest; inputs: {file: sha256}; looks: {stage: where its rows end}; client: the
    machine that sent requests to the variant's server, in memory only."""

    reference: str
    model: str
    machine: Machine | None
    kernels: dict[str, int] | None
    inputs: dict[str, str]
    versions: dict[str, str]
    metrics: Metrics
    curves: Curves
    bounds: Bounds
    looks: NotRequired[dict[str, Look]]
    client: NotRequired[Machine | None]


Results = dict[str, VariantResult]  # by variant


class RuleVerdict(Interval):
    """A rule's verdict on a variant, with the value judged. settle: number of items that would decide."""

    metric: str
    against: str
    bound: str
    threshold: float
    better: str
    neutral: float | None
    required: bool
    verdict: str
    reason: str
    settle: int | None
    p_fail: float | None
    p_fail_holm: float | None
    n: int | None
    clusters: int | None
    between: float | None


class Family(TypedDict):
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
    """reports/gate.json. floor: the reference's noise floors; inputs: digests of all else that the verdict depends on."""

    verdict: str
    reference: str
    inconclusive: str
    floor: dict[str, Metric | None]
    variants: dict[str, VariantVerdict]
    inputs: NotRequired[dict[str, str]]


class Tracked(TypedDict):
    """reports/mlflow.json: ids of the experiment, the parent run and each variant's run; versions in the registry."""

    experiment: str
    parent: str
    runs: dict[str, str]
    versions: dict[str, str]


class SetRecord(TypedDict):
    """What a shipped set measures. told: {variant: whether the interval of its difference to the probe excludes 0}."""

    files: dict[str, str]
    n: int
    chance: NotRequired[float]
    reference: NotRequired[float]
    changed: NotRequired[float]
    delta: NotRequired[dict[str, Interval]]
    half_width: NotRequired[float]
    resolvable: NotRequired[float]
    told: NotRequired[dict[str, bool]]
    tokens: NotRequired[int]
    kld: NotRequired[dict[str, Json]]
    ppl_half_width: NotRequired[float]
    resolvable_ppl: NotRequired[float]


class EvalsetsRecord(TypedDict):
    """reports/evalsets.json. probe: the variant whose difference to the reference was measured on each set."""

    reference: str
    probe: str
    confidence: float
    power: float
    seed: int
    base: str
    versions: dict[str, str]
    variants: dict[str, Json]
    sets: dict[str, SetRecord]


# ---- the smallest that passes: reports/smallest/ -----------------------------------------------------------------------------
class ByDocument(TypedDict):
    """Means per document, all of one length, against the unchanged model: KLD in nats, share of equal likeliest tokens, and loss of
    the true token's log-probability in nats. tokens: scored in each document."""

    kld: list[float]
    agreement: list[float]
    loss: list[float]
    tokens: int


class GroupSensitivity(TypedDict):
    """What one group costs. bytes, error: by level, the error squared and over the squares of its values; alone: mean KLD with only
    this group at the lowest level; returned: how much lower the lowest level's KLD is with only this group put back; unchanged: the
    lowest level stores it within the rounding of 16 bits."""

    name: str
    layer: int | None
    kind: str
    bytes: dict[str, int]
    error: dict[str, float]
    alone: WholeEstimate
    returned: WholeEstimate
    unchanged: bool


class Uniform(TypedDict):
    """All groups at one level. exact: number of groups stored within the rounding of 16 bits."""

    bytes: int
    kld: WholeEstimate
    rows: ByDocument
    exact: int


class Texts(TypedDict):
    """The texts that choose. files: {file: sha256}; documents: ids; tokens: read from each."""

    files: dict[str, str]
    documents: list[str]
    tokens: int


class Sensitivity(TypedDict):
    """reports/smallest/sensitivity.json. levels: lowest first; other_bytes: of tensors in no group; predicted: sum of `alone`;
    measured: KLD at the lowest level."""

    quantizer: str
    options: Options
    levels: list[str]
    model: str
    texts: Texts
    uniform: dict[str, Uniform]
    groups: list[GroupSensitivity]
    other_bytes: int
    predicted: float
    measured: float
    words: list[str]
    wall_s: float
    load: float
    versions: dict[str, str]


class Proposal(TypedDict):
    """A mix or a uniform model. predicted: KLD from the sensitivities; measured: in memory; engine: built and run, else null;
    against: the best uniform model of its size; gain: that model's KLD minus this one's, paired by document; kept: why it is or is
    not a candidate."""

    name: str
    mix: dict[str, str]
    options: Options
    bytes: int
    predicted: float | None
    measured: WholeEstimate
    agreement: float
    loss: float
    engine: WholeEstimate | None
    against: str | None
    gain: WholeEstimate | None
    candidate: bool
    kept: str


class Candidates(TypedDict):
    """reports/smallest/candidates.json, written before the certifying texts are read. order: safest first; digest: of the order and
    every candidate's options."""

    quantizer: str
    engine: str
    seed: int
    sensitivity: str
    proposals: list[Proposal]
    order: list[str]
    digest: str
    words: list[str]
    wall_s: float
    load: float


class Certified(TypedDict):
    name: str
    options: Options
    model: str
    weight_bytes: int | None
    bits_per_weight: float | None
    predicted: float | None
    measured: float
    kld: Metric | None
    judged: VariantVerdict
    wall_s: float


class Answer(TypedDict):
    """reports/smallest/answer.json. candidates, store: digests of the frozen list and of the reference's store; tested: in the
    frozen order, up to the first that did not pass; answer: the last that passed."""

    candidates: str
    store: str
    tested: list[Certified]
    answer: str | None
    looks: int
    words: list[str]
    wall_s: float
    load: float


# ---- failures ----------------------------------------------------------------------------------------------------------------
class Group(TypedDict):
    """Mean divergence of a group of tokens, and of all others. by: what defines the group (domain, token class, position)."""

    by: str
    group: str
    mean: WholeEstimate
    rest: WholeEstimate
    ratio: float | None
    stands_out: bool


class Spread(TypedDict):
    kind: str
    settled: bool
    n: int
    worst_share: WholeEstimate | None
    median_over_mean: float | None
    groups: list[Group]
    words: str


class WorstToken(TypedDict):
    set: str
    document: str
    window: str
    position: int
    kld: float | None
    not_finite: bool
    context: str
    token: str
    token_id: int
    reference_says: str
    reference_says_id: int
    variant_says: str
    variant_says_id: int
    p_reference: float
    p_variant: float


class ItemPair(TypedDict):
    """Both answers to an item in words. unknown: why its prompt is null; fall: loss of the right choice's margin, nats."""

    task: str
    item: str | int | None
    prompt: str | None
    unknown: str | None
    right: str
    reference_answers: str
    variant_answers: str
    margin_reference: float | None
    margin_variant: float | None
    fall: NotRequired[float]


class ReplyPair(TypedDict):
    prompt_id: str
    prompt: str
    reference_reply: str
    variant_reply: str
    departs_at: int | None
    faults: list[str]
    reference_faults: list[str]


class Cases(TypedDict, Generic[T]):
    """The first rows of a longer list. of: number of rows examined."""

    shown: int
    total: int
    of: NotRequired[int]
    by_task: NotRequired[dict[str, int]]
    rows: list[T]


class FailureLists(TypedDict):
    spread: Spread | None
    worst_tokens: Cases[WorstToken] | None
    worst_items: Cases[ItemPair] | None
    flips_to_wrong: Cases[ItemPair] | None
    flips_to_right: Cases[ItemPair] | None
    replies: Cases[ReplyPair] | None


class Failures(FailureLists):
    """artifacts/broke/<variant>.json. missing: {stage: why it has no rows}; words: `spread` in words."""

    variant: str
    reference: str
    missing: dict[str, str]
    notes: list[str]
    words: str


# ---- reading -----------------------------------------------------------------------------------------------------------------
@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(value: Any, kind: type[T], where: str, remedy: str = "delete it and run `dvc repro`") -> T:
    """`value` itself if it is a record of that kind. Raises `ArtifactError` with the first fault."""
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
