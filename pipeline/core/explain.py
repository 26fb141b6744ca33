"""Read YAML files, and explain their faults: the line, the path of keys, the value, and the nearest right one."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from pipeline.core.droppings import data_files
from pipeline.core.errors import ParamsError, QuantgateError
from pipeline.core.records import Options

# What a value must be, by pydantic's type of the error; bounds come from its context.
MUST_BE = {
    "model_type": "a section: keys with values", "model_attributes_type": "a section: keys with values",
    "dict_type": "a section: keys with values", "list_type": "a list, such as [a, b]", "tuple_type": "a list, such as [a, b]",
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "string_type": "text; put it in quotes", "none_required": "left empty", "literal_error": "{expected}",
    "finite_number": "a finite number", "greater_than": "more than {gt}", "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}", "less_than_equal": "at most {le}", "multiple_of": "a multiple of {multiple_of}",
    "too_short": "{min_length} or more, and there are {actual_length}", "too_long": "{max_length} or fewer",
}  # fmt: skip
BITS = re.compile(r"(?<!\d)(32|16|8|6|5|4|3|2)(?!\d)")
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")


class Fault(ValueError):
    """A fault below the section whose validator raises it. keys: the path from that section."""

    def __init__(self, message: str, *keys: str | int) -> None:
        super().__init__(message)
        self.keys = keys


def read_text(path: Path, error: type[QuantgateError], missing: str) -> str:
    """A UTF-8 file's text. Raises `error` if it cannot be read; missing: the message if it does not exist."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise error(missing) from None
    except OSError as e:
        raise error(f"{path} cannot be read ({e.strerror})") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise error(f"{path}:{line}: is not UTF-8 (byte {e.start}); save it as UTF-8") from None


def parse(path: Path, text: str, error: type[QuantgateError]) -> tuple[Any, Any]:
    """(content, root node or None) of YAML 1.2, which DVC reads too: `1e-4` is a number, `on` is text."""
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        return yaml.constructor.construct_document(root) if root else None, root
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise error(f"{where}: is not valid YAML ({e.problem or e.context})") from None
    except (ReaderError, ValueError) as e:  # a character that YAML forbids; an impossible date
        raise error(f"{path}: is not valid YAML ({str(e).splitlines()[0]})") from None


def node_at(root: Any, keys: Sequence[Any]) -> tuple[Any, int | None]:
    """The YAML node at a path of keys, and the 1-based line of its key or nearest ancestor (None: the whole file)."""
    node, line = root, None
    for key in keys:
        if isinstance(node, MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == str(key)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return node, line


def unknown(kind: str, name: str, known: list[str]) -> str:
    """`variant 'int9' is not in params.yaml; did you mean 'int8'?`"""
    return f"{kind} {name!r} is not in params.yaml{did_you_mean(name, known)}"


def some(names: list[str], most: int, between: str = ", ") -> str:
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: str, known: list[str]) -> str:
    return _near(name, known) or f"; there is: {', '.join(map(str, known))}"


def _near(name: str, known: list[str]) -> str:
    close = partial(difflib.get_close_matches, name, known, n=1)
    near = close(cutoff=0.8) or [full for full in known if len(name) > 2 and full.startswith(name)] or close(cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def explain_all(
    errors: list[ErrorDetails], data: Any, root: Any, path: Path, top: type[BaseModel], sources: dict[str, type[BaseModel]]
) -> list[str]:
    """Validation errors as messages: file, line, path of keys, value and the nearest right one. A value of several allowed types is
    one fault. data, root: the file's content and YAML nodes; top: model of the whole file; sources: by `model.source`."""
    messages = []
    for keys, same in by_keys(errors, data, sources).items():
        line = node_at(root, keys)[1]
        where = f"{path}:{line}: " if line else f"{path}: "
        first = same[0]
        if first["type"] == "extra_forbidden":
            near = did_you_mean(str(keys[-1]), _known_keys(list(keys[:-1]), root, top, sources))
            messages.append(f"{where}{_dotted(keys)}: unknown key (value {first['input']!r}){near}")
        elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
            source = str(first["input"].get("source", "is missing"))
            messages.append(f"{where}{_dotted(keys)}: source {source}{did_you_mean(source, list(sources))}")
        else:
            messages.append(f"{where}{in_words(same, keys)}")
    return messages


def by_keys(errors: list[ErrorDetails], data: Any, tags: Collection[str] = ()) -> dict[tuple[Any, ...], list[ErrorDetails]]:
    """Errors by their path of keys in `data`. tags: names that pydantic inserts after `model`."""
    grouped: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in errors:
        grouped.setdefault(tuple(_keys(error, data, tags)), []).append(error)
    return grouped


def in_words(errors: list[ErrorDetails], keys: tuple[Any, ...]) -> str:
    """What is wrong with the value at `keys`, and what it must be. errors: several if several types are allowed."""
    value, name = errors[0]["input"], _dotted(keys) or "the file"
    if errors[0]["type"] == "missing":
        return f"{name}: this key is required"
    texts = [_message(e) for e in errors]
    must = [s.removeprefix("must be ") for s in texts if s.startswith("must be ")]
    message = "; ".join([*([f"must be {' or '.join(must)}"] if must else []), *(s for s in texts if not s.startswith("must be "))])
    if value is None:
        return f"{name}: is empty; {message}"
    plain = isinstance(value, (str, int, float, list))
    text = "" if isinstance(value, dict) or not keys else f" = {value!r}" if plain else f" = {value}"
    words = [w for e in errors if e["type"] == "literal_error" for w in re.findall(r"'([^']+)'", e["ctx"]["expected"])]
    finite = isinstance(value, float) and not math.isfinite(value) and errors[0]["type"] in BOUNDS
    return f"{name}{text}: {message}{', and finite' if finite else _near(str(value), words)}"


def _message(error: ErrorDetails) -> str:
    must = MUST_BE.get(error["type"])  # our own validators bring their message
    return f"must be {must.format(**error.get('ctx') or {})}" if must else error["msg"].removeprefix("Value error, ")


def _dotted(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))


