"""lm-eval tasks: evalsets/tasks/<name>.yaml with its rows, or <name>.jsonl alone, whose columns determine the kind.

Every row is checked here, so that a missing split or column or a malformed line is reported before a model is loaded."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.droppings import meant
from pipeline.core.errors import DataError
from pipeline.core.explain import did_you_mean, node_at, parse, read_text
from pipeline.core.params import HowMany
from pipeline.core.records import Json
from pipeline.evalset import fields_fault, load_rows

TASKS = Path("evalsets/tasks")
HOMES = (TASKS, Path("evalsets/corpus"))  # folders of tasks' rows, on which `evaluate` depends in dvc.yaml
OUTPUT_TYPES = ("multiple_choice", "generate_until", "loglikelihood_rolling", "loglikelihood")

ANSWER_TOKENS = 32  # longest reply of a task without a YAML
RIGHT = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
EXACT = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": [r"^\s+|\s+$"]}

# Columns of a JSONL file without a YAML -> the lm-eval config that fits them.
KINDS: dict[tuple[str, ...], Json] = {
    ("context", "choices", "answer"): {
        "output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "answer",
        "metric_list": [RIGHT],
    },
    ("context", "target"): {
        "output_type": "generate_until", "doc_to_text": "context", "doc_to_target": "target", "metric_list": [EXACT],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
    },
    ("text",): {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}  # fmt: skip


def local_tasks() -> dict[str, Path]:
    """{task in evalsets/tasks: its YAML, or its rows if it has none}."""
    named = {p.stem: p for p in meant(TASKS, "*.yaml")}
    used = {file.resolve() for path in named.values() for file in _data_files(_peek(path))}
    return named | {p.stem: p for p in meant(TASKS, "*.jsonl") if p.stem not in named and p.resolve() not in used}


def load_task(name: str) -> tuple[Json, list[Json]]:
    """A local task's lm-eval config and rows, all checked. Raises `DataError` with file and line."""
    tasks = local_tasks()
    if name not in tasks:
        raise DataError(f"task {name!r} is not in {TASKS}{did_you_mean(name, list(tasks))}")
    path = tasks[name]
    config = _config(name, path) if path.suffix == ".yaml" else _inferred(name, path)
    files = _split_files(path, config)
    if name == "all":
        raise DataError(f"{path}: a task cannot be called 'all': that is what all of them together are called")
    for file in _data_files(config):
        if not any(file.resolve().is_relative_to(home.resolve()) for home in HOMES):
            homes = " and ".join(map(str, HOMES))
            raise DataError(f"{path}: its data {file} lies outside {homes}, where a change would go unseen; move it there")
    rows = load_rows(files, partial(_task_row, config=config))
    _one_kind(files, rows, config)
    return config, rows


def task_files(name: str) -> list[Path]:
    """Every file of a local task: its YAML, if it has one, and its rows."""
    path = local_tasks()[name]
    return list(dict.fromkeys([path, *(_data_files(_peek(path)) if path.suffix == ".yaml" else [])]))


def subset(n: int, count: HowMany, seed: int) -> list[int]:
    """Indices of a fixed-seed subset in file order; smaller counts are subsets of larger ones."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return sorted(order[: None if isinstance(count, str) else count])


def is_chat(config: Json) -> bool:
    """Whether the task goes through the model's chat template (`metadata: {chat: true}` in its YAML)."""
    return bool((config.get("metadata") or {}).get("chat"))


def _config(name: str, path: Path) -> Json:
    config, root = parse(path, read_text(path, DataError, f"{path} is not here"), DataError)
    if not isinstance(config, dict):
        raise DataError(f"{path}: must be a mapping of keys, found {type(config).__name__}")

    def at(*keys: str) -> str:
        line = node_at(root, keys)[1]
        return f"{path}:{line}" if line else str(path)

    if config.get("task") != name:
        given = config.get("task")
        raise DataError(f"{at('task')}: says `task: {given}`; lm-eval goes by that, so it must be {name!r} as the file")
    metrics = {str(m.get("metric")) for m in config.get("metric_list") or [] if isinstance(m, dict)}
    splits, shots = _splits(config), config.get("fewshot_split")
    if shots and splits and shots not in splits:
        raise DataError(f"{at('fewshot_split')}: fewshot_split {shots!r} has no data file{did_you_mean(str(shots), list(splits))}")
    if "include" in config:
        raise DataError(f"{at('include')}: `include` is not read here; write the whole task into one file")
    kind = config.get("output_type")
    if kind != "loglikelihood_rolling" and metrics and not metrics & {"acc", "exact_match"}:
        raise DataError(f"{at('metric_list')}: metric_list has neither acc nor exact_match: an item must be right or wrong")
    if kind not in OUTPUT_TYPES:
        raise DataError(f"{at('output_type')}: output_type {kind!r}{did_you_mean(str(kind), list(OUTPUT_TYPES))}")
    return config


