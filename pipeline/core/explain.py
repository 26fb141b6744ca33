"""Faults of params.yaml in words: the line, the path of keys, the value, and the nearest right one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from pipeline.core.yamls import line_of, node_at

# What a value must be, by pydantic's name of the fault; the bounds come with it.
MUST_BE = {
    "model_type": "a section: keys with values", "model_attributes_type": "a section: keys with values",
    "dict_type": "a section: keys with values", "list_type": "a list, such as [a, b]", "tuple_type": "a list, such as [a, b]",
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "string_type": "text; put it in quotes", "none_required": "left empty", "literal_error": "{expected}",
    "finite_number": "a finite number", "greater_than": "more than {gt}", "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}", "less_than_equal": "at most {le}", "multiple_of": "a multiple of {multiple_of}",
}  # fmt: skip
LENGTH = {"too_short": "needs {min_length} at least, and has {actual_length}", "too_long": "may have {max_length} at most"}
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")
# What to write where there is nothing.
EMPTY = {
    ("variants",): "name a variant, as in `bf16: {quantizer: cast, options: {dtype: bfloat16}}`",
    ("serving",): "where nobody is served, leave the key out",
    ("serving", "variants"): "where nobody is served, write `variants: {}`",
}


class Fault(ValueError):
    """A fault that a validator of a whole section finds below it. keys: where, from that section on."""

    def __init__(self, message: str, *keys: str | int) -> None:
        super().__init__(message)
        self.keys = keys


def unknown(kind: str, name: str, known: list[str]) -> str:
    """`variant 'int9' is not in params.yaml; did you mean 'int8'?`"""
    return f"{kind} {name!r} is not in params.yaml{did_you_mean(name, known)}"


def did_you_mean(name: str, known: list[str]) -> str:
    near = _near(name, known)
    return near or f"; there is: {', '.join(map(str, known))}"


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def explain_all(
    errors: list[ErrorDetails], data: Any, root: Any, path: Path, top: type[BaseModel], sources: dict[str, type[BaseModel]]
) -> list[str]:
    """Validation errors in words: file and line, path of keys, value, and the nearest right one.

    data, root: what the file says, and its YAML nodes; top: the model of the whole file; sources: the models that
    `model.source` tells apart. A value of several allowed types is one fault and not one a type.
    """
    told = []
    for keys, own in by_place(errors, data, sources).items():
        line = line_of(root, list(keys))
        where = f"{path}:{line}: " if line else f"{path}: "
        if own[0]["type"] == "extra_forbidden":
            near = did_you_mean(str(keys[-1]), _known_keys(list(keys[:-1]), root, top, sources))
            told.append(f"{where}{_dotted(keys)}: unknown key (value {own[0]['input']!r}){near}")
        elif own[0]["type"] in ("union_tag_invalid", "union_tag_not_found"):
            source = str(own[0]["input"].get("source", "is missing"))
            told.append(f"{where}{_dotted(keys)}: source {source}{did_you_mean(source, list(sources))}")
        else:
            told.append(f"{where}{in_words(own, keys)}")
    return told


def by_place(errors: list[ErrorDetails], data: Any, tags: Collection[str] = ()) -> dict[tuple[Any, ...], list[ErrorDetails]]:
    """Errors by the path of keys in `data` that they are at. tags: names that pydantic puts after `model`."""
    found: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in errors:
        found.setdefault(tuple(_keys(error, data, tags)), []).append(error)
    return found


def in_words(errors: list[ErrorDetails], keys: tuple[Any, ...]) -> str:
    """What is wrong with one value, without pydantic's words: its path of keys, itself, what it must be instead.

    errors: those at `keys`; several where it may be of several types, and is of none.
    """
    value, name = errors[0]["input"], _dotted(keys) or "the file"
    if errors[0]["type"] == "missing":
        return f"{name}: this key is needed and missing" + (f"; {EMPTY[keys]}" if keys in EMPTY else "")
    said = [_message(e) for e in errors]
    must = [s.removeprefix("must be ") for s in said if s.startswith("must be ")]
    message = "; ".join([*([f"must be {' or '.join(must)}"] if must else []), *(s for s in said if not s.startswith("must be "))])
    if not value and keys in EMPTY:
        return f"{name}: is empty; {EMPTY[keys]}"
    if value is None:
        return f"{name}: is empty; {message}"
    plain = isinstance(value, (str, int, float, list))
    shown = "" if isinstance(value, dict) or not keys else f" = {value!r}" if plain else f" = {value}"
    return f"{name}{shown}: {message}{_misread(value, errors)}"


def _message(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx") or {}
    if kind in LENGTH:
        return LENGTH[kind].format(**context)
    if kind not in MUST_BE:  # a validator of ours has its own words
        return error["msg"].removeprefix("Value error, ")
    return f"must be {MUST_BE[kind].format(**context)}"


def _misread(value: Any, errors: list[ErrorDetails]) -> str:
    """That a number must be finite, or the nearest of the words allowed."""
    if isinstance(value, float) and not math.isfinite(value) and errors[0]["type"] in BOUNDS:
        return ", and finite"
    words = [w for e in errors if e["type"] == "literal_error" for w in re.findall(r"'([^']+)'", e["ctx"]["expected"])]
    return _near(str(value), words)


def _dotted(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))


def _keys(error: ErrorDetails, data: Any, tags: Collection[str]) -> list[Any]:
    """The path of keys in the file: pydantic puts names of types and of validators of its own between them."""
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
        else:  # a key of a mapping or an index of a list: its values' type
            model = get_args(model)[-1]
        if not isinstance(model, type):
            inner = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = inner[0] if len(inner) == 1 and type(None) in get_args(model) else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
