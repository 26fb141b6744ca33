"""power: the smallest loss that the chosen tier can tell from none, set against the gate's margins, before anything runs.

A comparison finds a true difference of 2.8 standard errors in 80 % of runs (two-sided 95 %), and a variant without any
loss passes a margin of that size as often. How large the error is depends on how many answers a variant changes, which
was measured once: on this base model (reports/metrics/), else when the sets were recorded (reports/evalsets.json). A task
that neither has takes the recorded tasks' share, once the reference has answered it. `check` prints it; nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import QuantgateError
from pipeline.core.params import HowMany, Params
from pipeline.evalset import load_prompts, load_texts, tasks
from pipeline.gating.rules import MIN_CLUSTERS, bound_of
from pipeline.metrics.definitions import definition
from pipeline.preflight.prior_results import RECORD, Sources
from pipeline.stats.intervals import paired_difference, resolvable, standard_errors

POWER = 0.8
UNKNOWN = "unknown until the reference has answered"
UNSCORED = "no right and wrong"
SHOWN = {"pp": (1.0, "pp"), "fraction": (100.0, "pp"), "ratio": (100.0, "%"), "nats": (1.0, "nats")}
TRAJECTORIES = ("kld_mean", "top1_agreement", "jsd_mean", "moved_10pct", "delta_p_rms")  # measured on them as well as on text
CORPUS = (*TRAJECTORIES, "ppl_ratio")
ROUNDS = ("speed_ratio", "prefill_ratio")


@dataclass(frozen=True)
class Resolution:
    """What n units can resolve. smallest: in the metric's unit, None where it is unknown; held: units that the sets hold;
    source: from what; detail: under which assumption; relative: smallest is in parts of the value (divergences spread as
    they grow); stays: what of `smallest` more units do not make less (whole runs differ)."""

    n: float
    unit: str
    smallest: float | None
    source: str
    detail: str = ""
    held: float = math.nan
    relative: bool = False
    stays: float = 0.0


# --- one task, all tasks, the corpus, the rounds -----------------------------------------------------------------


def task(name: str, count: HowMany, known: Sources) -> Resolution:
    """Accuracy of one task, in pp."""
    n, held = (count if isinstance(count, int) else math.nan), math.nan
    if name in tasks.local_tasks():
        config, rows = tasks.load_task(name)
        n, held = _count(count, len(rows)), len(rows)
        if config.get("output_type") == "loglikelihood_rolling":
            return Resolution(n, "documents", None, UNSCORED)
    found, card = interval(known.metrics.get(f"acc_delta/{name}")), known.recorded(f"tasks/{name}")
    if found:
        flips = [known.metrics[f"flips_to_{way}/{name}"]["value"] for way in ("wrong", "right")]
        detail = f"{sum(flips):.0f} of {found['n']} answers changed"
        return replace(_scaled(found, found["n"], n, "items", f"{known.probe}'s last run"), detail=detail, held=held)
    if math.isnan(n):
        return Resolution(n, "items", None, UNKNOWN)
    if card and "changed" in card:
        score, share = card["reference"], card["changed"]
        families = max(card["half_width"] / _half(card["n"], score, share, known), 1.0)  # items of a family change together
        detail = f"{100 * share:.2g} % of {card['n']} answers changed"
        return Resolution(n, "items", families * _smallest(n, score, share, known), str(RECORD), detail, held)
    return _assumed(name, n, held, known)


def _assumed(name: str, n: float, held: float, known: Sources) -> Resolution:
    """A task that only the reference has answered: as many answers change as in the recorded tasks, at most as many as
    would if both answered independently."""
    shares = [s["changed"] for s in known.record.get("sets", {}).values() if "changed" in s]
    if name not in known.answers or not shares:
        return Resolution(n, "items", None, UNKNOWN, held=held)
    score = known.answers[name]
    share = min(sum(shares) / len(shares), 2 * score * (1 - score))
    detail = f"assuming that {100 * share:.2g} % of answers change, as in the recorded tasks"
    return Resolution(n, "items", _smallest(n, score, share, known), "the reference's answers", detail, held)


def _half(n: float, score: float, share: float, known: Sources) -> float:
    """Half of Newcombe's paired interval in pp, where a share of n answers changes, as often to wrong as to right."""
    lost, right = round(share * n / 2), round(score * n)
    won = max(round(share * n) - lost, 0)
    cells = max(right - lost, 0), lost, won, max(round(n) - right - won, 0)
    found = paired_difference(*cells, confidence=known.settings.compare.confidence)
    assert found.low is not None and found.high is not None  # n is at least 1
    return 50 * (found.high - found.low)


def _smallest(n: float, score: float, share: float, known: Sources) -> float:
    half, confidence = _half(n, score, share, known), known.settings.compare.confidence
    return resolvable(-half, half, confidence=confidence, power=POWER)


