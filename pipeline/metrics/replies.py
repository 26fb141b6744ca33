"""Times of one request's row, in seconds; None if unknown.

Some tokens have no event of their own: a server holds back partial characters, and one event may carry several tokens. The last
token came no later than the event that ends the reply (`t_last`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Row = dict[str, Any]


def ttft(row: Row) -> float | None:
    """Submit to first token, in seconds; None if none came."""
    return None if row["t_first"] is None else float(row["t_first"] - row["t_submit"])


def ttfc(row: Row) -> float | None:
    """Submit to the first token of the content, in seconds; None, not 0, for a reply that was all reasoning."""
    return None if row["t_content"] is None else float(row["t_content"] - row["t_submit"])


def last(row: Row) -> float | None:
    """Arrival of the last token; None if no token was seen."""
    return row.get("t_last", row["t_chunks"][-1]) if row["t_chunks"] else None


def e2e(row: Row) -> float | None:
    """Submit to last token, in seconds."""
    return None if (end := last(row)) is None else float(end - row["t_submit"])


def tpot(row: Row) -> float | None:
    """Time per output token after the first. None for fewer than two tokens, an unknown number, or if all came at once."""
    n, times, end = row["output_tokens"], row["t_chunks"], last(row)
    return float((end - times[0]) / (n - 1)) if end is not None and n is not None and n > 1 and len(times) > 1 else None


def gaps(row: Row) -> list[float]:
    """Gaps between consecutive tokens, in seconds; none where an event carried more than one token or less."""
    return [b - a for a, b in pairwise(row["t_tokens"])] if row["t_tokens"] else []


def unseen(good: list[Row]) -> tuple[str, ...]:
    """Warnings on complete replies whose tokens did not come one an event."""
    known = [(len(r["t_chunks"]), r["output_tokens"]) for r in good if r["output_tokens"] is not None]
    fewer, more = sum(seen < n for seen, n in known), sum(seen > n for seen, n in known)
    notes = []
    if fewer:
        notes.append(
            f"{fewer} of {len(good)} complete replies came in fewer events than tokens (held back, or several in one): "
            "where the first token had none it came earlier than is seen, the last no later than the reply's end"
        )
    if more:
        notes.append(f"{more} of {len(good)} complete replies came in more events with text than tokens: their count is doubtful")
    return tuple(notes)


def unverified(good: list[Row]) -> tuple[str, ...]:
    """Warning on complete replies of forced length without usage."""
    forced = [r for r in good if r.get("forced")]
    unsure = sum(r["counted_by"] != "usage" for r in forced)
    return (f"length unverified: {unsure} of {len(forced)} replies of forced length came without usage",) if unsure else ()
