"""`quantgate COMMAND`, the same as `python -m pipeline COMMAND`. dvc.yaml runs the stages' own `python -m pipeline.<stage>`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from pipeline.core import cli


class Command(NamedTuple):
    """target: module:function, imported when the command runs; examples: a line each."""

    target: str
    about: str
    examples: tuple[str, ...]


COMMANDS = {
    "check": Command("pipeline.check:main", "Find faults in params.yaml and data before any work.", ("quantgate check",)),
    "status": Command(
        "tools.status:main", "Say what would run, and how long it took last time.",
        ("quantgate status", "quantgate status --json"),
    ),
    "doctor": Command(
        "tools.doctor:main", "Check machine, packages, network, git, DVC and MLflow; say what to do.",
        ("quantgate doctor", "quantgate doctor --json"),
    ),
    "gate": Command(
        "pipeline.gate:main", "Judge the results; with --enforce, exit by the verdict.",
        ("quantgate gate --enforce", "quantgate gate --enforce --baseline main --comment", "quantgate gate --enforce --json"),
    ),
    "report": Command(
        "pipeline.report:main", "Write report.html and report.md, or print the table.",
        ("quantgate report --summary", "quantgate report --readme"),
    ),
    "explain": Command(
        "tools.explain:main", "Say what a metric means, its values, and the rows behind it.",
        ("quantgate explain kld_mean", "quantgate explain acc_delta/facts"),
    ),
    "track": Command(
        "tools.track:main", "Log the results to MLflow; move the champion.",
        ("quantgate track --promote int8", "quantgate track --rollback --reason TEXT"),
    ),
    "serve": Command(
        "tools.serve_url:main", "Measure any OpenAI-compatible server.",
        ("quantgate serve http://127.0.0.1:8000 --concurrency 1,2,4 --objective ttft_ms=500",),
    ),
    "batch": Command(
        "tools.batch:main", "Send many requests to a server, each once.",
        ("quantgate batch http://127.0.0.1:8000 requests.jsonl results.jsonl",),
    ),
    "bundle": Command(
        "tools.bundle:main", "Pack what checks these results on another machine.", ("quantgate bundle out.zip",),
    ),
    "compare": Command(
        "tools.bundle:compare", "Compare these results with another machine's bundle.", ("quantgate compare out.zip",),
    ),
    "fan-out": Command(
        "pipeline.fan_out:main", "Run what is out of date on many GPUs or machines, by Ray.",
        ("quantgate fan-out", "quantgate fan-out --address ray://host:10001 --remote"),
    ),
    "evalset": Command(
        "pipeline.evalset.__main__:main", "Check evaluation sets; say what each can resolve.", ("quantgate evalset",),
    ),
}  # fmt: skip


class Late(TyperGroup):
    """Commands whose modules are imported when they run: help and completion answer at once."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, loaded(name) if name else command, rest


def loaded(name: str) -> Any:
    """A command with its own options."""
    module, _, function = COMMANDS[name].target.partition(":")
    work: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return cli.command(work, name=name, examples=COMMANDS[name].examples)


def app() -> typer.Typer:
    """All commands, without their options."""
    made = typer.Typer(cls=Late, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.callback(help="Can we ship this model at INT4? `make repro` measures; these commands check, judge and show.")(lambda: None)
    for name, command in COMMANDS.items():
        made.command(name, help=command.about)(lambda: None)
    return made


def main() -> None:
    """Run the command line."""
    cli.call(app())


if __name__ == "__main__":
    main()
