"""What dvc.lock (schema 2) says that stages wrote, and rows of a commit from DVC's cache or remote."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

LOCK = Path("dvc.lock")
CACHE = Path(".dvc/cache/files/md5")  # a file of md5 `abcdef...` is ab/cdef...


@functools.lru_cache(maxsize=4)  # a third of a second for ten variants, and asked for every rows file
def stages(text: bytes, where: str = str(LOCK)) -> dict[str, Any]:
    """{stage: what it ran, read and wrote} of a dvc.lock's text. Raises `ArtifactError` if it is damaged."""
    try:
        return dict(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["stages"])  # noqa: S506
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise ArtifactError(f"{where} is damaged ({type(e).__name__}); take it back from git and run `dvc repro`") from None


def outputs(text: bytes, where: str = str(LOCK)) -> dict[str, str]:
    """{path of an output: its md5} of a dvc.lock's text; a folder's md5 ends in `.dir`."""
    return {out["path"]: out["md5"] for stage in stages(text, where).values() for out in stage.get("outs", [])}


def md5(content: bytes) -> str:
    """As DVC 3 hashes a file: of its bytes as they are."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def cached(path: str, md5_then: str, commit: str) -> Path:
    """The file that `path` was at a commit: DVC's cache, else what `dvc get` brings from wherever it is kept. Raises
    `ArtifactError` with the reason where neither has it."""
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
            raise ArtifactError(f"{path} of {commit[:7]} is in no cache or remote of DVC") from None
        with artifacts.atomic_file(kept) as tmp:
            shutil.copyfile(rows, tmp)
    return kept
