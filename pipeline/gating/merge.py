"""The verdict for a merge: fresh results, judged by rules no looser than the base's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.gating import baseline, freshness, policy, verdicts
from pipeline.serving import results as server_results

Row = dict[str, Any]


@dataclass(frozen=True)
class Merge:
    """beside: see `baseline.beside`, None without a baseline; absent: files that could not be compared."""

    verdict: Row
    results: dict[str, Row]
    beside: Row | None
    absent: list[str]


def load_results(settings: Params) -> dict[str, Row]:
    """{variant: its metrics} of those that exist. Raises `ArtifactError` for a file that `compare` did not write."""
    results = {n: artifacts.read_json(artifacts.metrics(n)) for n in settings.variants if artifacts.metrics(n).exists()}
    for name, result in results.items():
        if not isinstance(result, dict) or not isinstance(result.get("metrics"), dict) or "asked" not in result:
            raise ArtifactError(f"{artifacts.metrics(name)} is damaged; delete it and run `dvc repro`")
    server_results.add(results, settings)
    return results


def judge(settings: Params, rev: str | None = None) -> Merge:
    """Judge the results on file as a merge does. rev: the commit merged into; else QUANTGATE_BASELINE or gate.baseline. Raises
    `ArtifactError` for stale results or a missing baseline."""
    if rev is not None and not rev.strip():
        raise ArtifactError("no baseline: --baseline is empty; name the commit merged into, or leave it out")
    absent = freshness.check(settings)
    results, beside, loosened = load_results(settings), None, []
    if (named := baseline.wanted(rev, settings)) is not None:
        base = baseline.read(named)
        beside = baseline.beside(base, results, settings)
        loosened = policy.compare(settings, base.params, results)
    elif any(rule.against == "baseline" for rule in settings.gate.rules):
        name = f"name the commit: --baseline, {baseline.VARIABLE} or gate.baseline"
        raise ArtifactError(f"no baseline: params.yaml has rules against it; {name}")
    verdict = policy.hold(dict(artifacts.jsonable(verdicts.of(results, settings, beside))), loosened)
    return Merge(verdict, results, beside, absent)
