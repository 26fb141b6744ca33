"""What the figures mean: definitions, units, directions, and the arithmetic. Pure: no files, no clock, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
    "kld_p99": Definition("nats", "lower", 0.0, "99th percentile over tokens"),
    "kld_p999": Definition("nats", "lower", 0.0, "99.9th percentile over tokens"),
    "kld_max": Definition("nats", "lower", 0.0, "worst token"),
    "kld_infinite": Definition("tokens", "lower", 0.0, "tokens the reference allows and the variant rules out"),
    "jsd_mean": Definition("nats", "lower", 0.0, "Jensen-Shannon divergence, mean over tokens"),
    "top1_agreement": Definition("fraction", "higher", 1.0, "share of tokens with the same most likely next token"),
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
    "kv_bytes_per_token": Definition("bytes", "lower", None, "key-value cache per token, read off the cache"),
    "load_s": Definition("s", "lower", None, "loading the model in a fresh process"),
    "peak_memory_bytes": Definition("bytes", "lower", None, "peak resident memory of the process while serving"),
    "load_memory_bytes": Definition("bytes", "lower", None, "peak resident memory of the process while loading"),
    "ttft_ms": Definition("ms", "lower", None, "submit to first token"),
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


def definition(name: str) -> Definition | None:
    """The definition of a metric by its name, `acc_delta/facts` by `acc_delta`."""
    return DEFINITIONS.get(name.split("/")[0])


TINY = np.float32(1e-37)

# --- token distributions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRows:
    """One value a position; see `compare_logits`."""

    kld: NDArray[np.float64]
    jsd: NDArray[np.float64]
    logp_ref: NDArray[np.float64]
    logp: NDArray[np.float64]
    top1_ref: NDArray[np.int64]
    top1: NDArray[np.int64]
    entropy_ref: NDArray[np.float64]


def compare_logits(ref: NDArray[np.float32], var: NDArray[np.float32], true_ids: NDArray[np.int64]) -> TokenRows:
    """Full-vocabulary comparison of two next-token distributions, position by position, in nats.

    ref, var: raw logits [n, vocab], float32, temperature 1; true_ids: [n], the token that came next.
    KL(P||Q) where P > 0 and Q = 0 is infinite, and stays so. Equal logits give exactly 0.

    The divergence is taken from the logit difference d = var - ref as log E_P[exp(x)], x = d - E_P[d], through
    E_P[expm1(x) - x], which is second order in x: near-equal distributions keep their digits, where the textbook
    difference of two log-softmaxes in float32 drowns a KLD of 1e-6 in rounding.
    """
    p, logz_ref = _softmax(ref)
    q, logz = _softmax(var)
    rows = np.arange(len(ref))
    with np.errstate(invalid="ignore", over="ignore"):
        d = var - ref
        d[p == 0] = 0.0  # 0 log 0 = 0, also where both logits are -inf
        mean_d = _dot(p, d)
        x = d - mean_d[:, None].astype(np.float32)
        # E_P sees only where P > 0; the variant's mass elsewhere is missing from its normalizer there
        kld = np.log1p(_dot(p, _expm1_minus(x))) - np.log1p(-np.where(p == 0, q, 0).sum(-1, dtype=np.float64))
        kld = np.where(np.isfinite(mean_d), kld, np.inf)
        far = ~(np.abs(kld) < 0.5) & np.isfinite(mean_d)  # expm1 may overflow far away; there the textbook form is exact
        if far.any():
            kld[far] = (logz - logz_ref - mean_d)[far]
        entropy = logz_ref - _dot(p, np.where(p > 0, ref, 0.0))
    bad = ~(np.isfinite(logz_ref) & np.isfinite(logz))  # a NaN or an all -inf row: no distribution at all
    kld[bad] = np.nan
    return TokenRows(
        kld=np.where(kld < 0, 0.0, kld),
        jsd=np.where(bad, np.nan, _jsd(p, q)),
        logp_ref=ref[rows, true_ids] - logz_ref,
        logp=var[rows, true_ids] - logz,
        top1_ref=ref.argmax(-1),
        top1=var.argmax(-1),
        entropy_ref=entropy,
    )


def _softmax(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """(probabilities float32 [n, vocab], log normalizer float64 [n]); float32 with pairwise sums."""
    top = logits.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        e = np.exp(logits - top)
    z = e.sum(-1, dtype=np.float64)
    return e / z[:, None].astype(np.float32), top[:, 0] + np.log(z)


def _dot(p: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float64]:
    return (p * x).sum(-1, dtype=np.float64)  # type: ignore[no-any-return]


def _expm1_minus(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp(x) - 1 - x to full relative precision; NumPy's expm1 is not vectorized, its exp is."""
    near = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120))))
    return np.where(np.abs(x) < 0.1, near, np.exp(x) - 1 - x)


def _jsd(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence, through t = (p - q)/(p + q): 0 exactly where p = q, and no cancellation near it.

    Each term is (p + q)/4 · h(t) with h(t) = (1 + t) log(1 + t) + (1 - t) log(1 - t) = t² + t⁴/6 + t⁶/15 + t⁸/28 + ...
    """
    s = p + q
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(s > 0, (p - q) / s, 0)
        u = t * t
        near = u * (1 + u * (1 / 6 + u * (1 / 15 + u * (1 / 28))))
        up, down = 1 + t, 1 - t
        far = up * np.log(np.maximum(up, TINY)) + down * np.log(np.maximum(down, TINY))  # x log x = 0 at x = 0
    return 0.25 * _dot(s, np.where(u < 0.09, near, far))


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
