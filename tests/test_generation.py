"""Metrics of free-running replies: paired with the reference by prompt, with exact intervals, and a looping variant is seen."""

from typing import Any

import numpy as np
import pytest
from gate_house import builder
from scipy.stats import binom

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Metrics
from pipeline.metrics import generation

MOST = 24


def reply(k: int, tokens: list[int], **more: Any) -> Any:
    text = " ".join(f"word{t}" for t in tokens)
    return {"id": f"p{k}", "prompt": "Go on.", "token_ids": tokens, "text": text, "cut": len(tokens) >= MOST, **more}


REFERENCE = [reply(k, list(range(100 * k, 100 * k + MOST)), again=list(range(100 * k, 100 * k + MOST))) for k in range(16)]


def metrics(rows: list[Any], is_reference: bool = False, reference: list[Any] = REFERENCE) -> Metrics:
    b = builder()
    assert generation.free_metrics(b, generation.pair(rows, reference), MOST, is_reference) is None
    return b.metrics


def test_the_reference_beside_itself_is_the_same_everywhere() -> None:
    m = metrics(REFERENCE, is_reference=True)
    assert m["free_same"]["value"] == 1 and m["free_same"]["n"] == 16 and m["free_same_floor"]["value"] == 1
    assert m["free_departure"]["value"] is None and "never differ" in m["free_departure"]["warnings"][0]
    assert all(m[name]["value"] == 0 for name in m if name.endswith("_delta"))


def test_where_the_reference_and_the_variant_are_both_silent_no_interval_says_that_nothing_was_lost() -> None:
    silent = [reply(k, []) for k in range(16)]
    m = metrics(silent, reference=silent)
    for name in ("free_same", "free_empty_delta", "free_garbled_delta"):
        assert m[name]["low"] is None and "nothing could" in m[name]["warnings"][0], name


def test_a_reference_that_another_batch_size_moves_says_how_often() -> None:
    m = metrics([r if k else {**r, "again": [7]} for k, r in enumerate(REFERENCE)], is_reference=True)
    assert m["free_same_floor"]["value"] == pytest.approx(15 / 16) and m["free_same"]["value"] == 1


def test_a_degenerate_variant_that_loops_is_seen_unless_the_reference_loops_as_well() -> None:
    looping = [reply(k, [1, 2, 3] * 8) for k in range(16)]
    m = metrics(looping)
    assert m["free_loop"]["value"] == 1 and m["free_garbled"]["value"] == 1
    assert m["free_loop_delta"]["value"] == pytest.approx(100) and m["free_loop_delta"]["low"] > 50
    assert m["free_repetition"]["value"] == pytest.approx(18 / 21)
    assert m["free_repetition_delta"]["value"] == pytest.approx(1800 / 21)
    both = metrics(looping, reference=looping)
    assert both["free_loop"]["value"] == 1 and both["free_loop_delta"]["value"] == 0


def test_an_empty_reply_counts_once_as_garbled_and_has_no_repetition() -> None:
    m = metrics([reply(0, [5], text=""), *REFERENCE[1:]])
    assert m["free_empty"]["value"] == m["free_garbled"]["value"] == pytest.approx(1 / 16)
    assert m["free_repetition"]["n"] == 15


@pytest.mark.parametrize("n, ranks", [(6, (1, 6)), (16, (4, 13)), (25, (8, 18))])
def test_the_median_s_interval_is_that_of_the_tables(n: int, ranks: tuple[int, int]) -> None:
    """Ranks of the 95 % interval as printed in tables of the sign test, and the coverage they promise."""
    found = generation.median_position(list(range(1, n + 1)), 1000, confidence=0.95)
    assert (found.low, found.high) == ranks
    assert 1 - 2 * binom.cdf(ranks[0] - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(ranks[0], n, 0.5)


def test_a_reply_that_never_differs_ranks_behind_every_number() -> None:
    found = generation.median_position([1, 2, 3, 4, 5, 6, 7, 8, 9, *[None] * 7], 48, confidence=0.95)
    assert found.value == 8 and found.low == 4 and found.high == 48 and "upper bound lies beyond" in found.warnings[0]
    few = generation.median_position([3, 4, 5], 48, confidence=0.95)
    assert few.value == 4 and few.low is None and "too few" in few.warnings[0]


def test_other_prompts_are_not_paired() -> None:
    with pytest.raises(ArtifactError, match="not the same prompts"):
        generation.pair(REFERENCE[1:], REFERENCE)


def test_no_reply_at_all_is_a_reason_and_no_metric() -> None:
    b = builder()
    assert "no trajectory prompt" in str(generation.free_metrics(b, [], MOST, False)) and not b.metrics


def test_agreement_by_position_decays_as_the_replies_do() -> None:
    rows = []
    for k, r in enumerate(REFERENCE):  # the first four differ at token 3, the next four at token 10
        at = 3 if k < 4 else 10 if k < 8 else None
        ids = list(r["token_ids"])
        rows.append(reply(k, ids if at is None else [*ids[: at - 1], -1, *ids[at:]]))
    tokens = {
        "set": ["news"] + ["trajectory"] * 8, "window": ["d", *["w0"] * 4, *["w1"] * 4],
        "position": [1, 10, 11, 12, 13, 7, 8, 9, 10],
        "top1": [0, 1, 1, 1, 1, 1, 1, 1, 2], "top1_ref": [1] * 9,
    }  # fmt: skip
    curve = generation.by_position(builder(), generation.pair(rows, REFERENCE), tokens, MOST)
    free = {c["position"]: c["free"]["value"] for c in curve}
    assert free == {1: 1, 2: 1, 4: 0.75, 8: 0.75, 16: 0.5, MOST: 0.5}
    forced = {c["position"]: c["forced"] and (c["forced"]["value"], c["forced"]["n"]) for c in curve}
    assert forced == {1: (1, 2), 2: (1, 2), 4: (0.75, 4), 8: None, 16: None, MOST: None}
    assert np.all(np.diff(list(free.values())) <= 0)
    alone = generation.by_position(builder(), generation.pair(REFERENCE, REFERENCE), None, MOST)
    assert all(c["free"]["value"] == 1 and c["forced"] is None for c in alone), "without token rows only the free curve is there"
