"""power: the smallest loss that the chosen tier can tell from none, compared with the gate's margins, before anything runs.

A comparison finds a true difference of 2.8 standard errors in 80 % of runs (two-sided 95 %), and a variant without any loss
passes a margin of that size as often. The error depends on how many answers a variant changes. That was measured on this base
model (reports/metrics/), or when the sets were recorded (reports/evalsets.json). `check` prints it; nothing is written.
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
from pipeline.reporting.text import difference
from pipeline.stats.intervals import paired_difference, resolvable, standard_errors

UNKNOWN = "unknown until a variant has been measured"
UNSCORED = "no right and wrong"
TRAJECTORIES = ("kld_mean", "top1_agreement", "jsd_mean", "moved_10pct", "delta_p_rms")  # measured on them as well as on text
CORPUS = (*TRAJECTORIES, "ppl_ratio")
ROUNDS = ("speed_ratio", "prefill_ratio")


@dataclass(frozen=True)
class Resolution:
    """What n units can resolve. smallest: in the metric's unit, None where unknown; held: units that the sets hold; source, detail:
    where it comes from; relative: smallest is in parts of the value (divergences spread as they grow); stays: the part of
    `smallest` that more units do not reduce (whole runs differ)."""

    n: float
    unit: str
    smallest: float | None
    source: str
    detail: str = ""
    held: float = math.nan
    relative: bool = False
    stays: float = 0.0


def task(name: str, count: HowMany, known: Sources) -> Resolution:
    """Accuracy of one task, in pp."""
    n, held = (count if isinstance(count, int) else math.nan), math.nan
    if name in tasks.local_tasks():
        config, rows = tasks.load_task(name)
        n, held = _count(count, len(rows)), len(rows)
        if config.get("output_type") == "loglikelihood_rolling":
            return Resolution(n, "documents", None, UNSCORED)
    last, card = interval(known.metrics.get(f"acc_delta/{name}")), known.recorded(f"tasks/{name}")
    if last:
        flips = [known.metrics[f"flips_to_{way}/{name}"]["value"] for way in ("wrong", "right")]
        detail = f"{sum(flips):.0f} of {last['n']} answers changed"
        return _scaled(last, last["n"], n, "items", known, detail=detail, held=held)
    if math.isnan(n) or not card or "changed" not in card:
        return Resolution(n, "items", None, UNKNOWN, held=held)
    score, share = card["reference"], card["changed"]
    families = max(card["half_width"] / _half(card["n"], score, share, known), 1.0)  # items of a family change together
    detail = f"{100 * share:.2g} % of {card['n']} answers changed"
    return Resolution(n, "items", families * _smallest(n, score, share, known), str(RECORD), detail, held)


def _half(n: float, score: float, share: float, known: Sources) -> float:
    """Half of Newcombe's paired interval in pp, where a share of n answers changes, to wrong as often as to right."""
    lost, right = round(share * n / 2), round(score * n)
    won = max(round(share * n) - lost, 0)
    cells = max(right - lost, 0), lost, won, max(round(n) - right - won, 0)
    half = paired_difference(*cells, confidence=known.settings.compare.confidence)
    assert half.low is not None and half.high is not None  # n is at least 1
    return 50 * (half.high - half.low)


def _smallest(n: float, score: float, share: float, known: Sources) -> float:
    half, confidence = _half(n, score, share, known), known.settings.compare.confidence
    return resolvable(-half, half, confidence=confidence)


def all_tasks(parts: dict[str, Resolution], known: Sources) -> Resolution:
    """Accuracy over all items: of the last run over the same tasks, else the tasks' errors by their squares, weighted by items."""
    scored = {name: r for name, r in parts.items() if r.source != UNSCORED}
    n, held = sum(r.n for r in scored.values()), sum(r.held for r in scored.values())
    measured = {name.partition("/")[2] for name in known.metrics if name.startswith("acc_delta/")} - {"all"}
    last = interval(known.metrics.get("acc_delta/all"))
    if last and measured == scored.keys():
        return _scaled(last, last["n"], n, "items", known, held=held)
    unknown = [name for name, r in scored.items() if r.smallest is None]
    if unknown or not scored:
        return Resolution(n, "items", None, UNKNOWN, f"{', '.join(unknown) or 'no task'}", held)
    together = math.sqrt(sum((r.n * (r.smallest or 0)) ** 2 for r in scored.values())) / n
    return Resolution(n, "items", together, " and ".join(dict.fromkeys(r.source for r in scored.values())), held=held)


