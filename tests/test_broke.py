"""Where it broke: lists with their texts and totals, from rows alone, and nothing of them can break the page."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError
from pipeline.evalset.tasks import load_task
from pipeline.metrics import failure_analysis, worst_cases
from pipeline.reporting import failures
from pipeline.reporting.text import render

ROOT = Path(__file__).resolve().parent.parent
EVIL = "<script>alert(1)</script>"
PROMPT_TOKENS = 3


@functools.cache
def items(task: str) -> list[dict[str, Any]]:
    return load_task(task)[1]


def answer(k: int, prediction: int, ref_margin: float, task: str = "facts") -> dict[str, Any]:
    item = items(task)[k]
    wrong = next(i for i in range(len(item["choices"])) if i != item["answer"])
    scores = [-20.0] * len(item["choices"])
    scores[item["answer"]], scores[wrong] = -5.0, -5.0 - ref_margin
    chosen = item["answer"] if prediction else wrong
    return {
        "task": task, "doc_id": k, "item": item["id"], "filter": "none", "doc_hash": f"d{k}", "prompt_hash": "p",
        "target_hash": "t", "first_token_ids": [1], "kind": "multiple_choice", "loglikelihoods": scores, "prediction": chosen,
        "target": item["answer"], "acc": float(prediction), "cluster": item["id"],
    }  # fmt: skip


def token_columns(windows: list[dict[str, Any]], kld: float) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for w in windows:
        for p in range(w["first"], len(w["token_ids"])):
            row = {
                "set": w["set"], "document": w["document"], "window": w["window"], "position": p, "token_id": w["token_ids"][p],
                "token_class": "words",
                "kld": kld * (1 + 0.5 * math.sin(p)), "logp_ref": -1.0, "logp": -1.5, "top1_ref": w["token_ids"][p], "top1": 1,
            }  # fmt: skip
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return columns


@pytest.fixture
def house(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> params.Params:
    """Two variants' rows beside a tokenizer and the project's own evalsets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    (tmp_path / "evalsets").symlink_to(ROOT / "evalsets")
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["variants"] = {k: data["variants"][k] for k in ("bf16", "int8")}
    data["serving"] = {"variants": {}}
    data["compare"]["resamples"] = 200
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    artifacts.BASE.mkdir(parents=True)
    (artifacts.BASE / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    words = worst_cases.Words(artifacts.BASE)
    ids = words._tokenizer.encode(f"The harbour {EVIL} was closed for the third day in a row. " * 6).ids
    own = {"set": "news", "first": 1}
    windows = [own | {"window": f"n{k}#0", "document": f"n{k}", "token_ids": ids[k : k + 80]} for k in range(30)]
    artifacts.write_jsonl(artifacts.REFERENCE / "windows.jsonl", windows)
    artifacts.write_json(artifacts.REFERENCE / artifacts.MANIFEST, {"digest": "store"})
    for name, kld in (("bf16", 0.0), ("int8", 0.1)):
        artifacts.write_json(artifacts.model_dir(name) / artifacts.MANIFEST, {"digest": f"m-{name}"})
        artifacts.tokens(name).parent.mkdir(parents=True, exist_ok=True)
        columns = token_columns(windows, kld)
        if kld:
            columns["kld"][7], columns["kld"][9] = 8.0, 9.0
        pq.write_table(pa.table(columns), artifacts.tokens(name))
        hurt = name == "int8"
        rows = [answer(k, 0 if hurt and k < 25 else 1, -4.0 if hurt and k < 25 else 2.0) for k in range(40)]
        artifacts.write_jsonl(artifacts.answers(name), rows)
        text = f"And then {EVIL}" if hurt else "And then it rained."
        ids_of = [1, 2, 3] * 8 if hurt else list(range(24))
        reply = {"prompt": EVIL, "token_ids": ids_of, "text": text, "cut": True, "again": ids_of}
        artifacts.write_jsonl(artifacts.generations(name), [{"id": f"t{k}"} | reply for k in range(4)])
        for make in (artifacts.tokens, artifacts.answers, artifacts.generations):
            meta = {"variant": name, "model": f"m-{name}", "status": "ok", "reason": None, "reference": "store"}
            artifacts.write_json(artifacts.meta_of(make(name)), meta)
    return params.load()


def found(settings: params.Params) -> dict[str, Any]:
    failure_analysis.write("int8", settings)
    result: dict[str, Any] = artifacts.read_json(artifacts.failures("int8"))
    return result


def test_the_worst_tokens_come_first_with_their_context_and_the_total(house: params.Params) -> None:
    tokens = found(house)["worst_tokens"]
    assert (tokens["shown"], tokens["total"]) == (worst_cases.SHOWN, 30 * 79)
    first, second = tokens["rows"][:2]
    assert first["kld"] == 9.0 and second["kld"] == 8.0 and first["position"] == 10
    whole = "The harbour <script>"
    assert (first["context"] + first["token"]).startswith(whole[:8]) and first["token"] == first["reference_says"]
    assert first["p_reference"] == pytest.approx(math.exp(-1)) and first["p_variant"] == pytest.approx(math.exp(-1.5))


def test_what_is_not_finite_stands_before_everything_else(house: params.Params) -> None:
    columns = artifacts.read_columns(artifacts.tokens("int8"))
    columns["kld"][20] = math.nan
    windows = artifacts.read_jsonl(artifacts.REFERENCE / "windows.jsonl")
    rows = worst_cases.worst_tokens(columns, windows, worst_cases.Words(artifacts.BASE))["rows"]
    assert rows[0]["not_finite"] and rows[0]["kld"] is None and rows[0]["position"] == 21


def test_flips_are_listed_with_prompt_and_both_answers_and_say_how_many_there_are(house: params.Params) -> None:
    result = found(house)
    wrong, right = result["flips_to_wrong"], result["flips_to_right"]
    assert (wrong["shown"], wrong["total"], wrong["of"]) == (20, 25, 40) and wrong["by_task"] == {"facts": 25}
    assert (right["shown"], right["total"]) == (0, 0)
    _, items = load_task("facts")
    row = wrong["rows"][0]
    right = items[0]["choices"][items[0]["answer"]]
    assert row["prompt"] == items[0]["context"] and row["right"] == row["reference_answers"] == right
    assert row["variant_answers"] in items[0]["choices"] and row["variant_answers"] != row["right"]


def test_worst_items_lost_most_of_their_margin(house: params.Params) -> None:
    listed = found(house)["worst_items"]
    assert listed["total"] == 40 and [r["fall"] for r in listed["rows"]] == pytest.approx([6.0] * 20)
    assert [listed["rows"][0][f"margin_{who}"] for who in ("reference", "variant")] == pytest.approx([2.0, -4.0])


def test_replies_that_loop_are_shown_as_such(house: params.Params) -> None:
    replies = found(house)["replies"]
    assert replies["total"] == replies["of"] == 4 and replies["rows"][0]["faults"] == ["loop"]
    assert replies["rows"][0]["reference_faults"] == []


def test_the_reference_differs_from_itself_nowhere(house: params.Params) -> None:
    failure_analysis.write("bf16", house)
    result = artifacts.read_json(artifacts.failures("bf16"))
    assert result["spread"]["kind"] == "none" and result["flips_to_wrong"]["total"] == result["replies"]["total"] == 0


def test_rows_that_are_missing_leave_a_reason_and_no_verdict(house: params.Params) -> None:
    meta = artifacts.meta_of(artifacts.tokens("int8"))
    artifacts.write_json(meta, artifacts.read_json(meta) | {"status": "unsupported", "reason": "no such kernel"})
    result = found(house)
    assert result["spread"] is None and result["worst_tokens"] is None and "no such kernel" in result["words"]
    assert result["flips_to_wrong"]["total"] == 25


def test_an_item_that_is_another_one_now_is_refused(house: params.Params) -> None:
    rows = [[{**r, "item": "older"} for r in artifacts.read_jsonl(artifacts.answers(v))] for v in ("int8", "bf16")]
    for name, own in zip(("int8", "bf16"), rows):
        artifacts.write_jsonl(artifacts.answers(name), own)
    with pytest.raises(ArtifactError, match="was 'older'"):
        found(house)


def test_without_a_tokenizer_ids_stand_for_words_and_the_page_says_so(house: params.Params) -> None:
    (artifacts.BASE / "tokenizer.json").unlink()
    result = found(house)
    assert "no tokenizer.json" in result["notes"][0] and re.fullmatch(r"<\d+>", result["worst_tokens"]["rows"][0]["token"])


def test_capped_flips_come_from_every_task() -> None:
    def flip(k: int, task: str, right: bool) -> dict[str, Any]:
        return {
            "task": task, "doc_id": k, "item": None, "acc": float(right), "loglikelihoods": None, "prediction": "x", "target": "y",
            "filter": "none",
        }  # fmt: skip

    pairs = [(flip(k, task, False), flip(k, task, True)) for task in ("long", "short") for k in range(60 if task == "long" else 3)]
    listed = worst_cases.flips(pairs, worst_cases.Questions(), to_right=False)
    assert listed["total"] == 63 and listed["shown"] == 20 and sum(r["task"] == "short" for r in listed["rows"]) == 3
    assert "lm-eval's own" in listed["rows"][0]["unknown"]


def test_a_long_prompt_keeps_head_and_tail_and_says_what_is_left_out() -> None:
    text = "a" * 300 + "b" * 1000
    short = worst_cases.shortened(text)
    assert short.startswith("a" * 200) and short.endswith("b" * 400) and "[…700 characters…]" in short
    assert worst_cases.shortened("short") == "short"


def test_white_space_and_control_characters_of_a_token_can_be_seen() -> None:
    assert failures.visible(" a\n") == "␣a↵" and failures.visible("\u200b") == "U+200B" and failures.visible("\ufffd") == "(bytes)"
    assert failures.visible("") == "nothing"


def page(settings: params.Params) -> tuple[str, str]:
    found(settings)
    results: dict[str, Any] = {name: {"metrics": {}, "curves": {}} for name in ("bf16", "int8")}
    context = {
        "failures": failures.of(results, "bf16"), "reference": "bf16", "visible": failures.visible,
        "clipped": failures.clipped, "fault_words": failures.FAULT_WORDS,
    }  # fmt: skip
    return render("failures.html.j2", context), render("failures.md.j2", context)


def test_the_page_shows_every_list_with_its_total_and_escapes_everything(house: params.Params) -> None:
    html, words = page(house)
    for told in ("8 of 2370 tokens", "4 of 40 items", "5 of 25 items shown, of 40 asked", "4 of 4 replies that differ"):
        assert told in html, told
    assert EVIL not in html and "&lt;script&gt;alert(1)" in html and "<script" not in html
    assert "<strong>bf16</strong>" not in html and html.count("<details") == html.count("</details>") == 6
    assert "<strong>int8</strong>: uniform shift; 25 answers became wrong, 0 right; 4 of 4 free replies differ" in html
    assert words.count("- **int8**:") == 1 and "worst 1 %" in words


def test_free_running_figures_are_said_in_a_sentence() -> None:
    def metric(value: float | None, low: float = 0.0, high: float = 0.0) -> dict[str, Any]:
        return {"value": value, "low": low, "high": high, "n": 16}

    rates = {f"free_{k}": metric(0.0) for k in failures.FAULT_WORDS} | {"free_loop": metric(0.25)}
    m = rates | {
        "free_same": metric(0.125), "free_departure": metric(4, 2, 9), "free_garbled": metric(0.25),
        "free_garbled_delta": metric(18.75, -3, 40),
    }  # fmt: skip
    said = failures.free_words({"metrics": m})
    assert said is not None and "14 of 16 greedy replies leave" in said and "token 4 [2, 9]" in said
    assert "4 of 16 are garbled (a loop 4), +19 pp against the reference [-3, +40]" in said
    floor = {"value": 0.75, "low": 0.5, "high": 0.9, "n": 16}
    assert "(4 of 16 of its own do at another batch size)" in str(failures.free_words({"metrics": m}, floor))
    assert failures.free_words({"metrics": {}}) is None


def test_what_is_written_is_strict_json(house: params.Params) -> None:
    found(house)
    json.loads(artifacts.failures("int8").read_text(encoding="utf-8"), parse_constant=lambda c: pytest.fail(c))
