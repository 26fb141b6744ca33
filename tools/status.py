"""`quantgate status`: which stages `make repro` would run, why, and how long they took last time on this machine."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, NamedTuple

import typer

from pipeline.core import artifacts, cli
from pipeline.gating import freshness

HERE = re.compile(r"[^:]+$")  # a stage of this dvc.yaml; another file's has that file's name before it


class Pending(NamedTuple):
    """A stage to run. why: what changed; None if it only follows stages whose output may change. seconds: of its last run, or the
    mean of its variants' (`guess`); None if it never ran here."""

    stage: str
    why: str | None
    seconds: float | None
    guess: bool


def pending() -> list[Pending]:
    """Stages to run, in DVC's order. Raises `ArtifactError` if DVC cannot tell."""
    import networkx as nx

    with freshness.project("this folder") as repo:
        changed = {name: faults for name, faults in repo.status().items() if HERE.match(name)}
        graph = repo.index.graph  # edges lead from a stage to its dependencies
        begun = [stage for stage in graph if stage.addressing in changed]
        affected = set(begun).union(*(nx.ancestors(graph, stage) for stage in begun))
        order = [s.addressing for s in nx.dfs_postorder_nodes(graph) if s in affected and HERE.match(s.addressing)]
    return [Pending(name, _why(changed.get(name)), *artifacts.seconds_of(name)) for name in order]


def _why(faults: list[Any] | None) -> str | None:
    """DVC's first reason."""
    if not faults:
        return None
    if first := next((f for f in faults if isinstance(f, str)), None):
        return first
    paths = [path for fault in faults for path in next(iter(fault.values()))]
    return f"changed: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def main(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say which stages `make repro` would run, why, and how long they took last time."""
    stages = pending()
    runs, follows = [p for p in stages if p.why], [p for p in stages if not p.why]
    if as_json:
        answer = {"stages": [p._asdict() for p in stages], "seconds": _sum(runs), "seconds_at_most": _sum(stages)}
        print(json.dumps(answer, indent=2))
        return
    if not stages:
        print("Everything is up to date.")
        return
    rows = [{"stage": p.stage, "why": p.why or "", "last time": _time(p)} for p in runs]
    cli.table(("stage", "why", "last time"), rows, left=("stage", "why"))
    print(f"`make repro` runs these {len(runs)} stages: {_minutes(runs)}.")
    if follows:
        print(f"If their output changes, up to {len(follows)} stages follow: at most {_minutes(stages)} in all.")


def _sum(stages: list[Pending]) -> float:
    return sum(p.seconds for p in stages if p.seconds is not None)


def _minutes(stages: list[Pending]) -> str:
    seconds, unknown = _sum(stages), sum(p.seconds is None for p in stages)
    text = f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
    return text + (f" without {unknown} whose time is unknown" if unknown else "")


def _time(stage: Pending) -> str:
    return "–" if stage.seconds is None else f"{'~' * stage.guess}{stage.seconds:.0f} s"
