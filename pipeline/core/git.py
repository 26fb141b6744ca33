"""Ask git what a commit holds and where this folder stands. Nothing is written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pipeline.core.errors import ArtifactError

ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}  # git sets them for hooks, and another repository's may be left over


def ask(*words: str) -> bytes | None:
    """What a git command prints; None where it fails: no repository, no such commit or file, git not installed."""
    try:
        env = {k: v for k, v in os.environ.items() if k not in ELSEWHERE}
        done = subprocess.run(["git", *words], capture_output=True, env=env)
    except FileNotFoundError:
        return None
    if b"dubious ownership" in done.stderr:
        raise ArtifactError(f"git refuses another user's folder: git config --global --add safe.directory {Path.cwd()}")
    return done.stdout if done.returncode == 0 else None


def line(*words: str) -> str | None:
    printed = ask(*words)
    return None if printed is None else printed.decode(errors="replace").strip()


def show(commit: str, path: Path) -> bytes | None:
    """A file as it is at a commit; None where it is not in git there. path: from the working directory."""
    return ask("show", f"{commit}:./{path.as_posix()}")
