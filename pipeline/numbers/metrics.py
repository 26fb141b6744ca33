"""What the figures mean: definitions, units, directions, and the arithmetic. Pure: no files, no clock, no torch."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

Floats = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True)
class Definition:
    """A metric: its unit, which way is better, and the value that means "no difference" (None: there is none)."""

    unit: str
    better: Literal["lower", "higher"]
    neutral: float | None
    about: str


# `name/<task>` metrics are looked up by the part before the slash.
DEFINITIONS: dict[str, Definition] = {
    "kld_mean": Definition("nats", "lower", 0.0, "KL(reference || variant), full vocabulary, mean over tokens"),
    "kld_median": Definition("nats", "lower", 0.0, "median over tokens"),
    "kld_p90": Definition("nats", "lower", 0.0, "90th percentile over tokens"),
    "kld_p95": Definition("nats", "lower", 0.0, "95th percentile over tokens"),
    "kld_p99": Definition("nats", "lower", 0.0, "99th percentile over tokens"),
    "kld_p999": Definition("nats", "lower", 0.0, "99.9th percentile over tokens"),
    "kld_max": Definition("nats", "lower", 0.0, "worst token"),
    "kld_infinite": Definition("tokens", "lower", 0.0, "tokens the reference allows and the variant rules out"),
    "kld_reverse_mean": Definition("nats", "lower", 0.0, "KL(variant || reference), full vocabulary, mean over tokens"),
    "kld_floor": Definition("nats", "lower", 0.0, "mean KLD of the reference against itself, computed in another way"),
    "kld_rounding": Definition("nats", "lower", 0.0, "mean KLD of the reference against the same weights in float32"),
    "flip_floor": Definition("fraction", "lower", 0.0, "share of tokens whose most likely one differs, as in kld_floor"),
    "flip_rounding": Definition("fraction", "lower", 0.0, "share of tokens whose most likely one differs, as in kld_rounding"),
    "jsd_mean": Definition("nats", "lower", 0.0, "Jensen-Shannon divergence, mean over tokens"),
    "top1_agreement": Definition("fraction", "higher", 1.0, "share of tokens with the same most likely next token"),
    "top5_agreement": Definition("fraction", "higher", 1.0, "share of the reference's five likeliest that the variant's five hold"),
    "first_departure": Definition(
        "tokens", "higher", None, "median position in a trajectory where the likeliest token first differs"
    ),
    "never_departs": Definition("fraction", "higher", 1.0, "share of trajectories in which the likeliest token never differs"),
    "delta_p_mean": Definition("fraction", "higher", 0.0, "mean change of the true token's probability, signed"),
    "delta_p_rms": Definition("fraction", "lower", 0.0, "root mean square change of the true token's probability"),
    "moved_10pct": Definition("fraction", "lower", 0.0, "share of tokens whose true-token probability moved over 0.1"),
    "ppl": Definition("ppl", "lower", None, "exp of the token-weighted mean negative log-likelihood"),
    "ppl_ratio": Definition("ratio", "lower", 1.0, "perplexity over the reference's, same tokens"),
    "acc": Definition("fraction", "higher", None, "share of items answered correctly"),
    "acc_delta": Definition("pp", "higher", 0.0, "accuracy minus the reference's, same items"),
    "recovery": Definition("ratio", "higher", 1.0, "accuracy over the reference's"),
    "flips_to_wrong": Definition("items", "lower", 0.0, "right with the reference, wrong with the variant"),
    "flips_to_right": Definition("items", "higher", 0.0, "wrong with the reference, right with the variant"),
    "p_mcnemar": Definition("p", "higher", None, "exact McNemar test of equal accuracy"),
    "byte_ppl": Definition("ppl", "lower", None, "exp of the negative log-likelihood per byte, whole documents"),
    "byte_ppl_ratio": Definition("ratio", "lower", 1.0, "byte perplexity over the reference's"),
    "truncated": Definition("items", "lower", 0.0, "items longer than the model's window"),
    "empty_outputs": Definition("items", "lower", 0.0, "generations without any text"),
    "weight_bytes": Definition("bytes", "lower", None, "size of the weight files"),
    "bits_per_weight": Definition("bits", "lower", None, "weight file bits over the base's number of weights"),
    "size_ratio": Definition("ratio", "lower", 1.0, "weight bytes over the reference's"),
    "kv_bytes_per_token": Definition("bytes", "lower", None, "key-value cache per token: slope over context lengths"),
    "load_s": Definition("s", "lower", None, "loading the model in a fresh process"),
    "peak_memory_bytes": Definition("bytes", "lower", None, "peak resident memory of the process while serving"),
    "load_memory_bytes": Definition("bytes", "lower", None, "peak resident memory of the process while loading"),
    "ttft_ms": Definition("ms", "lower", None, "submit to first token"),
    "ttft_cold_ms": Definition("ms", "lower", None, "submit to first token of the first request after loading"),
    "phase_ms": Definition("ms", "lower", None, "one phase of a request; decode and sampling a token"),
    "tpot_ms": Definition("ms", "lower", None, "(last token - first token) / (n - 1)"),
    "itl_p50_ms": Definition("ms", "lower", None, "median gap between consecutive tokens"),
    "itl_p95_ms": Definition("ms", "lower", None, "95th percentile gap"),
    "itl_p99_ms": Definition("ms", "lower", None, "99th percentile gap"),
    "e2e_ms": Definition("ms", "lower", None, "submit to last token"),
    "prefill_tok_s": Definition("tok/s", "higher", None, "prompt tokens over time to first token"),
    "decode_tok_s": Definition("tok/s", "higher", None, "tokens after the first over their time"),
    "speed_ratio": Definition("ratio", "higher", 1.0, "decode rate over the reference's, interleaved rounds"),
    "prefill_ratio": Definition("ratio", "higher", 1.0, "prefill rate over the reference's, interleaved rounds"),
    "mbu": Definition("fraction", "higher", None, "bytes read per token / TPOT / measured memory bandwidth"),
    "mfu": Definition("fraction", "higher", None, "products of the prompt's tokens / TTFT / measured matrix rate"),
    "reference_drift": Definition("fraction", "lower", None, "change a round of the reference's time per token"),
    "cuda_allocated_bytes": Definition("bytes", "lower", None, "peak bytes that torch allocated on the GPU"),
    "cuda_reserved_bytes": Definition("bytes", "lower", None, "peak bytes that torch reserved on the GPU"),
    "nvml_used_bytes": Definition("bytes", "lower", None, "bytes in use on the GPU by all processes, as NVML says"),
    "failure_rate": Definition("fraction", "lower", 0.0, "requests that failed"),
    "free_same": Definition("fraction", "higher", 1.0, "greedy replies that are the reference's, token for token"),
    "free_same_floor": Definition("fraction", "higher", None, "the reference's replies that stay at another batch size"),
    "free_departure": Definition("tokens", "higher", None, "median number of the first token in which a greedy reply differs"),
    "free_repetition": Definition("fraction", "lower", None, "share of a reply's 4-grams that stood in it before"),
    "free_repetition_delta": Definition("pp", "lower", 0.0, "repetition minus the reference's, same prompts"),
    "free_empty": Definition("fraction", "lower", None, "greedy replies without any text"),
    "free_empty_delta": Definition("pp", "lower", 0.0, "empty replies minus the reference's, same prompts"),
    "free_invalid": Definition("fraction", "lower", None, "greedy replies with bytes that are no UTF-8"),
    "free_invalid_delta": Definition("pp", "lower", 0.0, "such replies minus the reference's, same prompts"),
    "free_loop": Definition("fraction", "lower", None, "greedy replies that end in one block over and over"),
    "free_loop_delta": Definition("pp", "lower", 0.0, "looping replies minus the reference's, same prompts"),
    "free_script": Definition("fraction", "lower", 0.0, "greedy replies in a script that prompt and reference do not use"),
    "free_script_delta": Definition("pp", "lower", 0.0, "such replies minus the reference's, same prompts"),
    "free_garbled": Definition("fraction", "lower", None, "replies that are empty, invalid, looping or switch script"),
    "free_garbled_delta": Definition("pp", "lower", 0.0, "garbled replies minus the reference's, same prompts"),
}


# Metrics of a variant whose "no difference" is measured: (floor, rounding), both metrics of the reference.
FLOORS: dict[str, tuple[str, str]] = {
    "kld_mean": ("kld_floor", "kld_rounding"),
    "top1_agreement": ("flip_floor", "flip_rounding"),
}


SIGNED = ("delta_p_mean",)  # a fraction that may be below zero


def bounds_of(name: str, transform: str = "mean") -> tuple[float, float]:
    """What a mean of that metric's rows cannot pass, before its transform: shares lie in [0, 1], differences have two sides."""
    what = definition(name)
    if transform != "mean" or what is None:
        return (0.0, math.inf) if transform == "sqrt" else (-math.inf, math.inf)
    if what.unit == "pp" or name.split("/")[0] in SIGNED:
        return (-1.0, 1.0)
    return {"nats": (0.0, math.inf), "fraction": (0.0, 1.0), "ratio": (0.0, math.inf)}.get(what.unit, (-math.inf, math.inf))


