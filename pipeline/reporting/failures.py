"""What the report shows of where a variant broke: the heads of the lists, and free-running figures in words."""

from __future__ import annotations

import unicodedata
from typing import Any

from pipeline.core import artifacts

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
KINDS = {
    "uniform": "uniform shift", "isolated": "isolated tokens", "neither": "neither uniform nor isolated", "none": "no divergence",
    "too few": "too few tokens to say", "not finite": "divergence that is not finite",
}  # fmt: skip
MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣"}


def visible(text: str) -> str:
    """A token's text with its white space and control characters to be seen; bytes that are no character alone in words."""
    if "\ufffd" in text:
        return "(bytes)"
    shown = [MARKS.get(c, c if unicodedata.category(c)[0] != "C" else f"U+{ord(c):04X}") for c in text]
    return "".join(shown) or "nothing"


def clipped(text: str | None, longest: int = LONGEST) -> str:
    """A text for the page: its end where it is long, since what follows depends on that most."""
    text = (text or "").strip()
    return text if len(text) <= longest else f"… {text[-longest:]}"


def where(results: dict[str, Row], reference: str) -> dict[str, Row]:
    """{variant: what templates/where.*.j2 show of it}, the reference left out: it does not differ from itself."""
    floor = results[reference]["metrics"].get("free_same_floor")
    others = {name: result for name, result in results.items() if name != reference}
    return {name: _one(artifacts.read_json(artifacts.failures(name)), result, floor) for name, result in others.items()}


def _one(found: Row, result: Row, floor: Row | None) -> Row:
    heads = {name: _head(found[name], count) for name, count in HEADS.items()}
    spread = found["spread"] or {}
    groups = sorted(spread.get("groups") or [], key=lambda g: -(g["ratio"] or 0))[:5]
    return {
        "gist": _gist(found), "words": found["words"], "free": free_words(result, floor),
        "missing": found["missing"], "notes": found["notes"], "groups": groups,
        "curve": result.get("curves", {}).get("agreement_by_position", []), **heads,
    }  # fmt: skip


def _head(found: Row | None, count: int) -> Row | None:
    return None if found is None else {**found, "rows": found["rows"][:count], "shown": min(count, found["shown"])}


def free_words(result: Row, floor: Row | None = None) -> str | None:
    """Free-running figures of a variant in a sentence; None where there are none. floor: the reference's own free_same_floor."""
    m = result["metrics"]
    if "free_same" not in m or "free_garbled" not in m:
        return None
    n = m["free_same"]["n"]
    same = round(m["free_same"]["value"] * n)
    told = f"Running free, {n - same} of {n} greedy replies leave the reference's"
    if floor:
        told += f" ({round((1 - floor['value']) * floor['n'])} of {floor['n']} of its own do at another batch size)"
    gone = m["free_departure"]
    if gone["value"] is not None:
        low, high = gone["low"], gone["high"]
        told += f", in the median at token {gone['value']:.0f}" + (f" [{low:.0f}, {high:.0f}]" if low is not None else "")
    garbled, more = m["free_garbled"], m["free_garbled_delta"]
    kinds = ", ".join(f"{FAULT_WORDS[k]} {round(m[f'free_{k}']['value'] * n)}" for k in FAULT_WORDS if m[f"free_{k}"]["value"])
    told += f"; {round(garbled['value'] * n)} of {n} are garbled" + (f" ({kinds})" if kinds else "")
    interval = "" if more["low"] is None else f" [{signed(more['low'])}, {signed(more['high'])}]"
    return f"{told}, {signed(more['value'])} pp against the reference{interval}"


def signed(value: float) -> str:
    """Whole points with their sign; none on zero."""
    return f"{round(value):+d}" if round(value) else "0"


def _gist(found: Row) -> str:
    """What a closed section says of itself."""
    told = [KINDS[found["spread"]["kind"]] if found["spread"] else "not known"]
    if found["flips_to_wrong"]:
        told.append(f"{found['flips_to_wrong']['total']} answers became wrong, {found['flips_to_right']['total']} right")
    if found["replies"]:
        told.append(f"{found['replies']['total']} of {found['replies']['of']} free replies differ")
    return "; ".join(told)
