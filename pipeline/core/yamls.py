"""Read YAML files so that every fault names its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from pipeline.core.errors import QuantgateError


def read_text(path: Path, error: type[QuantgateError], missing: str) -> str:
    """A UTF-8 file's text. Raises `error` where it cannot be read; missing: the message where it does not exist."""
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
    """(content, root node or None) of a YAML file, by YAML 1.2, as DVC reads params.yaml: `1e-4` is a number, `on` is text."""
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        _refuse_odd_names(root, path, error)
        return yaml.constructor.construct_document(root) if root else None, root
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise error(f"{where}: is not valid YAML ({e.problem or e.context})") from None
    except ReaderError as e:
        raise error(f"{path}:{text.count(chr(10), 0, e.position) + 1}: holds a character that YAML does not take") from None
    except ValueError as e:  # a date that is none
        raise error(f"{path}: is not valid YAML ({e})") from None


def _refuse_odd_names(node: Any, path: Path, error: type[QuantgateError]) -> None:
    """Raise for a key that YAML does not read as text: `8` is a number, `true` a truth value."""
    for one in _below(node):
        for key, _ in one.value if isinstance(one, MappingNode) else []:
            kind = key.tag.rpartition(":")[2]
            if kind not in ("str", "merge"):
                raise error(f"{path}:{key.start_mark.line + 1}: YAML reads the name {key.value!r} as {kind}; put it in quotes")


def node_at(root: Any, keys: list[Any]) -> tuple[Any, int | None]:
    """The YAML node at a path of keys, and the 1-based line of its key or of its nearest ancestor (None: the whole file)."""
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


def line_of(root: Any, keys: list[Any]) -> int | None:
    return node_at(root, keys)[1]


def _below(node: Any) -> Iterator[Any]:
    """A node and all below it."""
    yield node
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield from (*_below(key), *_below(value))
    elif isinstance(node, SequenceNode):
        for item in node.value:
            yield from _below(item)
