"""A backend's options are the keyword arguments of its function; this checks params against that signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.core.droppings import data_files
from pipeline.core.errors import ParamsError
from pipeline.core.explain import by_keys, did_you_mean, in_words
from pipeline.core.records import Options

BITS = re.compile(r"(?<!\d)(32|16|8|6|5|4|3|2)(?!\d)")


def names_in(folder: Path) -> list[str]:
    """Names of the backends in a folder: one file each."""
    return [p.stem for p in data_files(folder, "*.py") if not p.stem.startswith("_")]


def with_defaults(function: Callable[..., Any], options: Options, given: set[str]) -> Options:
    """Every option that a call would use: those given, and the defaults of the rest."""
    parameters = inspect.signature(function).parameters
    return {n: p.default for n, p in parameters.items() if n not in given and n not in options} | options


def nominal_bits(options: Options) -> int | None:
    """Bits that a variant's options name (`bits: 4`, `int8-weight-only`, `Q4_0`); None where they name none."""
    for key in ("bits", "dtype", "scheme", "type", "precision"):
        if match := BITS.search(str(options.get(key, ""))):
            return int(match[1])
    return None


def check_options(owner: str, function: Callable[..., Any], options: Options, given: set[str]) -> None:
    """Raise `ParamsError` where an option is unknown, of the wrong type, or missing.
    given: arguments that the pipeline itself passes. Types are checked strictly: a string is not converted to a number."""
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in given}
    hints = get_type_hints(function, include_extras=True)  # bounds are extras
    for name, value in options.items():
        if name not in parameters:
            raise ParamsError(f"{owner}: unknown option {name!r} = {value!r}{did_you_mean(name, list(parameters))}")
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as e:
            keys, errors = next(iter(by_keys(e.errors(), value).items()))
            raise ParamsError(f"{owner}: option {in_words(errors, (name, *keys))}") from None
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise ParamsError(f"{owner}: option {name!r} is needed and missing")
