"""Calibration text: three sources, what was asked and what was used, and nothing that is measured on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from gate_house import write_manifest

from pipeline import calibrate
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, DataError
from pipeline.evalset.calibration import SHARED_WORDS, Calibration, overlap


@pytest.fixture
def house(tiny: Path, tmp_path: Path) -> Path:
    """A folder with the project's sets and params, and the tiny model as its base."""
    (tmp_path / "evalsets").symlink_to(ROOT / "evalsets")
    shutil.copytree(tiny, artifacts.BASE)
    write_manifest(artifacts.BASE)
    return tmp_path


def run(house: Path, **settings: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """(token rows, facts) after the stage ran with these settings of the calibration section."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["calibration"] |= {"rows": 4, "tokens": 32} | settings
    (house / "params.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    calibrate.main()
    calibration = Calibration()
    rows = calibration.token_rows()
    assert calibration.facts is not None
    return rows, calibration.facts


def own_text(house: Path, texts: list[Any], name: str = "own.jsonl") -> Path:
    artifacts.write_jsonl(house / name, ({"id": f"r{k}", "domain": "own", "text": t} for k, t in enumerate(texts)))
    return house / name


def test_text_becomes_equal_rows_and_the_same_ones_again_and_a_changed_file_of_them_is_found(house: Path) -> None:
    rows, facts = run(house)
    assert [len(r) for r in rows] == [32] * 4 and facts["rows_asked"] == facts["rows_used"] == 4
    assert facts["source"] == "text" and list(facts["set_files"])
    before = artifacts.files_of(artifacts.CALIBRATION)
    run(house)
    assert artifacts.files_of(artifacts.CALIBRATION) == before
    with (artifacts.CALIBRATION / "rows.jsonl").open("a") as f:
        f.write('{"token_ids": [1]}\n')
    with pytest.raises(ArtifactError, match="was changed after its manifest"):
        Calibration().token_rows()


def test_too_little_text_is_recorded_and_none_or_a_blank_row_of_a_file_is_an_error(house: Path) -> None:
    few = own_text(house, ["zebra umbrella xylophone " * 20])
    rows, facts = run(house, set=str(few), rows=1000)
    assert facts["rows_asked"] == 1000 and facts["rows_used"] == len(rows) < 1000
    with pytest.raises(DataError, match="make no row of 32; give more text"):
        run(house, set=str(own_text(house, ["hi"])))
    with pytest.raises(DataError, match=r"own.jsonl:2: field 'text' is empty"):
        run(house, set=str(own_text(house, ["some text", "  "])))


def test_the_model_s_own_samples_are_fixed_by_the_seed(house: Path) -> None:
    rows, facts = run(house, source="self")
    assert facts["source"] == "self" and len(rows) == 4
    before = artifacts.read_jsonl(artifacts.CALIBRATION / "texts.jsonl")
    run(house, source="self")
    assert artifacts.read_jsonl(artifacts.CALIBRATION / "texts.jsonl") == before
    own = {row["text"] for row in artifacts.read_jsonl(ROOT / "evalsets/calibration/own.jsonl")}
    assert not any(row["text"] in own for row in before)


@pytest.mark.filterwarnings("ignore")  # datasets' own
def test_blank_rows_of_a_dataset_are_left_out_and_counted(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(house / "cache"))
    texts = [f"zebra{k} umbrella xylophone harmonica " * 12 if k % 2 else "   " for k in range(20)]
    (house / "evalsets").unlink()
    shutil.copytree(ROOT / "evalsets", house / "evalsets")
    mine = "evalsets/mine"
    (house / mine).mkdir()
    (house / "outside").mkdir()
    own_text(house, texts, f"{mine}/train.jsonl")
    rows, facts = run(house, source="hub", hub={"dataset": mine}, rows=20)
    assert facts["documents_given"] == 20 and facts["documents_blank"] == 10
    assert facts["rows_asked"] == 20 and 0 < facts["rows_used"] == len(rows)
    for wrong, texts_now, words in (
        ({"column": "body"}, texts, "calibration.hub.column = 'body': 'evalsets/mine' has id, domain, text"),
        ({}, [["a", "b"]] * 3, "does not hold text"), ({}, ["  "] * 20, r"20 were blank\) make no row"),
        ({"dataset": "outside"}, texts, "lies outside evalsets/"),
        ({"dataset": "none/such"}, texts, "'none/such' could not be loaded"),
    ):  # fmt: skip
        own_text(house, texts_now, f"{mine}/train.jsonl")
        with pytest.raises(DataError, match=words):
            run(house, source="hub", hub={"dataset": mine} | wrong)


def test_text_that_is_measured_on_is_refused_by_name(house: Path) -> None:
    news = artifacts.read_jsonl(ROOT / "evalsets/corpus/news.jsonl")[0]
    words = news["text"].split()
    quoted = "Other words first. " + " ".join(words[3 : 3 + SHARED_WORDS + 3]) + " and others after. " * 30
    with pytest.raises(DataError, match=f"'r0' shares {SHARED_WORDS} words in a row with '{news['id']}'"):
        run(house, set=str(own_text(house, [quoted])))


@pytest.mark.parametrize("shared, found", [(SHARED_WORDS - 1, 0), (SHARED_WORDS, 1)])
@pytest.mark.parametrize("words", [[f"w{k}" for k in range(40)], [chr(0x4E00 + k) for k in range(40)]], ids=["English", "Chinese"])
def test_the_bound_is_where_it_says(shared: int, found: int, words: list[str]) -> None:
    join = "" if len(words[0]) == 1 else " "
    calibration = [{"id": "own", "text": join.join([*words[:shared], *(["x y"] * 5)])}]
    assert len(overlap(calibration, [{"id": "task", "context": join.join(words)}])) == found
    chat = {"id": "chat", "messages": [{"role": "user", "content": join.join(words)}]}
    assert len(overlap(calibration, [chat])) == found
