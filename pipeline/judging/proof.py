"""Whether the ledger's evidence is what was measured.

A seal is no secret, so an entry can be sealed anew over figures that nobody measured. What supports a looser bound is
therefore computed again: from the results on file, or from those of a commit behind HEAD, that its dvc.lock vouches for.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, git
from pipeline.core.errors import ArtifactError
from pipeline.judging import evidence, locked
from pipeline.numbers.definitions import is_served

Row = dict[str, Any]
SAME = ("value", "low", "high", "n")


def proven(entry: Row) -> list[Row]:
    """An entry's evidence that is what was measured. entry: {rule, evidence} of the ledger."""
    return [e for e in entry["evidence"] if not doubt(entry["rule"]["metric"], e)]


def doubts(entry: Row, known: set[str]) -> str:
    """Why an entry's evidence counts for nothing, in words to put behind others; empty where it counts. known: figures that
    were evidence before."""
    said = [doubt(entry["rule"]["metric"], e) for e in entry["evidence"] if e.get("figures") not in known]
    return "".join(f"; its evidence supports nothing: {why}" for why in dict.fromkeys(filter(None, said)))


def doubt(metric: str, found: Row) -> str:
    """Why a piece of evidence supports nothing, in words; empty where it is what was measured."""
    try:
        if found["figures"] != evidence.figures(found["of"], found, found.get("floor")):
            return f"{found['figures']} is not the digest of the figures that stand beside it"
        states = [None, *_commits(_file(metric, found["of"]))]
        measured = next((m for m in (_measured(metric, found, c) for c in states) if m), None)
        if measured is None:
            return _unmeasured(metric, found)
        return _other_noise(found["noise"], evidence.noise(metric, measured, found.get("floor")))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        return f"it is damaged ({type(e).__name__})"


def _other_noise(told: float | None, noise: float | None) -> str:
    if told is None:  # it explains nothing, and says so
        return ""
    if noise is None:
        return f"its noise of {told:.3g} is one run's; how far whole runs differ is not known (compare.between_runs)"
    same = math.isclose(told, noise, rel_tol=1e-9)
    return "" if same else f"its noise of {told:.3g} is {noise:.3g} by the figures that stand beside it"


def _unmeasured(metric: str, found: Row) -> str:
    what = f"{metric} of {found['of']} = {found['value']:.4g} (n = {found['n']})"
    if git.line("rev-parse", "--is-shallow-repository") == "true":
        return f"whether {what} was measured is not known in a clone without its history; `git fetch --unshallow`"
    return f"{what} stands in no results that a {locked.LOCK} vouches for, on file or behind HEAD"


def _file(metric: str, variant: str) -> Path:
    return artifacts.served(variant) if is_served(metric) else artifacts.metrics(variant)


def _commits(path: Path) -> list[str]:
    """Those behind HEAD that changed a file of results, newest first; none where there is no git."""
    return (git.line("log", "--full-history", "--format=%h", "--", f"./{path.as_posix()}", f"./{locked.LOCK}") or "").split()


def _measured(metric: str, found: Row, commit: str | None) -> Row | None:
    """The metric at a commit (None: on file) if it and its floor are those of the evidence, and a run's; else None."""
    path = _file(metric, found["of"])
    m = (result := _read(path, commit)) and _metric(metric, result)
    if not m or any(m.get(k) != found[k] for k in SAME):
        return None
    files, own = [path], {}
    if not is_served(metric):
        files.append(artifacts.metrics(result["reference"]))
        own = (_read(files[1], commit) or {}).get("metrics", {})
    same = artifacts.jsonable(evidence.floor_of(metric, own)) == found.get("floor")
    return m if same and _vouched(files, commit) else None


def _metric(name: str, result: Row) -> Row | None:
    stem, _, level = name.partition("/")
    own = result["metrics"] if not is_served(name) else result["levels"].get(level, {}) if level else result
    found: Row | None = own.get(stem if is_served(name) else name)
    return found


def _content(path: Path, commit: str | None) -> bytes | None:
    return git.show(commit, path) if commit else path.read_bytes() if path.exists() else None


def _read(path: Path, commit: str | None) -> Any:
    """What a file of results holds at a commit (None: on file); None where it is not there, or damaged."""
    try:
        return json.loads(_content(path, commit) or b"null")
    except ValueError:
        return None


def _vouched(files: list[Path], commit: str | None) -> bool:
    """Whether dvc.lock says that a stage wrote them; asked last, since a lock takes a third of a second to read."""
    try:
        known = locked.outputs(_content(locked.LOCK, commit) or b"")
    except ArtifactError:
        return False
    return all((content := _content(f, commit)) and known.get(f.as_posix()) == locked.md5(content) for f in files)


def unread() -> str:
    """Why what earlier commits held is not known here, in words; empty where it is."""
    if git.line("rev-parse", "HEAD") is None:
        return "git is not there, or cannot read this folder"
    if git.line("rev-parse", "--is-shallow-repository") == "true":
        return "this clone is without its history; `git fetch --unshallow`"
    return ""
