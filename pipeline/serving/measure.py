"""Measure one server: from its launch or URL through the probe to the last row and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from pipeline.core import artifacts, cli
from pipeline.core.errors import DataError, ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.records import TextRow
from pipeline.evalset import load_texts
from pipeline.metrics.definitions import SERVED
from pipeline.metrics.serving import Objective, in_a_round, level, saturation_point, scenarios, warm_ups
from pipeline.serving import launch, probe
from pipeline.serving.client import KEY, Endpoint, Request, Row, address, ask, connected, key_from
from pipeline.serving.load import closed, opened, schedule
from pipeline.speed.schedule import Prompts

CHARACTERS = 4  # of English text in a token, where no tokenizer counts them
OPENING = 24  # prompts differ within their first characters or tokens, so that a prefix cache has no hits
CONFIDENCE = 0.95
TEMPLATE_TOKENS = 256  # that a chat template and an end token may add to a prompt
END_TOKENS = 16  # that a server may add to a prompt without a template
PROBE_TOKENS = 512  # the most that a request of the probe takes, with any tokenizer


@dataclass(frozen=True)
class Plan:
    """What is asked of a server. requests: in a level and round, but at least four for each concurrent one; warmups: in a level,
    but one for each concurrent one unless 0, so that no slot of the server starts cold."""

    concurrency: Sequence[int] = (1, 2, 4, 8, 16)
    rates: Sequence[float] = ()
    requests: int = 16
    rounds: int = 3
    warmups: int = 2
    prompt_tokens: int = 256
    output_tokens: int = 32
    forced: bool = True
    objective: Objective = field(default_factory=Objective)
    seed: int = 0

    def levels(self) -> list[tuple[str, int]]:
        """(scenario, requests in a round) of each level; closed ones in order of concurrency."""
        return [(name, in_a_round(name, self.requests)) for name in scenarios(self.concurrency, self.rates)]

    def prompts(self) -> int:
        """The number of different prompts that the run needs."""
        return sum(self.rounds * n + warm_ups(name, self.warmups) for name, n in self.levels())


def objective_of(text: str) -> Objective:
    """Parse `ttft_ms=500,tpot_ms=50`. Raises `ParamsError` for another name or a limit that is not positive."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        names = list(Objective.__dataclass_fields__)
        if name.strip() not in names:
            raise ParamsError(f"--objective {part!r}: unknown limit {name.strip()!r}{did_you_mean(name, names)}")
        limits[name.strip()] = positive(value, f"--objective {part!r}")
    return Objective(**limits)


def positive(text: str, option: str) -> float:
    """A positive, finite number. Raises `ParamsError` that names the option."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ParamsError(f"{option}: {text!r} is not a positive number")
    return value


@contextmanager
def endpoint_of(
    url: str | None, kind: str | None, folder: Path | None, plan: Plan, *, tokenizer: Any = None, model: str = "",
    chat: bool = False, timeout_s: float = 120.0, key_env: str = KEY, threads: int = 1, options: dict[str, Any] | None = None,
) -> Iterator[tuple[Endpoint, Row | None]]:  # fmt: skip
    """(the endpoint, facts of the launch): the server at `url`, or one of `kind` that runs for the block on a model's folder.
    tokenizer: of the model, or None; options: the variant's engine options."""
    count = (lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)) if tokenizer else None
    if not kind or folder is None:
        yield Endpoint(address(url or "", key_env), model, chat, timeout_s, key_from(key_env), count, key_env), None
        return
    parallel, context = max(plan.concurrency, default=8), context_of(plan, tokenizer is not None, chat)
    with launch.launched(kind, folder, threads=threads, parallel=parallel, context=context, options=options) as server:
        yield Endpoint(server.url, model, chat, timeout_s, server.key, count, key_env), server.facts


