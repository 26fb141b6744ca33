"""What libraries need around them: their output in a log file, at the level of file descriptors, so that C++ and threads obey
too; and settings that libraries read when they are imported."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pipeline.core import quota

kept_terminal: TextIO | None = None  # stderr of the process that started this one, where this one's own goes to a log


def terminal() -> TextIO:
    """Where a person looks: this process's stderr, or what was kept of it."""
    return kept_terminal or sys.stderr


def keep_terminal() -> None:
    """Call before stderr goes to a log, in a process of which nothing else is to be seen."""
    global kept_terminal
    kept_terminal = os.fdopen(os.dup(2), "w", errors="replace")


@contextmanager
def output_to(log: Path) -> Iterator[TextIO]:
    """Redirect stdout and stderr to `log`, unless they go to a log already; yields the terminal's stderr for a progress bar."""
    if kept_terminal:
        yield kept_terminal
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    shown = os.fdopen(os.dup(2), "w", errors="replace")
    try:
        with log.open("wb") as f:
            os.dup2(f.fileno(), 1)
            os.dup2(f.fileno(), 2)
            yield shown
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, fd in zip((1, 2), saved):
            os.dup2(fd, target)
            os.close(fd)
        shown.close()


def before_sharing_cores() -> None:
    """Call before torch is imported where its work takes turns with threads of our own: GNU OpenMP's workers, done with a
    product, keep a core busy with waiting for the next one; this cuts that short (torch's own speed stays the same)."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def before_gptqmodel() -> None:
    """Call before gptqmodel is imported, which reads this: with one worker, on a machine of two cores, its loading stops."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, quota.processors())))


def libraries() -> None:
    """Keep the pages that model libraries print out of a stage's output, and give them a home; their errors still come through.

    Where nothing listens, as to a daemon, nothing is said; a terminal or log that takes ASCII only gets question marks.
    """
    sys.stdout, sys.stderr = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - a container's user without a name: Path.home() raises, MLflow's import too
        os.environ["HOME"] = tempfile.gettempdir()
    if not sys.stderr.isatty():  # a log wants a line now and then, not ten a second
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.basicConfig(level=logging.ERROR)
    for name in (
        "torch.utils._pytree",
        "torchao",
        "lm_eval",
        "datasets",
        "httpx",
        "mlflow",
        "alembic",
        "bitsandbytes",
        "llama-cpp-python",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
