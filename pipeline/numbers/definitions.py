"""Every metric by its name: those of a variant in process (metrics.py) and those of a server (serving_figures.py). Pure."""

from __future__ import annotations

from pipeline.numbers import metrics, serving_figures
from pipeline.numbers.metrics import Definition

DEFINITIONS: dict[str, Definition] = serving_figures.DEFINITIONS | metrics.DEFINITIONS


def definition(name: str) -> Definition | None:
    """The definition of a metric by its name, `ttft_p99_ms/closed-4` by `ttft_p99_ms`."""
    return DEFINITIONS.get(name.split("/")[0])


def is_served(name: str) -> bool:
    """Whether a metric is a server's: one of a level (`failure_rate/closed-4`), or one of a whole run (`knee`)."""
    stem, _, part = name.partition("/")
    return stem in serving_figures.WHOLE or (
        stem in serving_figures.DEFINITIONS and (stem not in metrics.DEFINITIONS or bool(part))
    )
