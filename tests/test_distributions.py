"""Divergence against closed forms and against SciPy in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr, softmax

from pipeline.divergence.distributions import compare_logits, top_ids


def rows(p: list[float] | NDArray[np.float32], q: list[float] | NDArray[np.float32], true: int = 0):  # type: ignore[no-untyped-def]
    return compare_logits(np.atleast_2d(np.float32(p)), np.atleast_2d(np.float32(q)), np.array([true]))


def log(p: list[float]) -> list[float]:
    with np.errstate(divide="ignore"):
        return list(np.log(np.array(p)))


@pytest.mark.parametrize("p, q, expected", [
    (log([0.5, 0.5, 0.0]), log([0.9, 0.1, 0.0]), {"kld": 0.510826, "tv": 0.4}),  # a zero in both contributes nothing
    (log([0.5, 0.5]), log([1.0, 0.0]), {"kld": np.inf, "tv": 0.5}),  # the variant rules out what the reference allows
    # and the other way round
    (log([1.0, 0.0]), log([0.5, 0.5]), {"kld": np.log(2), "kld_reverse": np.inf, "jsd": 0.215762, "tv": 0.5}),
    ([2.0, 0.0], [1.0, 0.0], {"kld": 0.067131, "tv": 0.149738}),  # raw logits, at temperature one
])  # fmt: skip
def test_divergences_by_hand(p: list[float], q: list[float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(rows(p, q), name)[0] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("zeros", [1, 3, 300])
def test_entries_ruled_out_by_both_change_nothing(zeros: int) -> None:
    rng = np.random.default_rng(4)
    ref = rng.normal(0, 3, (6, 400)).astype(np.float32)
    var = ref + rng.normal(0, 0.2, ref.shape).astype(np.float32)
    none = np.full((6, zeros), -np.inf, np.float32)
    bare = compare_logits(ref, var, np.zeros(6, int))
    padded = compare_logits(np.hstack([ref, none]), np.hstack([var, none]), np.zeros(6, int))
    for name in ("kld", "kld_reverse", "jsd", "tv", "logp", "logp_ref", "entropy_ref"):
        np.testing.assert_allclose(getattr(padded, name), getattr(bare, name), rtol=1e-4, atol=1e-6)
    same = compare_logits(np.hstack([ref, none]), np.hstack([ref, none]), np.zeros(6, int))
    assert not any(getattr(same, name).any() for name in ("kld", "kld_reverse", "jsd", "tv"))


@pytest.mark.parametrize("where", [0, 7, 399])
def test_one_token_that_the_variant_rules_out_makes_its_row_infinite_and_no_other(where: int) -> None:
    ref = np.random.default_rng(5).normal(0, 3, (3, 400)).astype(np.float32)
    var = ref.copy()
    var[1, where] = -np.inf
    found = compare_logits(ref, var, np.zeros(3, int))
    assert (found.kld == [0, np.inf, 0]).all()
    np.testing.assert_allclose(found.tv, [0, softmax(ref[1].astype(float))[where], 0], rtol=1e-6)  # what it takes away


@pytest.mark.parametrize("far", [50.0, 95.0, 200.0, 1000.0])
def test_mass_far_from_where_the_reference_has_any_is_not_lost(far: float) -> None:
    ref = np.float32([[0.0, -far, -1.0]])
    var = np.float32([[-far, 0.0, -1.0]])
    p, q = softmax(ref.astype(float), -1), softmax(var.astype(float), -1)
    logs = log_softmax(ref.astype(float), -1) - log_softmax(var.astype(float), -1)
    found = compare_logits(ref, var, np.array([1]))
    assert found.kld[0] == pytest.approx((p * logs).sum(), rel=1e-5)
    assert found.kld_reverse[0] == pytest.approx(-(q * logs).sum(), rel=1e-5)
    assert found.tv[0] == pytest.approx(np.maximum(p - q, 0).sum(), rel=1e-6) and found.tv[0] <= 1
    assert found.logp_ref[0] == pytest.approx(-far - np.log1p(np.exp(-1)), rel=1e-5)


def test_distributions_that_share_nothing_lie_no_further_apart_than_1() -> None:
    ref, var = np.random.default_rng(8).normal(0, 1, (2, 100, 301)).astype(np.float32)
    ref[:, :150] -= 600
    var[:, 150:] -= 600
    found = compare_logits(ref, var, np.zeros(100, int)).tv
    assert (found <= 1).all() and (found > 1 - 1e-12).all()


def test_mass_where_float32_sees_none_of_the_reference_s_is_not_lost() -> None:
    """e^-104 is 0 in float32, and nothing overflows: without float64 the reverse divergence of 79 e^-24 would be 0."""
    assert rows([0.0, -104.0], [0.0, -24.0]).kld_reverse[0] == pytest.approx(79 * np.exp(-24), rel=1e-3)


@pytest.mark.parametrize("bad", [[np.nan, 2.0], [np.nan, np.nan], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_a_row_that_is_no_distribution_has_no_figure_on_either_side(bad: list[float]) -> None:
    for found in (rows(bad, [1.0, 2.0]), rows([1.0, 2.0], bad)):
        assert np.isnan([found.kld[0], found.kld_reverse[0], found.jsd[0], found.tv[0], found.entropy_ref[0]]).all()
    assert np.isnan(rows([1.0, 2.0], bad).logp[0])


def test_equal_logits_give_exactly_zero() -> None:
    x = np.random.default_rng(1).normal(0, 5, (64, 4099)).astype(np.float32)
    found = compare_logits(x, x.copy(), np.zeros(64, int))
    assert not (found.kld.any() or found.kld_reverse.any() or found.jsd.any() or found.tv.any())
    assert (found.logp == found.logp_ref).all() and (found.top1 == found.top1_ref).all() and (found.top5_overlap == 5).all()


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
    np.testing.assert_allclose(found.kld_reverse, rel_entr(q, p).sum(-1), rtol=2e-3)
    np.testing.assert_allclose(found.jsd, (rel_entr(p, m) + rel_entr(q, m)).sum(-1) / 2, rtol=2e-3, atol=1e-11)
    np.testing.assert_allclose(found.tv, 1 - np.minimum(p, q).sum(-1), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(found.logp, log_softmax(var.astype(float), -1)[np.arange(50), true], atol=1e-5)
    np.testing.assert_allclose(found.entropy_ref, -(p * np.log(p)).sum(-1), rtol=1e-4)
    assert (found.top1 == var.argmax(-1)).all() and (found.top1_ref == ref.argmax(-1)).all()


@pytest.mark.parametrize("vocab", [1, 3, 5, 255, 256, 257, 1279, 1281, 5000])
def test_the_five_likeliest_are_those_of_a_full_sort(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for logits in (rng.normal(0, 3, vocab), rng.integers(0, 4, vocab), np.zeros(vocab), -np.arange(vocab), np.arange(vocab)):
        expected = np.argsort(-logits.astype(np.float32), kind="stable")[:5]
        assert top_ids(logits.astype(np.float32)[None]).tolist() == [expected.tolist()]


def test_the_likeliest_of_rows_with_masked_or_broken_entries_are_those_of_a_full_sort() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (6, 1000)).astype(np.float32)
    logits[0, 256:] = -np.inf  # chunks that are masked whole
    logits[1, 3:] = -np.inf  # fewer than five are left
    logits[2] = -np.inf
    logits[3, 500] = np.nan
    logits[4, 700] = np.inf
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    assert top_ids(logits).tolist() == expected.tolist()


def test_a_row_s_figures_do_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(6)
    ref = rng.normal(0, 4, (21, 3001)).astype(np.float32)
    var = (ref + rng.normal(0, 0.3, ref.shape)).astype(np.float32)
    var[4, 7] = np.nan  # this one is no distribution
    var[9, :2000] = -np.inf
    together = compare_logits(ref, var, np.arange(21))
    for i in range(21):
        alone = compare_logits(ref[i : i + 1], var[i : i + 1], np.arange(i, i + 1))
        for name, values in vars(together).items():
            assert np.array_equal(values[i : i + 1], getattr(alone, name), equal_nan=True), (i, name)


def test_the_overlap_counts_what_both_hold_among_their_five_likeliest() -> None:
    ref = np.float32([[9, 8, 7, 6, 5, 0, 0, 0]])
    var = np.float32([[5, 6, 7, 0, 0, 8, 9, 0]])
    found = compare_logits(ref, var, np.array([0]))
    assert found.top5_overlap[0] == 3 and found.top1_ref[0] == 0 and found.top1[0] == 6


def test_distributions_of_other_sizes_are_not_compared() -> None:
    x = np.zeros((2, 4), np.float32)
    for ref, var, true in ((x, x[:1], 2), (x, x[:, :3], 2), (x, x, 1)):
        with pytest.raises(ValueError, match="cannot be compared"):
            compare_logits(ref, var, np.zeros(true, int))


def test_a_shift_of_all_logits_changes_nothing() -> None:
    ref = np.random.default_rng(3).normal(0, 4, (8, 1000)).astype(np.float32)
    assert compare_logits(ref, ref + np.float32(8), np.zeros(8, int)).kld.max() < 1e-9
