"""`python -m pipeline.evalset`: check every shipped set and print its card."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.core import artifacts, cli, params
from pipeline.evalset import cards as sets
from pipeline.evalset import load_texts
from pipeline.evalset.overlap import measured_rows, refuse_overlap

README = sets.HOME / "README.md"
MARKS = ("<!-- cards -->", "<!-- /cards -->")
COLUMNS = ("set", "n", "sha256", "reference", "interval", "resolves", "tells apart")


def line(card: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """A table row of a card and its record; what was not measured is a dash."""
    measured = sets.figures(card, record)
    digest = list(card["files"].values())[-1]
    row = dict.fromkeys(COLUMNS, "–") | {"set": card["set"], "n": f"{card['n']} {card['unit']}", "sha256": digest[:12]}
    if measured is None:
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


def how(record: dict[str, Any]) -> str:
    """What the table's columns mean."""
    if not record:
        return "Nothing has been measured yet: run the pipeline with `tier: full`, then `python -m pipeline.evalset --record`."
    level = f"{100 * record['confidence']:g} %"
    probe = record["probe"]
    return (
        f"reference: accuracy of {record['reference']}, or mean KLD of {probe} to it. interval: half of the {level} interval "
        f"of {probe}'s paired difference in accuracy (Newcombe; whole families resampled where that is wider) or perplexity "
        f"(t over documents). resolves: the smallest true difference that {100 * record['power']:.0f} % of such comparisons "
        f"would find. tells apart: variants whose difference to {probe} has a {level} interval without 0. "
        "A dash: not measured since the set last changed."
    )


def markdown(cards: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """The table, and each set's card in words."""
    parts = [cli.markdown_table([line(card, record) for card in cards]), "", how(record), ""]
    for (measures, source, weaknesses), same in groupby(cards, lambda c: (c["measures"], c["source"], c["weaknesses"])):
        names = ", ".join(card["set"] for card in same)
        parts += [f"**{names}**: {measures} *Source:* {source} *Known weaknesses:* {weaknesses}", ""]
    return "\n".join(parts)


def main(
    record: Annotated[bool, typer.Option("--record", help="Take the figures from the rows of the last run (tier: full).")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Write the cards into evalsets/README.md.")] = False,
) -> None:
    """Check every set in evalsets/ and print the cards."""
    settings = params.load()
    cards = sets.cards()
    measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
    refuse_overlap(load_texts(sets.HOME / "calibration"), measured, "evalsets/calibration")
    if record:
        artifacts.write_json(sets.MEASURED, sets.record(settings))
    recorded = sets.measured()
    if readme:
        artifacts.write_between(README, MARKS, markdown(cards, recorded))
    cli.table(COLUMNS, [line(card, recorded) for card in cards], left=("set", "tells apart"))
    print(how(recorded))
    cli.say("evalset", f"{len(cards)} sets are valid; calibration text shares no run of 12 words with what is measured")


if __name__ == "__main__":
    cli.run(main)
