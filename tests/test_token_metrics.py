"""Token rows become metrics: tails, parts and departures stay visible, and nothing unknown turns into a number."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gate_house import builder

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Metrics
from pipeline.metrics import definitions
from pipeline.metrics.tokens import TOKEN, median_departure, refuse_other_tokens, token_metrics


def tokens(kld: Any, **more: Any) -> Any:
    n = len(kld)
    return {
        "kld": kld, "kld_reverse": [0.0] * n, "jsd": [0.0] * n, "tv": [0.0] * n, "logp": [-1.0] * n, "logp_ref": [-1.0] * n,
        "top1": [1] * n, "top1_ref": [1] * n, "top5_overlap": [5] * n, "document": [f"doc{k % 40}" for k in range(n)],
        "window": [f"doc{k % 40}#0" for k in range(n)], "set": ["news"] * n, "token_class": ["words"] * n,
        "position": [1 + k // 40 for k in range(n)], **more,
    }  # fmt: skip


def measured(rows: Any) -> Metrics:
    b = builder()
    assert token_metrics(b, rows) is None
    return b.metrics


def walks(*differs: list[int]) -> Any:
    """Rows of trajectories: 1 where the likeliest token differs, in the order of positions after a prompt of 7."""
    flat = [(k, p, d) for k, walk in enumerate(differs) for p, d in enumerate(walk)]
    names = [f"p{k}" for k, _, _ in flat]
    return tokens(
        [0.1 * d for _, _, d in flat], top1=[d for _, _, d in flat], top1_ref=[0] * len(flat), set=["trajectory"] * len(flat),
        document=names, window=names, position=[7 + p for _, p, _ in flat],
    )  # fmt: skip


def test_a_tail_stays_visible_beside_a_small_mean() -> None:
    kld = [0.0001] * 930 + [0.5] * 70
    change = np.log(np.array([0.5] * 930 + [0.35] * 70))
    found = measured(tokens(kld, logp=change, logp_ref=np.log(np.full(1000, 0.5))))
    assert found["kld_mean"]["value"] < 0.04 and found["kld_median"]["value"] == found["kld_p90"]["value"] == 0.0001
    assert all(found[name]["value"] == 0.5 for name in ("kld_p95", "kld_p99", "kld_p999", "kld_max"))
    assert found["moved_10pct"]["value"] == pytest.approx(0.07)
    assert found["delta_p_mean"]["value"] == pytest.approx(-0.15 * 0.07)
    assert found["delta_p_rms"]["value"] == pytest.approx(0.15 * np.sqrt(0.07))
    even = measured(tokens([0.1] * 80, logp=np.log([0.6, 0.4] * 40), logp_ref=np.log([0.5] * 80), top5_overlap=[5, 2] * 40))
    assert even["delta_p_mean"]["value"] == pytest.approx(0), "gains and losses cancel in the signed change only"
    assert even["delta_p_rms"]["value"] == pytest.approx(0.1)
    assert even["top5_agreement"]["value"] == pytest.approx(0.7), "the mean share of five"


@pytest.mark.parametrize("at", [0, 49, 99])
@pytest.mark.parametrize("bad, word", [(np.inf, "infinite divergence"), (np.nan, "not finite")])
def test_one_infinite_token_is_never_averaged_away(bad: float, word: str, at: int) -> None:
    b = builder()
    kld = [0.01] * 100
    kld[at] = bad
    fault = token_metrics(b, tokens(kld))
    assert fault and word in fault and "1 of 100" in fault and b.metrics.keys() == {"kld_infinite"} and not b.curves


def test_no_tokens_are_a_fault_and_not_a_divergence_of_zero() -> None:
    b = builder()
    assert "no token" in str(token_metrics(b, tokens([]))) and "kld_mean" not in b.metrics


def test_rows_of_other_tokens_than_the_reference_s_are_refused() -> None:
    whole = {name: np.arange(5) for name in (*TOKEN, "kld")}
    refuse_other_tokens(whole, {name: v.copy() for name, v in whole.items()})
    with pytest.raises(ArtifactError, match="4 token rows cannot be paired with the reference's 5"):
        refuse_other_tokens({name: v[1:] for name, v in whole.items()}, whole)
    for name in TOKEN:
        moved = whole | {name: np.array([0, 1, 3, 2, 4])}
        with pytest.raises(ArtifactError, match=f"token row 2: {name} is another"):
            refuse_other_tokens(moved, whole)


def test_mass_that_only_the_variant_has_leaves_the_reverse_without_value() -> None:
    found = measured(tokens([0.1] * 80, kld_reverse=[0.1] * 79 + [np.inf]))["kld_reverse_mean"]
    assert found["value"] is None and found["low"] is None and "1 of 80" in found["warnings"][0]


def test_self_comparison_is_exactly_zero_in_every_part() -> None:
    found = measured(tokens([0.0] * 200))
    for name, metric in found.items():
        neutral = definitions.definition(name).neutral  # type: ignore[union-attr]
        assert neutral is None or metric["value"] == neutral, name


def test_perplexity_leaves_out_what_the_reference_wrote_itself() -> None:
    loss = [-2.0] * 50 + [-9.0] * 50
    found = measured(tokens([0.1] * 100, logp=loss, logp_ref=loss, set=["news"] * 50 + ["trajectory"] * 50))
    assert found["ppl"]["value"] == pytest.approx(np.exp(2)) and found["ppl"]["n"] == 50
    assert found["kld_mean"]["n"] == 100


def test_each_way_of_cutting_covers_every_token_once_and_averages_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    n = 600
    found = measured(tokens(
        rng.exponential(0.1, n), top1=rng.integers(0, 2, n), set=rng.choice(["news", "code-rust", "trajectory"], n),
        token_class=rng.choice(definitions.TOKEN_CLASSES, n), position=rng.choice([1, 31, 32, 127, 128, 511, 512, 4000], n),
    ))  # fmt: skip
    for stem in ("kld_mean", "top1_agreement"):
        for mark in ("position:", "class:", ""):
            parts = [m for k, m in found.items() if k.startswith(f"{stem}/{mark}") and (mark or ":" not in k)]
            assert sum(m["n"] for m in parts) == n
            whole = sum(m["n"] * m["value"] for m in parts) / n
            assert whole == pytest.approx(found[stem]["value"])
    assert found["kld_mean/position:128-511"]["n"] == found["top1_agreement/position:128-511"]["n"] > 0


def test_tokens_and_sums_by_document_are_those_of_the_whole() -> None:
    b = builder()
    assert token_metrics(b, tokens([0.1, 0.2, 0.4, 0.8])) is None
    documents, whole = b.curves["kld_by_document"].values(), b.metrics["kld_mean"]
    assert sum(d["tokens"] for d in documents) == whole["n"] == 4
    assert sum(d["kld"] for d in documents) / 4 == pytest.approx(whole["value"]) == 0.375


def test_a_part_without_tokens_has_no_metric_and_without_trajectories_there_is_no_departure() -> None:
    found = measured(tokens([0.1] * 80))
    assert "kld_mean/class:words" in found
    absent = {"kld_mean/class:cjk", "kld_mean/position:512-up", "first_departure", "never_departs"}
    assert not absent & found.keys()


def test_the_first_departure_is_counted_from_where_the_continuation_begins_whatever_the_order_of_rows() -> None:
    rows = walks([1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0])
    order = np.random.default_rng(1).permutation(20)
    for given in (rows, {k: list(np.asarray(v)[order]) for k, v in rows.items()}):
        found = measured(given)
        assert found["first_departure"]["value"] == 3 and found["first_departure"]["unit"] == "tokens"
        assert found["first_departure"]["n"] == 5 and found["never_departs"]["value"] == pytest.approx(0.2)


def test_trajectories_that_never_depart_have_no_median_and_say_why() -> None:
    found = measured(walks([0] * 6, [0] * 6, [0, 1, 0, 0]))
    assert found["first_departure"]["value"] is None and "fewer than half" in " ".join(found["first_departure"]["warnings"])
    assert found["never_departs"]["value"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("at, departed", [
    ([1, 2, 2, 2, 9, 9], [False, True, True, True, False, False]),  # 3 of 6 depart at 2; one ended after 1
    ([1, 1, 1, 2, 2, 5, 9], [False, False, False, True, True, False, False]),
])  # fmt: skip
def test_a_trajectory_that_ended_early_is_not_taken_for_one_that_agreed_to_the_end(at: list[int], departed: list[bool]) -> None:
    """Product limit of the first: 1 - 3/5 = 0.4 at 2. Taking it for "never": 1 - 3/6."""
    assert median_departure(builder(), np.array(at), np.array(departed)).value == 2


def test_the_median_departure_is_the_plain_median_where_every_trajectory_departs() -> None:
    rng = np.random.default_rng(3)
    for n in (5, 31, 66):
        at = rng.geometric(0.1, n)
        found = median_departure(builder(400), at, np.ones(n, bool))
        assert found.value == np.sort(at)[(n - 1) // 2]
        assert found.low is not None and found.high is not None and found.low <= found.value <= found.high


def test_curves_hold_every_token_and_show_where_divergence_grows() -> None:
    b = builder()
    corpus = tokens([0.001 * (1 + k // 40) for k in range(4000)])
    rows = walks(*[[0] * 10 + [1] * 20 for _ in range(12)])
    token_metrics(b, {k: [*corpus[k], *rows[k]] for k in corpus})
    curves = b.curves["kld_by_position"]
    assert sum(p["n"] for p in curves["corpus"]) == 4000 and sum(p["n"] for p in curves["trajectory"]) == 360
    values = [p["value"] for p in curves["corpus"]]
    assert values == sorted(values) and [p["from"] for p in curves["corpus"]] == [1, 2, 4, 8, 16, 32, 64]
    assert curves["trajectory"][0]["value"] == 0 and curves["trajectory"][-1]["value"] == pytest.approx(0.1)
    for points in curves.values():
        assert all(p["to"] + 1 == q["from"] for p, q in pairwise(points))
        assert Counter(p["unit"] for p in points) == {"nats": len(points)}
