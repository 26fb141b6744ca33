"""Errors that a user can act on. A message says what is wrong, with which value, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class QuantgateError(Exception):
    """A fault that the user can act on: printed as one line, without a traceback."""


class ParamsError(QuantgateError):
    """params.yaml: unknown key, wrong type, value out of range."""


class DataError(QuantgateError):
    """An evaluation, calibration or prompt file is malformed; the message names file and line."""


class DownloadError(QuantgateError):
    """The base model is unavailable: offline, gated, missing, wrong hash."""


class ArtifactError(QuantgateError):
    """An input of a stage is missing, stale or damaged."""


class NoResult(QuantgateError):
    """Ends one variant's stage and not the run; `status` and message become its result."""

    status: str


class InvalidVariant(NoResult):
    """The variant ran, but its outputs are useless: NaN, overflow, not quantized."""

    status = "invalid"


class Unsupported(NoResult):
    """Impossible with this machine, package or model."""

    status = "unsupported"


class Crashed(NoResult):
    """The variant's process died, or a library raised an unexpected error."""

    status = "crashed"


@contextmanager
def needs(who: str, remedy: str) -> Iterator[None]:
    """Raise `Unsupported` for a package that an import inside lacks."""
    try:
        yield
    except ImportError as e:
        raise Unsupported(f"{who} needs {e.name}; {remedy}") from None
