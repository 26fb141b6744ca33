"""Looks before the end: the published bounds, what ends a measurement, and rows that pair as if it had gone on."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from gate_house import metric, result
from scipy.stats import norm
from store_house import stored, windows_of

from pipeline import diverge, engines, evaluate
from pipeline.core import params
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Rule
from pipeline.evalset import in_parts
from pipeline.gating import sequential, verdicts
from pipeline.metrics import answers, tokens
from pipeline.metrics.builder import Builder
from pipeline.reporting import text
from pipeline.stats.sequential import level, o_brien_fleming

SETTINGS = params.load(ROOT / "params.yaml")
LOOK: Any = {"look": 2, "looks": 4, "share": 0.5, "saved_s": 9.0}


def with_rules(*rules: Rule, stop: str = "decided") -> params.Params:
    tier = SETTINGS.amount.model_copy(update={"stop": stop})
    gate = SETTINGS.gate.model_copy(update={"rules": list(rules)})
    return SETTINGS.model_copy(update={"tiers": {SETTINGS.tier: tier}, "gate": gate})


# Jennison and Turnbull 2000, table 2.3: the last look's z
@pytest.mark.parametrize("looks, confidence, last", [(2, 0.95, 1.977), (4, 0.95, 2.024), (5, 0.95, 2.040), (4, 0.99, 2.609)])
def test_bounds_are_the_published_ones(looks: int, confidence: float, last: float) -> None:
    z = o_brien_fleming(looks, confidence)
    assert z[-1] == pytest.approx(last, abs=6e-4)
    assert z == pytest.approx([z[-1] * np.sqrt(looks / k) for k in range(1, looks + 1)])
    assert o_brien_fleming(1, confidence)[0] == pytest.approx(norm.ppf((1 + confidence) / 2))


def test_a_walk_passes_any_of_the_bounds_as_often_as_they_say() -> None:
    walks = np.random.default_rng(1).normal(size=(200_000, 4)).cumsum(1) / np.sqrt([1, 2, 3, 4])
    passed = (abs(walks) > o_brien_fleming(4, 0.95)).any(1).mean()
    assert passed == pytest.approx(0.05, abs=3 * np.sqrt(0.05 * 0.95 / 200_000))


def test_an_interval_at_a_look_is_of_that_looks_level_and_counts_have_none() -> None:
    b, plain = (Builder(SETTINGS.compare, 1) for _ in range(2))
    values, clusters = np.random.default_rng(2).normal(1, 1, 200), np.arange(200) // 2
    with b.at_look(LOOK):
        b.mean("jsd_mean", values, np.ones(200), clusters)
        b.exact("truncated", 0, 200, "count")
        b.bare("p_mcnemar/all", 0.2, 9, "McNemar")
    plain.confidence = level(2, 4, SETTINGS.compare.confidence)
    plain.mean("jsd_mean", values, np.ones(200), clusters)
    mean = b.metrics["jsd_mean"]
    assert (mean["low"], mean["high"]) == (plain.metrics["jsd_mean"]["low"], plain.metrics["jsd_mean"]["high"])
    assert mean["confidence"] == b.confidence == 0.95 and mean["method"].endswith("at 99.58 % for look 2 of 4 (O'Brien-Fleming)")
    assert b.metrics["truncated"]["method"] == "count" and b.metrics["p_mcnemar/all"]["warnings"]


def test_parts_are_equal_and_each_holds_every_group() -> None:
    groups = {f"{g}{k}": g for g in "abc" for k in range(8)}
    part = in_parts(groups, 4, 7)
    assert all(sum(part[f"{g}{k}"] == p for k in range(8)) == 2 for g in "abc" for p in range(4))
    assert part == in_parts(groups, 4, 7) != in_parts(groups, 4, 8)


KLD, TOP1 = Rule(metric="kld_mean", margin="0.02 nats"), Rule(metric="top1_agreement", margin="7 pp")
GOOD, BAD, OPEN = ({"kld_mean": metric(v, v - 0.005, v + 0.005)} for v in (0.01, 0.05, 0.018))
NEAR = {"kld_mean": metric(0.0302, 0.0201, 0.0403)}  # a FAIL by itself, not as one of six


@pytest.mark.parametrize(
    "rules, metrics, ends",
    [
        ((KLD,), GOOD, True), ((KLD,), BAD, True), ((KLD,), OPEN, False), ((KLD, TOP1), GOOD, False),
        ((KLD,), NEAR, True), ((KLD, *[Rule(metric="size_ratio", gain="1 %")] * 5), NEAR, False),
        ((Rule(metric="kld_infinite", limit="0 tokens"),), {"kld_infinite": metric(0, 0, 0, unit="tokens")}, False),
    ],
)  # fmt: skip
def test_a_measurement_ends_once_every_rule_on_it_passes_or_fails_for_good(rules: Any, metrics: Any, ends: bool) -> None:
    looks = sequential.looks_of(with_rules(*rules), "int8", "diverge", 44, lambda b, _: b.metrics.update(metrics))
    assert looks and looks.planned == 4 and looks.decided([]) is ends
    assert [looks.decided([]) for _ in range(3)] == [ends, ends, True]
    assert looks.record(30, 40) == {"look": 4, "looks": 4, "share": 0.75, "saved_s": 0.0}


ABOVE, AGAINST = ({"above": "floor"}, {"against": "baseline"})


@pytest.mark.parametrize(
    "settings, variant, units, planned",
    [
        (with_rules(KLD), "int8", 44, 4), (with_rules(KLD), "int8", 29, 2), (with_rules(KLD), "int8", 11, 0),
        (with_rules(KLD, stop="never"), "int8", 44, 0), (with_rules(KLD), "bf16", 44, 0),
        (with_rules(Rule(metric="size_ratio", gain="30 %")), "int8", 44, 0),
        (with_rules(KLD, KLD.model_copy(update=ABOVE)), "int8", 44, 0),
        (with_rules(TOP1.model_copy(update=AGAINST)), "int8", 44, 0),
    ],
)  # fmt: skip
def test_only_looks_that_can_decide_are_planned(settings: Any, variant: str, units: int, planned: int) -> None:
    looks = sequential.looks_of(settings, variant, "diverge", units, lambda *_: None)
    assert (looks.planned if looks else 0) == planned


def some(columns: dict[str, Any], documents: set[str]) -> dict[str, list[Any]]:
    keep = [k for k, document in enumerate(columns["document"]) if document in documents]
    return {name: [values[k] for k in keep] for name, values in columns.items()}


def test_tokens_of_a_look_are_whole_documents_in_the_references_order(tmp_path: Path, tiny: Path) -> None:
    engine: Any = engines.load("hf", tiny, threads=1)
    store = stored(engine, windows_of(engine), tmp_path / "reference")
    other: Any = engines.load("hf", make_model(tmp_path / "other", seed=5), threads=1)

    def columns(looks: Any) -> dict[str, Any]:
        blocks = diverge.in_order(diverge.diverge(other, store, batch_size=2, threads=1, looks=looks), store, 2)
        return {name: np.concatenate([block[name] for block in blocks]).tolist() for name in blocks[0]}

    whole = columns(None)
    seen: list[int] = []
    for ends in (False, True):
        looks = SimpleNamespace(planned=2, decided=lambda held, ends=ends: seen.append(len(held)) or ends)
        part = columns(looks)
        documents = set(part["document"])
        assert (documents == set(whole["document"])) is not ends and len(documents) >= 4
        same = some(whole, documents)
        assert all(part[name] == same[name] for name in tokens.TOKEN) and part["kld"] == pytest.approx(
            same["kld"], rel=1e-3, abs=1e-5
        )
    assert len(seen) == 3 and seen[0] < seen[1]
    tokens.refuse_other_tokens(part, tokens.of_same_documents(part, whole))
    with pytest.raises(ArtifactError, match="cannot be paired"):
        tokens.refuse_other_tokens(part, whole)
    cut = {name: values[:-1] for name, values in part.items()}  # a document that is not whole
    with pytest.raises(ArtifactError, match="cannot be paired"):
        tokens.refuse_other_tokens(cut, tokens.of_same_documents(cut, whole))


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
def test_answers_of_a_look_are_whole_families_in_the_references_order(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    engine, tasks, rows = engines.load("hf", tiny, threads=1), {"facts": 9, "arithmetic_copy": 4}, list[Any]()
    for ends in (None, False, True):
        looks: Any = SimpleNamespace(planned=2, decided=lambda _, ends=ends: ends)
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(evaluate.evaluate(engine, SETTINGS.evaluate, tasks, 1, Path(scratch), None if ends is None else looks))
    whole, both, first = rows
    assert [(r["task"], r["doc_id"]) for r in whole] == [(r["task"], r["doc_id"]) for r in both]
    assert {r["task"] for r in first} == set(tasks) and 4 <= len(first) < len(whole)
    theirs = answers.of_same_items(first, whole)
    assert len(answers.pair(first, theirs)) == len(first) and [r["acc"] for r in first] == [r["acc"] for r in theirs]
    with pytest.raises(ArtifactError, match="cannot be paired"):
        answers.pair(first, whole)


def test_an_open_verdict_over_rows_that_ended_early_says_how_to_go_on() -> None:
    settings = with_rules(Rule(metric="kld_mean", margin="0.018 nats"), Rule(metric="acc_delta/all", margin="2 pp"))
    open_both = OPEN | {"acc_delta/all": metric(-2.0, -3.0, -1.0)}
    judged = verdicts.of({"int8": result(settings, "int8", open_both, looks={"diverge": LOOK})}, settings)
    kld, accuracy = (rule["reason"] for rule in judged["variants"]["int8"]["rules"])
    assert "; diverge stopped at 50 %" in kld and "`dvc repro -f -s diverge@int8`" in kld and "stopped" not in accuracy


def test_a_count_of_rows_that_ended_early_passes_no_rule_that_came_later() -> None:
    settings = with_rules(Rule(metric="empty_outputs", limit="0 items"), Rule(metric="truncated", limit="0 items"))
    counts = {"empty_outputs": metric(0, 0, 0, unit="items"), "truncated": metric(1, 1, 1, unit="items")}
    for share, words in ((0.5, ["INCONCLUSIVE", "FAIL"]), (1.0, ["PASS", "FAIL"])):
        found = result(settings, "int8", counts, looks={"evaluate": LOOK | {"share": share}})
        rules = verdicts.of({"int8": found}, settings)["variants"]["int8"]["rules"]
        assert [r["verdict"] for r in rules] == words and ("stopped at 50 %" in rules[0]["reason"]) is (share < 1)


def test_the_report_says_what_stopped_where_and_what_that_saved() -> None:
    results: Any = {"bf16": {}, "int8": {"looks": {"diverge": LOOK, "evaluate": LOOK | {"share": 1.0}}}}
    assert text.stopped_early(results) == "Stopped early, as their rules were decided: diverge of int8 at 50 %; 9 s saved."
    assert not text.stopped_early({"bf16": results["bf16"]})


def test_every_metric_of_tokens_and_answers_is_one_that_its_stage_feeds() -> None:
    from gate_house import answer_rows, token_rows

    b = Builder(SETTINGS.compare, 1)
    tokens.token_metrics(b, token_rows(0.1))
    assert {name.split("/")[0] for name in b.metrics} | {"first_departure", "never_departs"} == set(tokens.METRICS)
    b = Builder(SETTINGS.compare, 1)
    rows: Any = answer_rows(3)
    answers.answer_metrics(b, answers.pair(rows, answer_rows(9)), False)  # type: ignore[arg-type]
    assert {name.split("/")[0] for name in b.metrics} | {"byte_ppl", "byte_ppl_ratio", "acc_depth", "acc_depth_delta"} == set(
        answers.METRICS
    )
