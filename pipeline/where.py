"""What the report shows of where a variant broke: the heads of the lists, and free-running figures in words."""

from __future__ import annotations

import unicodedata
from typing import Any

from pipeline import artifacts

Row = dict[str, Any]
HEADS = {
    "worst_tokens": 8,
    "worst_items": 4,
    "flips_to_wrong": 5,
    "flips_to_right": 3,
    "replies": 4,
}  # the whole lists: artifacts/broke/
LONGEST = 220  # characters of a text on the page
FAULT_WORDS = {"empty": "empty", "invalid": "broken characters", "loop": "a loop", "script": "another script"}
MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣"}


def visible(text: str) -> str:
    """A token's text with its white space and control characters to be seen; bytes that are no character alone in words."""
    if "\ufffd" in text:
        return "part of a character"
    shown = [MARKS.get(c, c if unicodedata.category(c)[0] != "C" else f"U+{ord(c):04X}") for c in text]
    return "".join(shown) or "nothing"


def clipped(text: str | None) -> str:
    """A text for the page: its end where it is long, since what follows depends on that most."""
    text = text or ""
    return text if len(text) <= LONGEST else f"… {text[-LONGEST:]}"


def where(results: dict[str, Row], reference: str) -> dict[str, Row]:
    """{variant: what templates/where.*.j2 show of it}, the reference left out: it does not differ from itself."""
    return {name: _one(artifacts.read_json(artifacts.broke(name)), result) for name, result in results.items() if name != reference}


def _one(found: Row, result: Row) -> Row:
    heads = {name: _head(found[name], count) for name, count in HEADS.items()}
    spread = found["spread"] or {}
    groups = sorted(spread.get("groups") or [], key=lambda g: -(g["ratio"] or 0))[:5]
    return {
        "words": found["words"], "free": free_words(result), "missing": found["missing"], "notes": found["notes"],
        "curve": result.get("by_position") or [], "groups": groups, **heads,
    }  # fmt: skip


def _head(found: Row | None, count: int) -> Row | None:
    return None if found is None else {**found, "rows": found["rows"][:count], "shown": min(count, found["shown"])}


def free_words(result: Row) -> str | None:
    """Free-running figures of a variant in a sentence; None where there are none."""
    m = result["metrics"]
    if "free_same" not in m or "free_garbled" not in m:
        return None
    n = m["free_same"]["n"]
    same = round(m["free_same"]["value"] * n)
    told = f"Running free, {n - same} of {n} greedy replies leave the reference's"
    gone = m["free_departure"]
    if gone["value"] is not None:
        low, high = gone["low"], gone["high"]
        told += f", in the median at token {gone['value']:.0f}" + (f" [{low:.0f}, {high:.0f}]" if low is not None else "")
    garbled, more = m["free_garbled"], m["free_garbled_delta"]
    kinds = ", ".join(f"{FAULT_WORDS[k]} {round(m[f'free_{k}']['value'] * n)}" for k in FAULT_WORDS if m[f"free_{k}"]["value"])
    told += f"; {round(garbled['value'] * n)} of {n} are garbled" + (f" ({kinds})" if kinds else "")
    return f"{told}, {more['value']:+.0f} pp against the reference [{more['low']:+.0f}, {more['high']:+.0f}]"
