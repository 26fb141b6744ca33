"""A lower bound of a divergence, from the likeliest tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import rel_entr

from pipeline.divergence.distributions import F64

ROUNDING = 1e-3  # nats: the order of sums alone may change a server's log-probabilities by this much
UNDERFLOW = -80.0  # nats: in float32 a softmax near here may end at 0, and its logarithm anywhere
HALVINGS = 60


def rounding(values: Sequence[float]) -> float:
    """How far, in nats, rounding to their number of decimals may have moved log-probabilities."""
    decimals = next((d for d in range(3) if all(round(v, d) == v for v in values)), 3)
    return max(ROUNDING, 0.5 * 10.0**-decimals)


def kld_lower_bound(p: F64, logq: F64, off: float) -> F64:
    """The least KL(P || Q) in nats of all Q whose log-probabilities of k tokens are within `off` of `logq`: [n, k] -> [n].

    p: P's probabilities of the same tokens; a place with fewer than k is padded with p 0 and logq -inf. All other tokens are one
    cell: lumping raises no divergence (data processing inequality; Kullback and Leibler 1951). The Q nearest to P has cells p / u,
    clipped to the range that `off` allows, at the u that makes them sum to 1. The result is the dual function there: it is a lower
    bound at any u (weak duality), so u need not be exact."""
    low, high = np.exp(logq - off), np.exp(np.maximum(logq, UNDERFLOW) + off)
    rest = np.maximum(1 - p.sum(1), 0.0)
    log_u, step = np.zeros(len(p)), 32.0
    for _ in range(HALVINGS):
        step /= 2
        over = np.clip(p / np.exp(log_u)[:, None], low, high).sum(1) + rest / np.exp(log_u) > 1
        log_u = log_u + np.where(over, step, -step)
    u = np.exp(log_u)
    q = np.clip(p / u[:, None], low, high)
    return np.asarray(np.maximum(rel_entr(p, q).sum(1) + rest * log_u + u * (q.sum(1) - 1) + rest, 0.0))
