"""A malformed row is named with file and line before any model is loaded; and the sets that ship are sound."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from pipeline import evalset
from pipeline.core import artifacts
from pipeline.core.errors import DataError
from pipeline.evalset import __main__ as command
from pipeline.evalset import cards, tasks
from pipeline.evalset.calibration import measured_rows, overlap
from pipeline.evalset.tasks import load_task

ROW = '{"id": "a", "domain": "d", "text": "some text"}'
VALID: dict[str, object] = {"id": "a", "question": "q", "choices": ["x", "y"], "answer": 0}


@pytest.mark.parametrize("content, words", [
    (b"\xef\xbb\xbf" + ROW.encode(), ":1: is not JSON in UTF-8 (Unexpected UTF-8 BOM"),
    (ROW.encode() + b"\n{oops", ":2: is not JSON"), (b'{"id": "a", "domain": "d", "text": "\xff"}', ":1: is not JSON in UTF-8"),
    (b'{"id": "a", "domain": "d"}', ":1: field 'text' is missing"),
    (b'{"id": "a", "domain": "d", "text": 7}', ":1: field 'text' must be text, in quotes; found 7"),
    (b'{"id": "a", "domain": "d", "text": "  "}', ":1: field 'text' is empty"), (b"[1, 2]", ":1: a row must be an object"),
    (f"{ROW}\n{ROW}".encode(), ":2: id 'a' is used twice"),
    (f"{ROW}\n{ROW.replace(': ' + chr(34) + 'a', ': ' + chr(34) + 'b')}".encode(), "it would count twice"),
    (b'{"id": "a", "id": "b", "domain": "d", "text": "t"}', ":1: is not JSON in UTF-8 ('id' is given twice)"),
    (b'{"id": "a", "domain": "d", "text": "t", "weight": NaN}', ":1: is not JSON in UTF-8 (Out of range float values"),
    (b"[" * 100_000, ":1: is not JSON"), (b"\n\xff\n", ":2: is not JSON in UTF-8"), (b"\n\n", " is empty"), (b"", " is empty"),
    ("\n".join([ROW, "", "", *(ROW.replace('"a"', f'"{k}"').replace("some", f"{k}") for k in range(13)), "{"]).encode(),
     ":17: is not JSON"),
])  # fmt: skip
def test_a_malformed_row_is_named_with_its_line_and_a_file_without_one_to_blame_by_itself(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        evalset.load_texts(path)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)


def test_a_missing_file_an_empty_folder_a_dead_link_and_a_folder_for_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read \\(No such file"):
        evalset.load_texts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no .jsonl file"):
        evalset.load_texts(tmp_path)
    (tmp_path / "wiki.jsonl").symlink_to("nowhere")  # passed over, a part of the set would be missing
    with pytest.raises(DataError, match="wiki.jsonl cannot be read"):
        evalset.load_texts(tmp_path)
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
def home() -> Path:
    """An empty evalsets/tasks, and the process in the folder above."""
    home = Path("evalsets/tasks")
    home.mkdir(parents=True)
    return home


def write(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def yaml_of(file: str = "evalsets/tasks/mine.jsonl", split: str = "test") -> str:
    return f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: {split}
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
"""


CHOICE = "task: mine\noutput_type: multiple_choice\n"