def _keys(error: ErrorDetails, data: Any, tags: Collection[str]) -> list[Any]:
    """The path of keys in the file, without pydantic's names of types and validators."""
    keys: list[Any] = []
    location = list(error["loc"])
    if location[:1] == ["model"] and location[1:2] and location[1] in tags:
        del location[1]
    for at, part in enumerate(location):
        held = range(len(data)) if isinstance(data, (list, tuple)) else data if isinstance(data, dict) else ()
        if part in held:
            data = data[part]
            keys.append(part)
        elif error["type"] in ("missing", "extra_forbidden") and at == len(location) - 1:
            keys.append(part)
    raised = (error.get("ctx") or {}).get("error")
    return keys + list(raised.keys if isinstance(raised, Fault) else ())


def _known_keys(keys: list[Any], root: Any, top: type[BaseModel], sources: dict[str, type[BaseModel]]) -> list[str]:
    """Names of the fields of the section at `keys`."""
    model: Any = top
    for key in keys:
        if model is top and key == "model":
            model = sources[str(node_at(root, ["model", "source"])[0].value)]
        elif isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields:
            model = model.model_fields[key].annotation
        else:  # a key of a mapping or an index of a list: the type of its values
            model = get_args(model)[-1]
        if not isinstance(model, type):
            inner = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = inner[0] if len(inner) == 1 and type(None) in get_args(model) else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def backends(room: str) -> list[str]:
    """Names of the files in pipeline/<room>, one per quantizer or engine."""
    return [p.stem for p in data_files(Path(__file__).parents[1] / room, "*.py") if not p.stem.startswith("_")]


def backend(room: str, name: str) -> Any:
    """The module of a quantizer or engine. Raises `ParamsError` with the nearest name."""
    if name not in (known := backends(room)):
        raise ParamsError(f"{room[:-1]} {name!r} is not in pipeline/{room}/{did_you_mean(name, known)}")
    return import_module(f"pipeline.{room}.{name}")


def with_defaults(function: Callable[..., Any], options: Options, given: set[str]) -> Options:
    """All options that a call would use: `options` and the remaining defaults, except None."""
    parameters = inspect.signature(function).parameters
    return {n: p.default for n, p in parameters.items() if n not in given and n not in options and p.default is not None} | options


def nominal_bits(options: Options) -> int | None:
    """Bits named by a variant's options (`bits: 4`, `int8-weight-only`, `Q4_0`), else None."""
    for key in ("bits", "dtype", "scheme", "type", "precision"):
        if match := BITS.search(str(options.get(key, ""))):
            return int(match[1])
    return None


def check_options(owner: str, function: Callable[..., Any], options: Options, given: set[str]) -> None:
    """Raise `ParamsError` if an option is unknown, of the wrong type (a string is no number), or missing.
    given: arguments that the pipeline itself passes."""
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in given}
    hints = get_type_hints(function, include_extras=True)  # bounds are extras
    for name, value in options.items():
        if name not in parameters:
            raise ParamsError(f"{owner}: unknown option {name!r} = {value!r}{did_you_mean(name, list(parameters))}")
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as e:
            keys, errors = next(iter(by_keys(e.errors(), value).items()))
            raise ParamsError(f"{owner}: option {in_words(errors, (name, *keys))}") from None
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise ParamsError(f"{owner}: option {name!r} is required")