def all_tasks(parts: dict[str, Resolution], known: Sources) -> Resolution:
    """Accuracy over all items: as it was over the same tasks, else the tasks' errors by their squares, weighed by items."""
    scored = {name: r for name, r in parts.items() if r.source != UNSCORED}
    n, held = sum(r.n for r in scored.values()), sum(r.held for r in scored.values())
    measured = {name.partition("/")[2] for name in known.metrics if name.startswith("acc_delta/")} - {"all"}
    found = interval(known.metrics.get("acc_delta/all"))
    if found and measured == scored.keys():
        return replace(_scaled(found, found["n"], n, "items", f"{known.probe}'s last run"), held=held)
    unknown = [name for name, r in scored.items() if r.smallest is None]
    if unknown or not scored:
        return Resolution(n, "items", None, UNKNOWN, f"{', '.join(unknown) or 'no task'}", held)
    together = math.sqrt(sum((r.n * (r.smallest or 0)) ** 2 for r in scored.values())) / n
    return Resolution(n, "items", together, " and ".join(dict.fromkeys(r.source for r in scored.values())), held=held)


def corpus(metric: str, known: Sources) -> Resolution:
    """A figure over the corpus, and over trajectories where it is measured on them."""
    s, texts = known.settings, load_texts(Path(known.settings.diverge.corpus))
    held, unit = len(texts), "documents"
    n = _count(s.amount.documents, held)
    if metric in TRAJECTORIES:
        prompts = len(load_prompts(Path(s.diverge.trajectories.prompts)))
        n, held, unit = n + _count(s.amount.trajectories, prompts), held + prompts, "documents and trajectories"
    found = interval(known.metrics.get(metric))
    if found and found.get("clusters"):
        scaled = replace(_scaled(found, found["clusters"], n, unit, f"{known.probe}'s last run"), held=held)
        return _relative(scaled, found["value"]) if metric == "kld_mean" else scaled
    cards = [c for k in known.record.get("sets", {}) if k.startswith("corpus/") and (c := known.recorded(k))]
    if not cards or metric not in ("kld_mean", "ppl_ratio"):
        return Resolution(n, unit, None, "unknown until a variant has been measured", held=held)
    smallest, value = _recorded_kld(cards, n, known) if metric == "kld_mean" else (_recorded_ppl(cards, n), 0.0)
    return _relative(Resolution(n, unit, smallest, str(RECORD), held=held), value)


def judgeable(metric: str, known: Sources) -> str | None:
    """Why the gate will not judge a figure over so few documents, or None. Trajectories weigh less, being shorter: they
    count by their letters, four a token."""
    s, texts = known.settings, load_texts(Path(known.settings.diverge.corpus))
    n = _count(s.amount.documents, len(texts))
    weights = np.full(int(n), np.mean([len(t["text"]) for t in texts]))
    if metric in TRAJECTORIES:
        prompts = _count(s.amount.trajectories, len(load_prompts(Path(s.diverge.trajectories.prompts))))
        weights = np.append(weights, np.full(int(prompts), 4.0 * s.diverge.trajectories.tokens))
    equal = weights.sum() ** 2 / (weights**2).sum()
    if equal >= MIN_CLUSTERS - 0.5:
        return None
    told = f"{len(weights)} weigh as {equal:.0f} equal ones, and a verdict needs {MIN_CLUSTERS}"
    return f"WARNING: INCONCLUSIVE whatever is found: {told}; raise `documents` in tier {s.tier}"


def _recorded_ppl(cards: list[dict[str, Any]], n: float) -> float:
    """From each domain's own resolution: their errors add by their squares, weighed by documents."""
    total = sum(c["n"] for c in cards)
    error = math.sqrt(sum((c["n"] * math.log1p(c["resolvable_ppl"])) ** 2 for c in cards)) / total
    return math.expm1(error * math.sqrt(total / n))


def _recorded_kld(cards: list[dict[str, Any]], n: float, known: Sources) -> tuple[float, float]:
    """(smallest, mean) of the probe's divergence: documents differ within their domains, and domains from each other."""
    klds, sizes, total = [c["kld"][known.record["probe"]] for c in cards], [c["n"] for c in cards], sum(c["n"] for c in cards)
    level = {"confidence": known.record["confidence"], "power": POWER}
    within = sum((m * resolvable(k["low"], k["high"], **level)) ** 2 for m, k in zip(sizes, klds)) / total
    mean = sum(m * k["value"] for m, k in zip(sizes, klds)) / total
    between = sum(m * (k["value"] - mean) ** 2 for m, k in zip(sizes, klds)) / total
    return math.sqrt((within + standard_errors(**level) ** 2 * between) / n), mean


def rounds(metric: str, known: Sources) -> Resolution:
    """A speed ratio over the benchmark's rounds."""
    n, found = known.settings.amount.benchmark.rounds, interval(known.metrics.get(metric))
    if not found:
        return Resolution(n, "rounds", None, "unknown until a variant has been timed here")
    return _scaled(found, found["n"], n, "rounds", f"{known.probe}'s last run")


def interval(found: Any) -> dict[str, Any] | None:
    """A metric that has an interval (a point would claim to resolve anything), or None."""
    there = isinstance(found, dict) and found.get("low") is not None and found.get("high") is not None
    return found if there and found["low"] < found["high"] else None


