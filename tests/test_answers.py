"""Answers become metrics: pairing is checked, and nothing unknown turns into a number."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from gate_house import builder

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Metrics
from pipeline.evaluate import check as check_rows
from pipeline.gating.rules import Bound, judge
from pipeline.metrics.answers import answer_metrics, pair


def answer(k: int, acc: float, task: str = "t", **more: Any) -> Any:
    return {
        "task": task, "doc_id": k, "filter": "none", "doc_hash": f"d{k}", "prompt_hash": f"p{k}", "target_hash": f"t{k}",
        "first_token_ids": [1, 2], "acc": acc, "cluster": str(k), "kind": "multiple_choice", "target": 0, "truncated": False,
        "slice": None, "empty": False, "non_finite": 0, "loglikelihoods": [-1.0, -2.0, -3.0, -4.0], **more,
    }  # fmt: skip


def answers(right: Iterable[float], **more: Any) -> list[Any]:
    return [answer(k, float(acc), **more) for k, acc in enumerate(right)]


def measured(rows: list[Any], reference: list[Any], once: str | None = None) -> Metrics:
    b = builder()
    assert answer_metrics(b, pair(rows, reference), allow_truncated=False, once=once) is None
    return b.metrics


def scores(rows: Iterable[float], reference: Iterable[float]) -> Metrics:
    return measured(answers(rows), answers(reference))


def test_identical_answers_give_zero_flips() -> None:
    m = scores([1, 0, 1, 1], [1, 0, 1, 1])
    assert m["acc_delta/t"]["value"] == 0 and m["flips_to_wrong/t"]["value"] == m["flips_to_right/t"]["value"] == 0
    assert m["p_mcnemar/t"]["value"] is None and "nothing to test" in m["p_mcnemar/t"]["warnings"][0]


def test_accuracy_by_depth_is_that_of_the_items_at_that_depth() -> None:
    depths = ["long-0.1", "long-0.9", "plain", "long-0.9"]
    rows, reference = answers([1, 0, 1, 1]), answers([1, 1, 1, 1])
    for row, name in zip((*rows, *reference), depths * 2):
        row["slice"] = name
    m = measured(rows, reference)
    found = {k: (v["value"], v["n"]) for k, v in m.items() if k.startswith("acc_depth")}
    assert found == {
        "acc_depth/t:long-0.1": (1.0, 1), "acc_depth_delta/t:long-0.1": (0.0, 1),
        "acc_depth/t:long-0.9": (0.5, 2), "acc_depth_delta/t:long-0.9": (-50.0, 2),
    }  # fmt: skip


def test_flips_are_counted_by_direction_though_they_cancel() -> None:
    m = scores([0, 0, 1, 1, 1], [1, 1, 0, 0, 1])
    assert m["acc_delta/t"]["value"] == 0
    assert m["flips_to_wrong/t"]["value"] == 2 and m["flips_to_right/t"]["value"] == 2


def test_30_lost_and_20_won_of_1000() -> None:
    m = scores([0] * 30 + [1] * 20 + [1] * 600 + [0] * 350, [1] * 30 + [0] * 20 + [1] * 600 + [0] * 350)
    assert m["acc_delta/all"]["value"] == pytest.approx(-1.0) and m["acc_delta/all"]["unit"] == "pp"
    assert m["p_mcnemar/all"]["value"] == pytest.approx(0.203, abs=5e-4)
    assert m["acc_delta/all"]["low"] < -2 < m["acc_delta/all"]["high"] < 1
    assert m["recovery/all"]["value"] == pytest.approx(620 / 630)


@pytest.mark.parametrize("ours, theirs, more, blind", [
    (0, 0, {"kind": "generate_until", "loglikelihoods": [], "empty": True}, True),  # both silent
    (0, 1, {"kind": "generate_until", "loglikelihoods": []}, False),  # one right answer is above guessing, which gives none
    (100, 100, {}, True),  # a quarter of 400 with four choices
    (100, 110, {}, True), (200, 200, {"loglikelihoods": [-1.0, -2.0]}, True),
    (100, 200, {}, False),  # the variant lost all it could: that is seen
    (200, 100, {}, False), (300, 300, {}, False),
])  # fmt: skip
def test_where_both_do_no_better_than_guessing_no_rule_passes(ours: int, theirs: int, more: dict[str, Any], blind: bool) -> None:
    metrics = measured(*(answers((k < right for k in range(400)), **more) for right in (ours, theirs)))
    names = ("acc_delta/t", "acc_delta/all", "flips_to_wrong/t", *["score_delta/t"][: not more.get("kind")])
    for name in names:
        metric = metrics[name]
        assert (metric["low"] is None) == blind and metric["value"] is not None, name
        if blind:
            judged = judge(Bound(name, 50.0, "lower", "50"), metric)
            assert judged.verdict == "INCONCLUSIVE" and f"is at chance ({theirs} of 400 right" in judged.reason


def test_an_answer_that_float32_turns_counts_half_and_its_error_is_in_every_paired_figure() -> None:
    """Of 400, 10 are wrong by the reference's own products and right in float32: the variant, right there, won five."""
    theirs = answers(10 <= k < 300 for k in range(400))
    turned = [row | {"again": {"acc": float(k < 300), "loglikelihoods": row["loglikelihoods"]}} for k, row in enumerate(theirs)]
    alone, both = (measured(answers(k < 300 for k in range(400)), reference) for reference in (theirs, turned))
    assert (alone["acc_delta/t"]["value"], both["acc_delta/t"]["value"]) == (pytest.approx(2.5), pytest.approx(1.25))
    assert alone["recovery/t"]["value"] == pytest.approx(300 / 290) and both["recovery/t"]["value"] == pytest.approx(300 / 295)
    assert alone["acc_delta/t"]["low"] > 0 > both["acc_delta/t"]["low"] < 1.25 - 1.96 * 100 * 5 / 400 + 1e-6
    assert alone["p_mcnemar/t"]["value"] < 0.01 < 0.3 < both["p_mcnemar/t"]["value"] and alone["acc/t"] == both["acc/t"]
    same = measured(turned, turned)
    assert same["acc_delta/t"]["value"] == same["score_delta/t"]["high"] == 0, "beside itself nothing differs"


