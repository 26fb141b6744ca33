"""One run against one server, from the probe to the last row; by hand (`python -m pipeline.serving`) and as a stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, cli
from pipeline.core.errors import DataError
from pipeline.evalset import load_texts
from pipeline.serving import launch, measure, probe
from pipeline.serving.client import Endpoint, Row, connected
from pipeline.serving.launch import Launched
from pipeline.serving.measure import Plan

TEMPLATE = 256  # tokens that a chat's template, and an end, may add to a prompt
ENDS = 16  # that a server may put around one which is no chat
PROBED = 512  # tokens: no request of the probe takes more, whatever the tokenizer


def unfinished(rows: Path) -> Path:
    """Where the rows of a run lie that has not ended, round by round, for those who want to see what a stopped run had come
    to. No figure is made of them: rounds of two runs are not alike."""
    return rows.with_suffix(".unfinished.jsonl")


async def measured(
    endpoint: Endpoint, plan: Plan, corpus: Path, tokenizer: Any, only_probe: bool, rows: Path | None = None
) -> tuple[Row, Plan, list[Row]]:
    """(what the endpoint can do, the plan as it could be held, rows). rows: the file that they will be written to."""
    keep = partial(artifacts.write_jsonl, unfinished(rows)) if rows else lambda _: None
    async with connected(endpoint) as client:
        endpoint, found = await probe.probe(client, endpoint)
        if only_probe:
            return found, plan, []
        plan = replace(plan, forced=plan.forced and found["ignore_eos"]["value"] is not False)
        asked = measure.prompts(load_texts(corpus), plan, tokenizer, as_ids=not endpoint.chat)
        with cli.progress(len(asked), "serving", "request") as bar:
            return found, plan, await measure.run(client, endpoint, plan, asked, bar.update, keep)


def started(
    kind: str | None, folder: Path | None, plan: Plan, *, threads: int, is_counted: bool, is_chat: bool, **more: Any
) -> AbstractContextManager[Launched | None]:
    """A server on a model's folder with room for a plan, or None where no kind is named: then it is up already.

    more: see `launch.launched`.
    """
    if not kind or folder is None:
        return nullcontext(None)
    most, context = max(plan.concurrency, default=8), context_of(plan, is_counted, is_chat)
    return launch.launched(kind, folder, threads=threads, parallel=most, context=context, **more)


def load_tokenizer(path: Path | None) -> Any:
    """A tokenizer.json, or the one of a model folder; None if none was named."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(f"--tokenizer {path}: {file} is missing; name a tokenizer.json or a folder that has one")
    return Tokenizer.from_file(str(file))


def counter(tokenizer: Any) -> Callable[[str], int] | None:
    """Tokens of a text, where there is a tokenizer to count them."""
    return (lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)) if tokenizer else None


def context_of(plan: Plan, is_counted: bool, is_chat: bool) -> int:
    """Tokens that a launched server must take for one request, and no more: it keeps memory for all of them at once, times
    requests at once, and a model that was trained on short contexts is refused long ones. A prompt whose tokens nobody
    counted may have half as many again."""
    spare = max(TEMPLATE if is_chat else ENDS, 0 if is_counted else plan.prompt_tokens // 2)
    return max(PROBED, plan.prompt_tokens + plan.output_tokens + spare)
