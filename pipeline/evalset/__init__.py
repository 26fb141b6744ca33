"""Load and validate evaluation, calibration and prompt files: every row, with its line number, before a model loads.

`python -m pipeline.evalset` checks every set of the project and prints the cards."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.artifacts import sha256_file, unique_names
from pipeline.core.droppings import meant
from pipeline.core.errors import DataError
from pipeline.core.params import HowMany
from pipeline.core.records import PromptRow, TextRow

LABEL = re.compile(r"^[A-Za-z0-9._-]+$")
R = TypeVar("R", TextRow, PromptRow)


def load_texts(path: Path) -> list[TextRow]:
    """Documents of a JSONL file, or of every JSONL file of a folder in name order."""
    return load_rows(_files(path), _text_row)


def load_prompts(path: Path) -> list[PromptRow]:
    """Prompts of a JSONL file, or of every JSONL file of a folder in name order."""
    return load_rows(_files(path), _prompt_row)


def choose(rows: Sequence[R], count: HowMany, seed: int) -> list[R]:
    """A fixed-seed subset in file order, evenly over the domains; smaller counts are subsets of larger ones."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    taken: Counter[str] = Counter()
    turn = {}
    for i in order:  # the first of every domain, then the second of every domain, ...
        turn[i] = taken[rows[i]["domain"]]
        taken[rows[i]["domain"]] += 1
    return [rows[i] for i in sorted(sorted(order, key=turn.__getitem__)[: None if isinstance(count, str) else count])]


def in_parts(groups: Mapping[str, str], count: int, seed: int) -> dict[str, int]:
    """{unit: number of its part}: random parts of equal size, with each group's units spread evenly. groups: {unit: its group}."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return {unit: k % count for k, unit in enumerate(sorted(order, key=groups.__getitem__))}


def sets_digest(path: Path) -> dict[str, str]:
    """{file: sha256} of a set: an edited set under the same name is another set."""
    return {str(p): sha256_file(p) for p in _files(path)}


def _files(path: Path) -> list[Path]:
    files = meant(path, "*.jsonl") if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .jsonl file")
    return files


def load_rows(files: list[Path], check: Callable[[Any], str | None]) -> list[Any]:
    """Rows of JSONL files, each checked by `check` (a fault, or None), without an id or content twice. Raises `DataError` with file
    and line of the first fault."""
    rows: list[Any] = []
    ids: dict[str, str] = {}
    contents: dict[str, str] = {}
    for file in files:
        for line, row in _lines(file):
            where = f"{file}:{line}"
            fault = check(row)
            if fault:
                raise DataError(f"{where}: {fault}")
            if row["id"] in ids:
                raise DataError(f"{where}: id {row['id']!r} is used twice (first at {ids[row['id']]})")
            content = json.dumps({k: v for k, v in row.items() if k != "id"}, sort_keys=True)
            if content in contents:
                raise DataError(f"{where}: says the same as {contents[content]} under another id; it would count twice")
            ids[row["id"]] = contents[content] = where
            rows.append(row)
    return rows


def _lines(path: Path) -> list[tuple[int, Any]]:
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a zero byte in its name
        raise DataError(f"{path} cannot be read ({getattr(e, 'strerror', e)}); check the path in params.yaml") from None
    rows = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"), object_pairs_hook=unique_names)
            # refuses NaN and half surrogate pairs
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8")
            rows.append((number, row))
        except (ValueError, RecursionError) as e:
            raise DataError(f"{path}:{number}: is not JSON in UTF-8 ({e})") from None
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


def _text_row(row: Any) -> str | None:
    fault = fields_fault(row, {"id": str, "domain": str, "text": str})
    if fault is None and not LABEL.match(row["domain"]):
        fault = f"domain {row['domain']!r}: use letters, digits, '.', '_' and '-', since metrics are named by it"
    return fault


def _prompt_row(row: Any) -> str | None:
    if isinstance(row, dict) and "messages" in row:
        fault = fields_fault(row, {"id": str, "domain": str, "messages": list})
        for message in row["messages"] if fault is None else []:
            fault = fault or fields_fault(message, {"role": str, "content": str})
        return fault
    return fields_fault(row, {"id": str, "domain": str, "prompt": str})


def fields_fault(row: Any, needed: dict[str, type]) -> str | None:
    """What is wrong with a row's fields, or None. needed: {name: type}; none may be empty."""
    if not isinstance(row, dict):
        return f"a row must be an object, found {type(row).__name__}"
    for name, kind in needed.items():
        if name not in row:
            return f"field {name!r} is missing"
        if not isinstance(row[name], kind):
            what = "text, in quotes" if kind is str else f"a {kind.__name__}"
            return f"field {name!r} must be {what}; found {row[name]!r}"
        if not (row[name].strip() if isinstance(row[name], str) else row[name]):
            return f"field {name!r} is empty"
    return None
