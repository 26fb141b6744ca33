"""A malformed row is named with file and line before any model is loaded; and the sets that ship are sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import evalset
from pipeline.core.errors import DataError
from pipeline.evalset import cards, tasks
from pipeline.evalset.tasks import load_task

ROOT = Path(__file__).resolve().parent.parent
ROW = '{"id": "a", "domain": "d", "text": "some text"}'
SOUND: dict[str, object] = {"id": "a", "question": "q", "choices": ["x", "y"], "answer": 0}


@pytest.mark.parametrize("content, line, word", [
    (b"\xef\xbb\xbf" + ROW.encode(), 1, "byte order mark"), (ROW.encode() + b"\r\n", 1, "CR LF"),
    (ROW.encode() + b"\n{oops", 2, "not JSON"), (b'{"id": "a", "domain": "d", "text": "\xff"}', 1, "not UTF-8"),
    (b'{"id": "a", "domain": "d"}', 1, "'text' is missing"),
    (b'{"id": "a", "domain": "d", "text": 7}', 1, "must be text, in quotes; found 7"),
    (b'{"id": "a", "domain": "d", "text": "  "}', 1, "is empty"), (b"[1, 2]", 1, "must be an object"),
    (f"{ROW}\n{ROW}".encode(), 2, "used twice"),
    (f"{ROW}\n{ROW.replace(': ' + chr(34) + 'a', ': ' + chr(34) + 'b')}".encode(), 2, "would count twice"),
    (f"{ROW}\n{ROW}\r\n".encode(), 2, "CR LF"), (b'{"id": "a", "id": "b", "domain": "d", "text": "t"}', 1, "'id' stands twice"),
    (b'{"id": "a", "domain": "d", "text": "\\ud800"}', 1, "surrogate"),
    (b'{"id": "a", "domain": "d", "text": "t", "weight": NaN}', 1, "NaN is not a JSON value"),
    (b'{"id": null, "domain": "d", "text": "t"}', 1, "must be text, in quotes; found None"),
    ("\ufeff".encode("utf-16-le") + ROW.encode("utf-16-le"), 1, "not UTF-8"),
])  # fmt: skip
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


@pytest.mark.parametrize("content, words", [
    (b'{"a": 1}\n{"a": 1 "b"}\n', "mine.jsonl:2: is not JSON \\(Expecting ',' delimiter, column 9\\)"),
    (b"[" * 100_000, "mine.jsonl:1: is not JSON"), (b"\n\xff\n", "mine.jsonl:2: is not UTF-8"), (b"\n\n", "mine.jsonl is empty"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_has_a_line_only_where_one_is_to_blame(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        evalset.load_texts(path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").mkdir()
    with pytest.raises(DataError, match="mine.jsonl cannot be read \\(Is a directory\\)"):
        evalset.load_texts(tmp_path)


def test_an_edited_set_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(ROW, encoding="utf-8")
    before = evalset.sets_digest(path)
    path.write_text(ROW.replace("some", "sole"), encoding="utf-8")
    assert evalset.sets_digest(path) != before


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty evalsets/tasks, and the process in the folder above."""
    monkeypatch.chdir(tmp_path)
    home = Path("evalsets/tasks")
    home.mkdir(parents=True)
    return home


