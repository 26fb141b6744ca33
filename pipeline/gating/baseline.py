"""The baseline: results of the commit that a merge goes into, from git (summaries) and from DVC's cache (rows).

A branch moves while no file here changes, so DVC's stage `gate` judges against the reference only and leaves rules
`against: baseline` unjudged (never PASS). `python -m pipeline.gate --enforce --baseline REV` judges them at a merge and writes
nothing into reports/.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, git
from pipeline.core.errors import ArtifactError
from pipeline.core.explain import parse
from pipeline.core.params import PARAMS, Params
from pipeline.gating import dvc_lock, paired_difference
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import is_served
from pipeline.serving import results as server_results

Row = dict[str, Any]
VARIABLE = "QUANTGATE_BASELINE"
NEXT = "fetch it (`git fetch`), or name another commit with --baseline"


def wanted(given: str | None, settings: Params) -> str | None:
    """The revision to compare with: --baseline, else QUANTGATE_BASELINE, else gate.baseline, else None."""
    return given or os.environ.get(VARIABLE) or settings.gate.baseline


@dataclass(frozen=True)
class Baseline:
    """A commit's params.yaml as it was read, dvc.lock's {path: md5}, and results: {variant: metrics/<variant>.json}."""

    rev: str
    commit: str
    params: Row = field(default_factory=dict)
    lock: dict[str, str] = field(default_factory=dict)
    results: dict[str, Row] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.rev} ({self.commit[:7]})"


def read(rev: str) -> Baseline:
    """A commit's results. Raises `ArtifactError` if it has none, or others than its dvc.lock records."""
    commit = git.line("rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if commit is None:
        raise ArtifactError(f"no baseline: {rev!r} is no commit here; {NEXT}")
    base = Baseline(rev, commit)
    if (lock := git.show(commit, dvc_lock.LOCK)) is None:
        raise ArtifactError(f"no baseline: {base.name} has no {dvc_lock.LOCK}, so no results; {NEXT}")
    base.lock.update(dvc_lock.outputs(lock, f"{dvc_lock.LOCK} of {base.name}"))
    then, _ = parse(Path(f"{PARAMS} of {base.name}"), (git.show(commit, PARAMS) or b"").decode(errors="replace"), ArtifactError)
    if not isinstance(then, dict) or not isinstance(then.get("variants"), dict):
        raise ArtifactError(f"no baseline: {PARAMS} of {base.name} names no variants; {NEXT}")
    base.params.update(then)
    # files of a variant that was taken out before are not its results
    base.results.update({name: result for name in then["variants"] if (result := _written(base, artifacts.metrics(name)))})
    if not base.results:
        raise ArtifactError(f"no baseline: {base.name} holds no {artifacts.metrics('<variant>')}; {NEXT}")
    return base


def _written(base: Baseline, path: Path) -> Row | None:
    """What a JSON file that the baseline's pipeline wrote holds; None where it is not there."""
    content = git.show(base.commit, path)
    if content is not None and base.lock.get(path.as_posix()) != dvc_lock.md5(content):
        raise ArtifactError(f"no baseline: {path} of {base.name} is not what its {dvc_lock.LOCK} says the pipeline wrote")
    return None if content is None else dict(json.loads(content))


def beside(base: Baseline, results: dict[str, Row], settings: Params) -> dict[str, Any]:
    """Differences to the baseline: {rev, commit, variants: {name: {figures, lost, new, values}}}. figures: {metric: its
    difference} of metrics that a rule names; lost: metrics that only the baseline has; new: metrics that only this run has;
    values: the baseline's metrics that a rule names."""
    ref = settings.reference
    ours, theirs = results.get(ref, {}), base.results.get(ref, {})
    if not theirs or any(r.get("reference") != ref for r in base.results.values()):
        raise ArtifactError(f"no baseline: {base.name} measured against another reference than {ref}; {NEXT}")
    if ours.get("base") != theirs.get("base"):
        raise ArtifactError(f"no baseline: {base.name} measured another base model; {NEXT}")
    judged = base.results if server_results.judged(settings) else ()  # without a server's rule its metrics are not needed
    server_results.add(base.results, settings, {n: report for n in judged if (report := _written(base, artifacts.served(n)))})
    notes = () if ours.get("model") == theirs.get("model") else (f"the reference is built in another way than at {base.rev}",)
    names = list(dict.fromkeys(rule.metric for rule in settings.gate.rules))
    variants = {
        name: _variant(base, name, results.get(name, {"metrics": {}}), names, settings, notes)
        for name in settings.variants
        if name != ref
    }
    return {"rev": base.rev, "commit": base.commit, "variants": variants}


def _variant(base: Baseline, name: str, now: Row, names: list[str], settings: Params, notes: tuple[str, ...]) -> dict[str, Any]:
    then = base.results.get(name)
    have = now["metrics"]
    if then is None:
        return {"figures": {}, "lost": [], "new": sorted(have), "values": {}, "known": False}
    had = then["metrics"]
    figures = _figures(base, name, now, then, [n for n in names if n in have and n in had], settings)
    if notes:
        figures = {n: paired_difference.another_reference(n, figure, notes) for n, figure in figures.items()}
    unexplained = {n for n, m in have.items() if m.get("value") is None and not (m.get("reason") or m.get("warnings"))}
    lost = sorted(n for n, m in had.items() if m.get("value") is not None and (n not in have or n in unexplained))
    values = {n: had[n] for n in names if n in had}
    return {"figures": figures, "lost": lost, "new": sorted(have.keys() - had.keys()), "values": values, "known": True}


def _figures(base: Baseline, variant: str, now: Row, then: Row, names: list[str], settings: Params) -> dict[str, Row]:
    """{metric: its difference}: paired where the rows of both can be had, else from the two summaries."""
    same = {of: artifacts.digest(_part(now, of)) == artifacts.digest(_part(then, of)) for of in (True, False)}
    differences = {n: paired_difference.unchanged(n, now["metrics"][n]) for n in names if same[is_served(n)]}
    differences = {n: m for n, m in differences.items() if now["metrics"][n].get("value") is not None}
    names = [n for n in names if not same[is_served(n)]]
    if not names:
        return differences
    b = Builder(settings.compare, settings.seed)
    why = {"token": "no rows of tokens", "item": "no rows of items"}
    try:
        ours, theirs = (artifacts.read_columns(p) for p in _rows(base, artifacts.tokens(variant), now, then))
        differences |= {n: m for n in names if (m := paired_difference.tokens_paired(b, n, ours, theirs))}
    except (ArtifactError, KeyError) as e:
        why["token"] = str(e)
    try:
        answers = [artifacts.read_jsonl(p) for p in _rows(base, artifacts.answers(variant), now, then)]
        paired = paired_difference.items_paired(b, *answers)
        differences |= {n: paired[n] for n in names if n in paired}
    except (ArtifactError, KeyError) as e:
        why["item"] = str(e)
    for n in names:
        if n not in differences and now["metrics"][n].get("value") is not None and then["metrics"][n].get("value") is not None:
            reason = why["item" if n.split("/")[0] in paired_difference.PER_ITEM else "token"]
            machine = "client" if is_served(n) else "machine"
            same_machine = now.get(machine) == then.get(machine)
            differences[n] = paired_difference.unpaired(n, now["metrics"][n], then["metrics"][n], reason, same_machine=same_machine)
    return differences


def _part(result: Row, of_server: bool) -> Row:
    """A variant's server metrics, or its others."""
    kept = {n: m for n, m in result["metrics"].items() if is_served(n) == of_server}
    return {"metrics": kept, "client": result.get("client")} if of_server else result | {"metrics": kept, "client": None}


def _rows(base: Baseline, path: Path, now: Row, then: Row) -> list[Path]:
    """The rows of this run's metrics and of the baseline's, by their recorded hashes."""
    known = dvc_lock.outputs(dvc_lock.LOCK.read_bytes()) if dvc_lock.LOCK.exists() else {}
    name, paths = path.as_posix(), []
    for result, lock, commit in ((now, known, "HEAD"), (then, base.lock, base.commit)):
        sha256 = result.get("inputs", {}).get(name)
        here = path.exists() and artifacts.sha256_file(path) == sha256
        if not here and name not in lock:
            raise ArtifactError(f"{name} stands in no {dvc_lock.LOCK}")
        rows = path if here else dvc_lock.cached(name, lock[name], commit)
        if artifacts.sha256_file(rows) != sha256:
            raise ArtifactError(f"{rows} is not what the metrics were made from")
        paths.append(rows)
    return paths
