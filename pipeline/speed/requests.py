"""Times of a request, in seconds: of one in this process and of one to a server alike. Pure."""

from __future__ import annotations

from itertools import pairwise


def ttft(t_submit: float, t_tokens: list[float]) -> float | None:
    """Time to first token in seconds; None if no token came."""
    return t_tokens[0] - t_submit if t_tokens else None


def tpot(t_tokens: list[float], t_last: float | None = None, n: int | None = None) -> float | None:
    """Time per output token after the first, in seconds; undefined (None) for fewer than two tokens, or if all came at once.
    t_last, n: when the last of so many tokens came, where events of a server (t_tokens) hold other than one each."""
    last, n = t_tokens[-1] if t_last is None and t_tokens else t_last, len(t_tokens) if n is None else n
    return (last - t_tokens[0]) / (n - 1) if last is not None and n > 1 and len(t_tokens) > 1 else None


def itl(t_tokens: list[float]) -> list[float]:
    """Gaps between consecutive tokens, in seconds."""
    return [b - a for a, b in pairwise(t_tokens)]
