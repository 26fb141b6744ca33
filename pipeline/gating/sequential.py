"""Ends `diverge` and `evaluate` early, once all gate rules on their metrics are decided.

Rules and the reference's answers decide when to stop and not what an item measures, so neither stage depends on them in dvc.yaml.
At a look, the rows so far become metrics as in `compare`, with intervals that allow for repeated looks (stats/sequential.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline.core import artifacts, records
from pipeline.core.params import Params, Rule
from pipeline.core.records import AnswerRow, AnswersMeta, Look, Metric, ModelManifest, VariantResult
from pipeline.gating.rules import MIN_CLUSTERS, applies, bound_of, judge
from pipeline.metrics import answers, tokens
from pipeline.metrics.builder import Builder

FEEDS = {"diverge": tokens.METRICS, "evaluate": answers.METRICS}
MOST = 4  # looks; more would save little


class Looks:
    """A stage's looks at a variant's rows. measure: computes their metrics."""

    def __init__(self, settings: Params, rules: list[Rule], planned: int, measure: Callable[[Builder, Any], object]) -> None:
        self.settings, self.rules, self.planned, self.measure = settings, rules, planned, measure
        self.taken, self.spent, self.started = 0, 0.0, time.monotonic()

    def decided(self, rows: Any) -> bool:
        """Whether to stop: this is the last look, or these rows make each rule PASS or FAIL."""
        self.taken += 1
        if self.taken == self.planned:
            return True
        began = time.monotonic()
        b = Builder(self.settings.compare, self.settings.seed)
        with b.at_look(self.record(1, 1)):
            self.measure(b, rows)
        self.spent += time.monotonic() - began
        return all(self._settled(rule, b.metrics.get(rule.metric)) for rule in self.rules)

    def _settled(self, rule: Rule, metric: Metric | None) -> bool:
        """Whether a rule is decided. A FAIL must survive Holm's correction as the clearest; a count so far says nothing."""
        if metric is None or metric["low"] == metric["high"]:
            return False
        judged, tail = judge(bound_of(rule), metric), (1 - self.settings.compare.confidence) / 2
        failed = judged.verdict == "FAIL" and judged.p_fail is not None
        return judged.verdict == "PASS" or (failed and (judged.p_fail or 0.0) * len(self.settings.gate.rules) <= tail)

    def record(self, done: int, total: int) -> Look:
        """The record beside rows of which `done` of `total` were measured."""
        took = time.monotonic() - self.started - self.spent
        saved = took * (total / done - 1) - self.spent
        return {"look": self.taken, "looks": self.planned, "share": done / total, "saved_s": round(saved, 1)}


def rules_that_end(settings: Params, variant: str, stage: str) -> list[Rule]:
    """Gate rules that may end a stage: none with `stop: never`, for the reference, or if one is from floor or baseline."""
    rules = [r for r in settings.gate.rules if applies(r, variant) and r.metric.split("/")[0] in FEEDS[stage]]
    elsewhere = any(r.above or r.against == "baseline" for r in rules)
    return [] if settings.amount.stop == "never" or variant == settings.reference or elsewhere else rules


def looks_of(settings: Params, variant: str, stage: str, units: int, measure: Callable[[Builder, Any], object]) -> Looks | None:
    """Up to MOST looks, each with enough units (documents or item families) for a verdict; None if only the last is left."""
    rules, planned = rules_that_end(settings, variant, stage), min(MOST, units // MIN_CLUSTERS)
    return Looks(settings, rules, planned, measure) if rules and planned > 1 else None


def reference_answers(settings: Params) -> tuple[AnswersMeta, list[AnswerRow]] | None:
    """The reference's answers, for looks at a variant's; None if there are none yet, or only those of another build."""
    path, folder = artifacts.answers(settings.reference), artifacts.model_dir(settings.reference)
    if not artifacts.meta_of(path).exists():
        return None
    meta = records.read(artifacts.meta_of(path), AnswersMeta)
    now = records.read(folder / artifacts.MANIFEST, ModelManifest)["digest"]
    return (meta, records.read_rows(path, AnswerRow)) if meta["model"] == now else None


def stopped(look: Look | None) -> str:
    """How early the rows end, in words; empty if they are complete."""
    if look is None or look["share"] == 1:
        return ""
    which = f"look {look['look']} of {look['looks']}, {look['saved_s']:.0f} s saved"
    return f", stopped at {100 * look['share']:.0f} %: its rules are decided ({which})"


def early(result: VariantResult, metric: str) -> str:
    """Say that a metric's rows ended early, and how to continue; empty if they are complete."""
    for stage, look in result.get("looks", {}).items():
        if look["share"] < 1 and metric.split("/")[0] in FEEDS[stage]:
            how = f"`dvc repro -f -s {stage}@{result['variant']}`, or `stop: never` in the tier, then `make repro`"
            return f"; {stage} stopped at {100 * look['share']:.0f} %, which decided the rules of then; to go on: {how}"
    return ""
