"""The card of each set: what it measures, and how finely, by the last record (reports/evalsets.json, which tools/evalset_record.py
writes). A set that has changed since has no record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml

from pipeline.core import artifacts, cli, records
from pipeline.core.droppings import data_files
from pipeline.core.records import EvalsetsRecord, SetRecord
from pipeline.evalset import load_prompts, load_texts
from pipeline.evalset.tasks import load_task, local_tasks, task_files

HOME = Path("evalsets")
RECORD = artifacts.REPORTS / "evalsets.json"
KINDS = {"corpus": "documents", "search": "documents", "prompts": "prompts", "calibration": "documents"}
COLUMNS = ("set", "n", "sha256", "reference", "interval", "resolves", "tells apart")


@dataclass(frozen=True)
class Card:
    """A set: its number of units, its files with their sha256, and the words of cards.yaml."""

    name: str
    n: int
    unit: str
    files: dict[str, str]
    measures: str | None = None
    source: str | None = None
    weaknesses: str | None = None

    def recorded(self, record: EvalsetsRecord | None) -> SetRecord | None:
        """The set's record; None if there is none, or its files have changed since."""
        entry = record["sets"].get(self.name) if record else None
        return entry if entry is not None and entry["files"] == self.files else None


def cards() -> list[Card]:
    """One card per set; checks every row."""
    words = yaml.safe_load((HOME / "cards.yaml").read_text(encoding="utf-8"))

    def card(name: str, files: list[Path], n: int, unit: str) -> Card:
        described = words.get(name.split("/")[0], {}) | words.get(name, {})
        return Card(name, n, unit, {str(f): artifacts.sha256_file(f) for f in files}, **described)

    result = []
    for name in local_tasks():
        _, rows = load_task(name)
        clusters = len({row.get("cluster") or row["id"] for row in rows})
        unit = "items" if clusters == len(rows) else f"items in {clusters} families"
        result.append(card(f"tasks/{name}", task_files(name), len(rows), unit))
    for kind, unit in KINDS.items():
        load = load_prompts if kind == "prompts" else load_texts
        load(HOME / kind)  # as a whole: an id may not come twice in the folder
        result += [card(f"{kind}/{f.stem}", [f], len(load(f)), unit) for f in data_files(HOME / kind, "*.jsonl")]
    return result


def read_record() -> EvalsetsRecord | None:
    return records.read(RECORD, EvalsetsRecord) if RECORD.exists() else None


def line(card: Card, record: EvalsetsRecord | None) -> dict[str, str]:
    """A table row, with dashes for what was not measured."""
    row = dict.fromkeys(COLUMNS, "–")
    row |= {"set": card.name, "n": f"{card.n} {card.unit}", "sha256": list(card.files.values())[-1][:12]}
    measured = card.recorded(record)
    if record is None or measured is None:
        return row
    row["tells apart"] = ", ".join(name for name, apart in measured.get("told", {}).items() if apart) or "–"
    if "reference" in measured:
        row["reference"] = f"{100 * measured['reference']:.1f} % (chance {100 * measured['chance']:.0f})"
        row["interval"] = f"±{measured['half_width']:.1f} pp"
        row["resolves"] = f"{measured['resolvable']:.1f} pp"
    elif "kld" in measured:
        kld = measured["kld"][record["probe"]]
        row["n"] += f", {measured['tokens']} tokens"
        row["reference"] = f"KLD {kld['value']:.4f} ± {(kld['high'] - kld['low']) / 2:.4f} nats"
        row["interval"] = f"±{100 * measured['ppl_half_width']:.1f} % PPL"
        row["resolves"] = f"{100 * measured['resolvable_ppl']:.1f} % PPL"
    return row


def legend(record: EvalsetsRecord | None) -> str:
    """What the table's columns mean."""
    if record is None:
        return "Nothing has been measured yet: run the pipeline with `tier: full`, then `python -m tools.evalset_record`."
    level = f"{100 * record['confidence']:g} %"
    probe = record["probe"]
    return (
        f"reference: accuracy of {record['reference']}, or mean KLD of {probe} to it. interval: half of the {level} interval "
        f"of {probe}'s paired difference in accuracy (Newcombe; whole families resampled where that is wider) or perplexity "
        f"(t over documents). resolves: the smallest true difference that {100 * record['power']:.0f} % of such comparisons "
        f"would find. tells apart: variants whose difference to {probe} has a {level} interval without 0. "
        "A dash: not measured since the set last changed."
    )


def markdown(sets: list[Card], record: EvalsetsRecord | None) -> str:
    """The table, and each set's card in words."""
    parts = [cli.markdown_table([line(card, record) for card in sets]), "", legend(record), ""]
    for (measures, source, weaknesses), same in groupby(sets, lambda c: (c.measures, c.source, c.weaknesses)):
        names = ", ".join(card.name for card in same)
        parts += [f"**{names}**: {measures} *Source:* {source} *Known weaknesses:* {weaknesses}", ""]
    return "\n".join(parts)
