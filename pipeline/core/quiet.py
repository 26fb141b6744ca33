"""Redirect libraries' output to a log, by file descriptor so that C++ obeys too, and set the variables that they read on import."""

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

kept_terminal: TextIO | None = None  # the parent's stderr, if this process's own goes to a log


def terminal() -> TextIO:
    """The stream that a person sees: this process's stderr, or `kept_terminal`."""
    return kept_terminal or sys.stderr


@contextmanager
def output_to(log: Path) -> Iterator[TextIO]:
    """Redirect stdout and stderr to `log`, unless they already go to one. Yields the terminal's stderr, for progress bars."""
    if kept_terminal:
        yield kept_terminal
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal_copy = os.fdopen(os.dup(2), "w", errors="replace")
    try:
        with log.open("wb") as f:
            os.dup2(f.fileno(), 1)
            os.dup2(f.fileno(), 2)
            yield terminal_copy
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, fd in zip((1, 2), saved):
            os.dup2(fd, target)
            os.close(fd)
        terminal_copy.close()


def before_sharing_cores() -> None:
    """Call before importing torch if its work alternates with our threads: else idle GNU OpenMP workers spin while they wait."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def before_gptqmodel() -> None:
    """Call before importing gptqmodel: with one worker, its default on two cores, loading hangs."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, quota.processors())))


def libraries() -> None:
    """Silence model libraries except for errors, and give them a home folder. Discard output if there is no stream, as in a daemon;
    write question marks to one that takes only ASCII."""
    sys.stdout, sys.stderr = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - a container's nameless user: Path.home() and MLflow's import raise
        os.environ["HOME"] = tempfile.gettempdir()
    if not sys.stderr.isatty():  # a log wants a line now and then, not ten a second
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    for variable in (
        "TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_DATASETS_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_TELEMETRY=1"
    ).split():
        os.environ.setdefault(*variable.split("="))
    for category in (FutureWarning, UserWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    logging.basicConfig(level=logging.ERROR)
    for name in "torch.utils._pytree torchao lm_eval datasets httpx mlflow alembic bitsandbytes llama-cpp-python".split():
        logging.getLogger(name).setLevel(logging.ERROR)
