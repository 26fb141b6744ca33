"""Freshness: whether results and verdict still follow from the files here.

DVC compares files, params and commands with dvc.lock. Added here: a changed local model (`model.path`), and a changed draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, records
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.explain import some
from pipeline.core.params import Params, PathModel
from pipeline.core.records import BaseManifest, TimingsMeta
from pipeline.engines._speculation import drafting_variant, other_draft
from pipeline.model.config import wanted

ABSENT = ("deleted", "not in cache")  # DVC's words for a file missing in the folder or in its cache
NAMED = 8  # files named in a message
SUFFIXES = (".py", ".yaml", ".jsonl", ".txt")
SOURCES = ("evalsets", "envs", "constraints.txt", "pipeline/protocol.yaml")
JUDGED_BY = {"compare", "gate", "reference", "seed", "tier", "variants"}  # sections of params.yaml


def inputs(settings: Params) -> dict[str, str]:
    """Digests of what a verdict depends on besides the results: data, packages, protocol and params."""
    digests = {}
    for path in map(Path, SOURCES):
        files = [p for p in data_files(path, "**/*") if p.suffix in SUFFIXES] if path.is_dir() else [path]
        digests[str(path)] = artifacts.digest({p.as_posix(): artifacts.sha256_file(p) for p in files if p.exists()})
    return digests | {"params": artifacts.digest(settings.model_dump(include=JUDGED_BY))}


def check(settings: Params) -> list[str]:
    """Paths that could not be compared because they are not here. Raises `ArtifactError` if anything else differs."""
    changed, absent = status()
    if source := changed_source(settings):
        redo = "run `dvc repro -f download`, then `dvc repro`"
        raise ArtifactError(f"the local model is not what was downloaded: {some(source, NAMED)}; {redo}")
    if drafted := changed_drafts(settings):
        again = " ".join(f"{stage}@{name}" for name in drafted for stage in ("diverge", "benchmark"))
        raise ArtifactError(
            f"{some(drafted, NAMED)}: timed with another build of the draft; run `dvc repro -sf {again}`, then `dvc repro`"
        )
    if changed:
        raise ArtifactError(f"the results are stale; missing or changed: {some(changed, NAMED)}; run `dvc repro`")
    return absent


def changed_drafts(settings: Params) -> list[str]:
    """Variants timed with another build of their drafting variant; DVC does not know which variant drafts."""
    drafts = {n: draft for n, v in settings.variants.items() if (draft := drafting_variant(v.engine_options))}
    timed = {n: artifacts.meta_of(artifacts.timings(n)) for n in drafts}
    here = [n for n, d in drafts.items() if timed[n].exists() and (artifacts.model_dir(d) / artifacts.MANIFEST).exists()]
    return [n for n in here if other_draft(records.read(timed[n], TimingsMeta), drafts[n])]


@contextmanager
def project(what: str = "the results") -> Iterator[Any]:
    """DVC's project here, to compare `what` with dvc.lock. Raises `ArtifactError` if DVC refuses: none, damaged, or in use."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            yield repo
    except LockError:
        raise ArtifactError(f"a run is at work in this folder; compare {what} with dvc.lock when it has ended") from None
    except DvcException as e:
        why = " ".join(str(e).split())
        raise ArtifactError(f"DVC cannot compare {what} with dvc.lock ({why}); see `dvc status`") from None


def status() -> tuple[list[str], list[str]]:
    """(what differs from dvc.lock, what is absent) among all that stage `gate` depends on. Raises as `project` does."""
    with project() as repo:
        stages = repo.status(targets=["gate"], with_deps=True)
    changed: set[str] = set()
    absent: set[str] = set()
    for stage, faults in stages.items():
        for fault in faults:
            if isinstance(fault, str):  # "changed command"
                changed.add(f"stage {stage} ({fault})")
                continue
            for path, state in next(iter(fault.values())).items():
                if isinstance(state, dict):
                    changed |= {f"{path} ({key})" for key in state}
                elif state not in ABSENT or Path(artifacts.ARTIFACTS) not in Path(path).parents:  # reports are in git
                    changed.add(path if Path(path).exists() else f"{path} (missing)")
                elif not Path(path).exists():
                    absent.add(path)
    named = [c for c in changed if not any(other.startswith((f"{c}/", f"{c} (")) for other in changed)]
    return sorted(named), sorted(absent)


def changed_source(settings: Params) -> list[str]:
    """Files of a local model that changed since `download` read them."""
    if not isinstance(settings.model, PathModel) or not (artifacts.BASE / artifacts.MANIFEST).exists():
        return []
    manifest = records.read(artifacts.BASE / artifacts.MANIFEST, BaseManifest)
    folder, given = settings.model.folder, manifest.get("given", [])
    hashes = {name: facts["sha256"] for name, facts in manifest["files"].items()} | manifest.get("repaired", {})
    added = {f.name for f in wanted(folder, settings.model.trust_remote_code)} - set(given)
    folder = folder.parent if folder.suffix == ".gguf" else folder
    names = [*(name for name in given if name in hashes), *added]  # the others were made by `download`
    paths = {folder / name: None if name in added else hashes[name] for name in names}
    return [str(p) for p, sha256 in paths.items() if not p.exists() or artifacts.sha256_file(p) != sha256]