def _scaled(found: dict[str, Any], then: float, n: float, unit: str, source: str) -> Resolution:
    """An earlier interval's resolution, its error shrinking with the square root of the units."""
    n = then if math.isnan(n) else n
    smallest = resolvable(found["low"], found["high"], confidence=found["confidence"], power=POWER)
    stays = (found.get("between") or 0.0) * found["value"] * standard_errors(confidence=found["confidence"], power=POWER)
    shrinks = max(smallest**2 - stays**2, 0.0)
    return Resolution(n, unit, math.sqrt(shrinks * then / n + stays**2), source, stays=stays)


def _relative(resolution: Resolution, value: float) -> Resolution:
    if not value or resolution.smallest is None:
        return resolution
    return replace(resolution, smallest=resolution.smallest / value, relative=True)


def _count(count: HowMany, there: int) -> int:
    return there if isinstance(count, str) else min(count, there)


# --- against the gate, in words ----------------------------------------------------------------------------------


def told(settings: Params) -> list[str]:
    """`lines`, where a damaged report is a line and not an error: nothing depends on what is said here."""
    try:
        return lines(settings)
    except (QuantgateError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        return [f"unknown: a file in {artifacts.REPORTS} or {artifacts.ARTIFACTS} is damaged ({e!r})"]


def lines(settings: Params) -> list[str]:
    """What each task resolves, and whether each of the gate's margins can be met by a variant without any loss."""
    known = Sources(settings)
    parts = {name: task(name, count, known) for name, count in settings.amount.tasks.items()}
    found = [f"{n}: {_seen(f'acc_delta/{n}', known) or _said(r, 'pp')}" for n, r in parts.items() if r.source != UNSCORED]
    for rule in settings.gate.rules:
        if rule.against == "baseline":  # a paired difference between two commits: of those, nothing is foretold here
            continue
        if seen := _seen(rule.metric, known):
            found.append(f"rule {rule.metric}, {bound_of(rule).text}: {seen}")
            continue
        what, resolution = definition(rule.metric), _of(rule.metric, parts, known)
        if resolution and what and what.neutral is not None and what.unit in SHOWN and not rule.limit:
            bound = bound_of(rule)
            margin = abs(bound.threshold - what.neutral)
            few = judgeable(rule.metric, known) if rule.metric in CORPUS else None
            found.append(f"rule {rule.metric}, {bound.text}: {few or _against(resolution, margin, what.unit)}")
    found += [known.about()] if any(str(RECORD) in line for line in found) else []
    return found + [f"not used: {note}" for note in known.notes]


def _seen(metric: str, known: Sources) -> str | None:
    """Why a figure had no interval in an earlier run, so that no verdict could rest on it; None where it had one."""
    then = known.metrics.get(metric) or {}
    if then.get("value") is None or then.get("low") is not None:
        return None
    return f"WARNING: INCONCLUSIVE in {known.probe}'s last run: {'; '.join(then.get('warnings') or ['no interval'])}"


def _of(metric: str, parts: dict[str, Resolution], known: Sources) -> Resolution | None:
    """What a rule's metric can resolve; None for one that is exact, or of which nothing is foretold."""
    stem, _, part = metric.partition("/")
    if stem == "acc_delta":
        return all_tasks(parts, known) if part == "all" else parts.get(part)
    if stem in ROUNDS:
        return rounds(stem, known)
    return corpus(stem, known) if not part and stem in CORPUS else None


def _said(r: Resolution, unit: str) -> str:
    n = "all" if math.isnan(r.n) else f"{r.n:g}"
    detail = f": {r.detail}" if r.detail else ""
    if r.smallest is None:
        return f"n = {n} {r.unit}; {r.source}{detail}"
    scale, shown = (100.0, "% of its value") if r.relative else SHOWN[unit]
    return f"n = {n} {r.unit} resolves {scale * r.smallest:.2g} {shown} ({r.source}{detail})"


def _against(r: Resolution, margin: float, unit: str) -> str:
    """Whether n resolves a margin; where not, how much would."""
    scale, shown = SHOWN[unit]
    if r.relative and r.smallest is not None:
        return f"{_said(r, unit)}; a true value up to {scale * margin / (1 + r.smallest):.3g} {shown} passes in 80 % of runs"
    if r.smallest is None or r.smallest <= margin:
        return _said(r, unit)
    held = "" if math.isnan(r.held) else f" (the sets hold {r.held:g})"
    if r.stays >= margin > 0:
        return f"WARNING: {_said(r, unit)}; more {r.unit} would not help: whole runs differ too much (compare.between_runs)"
    enough = math.ceil(r.n * (r.smallest**2 - r.stays**2) / (margin**2 - r.stays**2)) if margin else None
    needed = f"about {enough} {r.unit}{held} resolve it" if enough else "no number of items resolves a margin of nothing"
    return f"WARNING: {_said(r, unit)}, so that a variant without any loss often ends INCONCLUSIVE; {needed}"


def main() -> None:
    """Print what the chosen tier can resolve, and where the gate asks for more."""
    settings = params.load()
    for line in lines(settings):
        cli.say("power", line)


if __name__ == "__main__":
    cli.run(main)
