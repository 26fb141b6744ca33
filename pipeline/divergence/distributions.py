"""Compare two next-token distributions over the whole vocabulary: KLD both ways, JSD, total variation, likeliest tokens.
NumPy only, since it also runs in other environments (in_vllm.py)."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BATCH = 16  # rows at a time: a thread releases the interpreter at every NumPy call; with one row two are no faster than one
PART = 2 * BATCH  # rows that a thread takes at a time
TOP = 5  # likeliest tokens that `top5_overlap` compares
CHUNK = 256  # entries searched together for the likeliest
LANE = 512  # products summed in float32, before float64
FAR = 40.0  # e^40 times likelier: float32 may lose how likely it was to the reference


@dataclass(frozen=True)
class TokenRows:
    """One value per position; see `compare_logits`."""

    kld: NDArray[np.float64]
    kld_reverse: NDArray[np.float64]
    jsd: NDArray[np.float64]
    tv: NDArray[np.float64]
    logp_ref: NDArray[np.float64]
    logp: NDArray[np.float64]
    entropy_ref: NDArray[np.float64]
    top1_ref: NDArray[np.int64]
    top1: NDArray[np.int64]
    top5_overlap: NDArray[np.int64]


def compare_logits(ref: F32, var: F32, true_ids: NDArray[np.int64]) -> TokenRows:
    """Compare two next-token distributions over the vocabulary, position by position, in nats.

    ref, var: raw logits [n, vocab], float32, temperature 1; true_ids: [n], the token that came next.
    kld is KL(ref || var), infinite if P > 0 where Q = 0; kld_reverse is KL(var || ref). tv is the total variation, half the sum of
    |P - Q|, in [0, 1]. top5_overlap: how many of the reference's five likeliest tokens are among the variant's (of equals the
    lower id). A row that is no distribution is NaN. Equal logits give exactly 0."""
    if ref.shape != var.shape or len(ref) != len(true_ids):
        raise ValueError(f"{ref.shape} logits cannot be compared with {var.shape} at {len(true_ids)} positions")
    n, vocab = ref.shape
    work = np.empty((4, min(BATCH, n), vocab), np.float32)  # stays in the cache between batches
    values, tops = np.empty((7, n)), np.empty((3, n), np.int64)
    with np.errstate(all="ignore"):  # rows that leave float32's range are computed again by `_exact`
        for at in range(0, n, BATCH):
            rows = slice(at, at + BATCH)
            r, v, true = ref[rows], var[rows], true_ids[rows, None]
            top_ref, top = top_ids(r), top_ids(v)
            result = _in_float32(r, v, np.take_along_axis(r, top_ref[:, :1], 1), work[:, : len(r)])
            for i in np.flatnonzero(~np.isfinite(result).all(axis=0)):
                result[:, i] = _exact(r[i], v[i])
            kld, reverse, jsd, tv, logz_ref, logz, entropy = result
            logp_ref, logp = (np.take_along_axis(x, true, 1)[:, 0] for x in (r, v))
            values[:, rows] = kld, reverse, jsd, np.minimum(tv, 1.0), logp_ref - logz_ref, logp - logz, entropy
            shared = (top_ref[:, :, None] == top[:, None, :]).any(2).sum(1)
            tops[:, rows] = top_ref[:, 0], top[:, 0], shared
    return TokenRows(*values, *tops)


def compare_parts(pool: Executor, ref: F32, var: F32, true_ids: NDArray[np.int64]) -> TokenRows:
    """`compare_logits` a few rows at a time, over threads: NumPy works on one core and releases the interpreter."""
    parts = [slice(at, at + PART) for at in range(0, max(len(ref), 1), PART)]
    done = list(pool.map(lambda s: compare_logits(ref[s], var[s], true_ids[s]), parts))
    return TokenRows(**{name: np.concatenate([getattr(d, name) for d in done]) for name in vars(done[0])})


def top_ids(logits: F32) -> NDArray[np.int64]:
    """Ids of the (up to) five largest logits of each row [n, vocab] -> [n, 5], the largest first; of equals the lower id. Each lies
    in one of the five chunks with the largest maxima. NaN counts as less than anything."""
    n, vocab = logits.shape
    starts = np.arange(0, vocab, CHUNK)
    peaks = np.maximum.reduceat(logits, starts, axis=1)
    most = min(TOP, vocab)
    result = np.empty((n, most), np.int64)
    odd = np.asarray(~(peaks < np.inf).all(axis=1))  # NaN among them
    plain = np.flatnonzero(~odd)
    best = np.sort(np.argsort(-peaks[plain], axis=1, kind="stable")[:, :TOP], axis=1)
    ids = (starts[best][:, :, None] + np.arange(CHUNK)).reshape(len(plain), best.shape[1] * CHUNK)
    held = logits[plain[:, None], np.minimum(ids, vocab - 1)]
    held[ids >= vocab] = -np.inf  # behind the last chunk's end
    rows = np.arange(len(plain))
    for k in range(most):
        at = held.argmax(1)  # the first of equals, and ids ascend
        result[plain, k] = ids[rows, at]
        odd[plain] |= held[rows, at] == -np.inf  # fewer than five that are not masked: sorted instead
        held[rows, at] = -np.inf
    for i in np.flatnonzero(odd):
        result[i] = np.argsort(-logits[i], kind="stable")[:most]
    return result


def _in_float32(ref: F32, var: F32, top: F32, work: F32) -> F64:
    """(kld, reverse kld, jsd, tv, both log normalizers, the reference's entropy) [7, n] of rows in float32; not finite: see
    `_exact`.

    Everything is an expectation under P of x = d - mean, d = var - ref, whose mean under P is 0 up to rounding. With
    E = expm1(x) and L = log E_P[e^x], the likelihood ratio is q/p = e^(x - L), and
        KL(P||Q) = L - E_P[x]                 where L = log1p(E_P[E - x] + E_P[x])
        KL(Q||P) = e^-L (E_P[x] + E_P[E x]) - L
        JSD      = KL(Q||P) / 2 - E_P[(1 + h) log1p(h) - h],    h = (q/p - 1) / 2
        TV       = E_P|h|
    so that one exp, one expm1 and one log1p suffice. E - x is second order in x: near-equal distributions keep their digits,
    while the textbook's difference of two log-softmaxes loses a KLD of 1e-6 in float32's rounding."""
    p, x, e, y = work
    np.subtract(ref, top, out=x)
    np.exp(x, out=p)
    z = p.sum(1).astype(np.float64)
    log_z = np.log(z)
    entropy = log_z - _dot(p, x) / z
    np.subtract(var, ref, out=x)
    mean = (_dot(p, x) / z).astype(np.float32)
    np.subtract(x, mean[:, None], out=x)
    far = ~(x.max(1) <= FAR)  # or NaN
    rest = _dot(p, x) / z
    np.expm1(x, out=e)
    np.subtract(e, x, out=y)
    log_mean = np.log1p(_dot(p, y) / z + rest)
    np.multiply(e, x, out=y)
    reverse = np.exp(-log_mean) * (rest + _dot(p, y) / z) - log_mean
    np.multiply(e, (np.exp(-log_mean) / 2).astype(np.float32)[:, None], out=e)
    np.add(e, (np.expm1(-log_mean) / 2).astype(np.float32)[:, None], out=e)  # h
    np.abs(e, out=y)
    tv = _dot(p, y) / z
    np.log1p(e, out=y)
    np.add(e, np.float32(1), out=x)
    np.multiply(x, y, out=x)
    np.subtract(x, e, out=x)
    jsd = reverse / 2 - _dot(p, x) / z
    logz_ref = top[:, 0] + log_z
    bounded = [np.maximum(d, 0.0) for d in (log_mean - rest, reverse, jsd)]
    result = np.stack([*bounded, tv, logz_ref, logz_ref + mean + log_mean, entropy])
    result[:, far] = np.nan
    return result


def _dot(a: F32, b: F32) -> F64:
    n, width = a.shape
    whole = width // LANE * LANE
    lanes = np.vecdot(a[:, :whole].reshape(n, -1, LANE), b[:, :whole].reshape(n, -1, LANE))
    return lanes.sum(1, dtype=np.float64) + np.vecdot(a[:, whole:], b[:, whole:])  # type: ignore[no-any-return]


def _exact(ref: F32, var: F32) -> tuple[float, ...]:
    """What `_in_float32` gives, by the textbook in float64, with 0 log 0 = 0; NaN where a row is no distribution."""
    logp, logz_ref = _log_softmax(ref.astype(np.float64))
    logq, logz = _log_softmax(var.astype(np.float64))
    if not (np.isfinite(logz_ref) and np.isfinite(logz)):
        return (np.nan,) * 7
    p, q = np.exp(logp), np.exp(logq)
    ratio = logp - logq
    kld = np.where(p > 0, p * ratio, 0.0).sum()
    reverse = np.where(q > 0, q * -ratio, 0.0).sum()
    middle = (p + q) / 2
    jsd = sum(np.where(x > 0, x * np.log(x / middle), 0.0).sum() for x in (p, q)) / 2
    entropy = -np.where(p > 0, p * logp, 0.0).sum()
    tv = np.abs(p - q).sum() / 2
    return max(kld, 0.0), max(reverse, 0.0), max(jsd, 0.0), tv, logz_ref, logz, float(entropy)


def _log_softmax(logits: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    top = logits.max()
    logz = float(top + np.log(np.exp(logits - top).sum()))
    return logits - logz, logz
