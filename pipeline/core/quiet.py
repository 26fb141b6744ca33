"""What libraries need around them: their output in a log file, at the level of file descriptors, so that C++ and threads obey
too; and settings that libraries read when they are imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def output_to(log: Path) -> Iterator[TextIO]:
    """Redirect stdout and stderr to `log`; yields the terminal's stderr for a progress bar."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(saved[1]), "w")
    try:
        with log.open("wb") as f:
            os.dup2(f.fileno(), 1)
            os.dup2(f.fileno(), 2)
            yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, fd in zip((1, 2), saved):
            os.dup2(fd, target)
            os.close(fd)
        terminal.close()


def before_sharing_cores() -> None:
    """Call before torch is imported where its work takes turns with threads of our own: GNU OpenMP's workers, done with a
    product, keep a core busy with waiting for the next one; this cuts that short (torch's own speed stays the same)."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def before_gptqmodel() -> None:
    """Call before gptqmodel is imported, which reads this: with one worker, on a machine of two cores, its loading stops."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, os.cpu_count() or 2)))
