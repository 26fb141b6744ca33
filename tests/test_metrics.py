"""Divergence against closed forms and against SciPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr, softmax

from pipeline.metrics import DEFINITIONS, compare_logits, definition, itl, tpot, ttft


def rows(p: list[float] | NDArray[np.float32], q: list[float] | NDArray[np.float32], true: int = 0):  # type: ignore[no-untyped-def]
    return compare_logits(np.atleast_2d(np.float32(p)), np.atleast_2d(np.float32(q)), np.array([true]))


def log(p: list[float]) -> list[float]:
    with np.errstate(divide="ignore"):
        return list(np.log(np.array(p)))


def test_a_zero_in_both_contributes_nothing() -> None:
    assert rows(log([0.5, 0.5, 0.0]), log([0.9, 0.1, 0.0])).kld[0] == pytest.approx(0.510826, abs=1e-6)


def test_mass_where_the_variant_has_none_is_infinite() -> None:
    assert rows(log([0.5, 0.5]), log([1.0, 0.0])).kld[0] == np.inf


def test_mass_where_only_the_reference_has_none_is_finite() -> None:
    assert rows(log([1.0, 0.0]), log([0.5, 0.5])).kld[0] == pytest.approx(np.log(2), abs=1e-6)


def test_logits_are_compared_raw_at_temperature_one() -> None:
    assert rows([2.0, 0.0], [1.0, 0.0]).kld[0] == pytest.approx(0.067131, abs=1e-6)


def test_a_nan_row_stays_nan() -> None:
    found = rows([1.0, 2.0], [np.nan, 2.0])
    assert np.isnan(found.kld[0]) and np.isnan(found.jsd[0])


def test_equal_logits_give_exactly_zero() -> None:
    x = np.random.default_rng(1).normal(0, 5, (64, 4099)).astype(np.float32)
    found = compare_logits(x, x.copy(), np.zeros(64, int))
    assert (found.kld == 0).all() and (found.jsd == 0).all() and (found.logp == found.logp_ref).all()


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.3, 3.0, 30.0])
def test_divergences_agree_with_scipy_in_float64(noise: float) -> None:
    rng = np.random.default_rng(2)
    ref = rng.normal(0, 4, (50, 3001)).astype(np.float32)
    var = (ref + rng.normal(0, noise, ref.shape)).astype(np.float32)
    true = rng.integers(0, 3001, 50)
    p, q = softmax(ref.astype(float), -1), softmax(var.astype(float), -1)
    found = compare_logits(ref, var, true)
    m = (p + q) / 2
    np.testing.assert_allclose(found.kld, rel_entr(p, q).sum(-1), rtol=2e-3)
    np.testing.assert_allclose(found.jsd, (rel_entr(p, m) + rel_entr(q, m)).sum(-1) / 2, rtol=2e-3)
    np.testing.assert_allclose(found.logp, log_softmax(var.astype(float), -1)[np.arange(50), true], atol=1e-5)
    np.testing.assert_allclose(found.entropy_ref, -(p * np.log(p)).sum(-1), rtol=1e-4)
    assert (found.top1 == var.argmax(-1)).all() and (found.top1_ref == ref.argmax(-1)).all()


def test_a_shift_of_all_logits_changes_nothing() -> None:
    ref = np.random.default_rng(3).normal(0, 4, (8, 1000)).astype(np.float32)
    assert compare_logits(ref, ref + np.float32(8), np.zeros(8, int)).kld.max() < 1e-9


def test_ttft_and_tpot_of_a_known_stream() -> None:
    times = [0.30 + 0.05 * k for k in range(21)]
    assert ttft(0.0, times) == pytest.approx(0.30)
    assert tpot(times) == pytest.approx(0.050)
    assert itl(times) == pytest.approx([0.05] * 20)


def test_one_token_has_no_tpot_and_none_has_no_ttft() -> None:
    assert tpot([1.0]) is None and ttft(0.0, []) is None


def test_direction_belongs_to_the_metric() -> None:
    lower = {definition(n).better for n in ("ppl", "kld_mean/news", "ttft_ms", "peak_memory_bytes")}  # type: ignore[union-attr]
    higher = {definition(n).better for n in ("acc/facts", "acc_delta/all", "speed_ratio")}  # type: ignore[union-attr]
    assert lower == {"lower"} and higher == {"higher"}
    assert definition("kld_maen") is None


def test_every_metric_says_its_unit_and_meaning() -> None:
    assert all(d.unit and d.about for d in DEFINITIONS.values())
