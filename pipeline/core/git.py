"""Read from git: files of a commit, and the state of this folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pipeline.core.errors import ArtifactError

ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}  # set by git for hooks, perhaps of another repository


def ask(*words: str) -> bytes | None:
    """A git command's output; None if it fails: no repository, no such commit or file, git not installed."""
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
    """A file's content at a commit, None if git has no such file. path: from the working directory."""
    return ask("show", f"{commit}:./{path.as_posix()}")