def definition(name: str) -> Definition | None:
    """The definition of a metric by its name, `acc_delta/facts` by `acc_delta`."""
    return DEFINITIONS.get(name.split("/")[0])


# Parts of `kld_mean` and `top1_agreement` besides the domains: kld_mean/position:32-127, top1_agreement/class:digits.
POSITIONS: dict[str, tuple[int, float]] = {"1-31": (1, 31), "32-127": (32, 127), "128-511": (128, 511), "512-up": (512, np.inf)}
LASTS = [last for _, last in POSITIONS.values()]
TOKEN_CLASSES = ("words", "digits", "punctuation", "code", "cjk", "special", "whitespace", "other")
TOKEN_PARTS = (*(f"position:{name}" for name in POSITIONS), *(f"class:{name}" for name in TOKEN_CLASSES))


def position_parts(positions: ArrayLike) -> NDArray[np.str_]:
    """The name in POSITIONS of each position, of at least 1: [n] -> [n]."""
    return np.asarray(list(POSITIONS))[np.searchsorted(LASTS, np.asarray(positions))]


# --- token distributions -----------------------------------------------------------------------------------------

PART = 16  # rows that a thread takes at a time: enough to pay for handing them over
TOP = 5  # how many of the likeliest tokens `top5_overlap` compares
CHUNK = 256  # entries searched together for the likeliest
LANE = 512  # products summed in float32 before float64 takes over
FAR = 40.0  # e^40 times likelier: float32 may no longer see how likely it was to the reference


