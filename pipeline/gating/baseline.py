"""The baseline: results of the commit that a merge goes into, from git (summaries) and from DVC's cache (rows).

A branch can move while no file here changes. So DVC's stage `gate` leaves rules `against: baseline` unjudged (never PASS);
`quantgate gate --enforce --baseline REV` judges them at a merge, and writes nothing into reports/.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipeline.core import artifacts, git, records
from pipeline.core.errors import ArtifactError
from pipeline.core.explain import parse
from pipeline.core.params import PARAMS, Params
from pipeline.core.records import AnswerRow, Metric, VariantResult
from pipeline.gating import paired_difference
from pipeline.gating.paired_difference import Difference
from pipeline.gating.sequential import early
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import is_served
from pipeline.serving import results as server_results

VARIABLE = "QUANTGATE_BASELINE"
NEXT = "fetch it (`git fetch`), or name another commit with --baseline"
LOCK = Path("dvc.lock")
CACHE = Path(".dvc/cache/files/md5")  # the file with md5 `abcdef...` is ab/cdef...
Record = TypeVar("Record")


@dataclass(frozen=True)
class Baseline:
    """A commit's parsed params.yaml, {path: md5} of its dvc.lock, and results by variant. name: for messages."""

    name: str
    rev: str
    commit: str
    params: dict[str, Any]
    lock: dict[str, str]
    results: dict[str, VariantResult] = field(default_factory=dict)


@dataclass(frozen=True)
class VariantChanges:
    """differences, before: of metrics that a rule names, difference and baseline; lost: metrics that only the baseline has."""

    differences: dict[str, Difference] = field(default_factory=dict)
    before: dict[str, Metric] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Changes:
    """All variants except the reference since the baseline: a revision and its commit."""

    rev: str
    commit: str
    variants: dict[str, VariantChanges]


def wanted(given: str | None, settings: Params) -> str | None:
    """The revision to compare with: --baseline, QUANTGATE_BASELINE, gate.baseline or None, in this order."""
    return given or os.environ.get(VARIABLE) or settings.gate.baseline


