"""`python -m pipeline.evalset`: check every shipped set and print its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.core import artifacts, cli, params
from pipeline.evalset import cards, load_texts
from pipeline.evalset.calibration import measured_rows, refuse_overlap

README = cards.HOME / "README.md"
MARKS = ("<!-- cards -->", "<!-- /cards -->")


def main(readme: Annotated[bool, typer.Option("--readme", help="Write the cards into evalsets/README.md.")] = False) -> None:
    """Check every set in evalsets/ and print the cards."""
    settings = params.load()
    sets, record = cards.cards(), cards.read_record()
    measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
    search = load_texts(cards.HOME / "search")
    refuse_overlap(search, measured, "evalsets/search")
    refuse_overlap(load_texts(cards.HOME / "calibration"), [*measured, *search], "evalsets/calibration")
    if readme:
        artifacts.write_between(README, MARKS, f"\n{cards.markdown(sets, record)}")
    cli.table(cards.COLUMNS, [cards.line(card, record) for card in sets], left=("set", "tells apart"))
    print(cards.legend(record))
    cli.say("evalset", f"{len(sets)} sets are valid; calibration, search and measured text share no run of 12 words")


if __name__ == "__main__":
    cli.run(main)
