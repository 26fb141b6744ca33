"""`quantgate explain METRIC`: what a number means, its values, and the rows it was computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.metrics.definitions import DEFINITIONS, definition
from pipeline.reporting.text import show, unit_of

METRICS = Path(__file__).parents[1] / "pipeline" / "metrics"


def modules(stem: str) -> list[str]:
    """Modules of pipeline/metrics/ that name a metric, except the table of definitions."""
    named = [p for p in sorted(METRICS.glob("*.py")) if p.name != "definitions.py" and f'"{stem}' in p.read_text(encoding="utf-8")]
    return [f"pipeline/metrics/{p.name}" for p in named]


def main(name: Annotated[str, typer.Argument(help="a metric, such as kld_mean or acc_delta/facts")]) -> None:
    """Say what a metric means, its values, and the rows behind it."""
    what = definition(name)
    if what is None:
        raise ParamsError(f"{name!r} is not a metric{did_you_mean(name.split('/')[0], sorted(DEFINITIONS))}")
    settings = params.load()
    results = {n: records.read(p, records.VariantResult) for n in settings.variants if (p := artifacts.metrics(n)).exists()}
    print(f"{name}: {what.about}.\nUnit: {unit_of(what.unit).name}; better: {what.better}.")
    where = ", ".join(modules(name.split("/")[0])) or "pipeline/metrics/"
    print(f"Computed in {where}, defined in pipeline/metrics/definitions.py.")
    values = {n: m for n, r in results.items() if (m := r["metrics"].get(name))}
    if not values:
        print("No variant has a value here.")
        return
    rows = [{"variant": n, "value": show(m), "n": str(m["n"]), "method": m["method"]} for n, m in values.items()]
    cli.table(("variant", "value", "n", "method"), rows, left=("variant", "value", "method"))
    first = next(iter(values))
    print(f"Rows of {first}: {', '.join(f for f in results[first]['inputs'] if f'/{first}.' in f)}")
