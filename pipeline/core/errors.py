"""What can go wrong, as one tree; every message says what, which value, and what to do next.

QuantgateError
├── ParamsError         params.yaml: unknown key, wrong type, value out of range
├── DataError           an evaluation, calibration or prompt file, with its line
├── DownloadError       the base model could not be had (offline, gated, missing, wrong hash)
├── ArtifactError       something an earlier stage should have written is missing, stale or damaged
└── NoResult            ends one variant's stage and not the run; status and reason become part of the result
    ├── InvalidVariant  the variant ran, but what it computes cannot be used (NaN, overflow, not quantized)
    ├── Unsupported     this machine, package or model cannot do it
    └── Crashed         a library ended the process that ran the variant, or raised what nobody expected
"""

from __future__ import annotations


class QuantgateError(Exception):
    """A mistake or a limit the user can act on: printed as one line, without a traceback."""


class ParamsError(QuantgateError):
    """params.yaml says something that cannot be meant."""


class DataError(QuantgateError):
    """A data file is malformed; the message names file and line."""


class DownloadError(QuantgateError):
    """The base model could not be had."""


class ArtifactError(QuantgateError):
    """An input of a stage is missing, stale or damaged."""


class NoResult(QuantgateError):
    """A stage has no rows of a variant; `status` and `str(error)` are kept in their place."""

    status: str


class InvalidVariant(NoResult):
    """A variant's outputs cannot be used for any figure."""

    status = "invalid"


class Unsupported(NoResult):
    """Something cannot be done here."""

    status = "unsupported"


class Crashed(NoResult):
    """The process that ran a variant died."""

    status = "crashed"
