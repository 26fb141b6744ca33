"""What the report shows of a variant's failures: the heads of the lists, and free-running figures in words."""

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
    characters = [MARKS.get(c, c if unicodedata.category(c)[0] != "C" else f"U+{ord(c):04X}") for c in text]
    return "".join(characters) or "nothing"


def clipped(text: str | None, longest: int = LONGEST) -> str:
    """A text for the page: its end where it is long, since what follows depends on that most."""
    text = (text or "").strip()
    return text if len(text) <= longest else f"… {text[-longest:]}"


def of(results: dict[str, Row], reference: str) -> dict[str, Row]:
    """{variant: what templates/failures.*.j2 show of it}, without the reference."""
    floor = results[reference]["metrics"].get("free_same_floor")
    return {name: _one(artifacts.read_json(artifacts.failures(name)), r, floor) for name, r in results.items() if name != reference}


def _one(lists: Row, result: Row, floor: Row | None) -> Row:
    heads = {
        name: rows and rows | {"rows": rows["rows"][:count], "shown": min(count, rows["shown"])}
        for name, count in HEADS.items() for rows in [lists[name]]
    }  # fmt: skip
    spread, wrong, replies = lists["spread"] or {}, lists["flips_to_wrong"], lists["replies"]
    gist = [KINDS[spread["kind"]] if spread else "not known"]
    if wrong:
        gist.append(f"{wrong['total']} answers became wrong, {lists['flips_to_right']['total']} right")
    if replies:
        gist.append(f"{replies['total']} of {replies['of']} free replies differ")
    return {
        "gist": "; ".join(gist), "words": lists["words"], "free": free_words(result, floor),
        "missing": lists["missing"], "notes": lists["notes"],
        "groups": sorted(spread.get("groups") or [], key=lambda g: -(g["ratio"] or 0))[:5],
        "curve": result.get("curves", {}).get("agreement_by_position", []), **heads,
    }  # fmt: skip


def free_words(result: Row, floor: Row | None = None) -> str | None:
    """Free-running figures of a variant in a sentence; None where there are none. floor: the reference's own free_same_floor."""
    m = result["metrics"]
    if "free_same" not in m or "free_garbled" not in m:
        return None
    n = m["free_same"]["n"]
    same = round(m["free_same"]["value"] * n)
    line = f"Running free, {n - same} of {n} greedy replies leave the reference's"
    if floor:
        line += f" ({round((1 - floor['value']) * floor['n'])} of {floor['n']} of its own do at another batch size)"
    gone = m["free_departure"]
    if gone["value"] is not None:
        low, high = gone["low"], gone["high"]
        line += f", in the median at token {gone['value']:.0f}" + (f" [{low:.0f}, {high:.0f}]" if low is not None else "")
    garbled, more = m["free_garbled"], m["free_garbled_delta"]
    kinds = ", ".join(f"{FAULT_WORDS[k]} {round(m[f'free_{k}']['value'] * n)}" for k in FAULT_WORDS if m[f"free_{k}"]["value"])
    line += f"; {round(garbled['value'] * n)} of {n} are garbled" + (f" ({kinds})" if kinds else "")
    interval = "" if more["low"] is None else f" [{signed(more['low'])}, {signed(more['high'])}]"
    return f"{line}, {signed(more['value'])} pp against the reference{interval}"


def signed(value: float) -> str:
    """Whole points with their sign; none on zero."""
    return f"{round(value):+d}" if round(value) else "0"
