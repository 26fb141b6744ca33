"""What the metrics mean: unit, direction, "no difference". One table for metrics in process, one for a server's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.core.records import Metrics


@dataclass(frozen=True)
class Definition:
    """A metric's unit, better direction, and value that means "no difference" (None: there is none)."""

    unit: str
    better: Literal["lower", "higher"]
    neutral: float | None
    about: str


FREE = {
    "repetition": "share of a reply's 4-grams that repeat an earlier one",
    "empty": "greedy replies without any text",
    "invalid": "greedy replies with bytes that are not UTF-8",
    "loop": "greedy replies that end in a repeated block",
    "script": "greedy replies in a script that prompt and reference do not use",
    "garbled": "replies that are empty, invalid, looping or switch script",
}
# A metric is a line here and a call of Builder (mean, quantile, exact, bare) in tokens, answers, speed or generation. A line in
# tokens.PER_TOKEN or answers.PAIRED pairs it with a baseline's. `name/<task>` is looked up by `name`.
IN_PROCESS: dict[str, Definition] = {
    "kld_mean": Definition("nats", "lower", 0.0, "KL(reference || variant), full vocabulary, mean over tokens"),
    "kld_median": Definition("nats", "lower", 0.0, "median over tokens"),
    "kld_p90": Definition("nats", "lower", 0.0, "90th percentile over tokens"),
    "kld_p95": Definition("nats", "lower", 0.0, "95th percentile over tokens"),
    "kld_p99": Definition("nats", "lower", 0.0, "99th percentile over tokens"),
    "kld_p999": Definition("nats", "lower", 0.0, "99.9th percentile over tokens"),
    "kld_max": Definition("nats", "lower", 0.0, "worst token"),
    "kld_infinite": Definition("tokens", "lower", 0.0, "tokens the reference allows and the variant rules out"),
    "kld_reverse_mean": Definition("nats", "lower", 0.0, "KL(variant || reference), full vocabulary, mean over tokens"),
    "kld_floor": Definition("nats", "lower", 0.0, "mean KLD of the reference against itself, computed differently"),
    "kld_rounding": Definition("nats", "lower", 0.0, "mean KLD of the reference against the same weights in float32"),
    "flip_floor": Definition("fraction", "lower", 0.0, "share of tokens whose most likely one differs, as in kld_floor"),
    "flip_rounding": Definition("fraction", "lower", 0.0, "share of tokens whose most likely one differs, as in kld_rounding"),
    "jsd_mean": Definition("nats", "lower", 0.0, "Jensen-Shannon divergence, mean over tokens"),
    "top1_agreement": Definition("fraction", "higher", 1.0, "share of tokens with the same most likely next token"),
    "top5_agreement": Definition("fraction", "higher", 1.0, "share of the reference's five likeliest that the variant's five hold"),
    "first_departure": Definition("tokens", "higher", None, "median position in a trajectory of the first other likeliest token"),
    "never_departs": Definition("fraction", "higher", 1.0, "share of trajectories in which the likeliest token never differs"),
    "delta_p_mean": Definition("fraction", "higher", 0.0, "mean change of the true token's probability, signed"),
    "delta_p_rms": Definition("fraction", "lower", 0.0, "root mean square change of the true token's probability"),
    "moved_10pct": Definition("fraction", "lower", 0.0, "share of tokens whose true-token probability moved over 0.1"),
    "ppl": Definition("ppl", "lower", None, "exp of the token-weighted mean negative log-likelihood"),
    "ppl_ratio": Definition("ratio", "lower", 1.0, "perplexity over the reference's, same tokens"),
    "acc": Definition("fraction", "higher", None, "share of items answered correctly"),
    "acc_depth": Definition("fraction", "higher", None, "accuracy on items whose answer is at one depth of their context"),
    "acc_depth_delta": Definition("pp", "higher", 0.0, "the same minus the reference's, same items"),
    "acc_delta": Definition("pp", "higher", 0.0, "accuracy minus the reference's, same items"),
    "score_delta": Definition("pp", "higher", 0.0, "right choice's share of probability minus the reference's, same items"),
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
    "draft_step": Definition("tokens", "higher", None, "per pass of the reference with this variant as its draft, temperature 0"),
    "draft_step_sampled": Definition("tokens", "higher", None, "the same at temperature 1"),
    "draft_overlap": Definition("fraction", "higher", 1.0, "mean over tokens of summed min(reference's, variant's probability)"),
    "spec_step": Definition("tokens", "higher", None, "tokens per pass of the model with its draft: accepted ones and its own"),
    "spec_accepted": Definition("fraction", "higher", None, "the draft's tokens that were accepted, of all or of one position"),
    "spec_speed_ratio": Definition("ratio", "higher", 1.0, "decode rate with the draft over that without, interleaved rounds"),
    "spec_e2e_ratio": Definition("ratio", "higher", 1.0, "rate of whole requests with the draft over that without"),
    "spec_same": Definition("fraction", "higher", 1.0, "greedy replies with the draft that equal those without, token for token"),
    "spec_gap": Definition("nats", "lower", None, "largest gap of the two likeliest tokens where a reply with the draft departs"),
    "spec_gap_floor": Definition("nats", "lower", None, "largest change of such a gap when tokens share a pass, without a draft"),
    "mbu": Definition("fraction", "higher", None, "bytes that decoding (or the phase named) reads / its time / measured bandwidth"),
    "mfu": Definition("fraction", "higher", None, "products of prefill (or the phase named) / its time / measured matrix rate"),
    "reference_drift": Definition("fraction", "lower", None, "change a round of the reference's time per token"),
    "cuda_allocated_bytes": Definition("bytes", "lower", None, "peak bytes that torch allocated on the GPU"),
    "cuda_reserved_bytes": Definition("bytes", "lower", None, "peak bytes that torch reserved on the GPU"),
    "nvml_used_bytes": Definition("bytes", "lower", None, "bytes in use on the GPU by all processes, according to NVML"),
    "failure_rate": Definition("fraction", "lower", 0.0, "requests that failed"),
    "free_same": Definition("fraction", "higher", 1.0, "greedy replies that equal the reference's, token for token"),
    "free_same_floor": Definition("fraction", "higher", None, "the reference's replies that do not change at another batch size"),
    "free_departure": Definition("tokens", "higher", None, "median position of the first token in which a greedy reply differs"),
    **{f"free_{name}": Definition("fraction", "lower", 0.0 if name == "script" else None, about) for name, about in FREE.items()},
    **{f"free_{name}_delta": Definition("pp", "lower", 0.0, "the same minus the reference's, same prompts") for name in FREE},
}  # fmt: skip
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TIMES = {
    "ttft": "submit to first token, reasoning counted",
    "ttfc": "submit to first token of the content proper",
    "tpot": "(last token - first token) / (n - 1), n by usage",
    "itl": "gap between consecutive tokens",
    "e2e": "submit to last token",
}
SERVED: dict[str, Definition] = {
    **{f"{k}_{q}_ms": Definition("ms", "lower", None, f"{about}, {q}") for k, about in TIMES.items() for q in QUANTILES},
    "throughput_tok_s": Definition("tok/s", "higher", None, "output tokens of all complete requests over the round's wall time"),
    "throughput_req_s": Definition("req/s", "higher", None, "complete requests over the round's wall time"),
    "goodput_req_s": Definition("req/s", "higher", None, "requests that meet the objective over the round's wall time"),
    "attainment": Definition("fraction", "higher", 1.0, "share of all requests that meet the objective; failed ones do not"),
    "failure_rate": Definition("fraction", "lower", 0.0, "requests that failed, in any way"),
    "timeout_rate": Definition("fraction", "lower", 0.0, "requests without a complete reply in time"),
    "one_token_replies": Definition("requests", "lower", None, "complete replies of one token: they have no TPOT"),
    "output_tokens_min": Definition("tokens", "higher", None, "shortest complete reply"),
    "output_tokens_max": Definition("tokens", "lower", None, "longest complete reply"),
    "cached_tokens": Definition("tokens", "lower", 0.0, "prompt tokens that a prefix cache answered"),
    "prefix_hit_rate": Definition("fraction", "higher", None, "of prompts with a known beginning, tokens that were not read again"),
    "prefix_gain": Definition("ratio", "higher", 1.0, "TTFT of prompts with a new beginning over that of prompts with a known one"),
    "prefix_same": Definition("fraction", "higher", 1.0, "replies after a prefix hit equal to those without one, token for token"),
    "prefix_gap": Definition("nats", "lower", 0.0, "largest gap between the two likeliest tokens where such a reply departs"),
    "warmups": Definition("requests", "higher", None, "complete requests before the measured ones"),
    "client_lag_p99_ms": Definition("ms", "lower", 0.0, "how late this client sent what was due (open loop)"),
    "server_memory_bytes": Definition("bytes", "lower", None, "peak resident memory of a launched server, all its processes"),
    "served_kld_lower_bound": Definition("nats", "lower", 0.0, "lower bound of KL(reference || server), mean over tokens"),
    "served_top1_agreement": Definition("fraction", "higher", 1.0, "share of tokens whose most likely one is the reference's"),
    "knee": Definition("requests at once", "higher", None, "where throughput over median latency is greatest (Kleinrock's power)"),
}  # fmt: skip
SERVED_TOKENS = ("served_kld_lower_bound", "served_top1_agreement")  # from log-probabilities, not from a load
SERVED_WHOLE = ("knee", "server_memory_bytes", *SERVED_TOKENS)  # of a run, not of a level
LOWER_BOUNDS = ("served_kld_lower_bound",)  # the true value may be larger: a rule can fail and never pass
DEFINITIONS = SERVED | IN_PROCESS
# Metrics whose "no difference" is measured: (floor, rounding), both metrics of the reference.
FLOORS: dict[str, tuple[str, str]] = {"kld_mean": ("kld_floor", "kld_rounding"), "top1_agreement": ("flip_floor", "flip_rounding")}
FLOOR_MARK = "floor-limited"
FLOOR_TIMES = 2  # a difference below this many floors may be all noise
SIGNED = ("delta_p_mean",)  # a fraction that may be negative


