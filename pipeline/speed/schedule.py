"""Requests to a model: prompts that no cache holds, and, after the paired rounds, sweeps over contexts, batches and prefixes.
Sweeps show how the variant scales, not how it compares: few tokens and two repetitions each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.core.errors import ArtifactError, DataError, Unsupported
from pipeline.core.params import Requests
from pipeline.core.records import TextRow, TimedAnswer, TimingRow

HEAD = 16  # leading tokens in which any two prompts differ
OUTPUT = 8  # tokens of a sweep's replies
REPEATS = 2
BATCH_PROMPT = 64  # tokens: a batch is about decoding
SWEPT: dict[str, tuple[str, ...]] = {  # metrics of each kind of scenario
    "context": ("ttft_ms", "prefill_tok_s", "tpot_ms", "decode_tok_s", "peak_memory_bytes"),
    "batch": ("ttft_ms", "tpot_ms", "decode_tok_s", "peak_memory_bytes"),
    "prefix": ("ttft_ms",),
}
PHASES = ("tokenize", "prefill", "decode", "sampling", "detokenize")
PREFIX_SHARE = 0.75  # of a prompt that the next one repeats


@dataclass
class Step:
    """One request of a sweep. lengths: tokens of each prompt; how: see `Worker.ask`."""

    scenario: str
    lengths: list[int]
    how: str = "stream"
    repeat: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.scenario.partition("-")[0]


@dataclass
class Plan:
    """A sweep's steps in order. notes: warnings of a scenario's metrics; missing: why a scenario or a kind (`batch`) has none."""

    steps: list[Step]
    notes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def lacks(self, step: Step) -> bool:
        return not self.missing.keys().isdisjoint((step.scenario, step.kind))

    def absent(self) -> dict[str, str]:
        lost = [step for step in self.steps if self.lacks(step)]
        return {step.scenario: self.missing.get(step.scenario) or self.missing[step.kind] for step in lost}


def tokens_of(documents: Sequence[TextRow], tokenizer: Any) -> list[int]:
    return [t for d in documents for t in tokenizer.encode(d["text"] + "\n\n", add_special_tokens=False).ids]


class Prompts:
    """Cut prompts from token ids or a text, with distinct openings, so that no prefix cache can help. starts: where a prompt may
    begin; opening: number of its first tokens, or characters, that must differ."""

    def __init__(self, source: Sequence[Any], seed: int, *, starts: range | None = None, opening: int = HEAD) -> None:
        self.source, self.opening = source, opening
        self.starts = list(range(0, len(source), opening) if starts is None else starts)
        random.Random(seed).shuffle(self.starts)
        self.openings: set[tuple[Any, ...]] = set()

    def cut(self, length: int) -> Any:
        """A prompt of exactly `length` tokens (or characters). Raises `DataError` if the text has no more."""
        for start in self.starts:
            piece = self.source[start : start + length]
            head = tuple(piece[: self.opening])
            # openings that may equal this one: the same, or of another length (prompts shorter than an opening)
            alike = (o for o in self.openings if o == head or len(o) != len(head))
            if len(piece) == length and not any(head[: len(o)] == o[: len(head)] for o in alike):
                self.openings.add(head)
                self.starts.remove(start)
                return piece
        there = f"{len(self.source)} tokens of text make no more than {len(self.openings)} different prompts"
        raise DataError(f"{there}, and none of {length} tokens besides; add text to benchmark.prompts")


def plan(setup: Requests, longest: int) -> Plan:
    """The sweep of a tier for a model (and a text) with room for `longest` tokens."""
    sweep = Plan([])
    contexts = [room for room in sorted({min(asked, longest) for asked in setup.contexts}) if room > OUTPUT]
    for asked in (asked for asked in sorted(setup.contexts) if asked > longest):
        why = f"{asked} tokens were asked for; {longest} is the most that engine, model and text hold"
        sweep.notes[f"context-{longest}"] = why
    passes = [
        [Step(f"context-{c}", [c - OUTPUT]) for c in contexts],
        [Step(f"batch-{b}", [BATCH_PROMPT] * b, "stream_batch") for b in sorted(set(setup.batches))],
        [Step(f"prefix-{t}", [setup.prompt_tokens], "stream_on") for t in ("cold", "warm") if contexts],
    ]
    sweep.steps = [replace(step, repeat=repeat) for steps in passes for repeat in range(REPEATS) for step in steps]
    return sweep


def published(setup: Requests) -> dict[str, list[str]]:
    """{metric: its parts} from a tier's requests, for a model with room for all of them."""
    parts: dict[str, list[str]] = {"phase_ms": list(PHASES)}
    for scenario in dict.fromkeys(step.scenario for step in plan(setup, max(setup.contexts, default=0)).steps):
        for name in SWEPT[scenario.partition("-")[0]]:
            parts.setdefault(name, []).append(scenario)
    return parts


def fill(plan: Plan, prompts: Prompts) -> None:
    """Give every step its prompts, if the text has enough; a warm prompt begins like the cold one before it."""
    cold: list[int] = []
    for step in plan.steps:
        if plan.lacks(step):
            continue
        try:
            step.prompts = [prompts.cut(length) for length in step.lengths]
        except DataError as e:
            plan.missing[step.kind if step.kind == "prefix" else step.scenario] = str(e)
            continue
        if step.scenario == "prefix-warm":
            shared = int(PREFIX_SHARE * len(cold))
            step.prompts = [cold[:shared] + step.prompts[0][shared:]]
        elif step.scenario == "prefix-cold":
            cold = step.prompts[0]


def run(worker: Any, plan: Plan) -> Iterator[TimingRow]:
    """The sweep's rows. What the engine cannot do goes to the plan's `missing`; a process that dies ends the sweep with a row."""
    died = False
    for at, step in enumerate(plan.steps):
        if died or plan.lacks(step):
            continue
        answer: TimedAnswer
        try:
            if step.how == "stream_batch":
                answer = worker.ask_batch(step.prompts, OUTPUT)
            else:
                answer = worker.ask(step.prompts[0], OUTPUT, how=step.how, fresh=True)
        except Unsupported as e:
            plan.missing[step.kind] = str(e)
            continue
        except ArtifactError as e:
            died = True
            answer = {"ok": False, "error": str(e), "t_submit": None, "t_tokens": [], "batch": len(step.prompts)}
            done = {s.scenario for s in plan.steps[: at + 1]}
            plan.missing |= {s.scenario: f"the sweep ended before: {e}" for s in plan.steps[at:] if s.scenario not in done}
        yield {
            "round": step.repeat, "scenario": step.scenario, "who": "variant", "warmup": False, "prompt_tokens": step.lengths[0],
            **answer,
        }  # fmt: skip