def test_a_reference_without_second_answers_is_a_warning_of_every_paired_figure() -> None:
    metrics = measured(answers([0, 1]), answers([1, 1]), once="too large")
    for name in ("acc_delta", "score_delta", "recovery", "p_mcnemar"):
        assert metrics[f"{name}/t"]["warnings"][-1].endswith("is not in it: too large"), name


def test_score_is_the_right_choices_share_of_probability() -> None:
    ours = [answer(k, 1.0, target=1, loglikelihoods=np.log([0.1, 0.3, 0.1]).tolist()) for k in range(20)]
    theirs = [answer(k, 1.0, target=1, loglikelihoods=np.log([0.2, 0.2, 0.1]).tolist()) for k in range(20)]
    words = [answer(20 + k, 1.0, kind="generate_until", target="yes", loglikelihoods=None) for k in range(5)]
    delta = measured(ours + words, theirs + words)["score_delta/all"]
    assert delta["value"] == pytest.approx(100 * (0.6 - 0.4)) and delta["n"] == 20


def test_families_that_flip_together_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    flips = np.repeat(rng.choice([-1, 0, 1], 50, p=[0.15, 0.7, 0.15]), 4)
    theirs = np.where(flips < 0, 1, np.where(flips > 0, 0, np.repeat(rng.integers(0, 2, 50), 4)))
    ours = theirs + flips
    alone = scores(list(ours), list(theirs))["acc_delta/t"]
    family = [answer(k, float(a), cluster=str(k // 4)) for k, a in enumerate(ours)]
    together = measured(family, answers(theirs))["acc_delta/t"]
    assert together["value"] == pytest.approx(alone["value"]) and together["clusters"] == 50
    assert together["high"] - together["low"] > 1.7 * (alone["high"] - alone["low"])


def test_a_task_with_two_filters_counts_each_item_once() -> None:
    rows = [answer(k, 1.0, filter=f) for f in ("strict", "loose") for k in range(3)]
    metrics = measured(rows, rows)
    assert metrics["acc/all"]["n"] == metrics["acc/t"]["n"] == 3


@pytest.mark.parametrize("rows, reference, fault", [
    ([answer(0, 1.0)] * 2, [answer(0, 1.0)] * 2, "answered twice"),
    ([answer(0, 1.0)], [answer(0, 1.0), answer(1, 1.0)], "cannot be paired"),
    *(
        ([answer(0, 1.0)], [answer(0, 1.0, **{key: "other"})], key)
        for key in ("doc_hash", "prompt_hash", "target_hash", "first_token_ids")
    ),
])  # fmt: skip
def test_only_the_same_items_asked_the_same_once_are_paired(rows: list[Any], reference: list[Any], fault: str) -> None:
    with pytest.raises(ArtifactError, match=fault):
        pair(rows, reference)


def test_truncated_items_make_the_variant_invalid_unless_allowed() -> None:
    pairs = pair([answer(0, 1.0, truncated=True)], [answer(0, 1.0, truncated=True)])
    b = builder()
    assert "1 items are longer" in str(answer_metrics(b, pairs, allow_truncated=False))
    assert answer_metrics(b, pairs, allow_truncated=True) is None


def test_one_nan_among_right_answers_publishes_no_accuracy() -> None:
    class Tokenizer:
        bos_token_id = 1

    rows = [answer(0, 1.0), answer(1, 1.0, non_finite=1)]
    assert "1 of 2 items have a log-likelihood that is not finite (first: t 1)" in str(check_rows(rows, Tokenizer()))
    assert check_rows([answer(0, 1.0)], Tokenizer()) is None
    assert "two BOS" in str(check_rows([answer(0, 1.0, first_token_ids=[1, 1, 5])], Tokenizer()))
    assert check_rows([], Tokenizer()) is not None
