"""Faults of params.yaml in words: the line, the path of keys, the value, and the nearest right one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from pipeline.core.errors import ParamsError


def unknown(kind: str, name: str, known: list[str]) -> str:
    """`variant 'int9' is not in params.yaml; did you mean 'int8'?`"""
    return f"{kind} {name!r} is not in params.yaml{did_you_mean(name, known)}"


def did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there is: {', '.join(map(str, known))}"


def explain(error: ErrorDetails, root: Any, path: Path, top: type[BaseModel], sources: dict[str, type[BaseModel]]) -> str:
    """One validation error in words: file and line, path of keys, value, and the nearest right one.

    root: the file's YAML nodes; top: the model of the whole file; sources: the models that `model.source` tells apart.
    """
    keys = [k for k in error["loc"] if k not in ("function-after[_one_bound(), Rule]",)]
    if keys[:1] == ["model"] and len(keys) > 1 and keys[1] in sources:
        del keys[1]  # pydantic puts the union's tag into the path; it is no key of the file
    if keys[:1] == ["threads"]:
        keys = keys[:1]
    where = f"{path}:{_line(root, keys)}: {'.'.join(map(str, keys)) or 'the file'}"
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key (value {value!r}){did_you_mean(str(keys[-1]), _known_keys(keys[:-1], root, top, sources))}"
    if kind == "missing":
        return f"{where}: this key is needed and missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        source = value.get("source") if isinstance(value, dict) else value
        return f"{where}: source {source!r}{did_you_mean(str(source), list(sources))}"
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+e[+-]?\d+", value):
        message += f"; YAML reads {value} as text, write {value.replace('e', '.0e')}"
    if kind == "literal_error":
        message += did_you_mean(str(value), re.findall(r"'([^']+)'", error["ctx"]["expected"]))
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{where}{shown}: {message}"


def _known_keys(keys: list[Any], root: Any, top: type[BaseModel], sources: dict[str, type[BaseModel]]) -> list[str]:
    """Names of the fields of the section at `keys`."""
    model: Any = top
    for key in keys:
        if model is top and key == "model":
            model = sources[_scalar(root, ["model", "source"])]
        elif isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields:
            model = model.model_fields[key].annotation
        else:  # a key of a mapping or an index of a list: its values' type
            model = get_args(model)[-1]
        if not isinstance(model, type):
            inner = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = inner[0] if len(inner) == 1 and type(None) in get_args(model) else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


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


def refuse_duplicates(node: Any, path: Path) -> None:
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ParamsError(f"{path}:{line}: {key.value!r} is given twice (first on line {seen[key.value]})")
            seen[key.value] = line
            refuse_duplicates(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            refuse_duplicates(item, path)