def context_of(plan: Plan, is_counted: bool, is_chat: bool) -> int:
    """The context that one request needs. No more: a server reserves memory for all requests at once, and refuses a context longer
    than the model's. A prompt whose tokens were not counted may have half as many again."""
    spare = max(TEMPLATE_TOKENS if is_chat else END_TOKENS, 0 if is_counted else plan.prompt_tokens // 2)
    return max(PROBE_TOKENS, plan.prompt_tokens + plan.output_tokens + spare)


def load_tokenizer(path: Path | None) -> Any:
    """A tokenizer.json, or a model folder's; None for None."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(f"--tokenizer {path}: {file} does not exist; name a tokenizer.json or a folder that has one")
    return Tokenizer.from_file(str(file))


def prompts(documents: Sequence[TextRow], plan: Plan, tokenizer: Any, as_ids: bool) -> list[Any]:
    """The plan's prompts: token ids, or text of about as many tokens where ids cannot be sent."""
    text = "\n\n".join(d["text"] for d in documents)
    if tokenizer is None:
        return pieces(text, CHARACTERS * plan.prompt_tokens, plan.prompts(), plan.seed)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = pieces(ids, plan.prompt_tokens, plan.prompts(), plan.seed)
    return cut if as_ids else [tokenizer.decode(p) for p in cut]


def pieces(source: Sequence[Any], length: int, count: int, seed: int) -> list[Any]:
    """`count` stretches of a text (`length` characters) or of token ids, each with another opening."""
    cutter = Prompts(source, seed, starts=range(len(source) - length + 1), opening=OPENING)
    try:
        return [cutter.cut(length) for _ in range(count)]
    except DataError:
        made = f"the text makes {len(cutter.openings)} different prompts of {length}"
        raise DataError(f"{made}; {count} are needed: add text, or ask for fewer") from None


def unfinished(rows: Path) -> Path:
    """Where rows lie, round by round, until a run ends. No metric uses them: rounds of two runs differ."""
    return rows.with_suffix(".unfinished.jsonl")


async def measured(
    endpoint: Endpoint, plan: Plan, corpus: Path, tokenizer: Any, only_probe: bool, rows: Path | None = None
) -> tuple[Row, Plan, list[Row]]:
    """(what the endpoint can do, the plan as it was carried out, rows). rows: the file that they will be written to."""
    keep = partial(artifacts.write_jsonl, unfinished(rows)) if rows else lambda _: None
    async with connected(endpoint) as client:
        endpoint, abilities = await probe.probe(client, endpoint)
        if only_probe:
            return abilities, plan, []
        plan = replace(plan, forced=plan.forced and abilities["ignore_eos"]["value"] is not False)
        texts = prompts(load_texts(corpus), plan, tokenizer, as_ids=not endpoint.chat)
        with cli.progress(len(texts), "serving", "request") as bar:
            return abilities, plan, await run(client, endpoint, plan, texts, bar.update, keep)


async def run(
    client: httpx2.AsyncClient, endpoint: Endpoint, plan: Plan, texts: Sequence[Any], tick: Callable[[], object],
    keep: Callable[[list[Row]], object] = lambda _: None,
) -> list[Row]:  # fmt: skip
    """Every level's warm-ups, then rounds over all levels, forwards and backwards: a drift of the machine affects all levels
    alike. keep: called with all rows so far after each round."""
    unused = iter(texts)
    rng = np.random.default_rng(plan.seed)
    ask_one, rows = partial(ask, client, endpoint), list[Row]()

    def take(n: int) -> list[Request]:
        return [Request(next(unused), plan.output_tokens, forced=plan.forced) for _ in range(n)]

    for number in range(plan.rounds):
        for name, n in plan.levels()[:: -1 if number % 2 else 1]:
            if number == 0:
                warmups = warm_ups(name, plan.warmups)
                rows += _labelled(await closed(ask_one, take(warmups), max(1, warmups), tick=tick), name, None)
            kind, _, size = name.partition("-")
            if kind == "closed":
                answered = await closed(ask_one, take(n), int(size), tick=tick)
            else:
                answered = await opened(ask_one, take(n), schedule(float(size), n, rng), tick=tick)
            rows += _labelled(answered, name, number)
        keep(rows)
    return rows


def _labelled(rows: list[Row], scenario: str, number: int | None) -> Iterator[Row]:
    """Rows with their level and round; a warm-up has no round."""
    for row in rows:
        yield {"round": number, "scenario": scenario, "warmup": number is None, **row}


def figures(rows: list[Row], plan: Plan, confidence: float = CONFIDENCE, between: float | None = None) -> Row:
    """{levels: {scenario: metrics}, knee, objective, about} of a run's rows. between: the variation between whole runs."""
    by_level = {name: [r for r in rows if r["scenario"] == name] for name, _ in plan.levels()}
    by_concurrency = {int(name.partition("-")[2]): r for name, r in by_level.items() if name.startswith("closed-")}
    return {
        "levels": {name: level(r, confidence, plan.objective, between) for name, r in by_level.items()},
        "knee": saturation_point(by_concurrency, confidence),
        "objective": plan.objective.__dict__,
        "about": {name: d.about for name, d in SERVED.items()},
    }


def failure(rows: list[Row]) -> str | None:
    """Why a run has no metrics: none of its requests was complete; else None."""
    counted = [r for r in rows if not r["warmup"]]
    if any(r["ok"] for r in counted):
        return None
    return f"none of {len(counted)} requests was complete; the first failed with: {counted[0]['error']}"


def saturation(knee: Row) -> str:
    """The saturation point as text."""
    if knee["value"] is None:
        return f"no saturation point: {knee['warnings'][0]}"
    return f"saturation point: {knee['value']:g} concurrent requests"