def bounds_of(name: str, transform: str = "mean") -> tuple[float, float]:
    """Limits of a mean over the metric's rows, before its transform: shares lie in [0, 1], differences have two sides."""
    what = definition(name)
    if transform != "mean" or what is None:
        return (0.0, math.inf) if transform == "sqrt" else (-math.inf, math.inf)
    if what.unit == "pp" or name.split("/")[0] in SIGNED:
        return (-1.0, 1.0)
    return {"nats": (0.0, math.inf), "fraction": (0.0, 1.0), "ratio": (0.0, math.inf)}.get(what.unit, (-math.inf, math.inf))


def definition(name: str) -> Definition | None:
    """A metric's definition; `acc_delta/facts` has that of `acc_delta`, `ttft_p99_ms/closed-4` that of `ttft_p99_ms`."""
    return DEFINITIONS.get(name.split("/")[0])


CLOCKED = ("ms", "s", "tok/s")  # units that depend on the machine
OF_MACHINES = (  # other metrics that do
    "speed_ratio", "prefill_ratio", "spec_speed_ratio", "spec_e2e_ratio", "mbu", "mfu", "reference_drift", "failure_rate",
    "peak_memory_bytes", "load_memory_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "nvml_used_bytes",
)  # fmt: skip


def timed(name: str) -> bool:
    """Whether a metric depends on the machine and so is never compared between machines."""
    what = definition(name)
    return name.split("/")[0] in OF_MACHINES or is_served(name) or (what is not None and what.unit in CLOCKED)


