"""Bounds for looking at data as they come in, with no more errors than one look at the end."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm


@cache
def o_brien_fleming(looks: int, confidence: float) -> tuple[float, ...]:
    """z of each look after equal parts: chance passes any with probability 1 - confidence (O'Brien and Fleming 1979). The sum of k
    parts has one bound; the density of sums inside is integrated from look to look (Armitage, McPherson, Rowe 1969)."""
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def excess(bound: float) -> float:
        x, w = bound * nodes, bound * weights
        density = norm.pdf(x)
        for _ in range(looks - 1):
            density = norm.pdf(x[:, None] - x) @ (w * density)
        return float(confidence - w @ density)

    tail, root = (1 - confidence) / 2, float(np.sqrt(looks))
    bound = brentq(excess, 0.9 * root * norm.isf(tail), 1.1 * root * norm.isf(tail / looks))  # one look; Bonferroni
    return tuple(float(bound / np.sqrt(k)) for k in range(1, looks + 1))


def level(look: int, looks: int, confidence: float) -> float:
    """Confidence of the interval at one look so that the intervals of all looks hold together with `confidence`, whenever looking
    stops: repeated confidence intervals (Jennison and Turnbull 1989)."""
    return float(1 - 2 * norm.sf(o_brien_fleming(looks, confidence)[look - 1]))
