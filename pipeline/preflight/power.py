"""power: the smallest loss that the chosen tier can resolve, compared with the gate's margins before anything runs.

A comparison finds a true difference of 2.8 standard errors in 80 % of runs (two-sided 95 %), and a variant without any loss
passes a margin of that size as often. The error depends on how many answers a variant changes, as measured on this base model
(reports/metrics/) or when the sets were recorded (reports/evalsets.json)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.core import artifacts, records
from pipeline.core.errors import QuantgateError
from pipeline.core.params import HowMany, Params
from pipeline.core.records import EvalsetsRecord, Metrics, SetRecord, VariantResult
from pipeline.evalset import load_prompts, load_texts, tasks
from pipeline.evalset.cards import RECORD
from pipeline.gating.rules import MIN_CLUSTERS, bound_of
from pipeline.metrics.definitions import definition
from pipeline.preflight.model import base_manifest
from pipeline.reporting.text import difference
from pipeline.stats.intervals import paired_difference, resolvable, standard_errors

T = TypeVar("T")
UNKNOWN = "unknown until a variant has been measured"
UNSCORED = "no right and wrong"
TRAJECTORIES = ("kld_mean", "top1_agreement", "jsd_mean", "moved_10pct", "delta_p_rms")  # measured on both trajectories and texts
CORPUS = (*TRAJECTORIES, "ppl_ratio")
ROUNDS = ("speed_ratio", "prefill_ratio")


@dataclass(frozen=True)
class Resolution:
    """What n units resolve. smallest: in the metric's unit, None if unknown; source, detail: where it is from; held: units in the
    sets; relative: `smallest` is a share of the value (divergences spread as they grow); stays: its part that n leaves."""

    n: float
    unit: str
    smallest: float | None
    source: str
    detail: str = ""
    held: float = math.nan
    relative: bool = False
    stays: float = 0.0

    def of_value(self, value: float) -> Resolution:
        return replace(self, smallest=(self.smallest or 0.0) / value, relative=True) if value else self


class Sources:
    """The probe's metrics if of this base model, and the record of the sets. An unreadable file counts as absent, with a note."""

    def __init__(self, settings: Params) -> None:
        self.settings, self.confidence, self.probe = settings, settings.compare.confidence, settings.gate.required[0]
        self.notes: list[str] = []
        base = base_manifest(settings)
        self.base = base["digest"] if base else None
        last = self._read(artifacts.metrics(self.probe), VariantResult)
        usable = last and last["status"] == "ok" and last["base"] == self.base and last["reference"] == settings.reference
        self.metrics: Metrics = last["metrics"] if last and usable else {}
        self.record = self._read(RECORD, EvalsetsRecord)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return records.read(path, kind) if path.exists() else None
        except QuantgateError as e:
            self.notes.append(str(e))
            return None

    def recorded(self, kind: str) -> dict[str, SetRecord]:
        """{set: its record} of a kind, `tasks` or `corpus`, if its files have not changed since."""
        sets = self.record["sets"] if self.record else {}
        return {
            name.partition("/")[2]: entry
            for name, entry in sets.items()
            if name.startswith(kind)
            and all(Path(file).is_file() and artifacts.sha256_file(Path(file)) == sha256 for file, sha256 in entry["files"].items())
        }

    def blind(self, name: str) -> str | None:
        """Why a metric had no interval in the last run, and so no verdict; None if it had one."""
        metric = self.metrics.get(name)
        if metric is None or metric["value"] is None or metric["low"] is not None:
            return None
        return f"WARNING: INCONCLUSIVE in {self.probe}'s last run: {'; '.join(metric['warnings'])}"

    def measured(self, name: str, n: float, unit: str, held: float = math.nan) -> Resolution | None:
        """What n units resolve by the metric's last interval, whose error shrinks with the square root of n; None without one."""
        metric = self.metrics.get(name)
        if metric is None or metric["value"] is None or metric["low"] is None or metric["high"] is None:
            return None
        if not (then := metric["clusters"] if name in CORPUS else metric["n"]):
            return None
        confidence, n = metric["confidence"], then if math.isnan(n) else n
        stays = (metric["between"] or 0.0) * metric["value"] * standard_errors(confidence=confidence)
        shrinks = max(resolvable(metric["low"], metric["high"], confidence=confidence) ** 2 - stays**2, 0.0)
        smallest = math.sqrt(shrinks * then / n + stays**2)
        return Resolution(n, unit, smallest, f"{self.probe}'s last run", held=held, stays=stays) if smallest else None