@pytest.mark.parametrize("text, row, words", [
    (yaml_of(), VALID | {"answer": 2}, "answer 2 is neither an index from 0 to 1 nor the text of a choice"),
    (yaml_of(), VALID | {"choices": ["x", "x"]}, "two choices are equal"), (yaml_of(), VALID | {"choices": ["x"]}, "at least two"),
    (yaml_of(), {"id": "a", "choices": ["x", "y"], "answer": 0}, "column 'question' (doc_to_text) is missing"),
    (yaml_of(), {"question": "q", "choices": ["x", "y"], "answer": 0}, "'id' is missing"), (yaml_of(), None, "is empty"),
    (yaml_of(), VALID | {"choices": ["x", " "]}, "all non-empty text"),
    (yaml_of(), VALID | {"question": 5}, "field 'question' must be text, in quotes; found 5"),
    (yaml_of(split="tset"), VALID, "test_split 'tset' has no data file; did you mean 'test'"),
    (yaml_of("elsewhere.jsonl"), VALID, "elsewhere.jsonl lies outside evalsets/tasks"),
    (yaml_of().replace("task: mine", "task: other"), VALID, "mine.yaml:2: says `task: other`"),
    (yaml_of() + "include: facts.yaml", VALID, "`include` is not read here"),
    ("task: mine\noutput_type: multiple_chioce", VALID, "mine.yaml:2: output_type 'multiple_chioce'; did you mean"),
    (CHOICE + "test_split: test\ndataset_kwargs: {data_files: x.jsonl}", VALID, "needs dataset_kwargs"),
    (CHOICE + "metric_list: [{metric: bleu}]", VALID, "mine.yaml:3: metric_list has neither acc nor exact_match"),
    (CHOICE + "task: mine", VALID, "mine.yaml:3: is not valid YAML (found dup"),
])  # fmt: skip
def test_a_faulty_task_is_named(home: Path, text: str, row: dict[str, object] | None, words: str) -> None:
    write(home / "mine.jsonl", *([row] if row else []))
    (home / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_task("mine")
    assert words in str(caught.value)


@pytest.mark.parametrize("row, kind", [
    ({"context": "q", "choices": ["x", "y"], "answer": 1}, "multiple_choice"),
    ({"context": "q", "target": "x"}, "generate_until"), ({"text": "x"}, "loglikelihood_rolling"),
])  # fmt: skip
def test_rows_of_one_s_own_need_no_yaml(home: Path, row: dict[str, object], kind: str) -> None:
    write(home / "mine.jsonl", {"id": "a", **row})
    config, rows = load_task("mine")
    assert config["output_type"] == kind and len(rows) == 1 and tasks.task_files("mine") == [home / "mine.jsonl"]


@pytest.mark.parametrize("rows, words", [
    ([{"question": "q", "target": "t"}], "has columns id, question, target; needed besides id: context, choices, answer"),
    ([{"context": "q", "choices": [5], "answer": 0}], "'choices' must be a list of at least two"),
    ([{"context": "q", "choices": [" x", " y"], "answer": 0}, {"context": "r", "choices": ["x", "y"], "answer": 0}], "use one way"),
    ([{"context": "q", "target": "two\nlines"}], "can never match"),
    # lm-eval takes the first row's kind for all: the others could never be right
    ([{"context": "q", "target": "x"}, {"context": "r", "target": ["y", "z"]}], "'target' is list in some rows and str in others"),
])  # fmt: skip
def test_rows_that_could_only_mislead_are_refused(home: Path, rows: list[dict[str, object]], words: str) -> None:
    write(home / "mine.jsonl", *({"id": str(k), **row} for k, row in enumerate(rows)))
    with pytest.raises(DataError, match=words):
        load_task("mine")


def test_few_shot_examples_belong_to_a_task(home: Path) -> None:
    """They change every prompt: an edit must be seen, wherever they lie."""
    write(home / "mine.jsonl", VALID)
    write(home / "shots.jsonl", VALID)
    (home / "mine.yaml").write_text(yaml_of().replace("{test: ", "{dev: evalsets/tasks/shots.jsonl, test: "), encoding="utf-8")
    assert home / "shots.jsonl" in tasks.task_files("mine") and set(tasks.local_tasks()) == {"mine"}
    (home / "mine.yaml").write_text(yaml_of().replace("{test: ", "{dev: elsewhere.jsonl, test: "), encoding="utf-8")
    with pytest.raises(DataError, match="elsewhere.jsonl lies outside"):
        load_task("mine")


def test_choices_that_bring_their_space_get_no_second_one(home: Path) -> None:
    write(home / "mine.jsonl", {"id": "a", "context": "q", "choices": [" x", " y"], "answer": 1})
    assert load_task("mine")[0]["target_delimiter"] == ""


SIZES = {"facts": 400, "grammar": 600, "commonsense": 150, "retrieval": 150, "arithmetic_copy": 150, "instruct": 100}


def test_the_shipped_sets_are_as_large_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    by_name = {card.name: card for card in cards.cards()}
    assert all(by_name[f"tasks/{name}"].n >= n for name, n in SIZES.items())
    assert all(card.measures and card.source and card.weaknesses for card in by_name.values()), "a set has no card"
    for name in SIZES:
        assert all(row["slice"] and row["cluster"] for row in load_task(name)[1])
    assert len({row["slice"] for row in load_task("grammar")[1]}) >= 12
    assert len(evalset.load_texts(Path("evalsets/corpus"))) >= 60
    assert len(evalset.load_prompts(Path("evalsets/prompts/trajectories.jsonl"))) >= 64
    with pytest.raises(DataError, match="did you mean 'facts'"):
        load_task("fatcs")


CORPUS, PROMPTS = Path("evalsets/corpus"), Path("evalsets/prompts")


def test_the_search_set_has_the_corpus_s_domains_and_none_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses layers must not be what they are judged by, nor what their rounding was fitted to."""
    monkeypatch.chdir(ROOT)
    search = evalset.load_texts(Path("evalsets/search"))
    domains = Counter(row["domain"] for row in search)
    assert domains.keys() == {row["domain"] for row in evalset.load_texts(CORPUS)} and min(domains.values()) >= 6
    others = [*measured_rows(CORPUS, PROMPTS), *evalset.load_texts(Path("evalsets/calibration"))]
    assert overlap(search, others) == []
    assert [found for k, row in enumerate(search) for found in overlap([row], search[:k])] == []


@pytest.mark.parametrize("source, into", [("corpus/news", "search/news"), ("search/news", "calibration/own")])
def test_the_command_refuses_a_row_that_stands_in_two_sets(
    source: str, into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "evalsets", tmp_path / "evalsets")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    row = evalset.load_texts(Path(f"evalsets/{source}.jsonl"))[0]
    target = Path(f"evalsets/{into}.jsonl")
    artifacts.write_jsonl(target, [*evalset.load_texts(target), row | {"id": "copied"}])
    with pytest.raises(DataError, match=f"evalsets/{into.split('/')[0]} overlaps what is measured: row 'copied' .* '{row['id']}'"):
        command.main(readme=False)


def test_what_was_measured_was_measured_on_the_sets_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promises of the cards, from the committed figures: difficulty, resolution, and damage that is seen."""
    monkeypatch.chdir(ROOT)
    record = cards.read_record()
    assert record is not None
    sets = {card.name: card.recorded(record) for card in cards.cards()}
    stale = [name for name, entry in sets.items() if entry is None and name.startswith(("tasks/", "corpus/"))]
    assert not stale, f"not measured since they changed: {stale}; tier: full, dvc repro, python -m tools.evalset_record"
    for name in SIZES:
        entry = sets[f"tasks/{name}"]
        assert entry and max(0.4, 1.1 * entry["chance"]) < entry["reference"] < 0.85, name
        assert entry["n"] == entry["delta"][record["probe"]]["n"] and entry["resolvable"] > entry["half_width"] > 0
    damaged = {name: entry["told"]["int4-rtn"] for name, entry in sets.items() if entry and "told" in entry}
    assert sum(damaged[f"tasks/{name}"] for name in SIZES) >= 3
    assert all(told for name, told in damaged.items() if name.startswith("corpus/"))


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
