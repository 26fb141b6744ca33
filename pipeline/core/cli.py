"""Shared by all command lines: quiet libraries, one result line, errors without a traceback."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from pipeline.core import isolate, quiet
from pipeline.core.errors import QuantgateError

if TYPE_CHECKING:
    from tqdm import tqdm


def run(stage: Callable[..., Any]) -> None:
    """Run a function as a command line."""
    call(_alone(stage))


def command(work: Callable[..., Any], name: str, examples: Sequence[str]) -> Any:
    """A function as one of several commands. examples: for its help."""
    return typer.main.get_command(_alone(work, name, "Examples:\n\n" + "\n\n".join(examples)))


def _alone(work: Callable[..., Any], name: str | None = None, epilog: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=(work.__doc__ or "").split("\n\n")[0], epilog=epilog)(work)
    return app


def call(app: typer.Typer) -> None:
    """Run a command line. A `QuantgateError` is printed as one line, with exit code 1. SIGTERM acts like Ctrl-C, so that temporary
    files are removed and helper processes stopped."""
    quiet.libraries()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if "DVC_STAGE" in os.environ:  # a person's command may outlive its shell, as with nohup
        isolate.end_with_parent()
    try:
        code = app(standalone_mode=False)  # typer turns Ctrl-C and sys.exit into a returned code
    except QuantgateError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        # usage errors of typer and click have `show`; anything else is a bug and keeps its traceback
        if of_disk := isolate.disk_error(e):
            sys.exit(f"error: {of_disk}")
        if not hasattr(e, "show"):
            raise
        e.show()
        sys.exit(getattr(e, "exit_code", 2))
    if isinstance(code, int) and code:
        sys.exit(code)


def leave() -> NoReturn:
    """End the process right after its exit handlers: destroying torch's objects takes most of a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def say(stage: str, text: str) -> None:
    print(f"{stage:<10} {text}", file=quiet.kept_terminal, flush=True)  # None: stdout


def table(columns: Sequence[str], rows: Iterable[dict[str, str]], *, title: str | None = None, left: Sequence[str] = ()) -> None:
    """Print a table; in a log it is as wide as it needs to be. left: columns of text, aligned to the left."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title)
    for column in columns:
        grid.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        grid.add_row(*(row[c] for c in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(grid)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in [rows[0], *(row.values() for row in rows)])
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *lines])


def progress(total: int, what: str, unit: str, file: Any = None) -> tqdm[Any]:
    """A progress bar on a terminal; in a log, a line every ten seconds."""
    from tqdm import tqdm  # late: its import reads TQDM_MININTERVAL, which `call` sets

    stream = file or quiet.terminal()
    interval = 0.1 if stream.isatty() else 10.0
    return tqdm(total=total, desc=what, unit=unit, file=stream, leave=False, mininterval=interval)