def is_served(name: str) -> bool:
    """Whether a metric is a server's: of a level (`failure_rate/closed-4`) or of a whole run (`knee`)."""
    stem, _, part = name.partition("/")
    return stem in SERVED_WHOLE or (stem in SERVED and (stem not in IN_PROCESS or bool(part)))


# Parts of `kld_mean` and `top1_agreement` besides the domains: kld_mean/position:32-127, top1_agreement/class:digits.
POSITIONS: dict[str, tuple[int, float]] = {"1-31": (1, 31), "32-127": (32, 127), "128-511": (128, 511), "512-up": (512, np.inf)}
LASTS = [last for _, last in POSITIONS.values()]
TOKEN_CLASSES = ("words", "digits", "punctuation", "code", "cjk", "special", "whitespace", "other")
TOKEN_PARTS = (*(f"position:{name}" for name in POSITIONS), *(f"class:{name}" for name in TOKEN_CLASSES))


def position_parts(positions: ArrayLike) -> NDArray[np.str_]:
    """Name in POSITIONS of each position, from 1: [n] -> [n]."""
    return np.asarray(list(POSITIONS))[np.searchsorted(LASTS, np.asarray(positions))]


def floor_limit(name: str, floors: Metrics) -> float | None:
    """Distance from "no difference" below which a metric is floor-limited: FLOOR_TIMES times the larger of floor and rounding."""
    known = [value for f in FLOORS[name] if f in floors and (value := floors[f]["value"]) is not None]
    return FLOOR_TIMES * max(known) if known else None


def mark_floor_limited(metrics: Metrics, floors: Metrics) -> None:
    """Add a warning to each metric that is floor-limited, or whose floor is unknown."""
    for name in FLOORS.keys() & metrics.keys():
        value, smallest, what = metrics[name]["value"], floor_limit(name, floors), definition(name)
        assert what is not None and what.neutral is not None  # FLOORS names metrics that have both
        if value is None:
            continue
        if smallest is None:
            metrics[name]["warnings"].append("the noise floor is unknown")
        elif abs(value - what.neutral) < smallest:
            warning = f"{FLOOR_MARK}: below {FLOOR_TIMES} times what no difference measures here ({smallest / FLOOR_TIMES:.3g})"
            metrics[name]["warnings"].append(warning)
