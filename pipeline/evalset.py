"""Load and validate evaluation, calibration and prompt files: every row, with its line number, before a model loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts import sha256_file
from pipeline.errors import DataError
from pipeline.explain import did_you_mean

TASKS = Path("evalsets/tasks")

LABEL = re.compile(r"^[A-Za-z0-9._-]+$")
Row = dict[str, Any]


def load_texts(path: Path) -> list[Row]:
    """Documents: a JSONL file, or every JSONL file of a folder in name order; rows with id, domain, text."""
    return _load(path, _text_row)


def load_prompts(path: Path) -> list[Row]:
    """Prompts: rows with id, domain, and either prompt (plain text) or messages (a chat)."""
    return _load(path, _prompt_row)


def sets_digest(path: Path) -> dict[str, str]:
    """{file: sha256} of a set, for provenance: an edited set under the same name is another set."""
    return {str(p): sha256_file(p) for p in _files(path)}


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .jsonl file")
    return files


def _load(path: Path, check: Callable[[Any], str | None]) -> list[Row]:
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for file in _files(path):
        for line, row in _lines(file):
            where = f"{file}:{line}"
            fault = check(row)
            if fault:
                raise DataError(f"{where}: {fault}")
            if row["id"] in seen:
                raise DataError(f"{where}: id {row['id']!r} is used twice (first at {seen[row['id']]})")
            seen[row["id"]] = where
            rows.append(row)
    return rows


def _lines(path: Path) -> list[tuple[int, Any]]:
    """(line number, parsed row) of a JSONL file; refuses what editors and other systems leave in such files."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is not here; check the path in params.yaml") from None
    if raw.startswith(b"\xef\xbb\xbf"):
        raise DataError(f"{path}:1: starts with a byte order mark; save it as UTF-8 without BOM")
    rows = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.endswith(b"\r"):
            raise DataError(f"{path}:{number}: ends in CR LF; save it with LF line ends")
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line.decode("utf-8"))))
        except UnicodeDecodeError as e:
            raise DataError(f"{path}:{number}: is not UTF-8 (byte {e.start})") from None
        except ValueError as e:
            raise DataError(f"{path}:{number}: is not JSON ({e})") from None
    if not rows:
        raise DataError(f"{path}: is empty")
    return rows


def _text_row(row: Any) -> str | None:
    fault = _fields(row, {"id": str, "domain": str, "text": str})
    if fault is None and not LABEL.match(row["domain"]):
        fault = f"domain {row['domain']!r}: use letters, digits, '.', '_' and '-', since metrics are named by it"
    return fault


def _prompt_row(row: Any) -> str | None:
    if isinstance(row, dict) and "messages" in row:
        fault = _fields(row, {"id": str, "domain": str, "messages": list})
        for message in row["messages"] if fault is None else []:
            fault = fault or _fields(message, {"role": str, "content": str})
        return fault
    return _fields(row, {"id": str, "domain": str, "prompt": str})


def _fields(row: Any, needed: dict[str, type]) -> str | None:
    if not isinstance(row, dict):
        return f"a row must be an object, found {type(row).__name__}"
    for name, kind in needed.items():
        if name not in row:
            return f"field {name!r} is missing"
        if not isinstance(row[name], kind):
            return f"field {name!r} must be {kind.__name__}, found {type(row[name]).__name__}"
        if not (row[name].strip() if isinstance(row[name], str) else row[name]):
            return f"field {name!r} is empty"
    return None


# --- lm-eval tasks -----------------------------------------------------------------------------------------------


def local_tasks() -> dict[str, Path]:
    """{task name: its YAML} of the tasks that the project carries."""
    return {p.stem: p for p in sorted(TASKS.glob("*.yaml"))}


def load_task(name: str) -> dict[str, Any]:
    """A local task's YAML, after its data file was checked row by row.

    Checked here so that a missing split, a missing column or a malformed line is named before a model is loaded.
    """
    tasks = local_tasks()
    if name not in tasks:
        raise DataError(f"task {name!r} is not in {TASKS}{did_you_mean(name, list(tasks))}")
    path = tasks[name]
    try:
        config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise DataError(f"{path} is not valid YAML: {e}") from None
    if config.get("task") != name:
        raise DataError(f"{path}: says `task: {config.get('task')}`; lm-eval goes by that, so it must be {name!r} as the file")
    for file in task_files(path, config):
        if not file.resolve().is_relative_to(Path("evalsets").resolve()):
            raise DataError(f"{path}: its data {file} lies outside evalsets/, where a change would go unseen; move it there")
        _load(file, lambda row: _task_row(row, config))
    return config


def load_task_rows(name: str) -> list[Row]:
    """All rows of a local task."""
    path = local_tasks()[name]
    config = load_task(name)
    return [row for file in task_files(path, config) for _, row in _lines(file)]


def task_files(path: Path, config: dict[str, Any]) -> list[Path]:
    """The data files of a task's test split."""
    split = config.get("test_split")
    files = (config.get("dataset_kwargs") or {}).get("data_files") or {}
    if not split:
        raise DataError(f"{path}: names no test_split")
    if split not in files:
        raise DataError(f"{path}: test_split {split!r} has no data file{did_you_mean(split, list(files))}")
    found = files[split]
    return [Path(f) for f in ([found] if isinstance(found, str) else found)]


def _task_row(row: Any, config: dict[str, Any]) -> str | None:
    fault = _fields(row, {"id": str})
    if fault:
        return fault
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        column = config.get(key)
        plain = isinstance(column, str) and column.isidentifier()
        if plain and column not in row:
            return f"column {column!r} ({key}) is missing"
    if config.get("output_type") == "multiple_choice":
        choices, answer = row.get(config.get("doc_to_choice")), row.get(config.get("doc_to_target"))
        if isinstance(choices, list):
            if len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
                return f"needs at least two choices, all non-empty text; found {choices!r}"
            if len(set(choices)) < len(choices):
                return f"two choices are equal: {choices!r}"
            if not isinstance(answer, int) or not 0 <= answer < len(choices):
                return f"answer {answer!r} is out of range 0..{len(choices) - 1}"
    return None
