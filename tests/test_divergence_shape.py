"""Uniform or isolated: synthetic divergence of known shape gets its name, and no more is claimed than was seen."""

from typing import Any

import numpy as np
import pytest
from gate_house import builder
from scipy.stats import norm

from pipeline.metrics import failure_analysis

N, DOCS = 6000, 40


def judged(kld: Any, groups: dict[str, Any] | None = None, docs: Any = None) -> Any:
    documents = np.arange(len(kld)) % DOCS if docs is None else docs
    return failure_analysis.spread_of(builder(resamples=400), kld, documents, groups or {})


def lognormal(sigma: float, n: int = N) -> Any:
    """Quantiles of a lognormal in random order: its shape exactly, without sampling error."""
    values = np.exp(sigma * norm.ppf((np.arange(n) + 0.5) / n))
    return np.random.default_rng(1).permutation(values)


def clipped(share: float) -> Any:
    """Tokens alike but for a worst 1 % that carries a given share of all divergence."""
    kld = np.full(N, 0.01)
    worst = np.random.default_rng(2).permutation(N)[: N // 100]
    kld[worst] = share / (1 - share) * 0.01 * (N - len(worst)) / len(worst)
    return kld


def test_a_lognormal_spread_is_a_uniform_shift_and_its_figures_are_the_closed_forms() -> None:
    found = judged(lognormal(1.0))
    assert found["kind"] == "uniform" and found["settled"]
    assert found["worst_share"]["value"] == pytest.approx(norm.cdf(1.0 - norm.ppf(0.99)), rel=0.02)
    assert found["median_over_mean"] == pytest.approx(np.exp(-0.5), rel=0.01)
    assert "uniform shift" in found["words"]


@pytest.mark.parametrize(
    "share, kind",
    [(0.19, "uniform"), (0.21, "neither"), (0.35, "neither"), (0.49, "neither"), (0.51, "isolated"), (0.8, "isolated")],
)
def test_clipped_extremes_are_isolated_tokens_and_the_bounds_are_where_they_are_said_to_be(share: float, kind: str) -> None:
    found = judged(clipped(share))
    assert found["kind"] == kind and found["worst_share"]["value"] == pytest.approx(share)
    assert found["settled"] or share != 0.8
    names = {"uniform": "uniform shift", "isolated": "isolated tokens", "neither": "neither uniform nor isolated"}
    assert found["words"].startswith(names[kind]) and f"{100 * share:.0f} %" in found["words"]


def test_a_share_at_the_bound_is_named_but_not_called_settled() -> None:
    rng = np.random.default_rng(3)
    kld = clipped(0.52) * rng.uniform(0.2, 1.8, N)
    found = judged(kld)
    assert not found["settled"] and "not settled" in found["words"]
    assert judged(clipped(0.9))["settled"]


def test_a_long_tail_with_a_small_median_is_neither() -> None:
    half = np.where(np.random.default_rng(5).random(N) < 0.4, 0.02, 1e-5)  # two fifths moved, the others not
    found = judged(half)
    assert found["kind"] == "neither" and found["worst_share"]["value"] < failure_analysis.UNIFORM_SHARE


def test_the_verdict_does_not_depend_on_the_size_of_the_divergence() -> None:
    for make in (lognormal(1.0), clipped(0.8)):
        small, large = judged(make * 1e-6), judged(make * 10)
        assert small["kind"] == large["kind"] and small["worst_share"]["value"] == pytest.approx(large["worst_share"]["value"])


def test_too_few_tokens_say_so() -> None:
    found = judged(lognormal(1.0, 999))
    assert found["kind"] == "too few" and "999 tokens are too few" in found["words"] and found["worst_share"] is None
    assert judged(lognormal(1.0, 1000))["kind"] == "uniform"
    assert judged([])["kind"] == "too few"


def test_no_divergence_is_none_and_what_is_not_finite_comes_first() -> None:
    assert judged(np.zeros(N))["kind"] == "none"
    kld = lognormal(1.0)
    kld[[5, 6]] = np.inf, np.nan
    found = judged(kld)
    assert found["kind"] == "not finite" and "2 of 6000" in found["words"]


@pytest.mark.parametrize("times, stands_out", [(3.0, True), (1.5, False)])
def test_a_class_with_three_times_the_divergence_stands_out_one_with_half_again_does_not(times: float, stands_out: bool) -> None:
    labels = np.where(np.random.default_rng(4).random(N) < 0.1, "digits", "words")
    found = judged(lognormal(1.0) * np.where(labels == "digits", times, 1.0), {"token class": labels})
    digits = next(g for g in found["groups"] if g["group"] == "digits")
    assert digits["stands_out"] is stands_out and digits["ratio"] == pytest.approx(times, rel=0.3)
    assert ("concentrates on token class digits" if stands_out else "No token class stands out") in found["words"]


def test_a_domain_of_one_document_is_shown_and_nothing_is_claimed_of_it() -> None:
    docs = np.arange(N) % DOCS
    domain = np.where(docs == 0, "one", "many")
    found = judged(lognormal(1.0) * np.where(docs == 0, 9.0, 1.0), {"domain": domain}, docs)
    one = next(g for g in found["groups"] if g["group"] == "one")
    assert one["ratio"] > 5 and one["mean"]["low"] is None and not one["stands_out"]
    assert "nothing is claimed of 1 group " in found["words"]


def test_a_group_of_few_tokens_is_not_judged() -> None:
    labels = np.where(np.arange(N) < failure_analysis.FEW_IN_GROUP - 1, "rare", "common")
    assert not judged(lognormal(1.0), {"token class": labels})["groups"]
