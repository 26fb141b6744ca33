"""What DVC wrote and where it keeps it: the hashes in dvc.lock, and rows in DVC's cache. DVC itself is never imported.

dvc.lock (schema 2) gives each output's md5; the cache holds a file of md5 `abcdef...` as files/md5/ab/cdef...
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

LOCK = Path("dvc.lock")
CACHE = Path(".dvc/cache/files/md5")


@functools.lru_cache(maxsize=4)  # a third of a second for ten variants, and asked for every rows file
def stages(text: str | bytes, where: str = str(LOCK)) -> dict[str, Any]:
    """{stage: what it ran, read and wrote} of a dvc.lock's text. Raises `ArtifactError` if it is damaged."""
    try:
        return dict(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["stages"])  # noqa: S506
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise _damaged(where, e) from None


def outputs(text: str | bytes, where: str = str(LOCK)) -> dict[str, str]:
    """{path of an output: its md5} of a dvc.lock's text; a folder's md5 ends in `.dir`. Raises `ArtifactError` if damaged."""
    try:
        return {out["path"]: out["md5"] for stage in stages(text, where).values() for out in stage.get("outs", [])}
    except (AttributeError, KeyError, TypeError) as e:
        raise _damaged(where, e) from None


def _damaged(where: str, e: Exception) -> ArtifactError:
    return ArtifactError(f"{where} is damaged ({type(e).__name__}); take it back from git and run `dvc repro`")


def edited(paths: list[Path]) -> list[str]:
    """Those files that are not, byte for byte, what the pipeline wrote, each with the reason in words."""
    if not LOCK.exists():
        return [f"{LOCK} (missing: nothing says that {paths[0].parent} holds what the pipeline wrote)"]
    known = outputs(LOCK.read_bytes())
    found = []
    for path in paths:
        then = known.get(path.as_posix())
        if then is None:
            found.append(f"{path} (no stage in {LOCK} wrote it)")
        elif path.exists() and md5(path.read_bytes()) != then:
            found.append(
                f"{path} (not what {LOCK} says its stage wrote: edited by hand, made without dvc, or line ends that git rewrote)"
            )
    return found


def md5(content: bytes) -> str:
    """As DVC 3 hashes a file: of its bytes as they are."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def cached(path: str, md5_then: str, commit: str) -> Path:
    """The file that `path` was at a commit: DVC's cache, else what `dvc get` brings from wherever it is kept.

    Raises `ArtifactError` with the reason where neither has it.
    """
    here = CACHE / md5_then[:2] / md5_then[2:]
    if here.exists():
        return here
    kept = artifacts.ARTIFACTS / "baseline" / md5_then
    if not kept.exists():
        _get(path, commit, kept)
    return kept


def other_params(names: set[str]) -> list[str]:
    """`stage: key` of every param that is another now than when dvc.lock says that the stage ran, or another tier's."""
    found, read = [], functools.cache(lambda file: yaml.safe_load(Path(file).read_text(encoding="utf-8")))
    for name, stage in _ran(names):
        for file, params in (stage.get("params") or {}).items():
            now, tier = read(file), f"tiers.{read(file).get('tier')}."
            for key, then in params.items():
                other_tier = key.startswith("tiers.") and not key.startswith(tier)
                found += [f"{name}: {key}"] if other_tier or _at(now, key) != then else []
    return found


def other_code(names: set[str]) -> list[str]:
    """Quantizers and engines that changed since dvc.lock says that a stage ran with them, each once, in words."""
    found: dict[str, str] = {}
    for name, stage in _ran(names):
        for dep in stage.get("deps", []):
            code = Path(dep["path"])
            if code.suffix == ".py" and not (code.exists() and md5(code.read_bytes()) == dep["md5"]):
                found.setdefault(dep["path"], f"{code} (not what {name} ran with)")
    return list(found.values())


def _ran(names: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name, its entry in dvc.lock) of those stages that ran."""
    known = stages(LOCK.read_bytes()) if LOCK.exists() else {}
    return [(name, known[name]) for name in sorted(names & known.keys())]


def _at(params: Any, key: str) -> Any:
    """What stands at a path of keys, None where nothing does."""
    for part in key.split("."):
        params = params.get(part) if isinstance(params, dict) else None
    return params


def _get(path: str, commit: str, out: Path) -> None:
    beside = Path(sys.executable).with_name("dvc")
    dvc = str(beside) if beside.exists() else shutil.which("dvc")
    if dvc is None:
        raise ArtifactError(f"{path} is not in {CACHE}, and dvc is not installed to get it from a remote")
    with tempfile.TemporaryDirectory() as folder:
        got = Path(folder) / "rows"
        command = [dvc, "get", ".", path, "--rev", commit, "--out", str(got)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not got.exists():
            raise ArtifactError(f"{path} of {commit[:7]} is in no cache or remote of DVC")
        with artifacts.atomic_file(out) as tmp:
            shutil.copyfile(got, tmp)