def _inferred(name: str, path: Path) -> Json:
    """The config for the first row's columns."""
    first = load_rows([path], lambda row: fields_fault(row, {"id": str}))[0]
    for columns, config in KINDS.items():
        if all(c in first for c in columns):
            files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
            given = {"task": name, **files, "num_fewshot": 0, "metadata": {"version": 1.0}, **config}
            if "choices" in columns and str(first["choices"][0]).startswith(" "):
                given["target_delimiter"] = ""  # choices with their own space
            return given
    kinds = "; or ".join(", ".join(columns) for columns in KINDS)
    raise DataError(f"{path}:1: has columns {', '.join(first)}; needed besides id: {kinds}; or write {path.with_suffix('.yaml')}")


def _peek(path: Path) -> Json:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError):  # reported when the task is used
        return {}
    return config if isinstance(config, dict) else {}


def _splits(config: Json) -> Json:
    kwargs = config.get("dataset_kwargs")
    files = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    return files if isinstance(files, dict) else {}


def _data_files(config: Json) -> list[Path]:
    values = _splits(config).values()  # few-shot examples are part of a prompt, too
    return [Path(f) for one in values for f in (one if isinstance(one, list) else [one]) if isinstance(f, str)]


def _split_files(path: Path, config: Json) -> list[Path]:
    """The data files of a task's test split."""
    split = config.get("test_split")
    files = _splits(config)
    if not split:
        raise DataError(f"{path}: names no test_split")
    if not files:
        raise DataError(f"{path}: needs dataset_kwargs: {{data_files: {{{split}: evalsets/tasks/<file>.jsonl}}}}")
    if split not in files:
        raise DataError(f"{path}: test_split {split!r} has no data file{did_you_mean(split, list(files))}")
    names = files[split] if isinstance(files[split], list) else [files[split]]
    if not names or not all(isinstance(f, str) and "*" not in f for f in names):
        raise DataError(f"{path}: data_files.{split} must be the name of a file, or a list of names; found {files[split]!r}")
    return [Path(f) for f in names]


def _one_kind(files: list[Path], rows: list[Json], config: Json) -> None:
    """Raise if a target is text in one row and a list in another (lm-eval uses the first row's kind for all). Without a YAML also
    if only some choices begin with a space, or a target has several lines."""
    inferred = files[0].parent == TASKS and not (TASKS / f"{config['task']}.yaml").exists()
    for row in rows if inferred else []:
        where = f"{files[0]}: item {row['id']!r}"
        if "choices" in row and {c.startswith(" ") for c in row["choices"]} != {config.get("target_delimiter") == ""}:
            raise DataError(f"{where}: some choices of the file begin with a space and others do not; use one way")
        if config["output_type"] == "generate_until" and "\n" in "".join(row["target"]).strip():
            raise DataError(f"{where}: a target of several lines can never match, since a reply ends at its first")
    column = config.get("doc_to_target")
    kinds = {type(row[column]).__name__ for row in rows if isinstance(column, str) and column in row}
    if len(kinds) > 1:
        raise DataError(f"{files[0]}: column {column!r} is {' in some rows and '.join(sorted(kinds))} in others; use one of them")


def _task_row(row: Any, config: Json) -> str | None:
    if fault := fields_fault(row, {"id": str}):
        return fault
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        column = config.get(key)
        if isinstance(column, str) and column.isidentifier() and column not in row:
            return f"column {column!r} ({key}) is missing"
    return _choice_fault(row, config) or _text_fault(row, config)


def _choice_fault(row: Json, config: Json) -> str | None:
    if config.get("output_type") != "multiple_choice":
        return None
    named = [str(config.get(key)) for key in ("doc_to_choice", "doc_to_target")]
    if not all(name in row for name in named):  # made by a template
        return None
    choices, answer = (row[name] for name in named)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        return f"field {named[0]!r} must be a list of at least two choices, all non-empty text; found {choices!r}"
    if len(set(choices)) < len(choices):
        return f"two choices are equal: {choices!r}"
    if isinstance(answer, str) and answer in choices:
        return None
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        return f"answer {answer!r} is neither an index from 0 to {len(choices) - 1} nor the text of a choice"
    return None


def _text_fault(row: Json, config: Json) -> str | None:
    """Fault of a question or target that is not text or empty; only a multiple choice may have no context."""
    asked, expected, kind = config.get("doc_to_text"), config.get("doc_to_target"), config.get("output_type")
    given = asked in row and (kind != "multiple_choice" or row[asked] != "")
    if fault := fields_fault(row, {str(asked): str} if given else {}):
        return fault
    if kind != "multiple_choice" and isinstance(expected, str) and expected in row:
        values = row[expected] if isinstance(row[expected], list) else [row[expected]]
        if not values or not all(isinstance(v, str) and v.strip() for v in values):
            return f"field {expected!r} must be text, or a list of texts, none empty; found {row[expected]!r}"
    return None
