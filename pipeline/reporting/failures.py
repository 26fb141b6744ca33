"""A variant's failures for the report: the first rows of each list, and free-running metrics in words."""

from __future__ import annotations

import unicodedata

from pipeline.core import artifacts, records
from pipeline.core.records import Failures, Metric, Results, VariantResult
from pipeline.reporting.text import known

# rows of a list that the page shows; the whole lists are in artifacts/broke/
HEADS = {"worst_tokens": 8, "worst_items": 4, "flips_to_wrong": 5, "flips_to_right": 3, "replies": 4}
LONGEST = 220  # characters of a text on the page
FAULT_WORDS = {"empty": "empty", "invalid": "broken characters", "loop": "a loop", "script": "another script"}
KINDS = {
    "uniform": "uniform shift", "isolated": "isolated tokens", "neither": "neither uniform nor isolated", "none": "no divergence",
    "too few": "too few tokens to say", "not finite": "divergence that is not finite",
}  # fmt: skip
MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣"}


def visible(text: str) -> str:
    """A token's text with white space and control characters made visible; `(bytes)` for part of a character."""
    if "\ufffd" in text:
        return "(bytes)"
    characters = [MARKS.get(c, c if unicodedata.category(c)[0] != "C" else f"U+{ord(c):04X}") for c in text]
    return "".join(characters) or "nothing"


def clipped(text: str | None, longest: int = LONGEST) -> str:
    """The end of a text, which matters most for what follows."""
    text = (text or "").strip()
    return text if len(text) <= longest else f"… {text[-longest:]}"


def of(results: Results, reference: str) -> dict[str, dict[str, object]]:
    """{variant: what templates/failures.*.j2 show of it}, without the reference."""
    floor = results[reference]["metrics"].get("free_same_floor")
    return {name: _page(name, r, floor) for name, r in results.items() if name != reference}


def _page(name: str, result: VariantResult, floor: Metric | None) -> dict[str, object]:
    lists = records.read(artifacts.failures(name), Failures)
    spread, wrong, right, replies = lists["spread"], lists["flips_to_wrong"], lists["flips_to_right"], lists["replies"]
    gist = [KINDS[spread["kind"]] if spread else "not known"]
    if wrong and right:
        gist.append(f"{wrong['total']} answers became wrong, {right['total']} right")
    if replies:
        gist.append(f"{replies['total']} of {replies['of']} free replies differ")
    groups = sorted(spread["groups"] if spread else [], key=lambda g: -(g["ratio"] or 0))[:5]
    return {
        **lists, "gist": "; ".join(gist), "free": free_words(result, floor), "heads": HEADS, "groups": groups,
        "curve": result["curves"].get("agreement_by_position", []),
    }  # fmt: skip


def free_words(result: VariantResult, floor: Metric | None = None) -> str | None:
    """A variant's greedy replies in a sentence; None if they were not measured. floor: the reference's `free_same_floor`."""
    metrics = result["metrics"]
    same, garbled, more = (known(metrics.get(name)) for name in ("free_same", "free_garbled", "free_garbled_delta"))
    if not same or not garbled or not more:
        return None
    line = f"Running free, {same.n - round(same.value * same.n)} of {same.n} greedy replies leave the reference's"
    if kept := known(floor):
        line += f" ({round((1 - kept.value) * kept.n)} of {kept.n} of its own do at another batch size)"
    if left := known(metrics["free_departure"]):
        line += f", in the median at token {left.value:.0f}"
        line += f" [{left.interval[0]:.0f}, {left.interval[1]:.0f}]" if left.interval else ""
    counts = {words: m.value * same.n for k, words in FAULT_WORDS.items() if (m := known(metrics[f"free_{k}"]))}
    kinds = ", ".join(f"{words} {round(count)}" for words, count in counts.items() if count)
    line += f"; {round(garbled.value * same.n)} of {same.n} are garbled" + (f" ({kinds})" if kinds else "")
    interval = f" [{signed(more.interval[0])}, {signed(more.interval[1])}]" if more.interval else ""
    return f"{line}, {signed(more.value)} pp against the reference{interval}"


def signed(value: float) -> str:
    """Whole points with a sign, except zero."""
    return f"{round(value):+d}" if round(value) else "0"
