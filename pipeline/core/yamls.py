"""YAML files with their lines: what cannot be read is told with the line that is to blame, and without one where none is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import QuantgateError


def read_text(path: Path, error: type[QuantgateError], missing: str) -> str:
    """A UTF-8 file's text. Raises `error` in words for one that is not there (`missing`), no file, locked, or not UTF-8."""
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
    """(what a YAML file says, its root node or None); a key given twice, which PyYAML would overlook, is an error too."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(root, path, error, [])
        return yaml.safe_load(text), root
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise error(f"{path}:{line}: holds a character that YAML does not take (code {e.character})") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise error(f"{where}: is not valid YAML ({e.problem or e.context})") from None
    except RecursionError:
        raise error(f"{path} is nested too deeply to be read") from None
    except ValueError as e:  # a date that is none
        raise error(f"{path}:{_misfit(root)}: is not valid YAML ({e})") from None


def refuse_odd_names(node: Any, path: Path, error: type[QuantgateError]) -> None:
    """Raise for a key that YAML does not read as text: `no` is false, `8` a number."""
    for one in _below(node):
        for key, _ in one.value if isinstance(one, yaml.MappingNode) else []:
            kind = key.tag.rpartition(":")[2]
            if kind not in ("str", "merge"):
                raise error(f"{path}:{key.start_mark.line + 1}: YAML reads the name {key.value!r} as {kind}; put it in quotes")


def node_at(root: Any, keys: list[Any]) -> tuple[Any, int | None]:
    """The YAML node at a path of keys, and the 1-based line of its key (or of its nearest ancestor; None: the whole file)."""
    node, line = root, None
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


def line_of(root: Any, keys: list[Any]) -> int | None:
    """The line of a key, or of its nearest ancestor; None where only the whole file is to blame."""
    return node_at(root, keys)[1]


def _below(node: Any) -> Iterator[Any]:
    """A node and all below it."""
    yield node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (*_below(key), *_below(value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _below(item)


def _misfit(root: Any) -> int:
    """The line of the first value that cannot be made."""
    for node in _below(root):
        if isinstance(node, yaml.ScalarNode):
            try:
                yaml.SafeLoader("").construct_object(node)
            except ValueError:
                return int(node.start_mark.line) + 1
    raise AssertionError("every value can be made")


def _refuse_duplicates(node: Any, path: Path, error: type[QuantgateError], above: list[Any]) -> None:
    if any(node is one for one in above):
        raise error(f"{path}:{node.start_mark.line + 1}: holds itself, by an alias")
    if isinstance(node, yaml.MappingNode):
        seen: dict[Any, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise error(f"{path}:{line}: {key.value!r} is given twice (first on line {seen[key.value]})")
                seen[key.value] = line
            _refuse_duplicates(value, path, error, [*above, node])
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, path, error, [*above, node])