@dataclass(frozen=True)
class TokenRows:
    """One value a position; see `compare_logits`."""

    kld: NDArray[np.float64]
    kld_reverse: NDArray[np.float64]
    jsd: NDArray[np.float64]
    logp_ref: NDArray[np.float64]
    logp: NDArray[np.float64]
    entropy_ref: NDArray[np.float64]
    top1_ref: NDArray[np.int64]
    top1: NDArray[np.int64]
    top5_overlap: NDArray[np.int64]


def compare_logits(ref: NDArray[np.float32], var: NDArray[np.float32], true_ids: NDArray[np.int64]) -> TokenRows:
    """Full-vocabulary comparison of two next-token distributions, position by position, in nats.

    ref, var: raw logits [n, vocab], float32, temperature 1; true_ids: [n], the token that came next.
    kld is KL(ref || var), kld_reverse KL(var || ref): P > 0 where Q = 0 makes the first infinite, the other way round
    the second, and they stay so. A row that is no distribution is NaN. Equal logits give exactly 0.
    top5_overlap: how many of the reference's five likeliest tokens are among the variant's (of equals the lower id).
    """
    if ref.shape != var.shape or len(ref) != len(true_ids):
        raise ValueError(f"{ref.shape} logits cannot be compared with {var.shape} at {len(true_ids)} positions")
    work = np.empty((4, ref.shape[1]), np.float32)  # stays in the cache from row to row
    values, tops = np.empty((6, len(ref))), np.empty((3, len(ref)), np.int64)
    with np.errstate(all="ignore"):  # a row that leaves float32 is computed again by `_exact`
        for i, (r, v, true) in enumerate(zip(ref, var, true_ids)):
            theirs, ours = top_ids(r), top_ids(v)
            tops[:, i] = theirs[0], ours[0], len(set(theirs.tolist()) & set(ours.tolist()))
            kld, reverse, jsd, logz_ref, logz, entropy = _near(r, v, r[theirs[0]], work) or _exact(r, v)
            values[:, i] = kld, reverse, jsd, r[true] - logz_ref, v[true] - logz, entropy
    return TokenRows(*values, *tops)


def compare_parts(pool: Executor, ref: NDArray[np.float32], var: NDArray[np.float32], true_ids: NDArray[np.int64]) -> TokenRows:
    """`compare_logits` a few rows at a time, shared out over threads: NumPy works on one core and frees the interpreter.

    Measured at a vocabulary of 49 152: 0.28 ms of a core a token, where its body took 1.75 and each head 0.34 (bf16, 134 M).
    """
    parts = [slice(at, at + PART) for at in range(0, max(len(ref), 1), PART)]
    done = list(pool.map(lambda s: compare_logits(ref[s], var[s], true_ids[s]), parts))
    return TokenRows(**{name: np.concatenate([getattr(d, name) for d in done]) for name in vars(done[0])})


