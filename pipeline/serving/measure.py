"""Which requests make up a run, and what their rows come to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import numpy as np

from pipeline.core.errors import DataError, ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.knee import knee
from pipeline.numbers.serving_figures import DEFINITIONS, Objective, in_a_round, level, scenarios, warm_ups
from pipeline.serving.client import Endpoint, Request, Row, ask
from pipeline.serving.load import closed, opened, schedule

CHARACTERS = 4  # of English text to a token, where no tokenizer says how many
OPENING = 24  # prompts differ within their first characters, or tokens: a prefix cache finds nothing
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Plan:
    """What is asked of a server. requests: a level and round, but never fewer than four for each that is asked at once;
    warmups: a level, but none, or one for each that is asked at once: no slot of the server starts cold."""

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
        """How many different prompts the run needs."""
        return sum(self.rounds * n + warm_ups(name, self.warmups) for name, n in self.levels())


def objective_of(text: str) -> Objective:
    """`ttft_ms=500,tpot_ms=50` as limits. Raises `ParamsError` for another name, or what is no positive number."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        known = list(Objective.__dataclass_fields__)
        if name.strip() not in known:
            raise ParamsError(f"--objective {part!r}: {name.strip()!r} is no limit{did_you_mean(name, known)}")
        limits[name.strip()] = positive(value, f"--objective {part!r}")
    return Objective(**limits)


def positive(text: str, what: str) -> float:
    """A positive, finite number. Raises `ParamsError` that says which option holds none."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ParamsError(f"{what}: {text!r} is no positive number")
    return value


def pieces(source: Sequence[Any], length: int, count: int, seed: int) -> list[Any]:
    """`count` stretches of `length` characters (of a str) or tokens (of a list), each with an opening of its own.

    Raises `DataError` if there is too little text for that.
    """
    starts = list(range(max(0, len(source) - length + 1)))
    random.Random(seed).shuffle(starts)
    found: dict[Any, Any] = {}
    for start in starts:
        opening = source[start : start + min(length, OPENING)]
        found.setdefault(opening if isinstance(opening, str) else tuple(opening), source[start : start + length])
        if len(found) == count:
            return list(found.values())
    raise DataError(f"the text makes {len(found)} different prompts of {length}; {count} are needed: give more text, or ask less")


def prompts(documents: list[Row], plan: Plan, tokenizer: Any, as_ids: bool) -> list[Any]:
    """As many prompts as the plan needs: token ids, or text of about that many tokens where ids cannot be sent."""
    text = "\n\n".join(d["text"] for d in documents)
    if tokenizer is None:
        return pieces(text, CHARACTERS * plan.prompt_tokens, plan.prompts(), plan.seed)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = pieces(ids, plan.prompt_tokens, plan.prompts(), plan.seed)
    return found if as_ids else [tokenizer.decode(p) for p in found]


async def run(
    client: httpx2.AsyncClient, endpoint: Endpoint, plan: Plan, asked: Sequence[Any], tick: Callable[[], object],
    keep: Callable[[list[Row]], object] = lambda _: None,
) -> list[Row]:  # fmt: skip
    """Every level's warm-ups, then rounds over all levels, forwards and back: a machine that drifts touches all alike.

    keep: gets all rows so far after each round.
    """
    texts = iter(asked)
    rng = np.random.default_rng(plan.seed)
    one, rows = partial(ask, client, endpoint), list[Row]()

    def take(n: int) -> list[Request]:
        return [Request(next(texts), plan.output_tokens, forced=plan.forced) for _ in range(n)]

    for number in range(plan.rounds):
        for name, n in plan.levels()[:: -1 if number % 2 else 1]:
            if number == 0:
                ready = warm_ups(name, plan.warmups)
                rows += _labelled(await closed(one, take(ready), max(1, ready), tick=tick), name, None)
            kind, _, size = name.partition("-")
            if kind == "closed":
                found = await closed(one, take(n), int(size), tick=tick)
            else:
                found = await opened(one, take(n), schedule(float(size), n, rng), tick=tick)
            rows += _labelled(found, name, number)
        keep(rows)
    return rows


def _labelled(rows: list[Row], scenario: str, number: int | None) -> Iterator[Row]:
    """Rows with what they belong to; a warm-up has no round."""
    for row in rows:
        yield {"round": number, "scenario": scenario, "warmup": number is None, **row}


def figures(rows: list[Row], plan: Plan, confidence: float = CONFIDENCE, between: float | None = None) -> Row:
    """{levels: {scenario: metrics}, knee, objective, definitions} of a run's rows. between: what whole runs differ by."""
    by = {name: [r for r in rows if r["scenario"] == name] for name, _ in plan.levels()}
    shut = {int(name.partition("-")[2]): own for name, own in by.items() if name.startswith("closed-")}
    return {
        "levels": {name: level(own, confidence, plan.objective, between) for name, own in by.items()},
        "knee": knee(shut, confidence),
        "objective": plan.objective.__dict__,
        "about": {name: d.about for name, d in DEFINITIONS.items()},
    }