def corpus(metric: str, known: Sources) -> Resolution:
    """A metric over the corpus, and over trajectories where it is measured on them."""
    s, texts = known.settings, load_texts(Path(known.settings.diverge.corpus))
    held, unit = len(texts), "documents"
    n = _count(s.amount.documents, held)
    if metric in TRAJECTORIES:
        prompts = len(load_prompts(Path(s.diverge.trajectories.prompts)))
        n, held, unit = n + _count(s.amount.trajectories, prompts), held + prompts, "documents and trajectories"
    last = interval(known.metrics.get(metric))
    if last and last.get("clusters"):
        scaled = _scaled(last, last["clusters"], n, unit, known, held=held)
        return _relative(scaled, last["value"]) if metric == "kld_mean" else scaled
    cards = [c for k in known.record.get("sets", {}) if k.startswith("corpus/") and (c := known.recorded(k))]
    if not cards or metric not in ("kld_mean", "ppl_ratio"):
        return Resolution(n, unit, None, UNKNOWN, held=held)
    if metric == "ppl_ratio":  # from each domain's own resolution: their errors add by their squares, weighted by documents
        total = sum(c["n"] for c in cards)
        error = math.sqrt(sum((c["n"] * math.log1p(c["resolvable_ppl"])) ** 2 for c in cards)) / total
        return Resolution(n, unit, math.expm1(error * math.sqrt(total / n)), str(RECORD), held=held)
    smallest, value = _recorded_kld(cards, n, known)
    return _relative(Resolution(n, unit, smallest, str(RECORD), held=held), value)


def judgeable(metric: str, known: Sources) -> str | None:
    """Why the gate will not judge a metric over so few documents, or None. Trajectories are shorter and weigh less: they count by
    their letters, four a token."""
    s, texts = known.settings, load_texts(Path(known.settings.diverge.corpus))
    n = _count(s.amount.documents, len(texts))
    weights = np.full(int(n), np.mean([len(t["text"]) for t in texts]))
    if metric in TRAJECTORIES:
        prompts = _count(s.amount.trajectories, len(load_prompts(Path(s.diverge.trajectories.prompts))))
        weights = np.append(weights, np.full(int(prompts), 4.0 * s.diverge.trajectories.tokens))
    equal = weights.sum() ** 2 / (weights**2).sum()
    if equal >= MIN_CLUSTERS - 0.5:
        return None
    weigh = f"{len(weights)} weigh as {equal:.0f} equal ones, and a verdict needs {MIN_CLUSTERS}"
    return f"WARNING: INCONCLUSIVE whatever is found: {weigh}; raise `documents` in tier {s.tier}"


def _recorded_kld(cards: list[dict[str, Any]], n: float, known: Sources) -> tuple[float, float]:
    """(smallest, mean) of the probe's divergence: documents differ within their domains, and domains from each other."""
    klds, sizes, total = [c["kld"][known.record["probe"]] for c in cards], [c["n"] for c in cards], sum(c["n"] for c in cards)
    level = {"confidence": known.record["confidence"]}
    within = sum((m * resolvable(k["low"], k["high"], **level)) ** 2 for m, k in zip(sizes, klds)) / total
    mean = sum(m * k["value"] for m, k in zip(sizes, klds)) / total
    between = sum(m * (k["value"] - mean) ** 2 for m, k in zip(sizes, klds)) / total
    return math.sqrt((within + standard_errors(**level) ** 2 * between) / n), mean


def rounds(metric: str, known: Sources) -> Resolution:
    """A speed ratio over the benchmark's rounds."""
    n, last = known.settings.amount.benchmark.rounds, interval(known.metrics.get(metric))
    if not last:
        return Resolution(n, "rounds", None, "unknown until a variant has been timed here")
    return _scaled(last, last["n"], n, "rounds", known)


