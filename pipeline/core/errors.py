"""Errors that a user can act on. Every message says what, which value, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class QuantgateError(Exception):
    """A mistake or a limit the user can act on: printed as one line, without a traceback."""


class ParamsError(QuantgateError):
    """params.yaml: unknown key, wrong type, value out of range."""


class DataError(QuantgateError):
    """An evaluation, calibration or prompt file is malformed; the message names file and line."""


class DownloadError(QuantgateError):
    """The base model could not be had: offline, gated, missing, wrong hash."""


class ArtifactError(QuantgateError):
    """An input of a stage is missing, stale or damaged."""


class NoResult(QuantgateError):
    """Ends one variant's stage and not the run; `status` and the message become part of the result."""

    status: str


class InvalidVariant(NoResult):
    """The variant ran, but its outputs cannot be used: NaN, overflow, not quantized."""

    status = "invalid"


class Unsupported(NoResult):
    """This machine, package or model cannot do it."""

    status = "unsupported"


class Crashed(NoResult):
    """The process that ran the variant died, or a library raised what nobody expected."""

    status = "crashed"


@contextmanager
def needs(who: str, remedy: str) -> Iterator[None]:
    """Raise `Unsupported` for a package that an import inside lacks."""
    try:
        yield
    except ImportError as e:
        raise Unsupported(f"{who} needs {e.name}; {remedy}") from None
