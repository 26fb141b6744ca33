"""Times of a request that ran in this process, in seconds. Pure."""

from __future__ import annotations

from itertools import pairwise


def ttft(t_submit: float, t_tokens: list[float]) -> float | None:
    """Time to first token in seconds; None if no token came."""
    return t_tokens[0] - t_submit if t_tokens else None


def tpot(t_tokens: list[float]) -> float | None:
    """Time per output token after the first, in seconds; undefined (None) for fewer than two tokens."""
    return (t_tokens[-1] - t_tokens[0]) / (len(t_tokens) - 1) if len(t_tokens) > 1 else None


def itl(t_tokens: list[float]) -> list[float]:
    """Gaps between consecutive tokens, in seconds."""
    return [b - a for a, b in pairwise(t_tokens)]
