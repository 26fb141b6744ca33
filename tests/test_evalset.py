"""A malformed row is named with file and line before any model is loaded; and the sets that ship are sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import evalset
from pipeline.errors import DataError

ROOT = Path(__file__).resolve().parent.parent
ROW = '{"id": "a", "domain": "d", "text": "some text"}'


@pytest.mark.parametrize(
    "content, line, word",
    [
        (b"\xef\xbb\xbf" + ROW.encode(), 1, "byte order mark"),
        (ROW.encode() + b"\r\n", 1, "CR LF"),
        (ROW.encode() + b"\n{oops", 2, "not JSON"),
        (b'{"id": "a", "domain": "d", "text": "\xff"}', 1, "not UTF-8"),
        (b'{"id": "a", "domain": "d"}', 1, "'text' is missing"),
        (b'{"id": "a", "domain": "d", "text": 7}', 1, "must be str, found int"),
        (b'{"id": "a", "domain": "d", "text": "  "}', 1, "is empty"),
        (b"[1, 2]", 1, "must be an object"),
        (f"{ROW}\n{ROW}".encode(), 2, "used twice"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(tmp_path: Path, content: bytes, line: int, word: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        evalset.load_texts(path)
    assert f"{path}:{line}: " in str(caught.value) and word in str(caught.value)


def test_line_17_is_line_17_also_after_blank_lines(tmp_path: Path) -> None:
    rows = [json.dumps({"id": str(i), "domain": "d", "text": "t"}) for i in range(14)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join([*rows[:5], "", "", *rows[5:], "{"]), encoding="utf-8")
    with pytest.raises(DataError, match=":17: is not JSON"):
        evalset.load_texts(path)


def test_a_missing_and_an_empty_file_are_two_messages(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not here"):
        evalset.load_texts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="is empty"):
        evalset.load_texts(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="holds no .jsonl file"):
        (tmp_path / "folder").mkdir()
        evalset.load_texts(tmp_path / "folder")


def test_an_edited_set_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(ROW, encoding="utf-8")
    before = evalset.sets_digest(path)
    path.write_text(ROW.replace("some", "sole"), encoding="utf-8")
    assert evalset.sets_digest(path) != before


YAML = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: {split}
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
"""


@pytest.mark.parametrize(
    "row, split, word",
    [
        ({"id": "a", "question": "q", "choices": ["x", "y"], "answer": 2}, "test", "answer 2 is out of range 0..1"),
        ({"id": "a", "question": "q", "choices": ["x", "x"], "answer": 0}, "test", "two choices are equal"),
        ({"id": "a", "question": "q", "choices": ["x"], "answer": 0}, "test", "at least two choices"),
        ({"id": "a", "choices": ["x", "y"], "answer": 0}, "test", "column 'question' (doc_to_text) is missing"),
        ({"question": "q", "choices": ["x", "y"], "answer": 0}, "test", "'id' is missing"),
        ({"id": "a"}, "tset", "test_split 'tset' has no data file; did you mean 'test'"),
        (None, "test", "is empty"),
    ],
)
def test_a_faulty_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, object] | None, split: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "evalsets" / "mine.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(row) if row else "", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(YAML.format(file=file, split=split), encoding="utf-8")
    monkeypatch.setattr(evalset, "TASKS", tmp_path)
    with pytest.raises(DataError) as caught:
        evalset.load_task("mine")
    assert word in str(caught.value)


@pytest.mark.parametrize("name, word", [("other", "must be 'other'"), ("mine", "lies outside evalsets/")])
def test_a_task_must_be_called_as_its_file_and_keep_its_data_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    (tmp_path / f"{name}.yaml").write_text(YAML.format(file=tmp_path / "x.jsonl", split="test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evalset, "TASKS", tmp_path)
    with pytest.raises(DataError) as caught:
        evalset.load_task(name)
    assert word in str(caught.value)


def test_an_unknown_task_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DataError, match="did you mean 'facts'"):
        evalset.load_task("fatcs")


def test_the_shipped_sets_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for task in evalset.local_tasks():
        evalset.load_task(task)
    assert len(evalset.load_texts(Path("evalsets/corpus"))) >= 60
    assert len(evalset.load_prompts(Path("evalsets/prompts/trajectories.jsonl"))) >= 64
    assert len(evalset.load_texts(Path("evalsets/calibration"))) >= 50


@pytest.mark.parametrize("generator", sorted((ROOT / "evalsets/generators").glob("*.py")), ids=lambda p: p.stem)
def test_the_committed_rows_are_what_the_generator_makes(generator: Path, tmp_path: Path) -> None:
    home = tmp_path / "evalsets"
    (home / "generators").mkdir(parents=True)
    (home / "tasks").mkdir()
    copy = home / "generators" / generator.name
    copy.write_bytes(generator.read_bytes())
    done = subprocess.run([sys.executable, str(copy)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = (home / "tasks" / f"{generator.stem}.jsonl").read_bytes()
    assert made == (ROOT / "evalsets/tasks" / f"{generator.stem}.jsonl").read_bytes()