def task(name: str, count: HowMany, known: Sources) -> Resolution:
    """Accuracy of one task, in pp."""
    n, held = (count if isinstance(count, int) else math.nan), math.nan
    if name in tasks.local_tasks():
        config, rows = tasks.load_task(name)
        n, held = _count(count, len(rows)), len(rows)
        if config["output_type"] == "loglikelihood_rolling":
            return Resolution(n, "documents", None, UNSCORED)
    if last := known.measured(f"acc_delta/{name}", n, "items", held=held):
        flips = sum(known.metrics[f"flips_to_{way}/{name}"]["value"] or 0 for way in ("wrong", "right"))
        return replace(last, detail=f"{flips:.0f} of {known.metrics[f'acc_delta/{name}']['n']} answers changed")
    card = known.recorded(f"tasks/{name}").get(name)
    if math.isnan(n) or not card or "changed" not in card:
        return Resolution(n, "items", None, UNKNOWN, held=held)
    score, share = card["reference"], card["changed"]
    families = max(card["half_width"] / _half(card["n"], score, share, known), 1.0)  # items of a family change together
    detail = f"{100 * share:.2g} % of {card['n']} answers changed"
    return Resolution(n, "items", families * _smallest(n, score, share, known), str(RECORD), detail, held)


def _half(n: float, score: float, share: float, known: Sources) -> float:
    """Half-width of Newcombe's paired interval in pp if a share of n answers changes, to wrong as often as to right."""
    lost, right = round(share * n / 2), round(score * n)
    won = max(round(share * n) - lost, 0)
    half = paired_difference(max(right - lost, 0), lost, won, max(round(n) - right - won, 0), confidence=known.confidence)
    assert half.low is not None and half.high is not None  # n is at least 1
    return 50 * (half.high - half.low)


def _smallest(n: float, score: float, share: float, known: Sources) -> float:
    half = _half(n, score, share, known)
    return resolvable(-half, half, confidence=known.confidence)


def all_tasks(parts: dict[str, Resolution], known: Sources) -> Resolution:
    """Accuracy over all items: from the last run over the same tasks, else the tasks' errors in quadrature, weighted by items."""
    scored = {name: r for name, r in parts.items() if r.source != UNSCORED}
    n, held = sum(r.n for r in scored.values()), sum(r.held for r in scored.values())
    measured = {name.partition("/")[2] for name in known.metrics if name.startswith("acc_delta/")} - {"all"}
    if measured == scored.keys() and (last := known.measured("acc_delta/all", n, "items", held=held)):
        return last
    unknown = [name for name, r in scored.items() if r.smallest is None or math.isnan(r.n)]
    if unknown or not scored:
        return Resolution(n, "items", None, UNKNOWN, f"{', '.join(unknown) or 'no task'}", held)
    together = math.sqrt(sum((r.n * (r.smallest or 0)) ** 2 for r in scored.values())) / n
    return Resolution(n, "items", together, " and ".join(dict.fromkeys(r.source for r in scored.values())), held=held)


def corpus(metric: str, known: Sources) -> Resolution:
    """A metric over the corpus, and over trajectories if it is in TRAJECTORIES."""
    s, held, unit = known.settings, len(load_texts(Path(known.settings.diverge.corpus))), "documents"
    n = _count(s.amount.documents, held)
    if metric in TRAJECTORIES:
        prompts = len(load_prompts(Path(s.diverge.trajectories.prompts)))
        n, held, unit = n + _count(s.amount.trajectories, prompts), held + prompts, "documents and trajectories"
    if last := known.measured(metric, n, unit, held=held):
        return last.of_value(known.metrics[metric]["value"] or 0.0) if metric == "kld_mean" else last
    cards, record = list(known.recorded("corpus/").values()), known.record
    if not cards or not record or metric not in ("kld_mean", "ppl_ratio"):
        return Resolution(n, unit, None, UNKNOWN, held=held)
    total = sum(c["n"] for c in cards)
    if metric == "ppl_ratio":  # the domains' errors in quadrature, weighted by documents
        error = math.sqrt(sum((c["n"] * math.log1p(c["resolvable_ppl"])) ** 2 for c in cards)) / total
        return Resolution(n, unit, math.expm1(error * math.sqrt(total / n)), str(RECORD), held=held)
    # documents differ within their domains, and domains from each other
    klds, sizes, confidence = [c["kld"][record["probe"]] for c in cards], [c["n"] for c in cards], record["confidence"]
    within = sum((m * resolvable(k["low"], k["high"], confidence=confidence)) ** 2 for m, k in zip(sizes, klds)) / total
    mean = sum(m * k["value"] for m, k in zip(sizes, klds)) / total
    between = sum(m * (k["value"] - mean) ** 2 for m, k in zip(sizes, klds)) / total
    smallest = math.sqrt((within + standard_errors(confidence=confidence) ** 2 * between) / n)
    return Resolution(n, unit, smallest, str(RECORD), held=held).of_value(mean)