def top_ids(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The ids of the (up to) five largest logits [vocab], the largest first; of equals the lower id first.

    Each of the five lies in one of the five chunks with the largest maxima, so that only those are looked through.
    """
    starts = np.arange(0, len(logits), CHUNK)
    peaks = np.maximum.reduceat(logits, starts)
    best = np.argsort(-peaks, kind="stable")[:TOP]
    ids = (np.sort(starts[best])[:, None] + np.arange(CHUNK)).ravel()
    ids = ids[: np.searchsorted(ids, len(logits))]
    if len(peaks) > TOP:
        ids = ids[logits[ids] >= peaks[best[-1]]]
    found: NDArray[np.int64] = ids[np.argsort(-logits[ids], kind="stable")[:TOP]]
    return found if len(found) else np.zeros(1, np.int64)  # all NaN


def _near(ref: NDArray[np.float32], var: NDArray[np.float32], top: np.float32, work: NDArray[np.float32]) -> Any:
    """(kld, reverse kld, jsd, both log normalizers, the reference's entropy) of one row in float32; None: use `_exact`.

    Everything is an expectation under P of x = d - mean, d = var - ref, whose mean under P is (but for rounding) 0. With
    E = expm1(x) and L = log E_P[e^x], the likelihood ratio is q/p = e^(x - L), and
        KL(P||Q) = L - E_P[x]                 where L = log1p(E_P[E - x] + E_P[x])
        KL(Q||P) = e^-L (E_P[x] + E_P[E x]) - L
        JSD      = (KL(Q||P) - E_P[(2 + m) log1p(m/2) - m]) / 2,    m = q/p - 1
    so that one exp, one expm1 and one log1p do for all of it. E - x is second order in x: near-equal distributions keep
    their digits, where the textbook's difference of two log-softmaxes drowns a KLD of 1e-6 in float32's rounding.
    """
    p, x, e, y = work
    np.subtract(ref, top, out=x)
    np.exp(x, out=p)
    z = float(p.sum())
    logz_ref = float(top) + math.log(z) if z > 0 else math.nan
    entropy = math.log(z) - _dot(p, x) / z if z > 0 else math.nan
    np.subtract(var, ref, out=x)
    mean = np.float32(_dot(p, x) / z)
    np.subtract(x, mean, out=x)
    if not x.max() <= FAR:  # or NaN
        return None
    rest = _dot(p, x) / z
    np.expm1(x, out=e)
    np.subtract(e, x, out=y)
    log_mean = math.log1p(_dot(p, y) / z + rest)
    np.multiply(e, x, out=y)
    reverse = math.exp(-log_mean) * (rest + _dot(p, y) / z) - log_mean
    np.multiply(e, np.float32(math.exp(-log_mean)), out=e)
    np.add(e, np.float32(math.expm1(-log_mean)), out=e)  # m
    np.multiply(e, np.float32(0.5), out=y)
    np.log1p(y, out=y)
    np.add(e, np.float32(2), out=x)
    np.multiply(x, y, out=x)
    np.subtract(x, e, out=x)
    jsd = (reverse - _dot(p, x) / z) / 2
    found = (max(log_mean - rest, 0.0), max(reverse, 0.0), max(jsd, 0.0), logz_ref, logz_ref + float(mean) + log_mean, entropy)
    return found if all(map(math.isfinite, found)) else None


def _dot(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Sum of products, LANE of them at a time in float32, the rest in float64."""
    whole = len(a) // LANE * LANE
    lanes = np.vecdot(a[:whole].reshape(-1, LANE), b[:whole].reshape(-1, LANE))
    return float(lanes.sum(dtype=np.float64)) + float(a[whole:] @ b[whole:])


def _exact(ref: NDArray[np.float32], var: NDArray[np.float32]) -> tuple[float, ...]:
    """What `_near` gives, by the textbook in float64, with 0 log 0 = 0; NaN where a row is no distribution."""
    logp, logz_ref = _log_softmax(ref.astype(np.float64))
    logq, logz = _log_softmax(var.astype(np.float64))
    if not (math.isfinite(logz_ref) and math.isfinite(logz)):
        return (math.nan,) * 6
    p, q = np.exp(logp), np.exp(logq)
    ratio = logp - logq
    kld = np.where(p > 0, p * ratio, 0.0).sum()
    reverse = np.where(q > 0, q * -ratio, 0.0).sum()
    middle = (p + q) / 2
    jsd = (rel_entr(p, middle) + rel_entr(q, middle)).sum() / 2
    entropy = -np.where(p > 0, p * logp, 0.0).sum()
    return max(kld, 0.0), max(reverse, 0.0), max(jsd, 0.0), logz_ref, logz, float(entropy)


def _log_softmax(logits: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    top = logits.max()
    logz = float(top + np.log(np.exp(logits - top).sum()))
    return logits - logz, logz


# --- requests ----------------------------------------------------------------------------------------------------


def ttft(t_submit: float, t_tokens: list[float]) -> float | None:
    """Time to first token in seconds; None if no token came."""
    return t_tokens[0] - t_submit if t_tokens else None


def tpot(t_tokens: list[float]) -> float | None:
    """Time per output token after the first, in seconds; undefined (None) for fewer than two tokens."""
    return (t_tokens[-1] - t_tokens[0]) / (len(t_tokens) - 1) if len(t_tokens) > 1 else None


def itl(t_tokens: list[float]) -> list[float]:
    """Gaps between consecutive tokens, in seconds."""
    return [b - a for a, b in pairwise(t_tokens)]