def write(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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


@pytest.mark.parametrize("row, split, word", [
    (SOUND | {"answer": 2}, "test", "answer 2 is neither an index from 0 to 1 nor the text of a choice"),
    (SOUND | {"choices": ["x", "x"]}, "test", "two choices are equal"), (SOUND | {"choices": ["x"]}, "test", "at least two"),
    ({"id": "a", "choices": ["x", "y"], "answer": 0}, "test", "column 'question' (doc_to_text) is missing"),
    ({"question": "q", "choices": ["x", "y"], "answer": 0}, "test", "'id' is missing"),
    ({"id": "a"}, "tset", "test_split 'tset' has no data file; did you mean 'test'"), (None, "test", "is empty"),
    (SOUND | {"choices": ["x", " "]}, "test", "all non-empty text"), (SOUND | {"answer": True}, "test", "answer True is neither"),
    (SOUND | {"answer": "z"}, "test", "answer 'z' is neither"),
    (SOUND | {"question": 5}, "test", "'question' must be text, found 5; write it in quotes"),
])  # fmt: skip
def test_a_faulty_task_is_named(home: Path, row: dict[str, object] | None, split: str, word: str) -> None:
    write(home / "mine.jsonl", *([row] if row else []))
    (home / "mine.yaml").write_text(YAML.format(file=home / "mine.jsonl", split=split), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_task("mine")
    assert word in str(caught.value)


@pytest.mark.parametrize("name, file, word", [
    ("other", "evalsets/tasks/x.jsonl", "says `task: mine`"), ("mine", "elsewhere.jsonl", "lies outside evalsets/tasks"),
])  # fmt: skip
def test_a_task_must_be_called_as_its_file_and_keep_its_data_here(home: Path, name: str, file: str, word: str) -> None:
    (home / f"{name}.yaml").write_text(YAML.format(file=file, split="test"), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_task(name)
    assert word in str(caught.value)


CHOICE = "task: mine\noutput_type: multiple_choice\n"


@pytest.mark.parametrize("text, word", [
    ("- a list", "must be a mapping"), ("task: mine", "output_type None"), ("task: [", "is not valid YAML"),
    ("task: mine\noutput_type: multiple_chioce", "did you mean"), (CHOICE, "names no test_split"),
    (CHOICE + "test_split: test\ndataset_kwargs: {data_files: x.jsonl}", "needs dataset_kwargs"),
    (CHOICE + "test_split: test\ndataset_kwargs: {data_files: {test: }}", "must be the name of a file"),
    (CHOICE + "metric_list: [{metric: bleu}]", "mine.yaml:3: metric_list has neither acc nor exact_match"),
    (CHOICE + "metric_list: 5", "mine.yaml:3: metric_list = 5 must be a list"),
    (CHOICE + "task: mine", "mine.yaml:3: is not valid YAML (found dup"), ("a: 1\nb: [", "mine.yaml:2: is not valid YAML"),
    ("a: 1\ntask: other", "mine.yaml:2: says `task: other`"), ("a: \x01", "mine.yaml:1: holds a character"),
])  # fmt: skip
def test_a_faulty_yaml_is_named(home: Path, text: str, word: str) -> None:
    (home / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_task("mine")
    assert "mine.yaml" in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize("row, kind", [
    ({"context": "q", "choices": ["x", "y"], "answer": 1}, "multiple_choice"),
    ({"context": "q", "target": "x"}, "generate_until"), ({"text": "x"}, "loglikelihood_rolling"),
])  # fmt: skip
def test_rows_of_one_s_own_need_no_yaml(home: Path, row: dict[str, object], kind: str) -> None:
    write(home / "mine.jsonl", {"id": "a", **row})
    config, rows = load_task("mine")
    assert config["output_type"] == kind and len(rows) == 1 and tasks.task_files("mine") == [home / "mine.jsonl"]


def test_rows_whose_columns_fit_nothing_say_what_is_needed(home: Path) -> None:
    write(home / "mine.jsonl", {"id": "a", "question": "q", "target": "t"})
    with pytest.raises(DataError, match="has columns id, question, target; needed besides id: context, choices, answer"):
        load_task("mine")


def test_an_unknown_task_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DataError, match="did you mean 'facts'"):
        load_task("fatcs")


SIZES = {"facts": 400, "grammar": 600, "commonsense": 150, "retrieval": 150, "arithmetic_copy": 150, "instruct": 100}


def test_the_shipped_sets_are_sound_and_as_large_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = {card["set"]: card for card in cards.cards()}
    assert all(found[f"tasks/{name}"]["n"] >= n for name, n in SIZES.items())
    assert all(card[k] for card in found.values() for k in ("measures", "source", "weaknesses")), "a set has no card"
    for name in SIZES:
        _, rows = load_task(name)
        assert all(row["slice"] and row["cluster"] for row in rows)
    assert len({row["slice"] for row in load_task("grammar")[1]}) >= 12
    assert len(evalset.load_texts(Path("evalsets/corpus"))) >= 60
    assert len(evalset.load_prompts(Path("evalsets/prompts/trajectories.jsonl"))) >= 64


def test_what_was_measured_was_measured_on_the_sets_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promises of the cards, from the committed figures: difficulty, resolution, and damage that is seen."""
    monkeypatch.chdir(ROOT)
    record = cards.measured()
    found = {c["set"]: cards.figures(c, record) for c in cards.cards()}
    stale = [name for name, own in found.items() if own is None and name.startswith(("tasks/", "corpus/"))]
    assert not stale, f"not measured since they changed: {stale}; tier: full, dvc repro, python -m pipeline.evalset --record"
    for name in SIZES:
        own = found[f"tasks/{name}"]
        assert own and max(0.4, 1.1 * own["chance"]) < own["reference"] < 0.85, name
        assert own["n"] == own["delta"][record["probe"]]["n"] and own["resolvable"] > own["half_width"] > 0
    damaged = "int4-rtn"
    told = [name for name in SIZES if found[f"tasks/{name}"]["told"][damaged]]  # type: ignore[index]
    assert len(told) >= 3
    assert all(own["told"][damaged] for name, own in found.items() if own and name.startswith("corpus/"))


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


def test_few_shot_examples_belong_to_a_task(home: Path) -> None:
    """They change every prompt: an edit must be seen, wherever they lie."""
    write(home / "mine.jsonl", SOUND)
    write(home / "shots.jsonl", SOUND)
    text = YAML.format(file=home / "mine.jsonl", split="test")
    (home / "mine.yaml").write_text(text.replace("{test: ", "{dev: evalsets/tasks/shots.jsonl, test: "), encoding="utf-8")
    assert home / "shots.jsonl" in tasks.task_files("mine") and set(tasks.local_tasks()) == {"mine"}
    (home / "mine.yaml").write_text(text.replace("{test: ", "{dev: elsewhere.jsonl, test: "), encoding="utf-8")
    with pytest.raises(DataError, match="elsewhere.jsonl lies outside"):
        load_task("mine")


def test_a_target_of_two_kinds_is_refused(home: Path) -> None:
    """lm-eval takes the first row's kind for all: the others could never be right."""
    write(home / "mine.jsonl", {"id": "a", "context": "q", "target": "x"}, {"id": "b", "context": "r", "target": ["y", "z"]})
    with pytest.raises(DataError, match="column 'target' is list in some rows and str in others"):
        load_task("mine")


def test_choices_that_bring_their_space_get_no_second_one(home: Path) -> None:
    write(home / "mine.jsonl", {"id": "a", "context": "q", "choices": [" x", " y"], "answer": 1})
    assert load_task("mine")[0]["target_delimiter"] == ""


@pytest.mark.parametrize("rows, word", [
    ([{"context": "q", "choices": 5, "answer": 0}], "'choices' must be list, found int"),
    ([{"context": "q", "choices": [" x", " y"], "answer": 0}, {"context": "r", "choices": ["x", "y"], "answer": 0}], "use one way"),
    ([{"context": "q", "target": "two\nlines"}], "can never match"),
])  # fmt: skip
def test_rows_that_could_only_mislead_are_refused(home: Path, rows: list[dict[str, object]], word: str) -> None:
    write(home / "mine.jsonl", *({"id": str(k), **row} for k, row in enumerate(rows)))
    with pytest.raises(DataError, match=word):
        load_task("mine")


@pytest.mark.parametrize("line, word", [
    ("fewshot_split: tset", "did you mean 'test'"), ("include: facts.yaml", "`include` is not read here"),
])  # fmt: skip
def test_what_lm_eval_would_stumble_over_is_named_first(home: Path, line: str, word: str) -> None:
    (home / "mine.yaml").write_text(YAML.format(file=home / "mine.jsonl", split="test") + line + "\n", encoding="utf-8")
    write(home / "mine.jsonl", SOUND)
    with pytest.raises(DataError, match=word):
        load_task("mine")