def stages(lock: bytes, where: str = str(LOCK)) -> dict[str, Any]:
    """The stages in the text of a dvc.lock. Raises `ArtifactError` if it is damaged."""
    try:
        return dict(yaml.load(lock, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["stages"])  # noqa: S506
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise ArtifactError(f"{where} is damaged ({type(e).__name__}); take it back from git and run `dvc repro`") from None


@functools.lru_cache(maxsize=2)  # a third of a second for ten variants, and needed for each file of rows
def outputs(lock: bytes, where: str = str(LOCK)) -> dict[str, str]:
    """{path of an output: md5} in the text of a dvc.lock; a folder's md5 ends in `.dir`."""
    return {out["path"]: out["md5"] for stage in stages(lock, where).values() for out in stage.get("outs", [])}


def md5(content: bytes) -> str:
    """A file's hash in DVC 3."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def read(rev: str) -> Baseline:
    """A commit's results. Raises `ArtifactError` if it has none, or if they differ from its dvc.lock."""
    commit = git.line("rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if commit is None:
        raise ArtifactError(f"no baseline: {rev!r} is not a commit here; {NEXT}")
    name = f"{rev} ({commit[:7]})"
    if (text := git.show(commit, LOCK)) is None:
        raise ArtifactError(f"no baseline: {name} has no {LOCK}, so no results; {NEXT}")
    lock = outputs(text, f"{LOCK} of {name}")
    content, _ = parse(Path(f"{PARAMS} of {name}"), (git.show(commit, PARAMS) or b"").decode(errors="replace"), ArtifactError)
    if not isinstance(content, dict) or not isinstance(content.get("variants"), dict):
        raise ArtifactError(f"no baseline: {PARAMS} of {name} names no variants; {NEXT}")
    base = Baseline(name, rev, commit, content, lock)
    base.results.update(_written(base, artifacts.metrics, list(content["variants"]), VariantResult))
    if not base.results:
        raise ArtifactError(f"no baseline: {name} holds no {artifacts.metrics('<variant>')}; {NEXT}")
    return base


def _written(base: Baseline, path_of: Callable[[str], Path], variants: list[str], kind: type[Record]) -> dict[str, Record]:
    """{variant: record} as the baseline's pipeline wrote them. variants: of its params.yaml; files of others may be left over."""
    written = {}
    for name in variants:
        path = path_of(name)
        if (content := git.show(base.commit, path)) is None:
            continue
        if base.lock.get(path.as_posix()) != md5(content):
            raise ArtifactError(f"no baseline: {path} of {base.name} is not what its {LOCK} says the pipeline wrote")
        try:
            written[name] = records.checked(json.loads(content), kind, str(path))
        except ArtifactError:
            raise ArtifactError(f"no baseline: {path} of {base.name} comes from another version of quantgate; {NEXT}") from None
    return written


def compare(base: Baseline, results: dict[str, VariantResult], settings: Params) -> Changes:
    """What changed since the baseline. results: of this run. Raises `ArtifactError` if reference or base model was another."""
    reference, reference_before = results.get(settings.reference), base.results.get(settings.reference)
    if reference_before is None or any(r["reference"] != settings.reference for r in base.results.values()):
        raise ArtifactError(f"no baseline: {base.name} measured against another reference than {settings.reference}; {NEXT}")
    if reference is None or reference["base"] != reference_before["base"]:
        raise ArtifactError(f"no baseline: {base.name} measured another base model; {NEXT}")
    if server_results.judged(settings):  # else no server's metrics are needed
        reports = _written(base, artifacts.served, list(base.results), records.ServerReport)
        server_results.add(base.results, settings, reports)
    variants = {}
    for name in settings.variants:
        if name == settings.reference:
            continue
        change = _changes(base, name, results.get(name), settings)
        if reference["model"] != reference_before["model"]:
            note = f"the reference is not built as at {base.rev}"
            for metric, difference in change.differences.items():
                change.differences[metric] = paired_difference.of_another_reference(metric, difference, note)
        variants[name] = change
    return Changes(base.rev, base.commit, variants)


def _changes(base: Baseline, name: str, now: VariantResult | None, settings: Params) -> VariantChanges:
    if (before := base.results.get(name)) is None:
        return VariantChanges()
    have, had = now["metrics"] if now else {}, before["metrics"]
    ruled = [n for n in dict.fromkeys(rule.metric for rule in settings.gate.rules) if n in had]
    known = {n for n, m in have.items() if m["value"] is not None or m["warnings"]}
    known |= {n for n in had if now and early(now, n)}  # its rows may not have been measured yet
    return VariantChanges(
        differences=_differences(base, name, now, before, [n for n in ruled if n in have], settings) if now else {},
        before={n: had[n] for n in ruled},
        lost=sorted(n for n, m in had.items() if m["value"] is not None and n not in known),
    )


def _differences(
    base: Baseline, variant: str, now: VariantResult, before: VariantResult, names: list[str], settings: Params
) -> dict[str, Difference]:
    """{metric: difference}: paired if the rows of both commits are available, else from the two summaries."""
    have, had = now["metrics"], before["metrics"]
    same = {served: _digest(now, served) == _digest(before, served) for served in (True, False)}
    equal = [n for n in names if same[is_served(n)] and have[n]["value"] is not None]
    differences = {n: paired_difference.unchanged(n, have[n]) for n in equal}
    names = [n for n in names if not same[is_served(n)]]
    if not names:
        return differences
    b, looks = Builder(settings.compare, settings.seed), now.get("looks", {})
    no_tokens, no_items = "no rows of tokens", "no rows of items"
    try:
        tokens = [artifacts.read_columns(p) for p in _rows(base, artifacts.tokens(variant), now, before)]
        with b.at_look(looks.get("diverge")):
            differences |= {n: m for n in names if (m := paired_difference.tokens_paired(b, n, *tokens))}
    except (ArtifactError, KeyError) as e:
        no_tokens = str(e)
    try:
        answers = [records.read_rows(p, AnswerRow) for p in _rows(base, artifacts.answers(variant), now, before)]
        with b.at_look(looks.get("evaluate")):
            paired = paired_difference.items_paired(b, *answers)
        differences |= {n: paired[n] for n in names if n in paired}
    except ArtifactError as e:
        no_items = str(e)
    for n in names:
        if n not in differences and have[n]["value"] is not None and had[n]["value"] is not None:
            same_machine = now.get("client") == before.get("client") if is_served(n) else now["machine"] == before["machine"]
            why = no_items if paired_difference.by_item(n) else no_tokens
            differences[n] = paired_difference.unpaired(n, have[n], had[n], why, same_machine=same_machine)
    return differences


def _digest(result: VariantResult, served: bool) -> str:
    """Digest of a variant's server metrics, or of all its other results."""
    metrics = {n: m for n, m in result["metrics"].items() if is_served(n) == served}
    client = result.get("client")
    return artifacts.digest([metrics, client] if served else {**result, "metrics": metrics, "client": None, "looks": None})


def _rows(base: Baseline, path: Path, now: VariantResult, before: VariantResult) -> list[Path]:
    """The rows behind this run's and the baseline's metrics, checked by their recorded hashes."""
    name, paths = path.as_posix(), []
    lock = outputs(LOCK.read_bytes()) if LOCK.exists() else {}
    for result, md5_of, commit in ((now, lock, "HEAD"), (before, base.lock, base.commit)):
        sha256 = result["inputs"].get(name)
        here = path.exists() and artifacts.sha256_file(path) == sha256
        if not here and name not in md5_of:
            raise ArtifactError(f"{name} is in no {LOCK}")
        rows = path if here else _cached(name, md5_of[name], commit)
        if artifacts.sha256_file(rows) != sha256:
            raise ArtifactError(f"{rows} is not what the metrics were made from")
        paths.append(rows)
    return paths


def _cached(path: str, md5_then: str, commit: str) -> Path:
    """The file that `path` was at a commit, from DVC's cache or by `dvc get`. Raises `ArtifactError` if neither has it."""
    here = CACHE / md5_then[:2] / md5_then[2:]
    kept = artifacts.ARTIFACTS / "baseline" / md5_then
    if here.exists() or kept.exists():
        return here if here.exists() else kept
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        try:
            Repo.get(".", path, out=str(rows), rev=commit)
        except (DvcException, OSError):
            raise ArtifactError(f"{path} of {commit[:7]} is neither in DVC's cache nor in a remote") from None
        with artifacts.atomic_file(kept) as tmp:
            shutil.copyfile(rows, tmp)
    return kept