def _count(count: HowMany, there: int) -> int:
    return there if isinstance(count, str) else min(count, there)


def too_few(metric: str, settings: Params) -> str | None:
    """Why the gate will not judge a metric over so few documents, or None. Trajectories weigh less: by letters, four per token."""
    texts = load_texts(Path(settings.diverge.corpus))
    n = _count(settings.amount.documents, len(texts))
    weights = np.full(n, np.mean([len(t["text"]) for t in texts]))
    if metric in TRAJECTORIES:
        setup = settings.diverge.trajectories
        prompts = _count(settings.amount.trajectories, len(load_prompts(Path(setup.prompts))))
        weights = np.append(weights, np.full(prompts, 4.0 * setup.tokens))
    equal = weights.sum() ** 2 / (weights**2).sum()
    if equal >= MIN_CLUSTERS - 0.5:
        return None
    weigh = f"{len(weights)} texts weigh as {equal:.0f} equal ones, and a verdict needs {MIN_CLUSTERS}"
    return f"WARNING: always INCONCLUSIVE: {weigh}; raise `documents` in tier {settings.tier}"


def lines(settings: Params) -> list[str]:
    """What each task resolves, and whether a variant without any loss can meet the gate's margins."""
    known = Sources(settings)
    parts = {name: task(name, count, known) for name, count in settings.amount.tasks.items()}
    scored = {name: r for name, r in parts.items() if r.source != UNSCORED}
    result = [f"{name}: {known.blind(f'acc_delta/{name}') or _resolved(r, 'pp')}" for name, r in scored.items()]
    for rule in settings.gate.rules:
        bound, what, line = bound_of(rule), definition(rule.metric), known.blind(rule.metric)
        resolution = None if line or rule.kind == "limit" else _of(rule.metric, parts, known)
        if resolution and what and what.neutral is not None:
            few = too_few(rule.metric, settings) if rule.metric in CORPUS else None
            line = few or _compared(resolution, abs(bound.threshold - what.neutral), what.unit)
        if line and rule.against == "reference":  # nothing is known of paired differences between commits
            result.append(f"rule {rule.metric}, {bound.text}: {line}")
    if known.record and any(str(RECORD) in line for line in result):
        record = known.record
        other = f"another base ({record['base'][:8]})" if known.base else "the default model"
        whose = "this model" if known.base == record["base"] else other
        result.append(f"{RECORD}: {record['probe']} against {record['reference']} of {whose}, tier full")
    return result + [f"ignored: {note}" for note in known.notes]


def _of(metric: str, parts: dict[str, Resolution], known: Sources) -> Resolution | None:
    """What a rule's metric can resolve; None if it is exact or unknown here."""
    stem, _, part = metric.partition("/")
    if stem == "acc_delta":
        return all_tasks(parts, known) if part == "all" else parts.get(part)
    if stem in ROUNDS:
        n = known.settings.amount.benchmark.rounds
        return known.measured(stem, n, "rounds") or Resolution(n, "rounds", None, "unknown until a variant has been timed here")
    return corpus(stem, known) if not part and stem in CORPUS else None


def _resolved(r: Resolution, unit: str) -> str:
    n = "all" if math.isnan(r.n) else f"{r.n:g}"
    detail = f": {r.detail}" if r.detail else ""
    if r.smallest is None:
        return f"n = {n} {r.unit}; {r.source}{detail}"
    scale, name = (100.0, "% of its value") if r.relative else difference(unit)
    return f"n = {n} {r.unit} resolves {scale * r.smallest:.2g} {name} ({r.source}{detail})"


def _compared(r: Resolution, margin: float, unit: str) -> str:
    """Whether n resolves a margin and, if not, how many would."""
    text = _resolved(r, unit)
    if r.relative and r.smallest is not None:
        scale, name = difference(unit)
        return f"{text}; a true value up to {scale * margin / (1 + r.smallest):.3g} {name} passes in 80 % of runs"
    if r.smallest is None or r.smallest <= margin:
        return text
    if r.stays >= margin > 0:
        return f"WARNING: {text}; more {r.unit} would not help: whole runs differ too much (compare.between_runs)"
    held = "" if math.isnan(r.held) else f" (the sets hold {r.held:g})"
    enough = math.ceil(r.n * (r.smallest**2 - r.stays**2) / (margin**2 - r.stays**2)) if margin else None
    needed = f"about {enough} {r.unit}{held} resolve it" if enough else "no number of items resolves a margin of 0"
    return f"WARNING: {text}, so that a variant without any loss often ends INCONCLUSIVE; {needed}"