def interval(metric: Any) -> dict[str, Any] | None:
    """A metric that has an interval (a point would claim to resolve anything), or None."""
    has = isinstance(metric, dict) and metric.get("low") is not None and metric.get("high") is not None
    return metric if has and metric["low"] < metric["high"] else None


def _scaled(last: dict[str, Any], then: float, n: float, unit: str, known: Sources, **more: Any) -> Resolution:
    """An earlier interval's resolution, its error shrinking with the square root of the units."""
    n = then if math.isnan(n) else n
    smallest = resolvable(last["low"], last["high"], confidence=last["confidence"])
    stays = (last.get("between") or 0.0) * last["value"] * standard_errors(confidence=last["confidence"])
    shrinks = max(smallest**2 - stays**2, 0.0)
    return Resolution(n, unit, math.sqrt(shrinks * then / n + stays**2), f"{known.probe}'s last run", stays=stays, **more)


def _relative(resolution: Resolution, value: float) -> Resolution:
    if not value or resolution.smallest is None:
        return resolution
    return replace(resolution, smallest=resolution.smallest / value, relative=True)


def _count(count: HowMany, there: int) -> int:
    return there if isinstance(count, str) else min(count, there)


def notes(settings: Params) -> list[str]:
    """`lines`; where a report is damaged, one line that says so: nothing depends on these lines."""
    try:
        return lines(settings)
    except (QuantgateError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        return [f"unknown: a file in {artifacts.REPORTS} or {artifacts.ARTIFACTS} is damaged ({e!r})"]


def lines(settings: Params) -> list[str]:
    """What each task resolves, and whether a variant without any loss can meet each of the gate's margins."""
    known = Sources(settings)
    parts = {name: task(name, count, known) for name, count in settings.amount.tasks.items()}
    result = [f"{n}: {_seen(f'acc_delta/{n}', known) or _said(r, 'pp')}" for n, r in parts.items() if r.source != UNSCORED]
    for rule in settings.gate.rules:
        if rule.against == "baseline":  # a paired difference between two commits: nothing is known of it
            continue
        if seen := _seen(rule.metric, known):
            result.append(f"rule {rule.metric}, {bound_of(rule).text}: {seen}")
            continue
        what, resolution = definition(rule.metric), _of(rule.metric, parts, known)
        if resolution and what and what.neutral is not None and not rule.limit:
            bound = bound_of(rule)
            margin = abs(bound.threshold - what.neutral)
            few = judgeable(rule.metric, known) if rule.metric in CORPUS else None
            result.append(f"rule {rule.metric}, {bound.text}: {few or _compared(resolution, margin, what.unit)}")
    result += [known.about()] if any(str(RECORD) in line for line in result) else []
    return result + [f"not used: {note}" for note in known.notes]


def _seen(metric: str, known: Sources) -> str | None:
    """Why a metric had no interval in the last run, so that no verdict could rest on it; None where it had one."""
    then = known.metrics.get(metric) or {}
    if then.get("value") is None or then.get("low") is not None:
        return None
    return f"WARNING: INCONCLUSIVE in {known.probe}'s last run: {'; '.join(then.get('warnings') or ['no interval'])}"


def _of(metric: str, parts: dict[str, Resolution], known: Sources) -> Resolution | None:
    """What a rule's metric can resolve; None for one that is exact or unknown here."""
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
    scale, unit_text = (100.0, "% of its value") if r.relative else difference(unit)
    return f"n = {n} {r.unit} resolves {scale * r.smallest:.2g} {unit_text} ({r.source}{detail})"


def _compared(r: Resolution, margin: float, unit: str) -> str:
    """Whether n resolves a margin; where not, how many would."""
    scale, unit_text = difference(unit)
    if r.relative and r.smallest is not None:
        return f"{_said(r, unit)}; a true value up to {scale * margin / (1 + r.smallest):.3g} {unit_text} passes in 80 % of runs"
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
