"""When `diverge` and `evaluate` end before their last document or item: once every gate rule that they feed is decided.

Rules and the reference's answers say when to stop, not what an item measures: so neither stage depends on them in dvc.yaml. At a
look the rows so far become metrics as `compare` makes them, in intervals that hold however often one looks (stats/sequential.py).
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
MOST = 4  # looks: more save little


class Looks:
    """The looks of a stage at a variant's rows, from now on. measure: makes their metrics."""

    def __init__(self, settings: Params, rules: list[Rule], planned: int, measure: Callable[[Builder, Any], object]) -> None:
        self.settings, self.rules, self.planned, self.measure = settings, rules, planned, measure
        self.taken, self.spent, self.started = 0, 0.0, time.monotonic()

    def decided(self, rows: Any) -> bool:
        """Whether nothing is left to measure for: this was the last look, or every rule is PASS or FAIL by these rows."""
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
        """A FAIL is one that Holm's correction leaves, even as the first of all rules. A count so far says nothing of the rest."""
        if metric is None or metric["low"] == metric["high"]:
            return False
        judged, tail = judge(bound_of(rule), metric), (1 - self.settings.compare.confidence) / 2
        failed = judged.verdict == "FAIL" and judged.p_fail is not None
        return judged.verdict == "PASS" or (failed and (judged.p_fail or 0.0) * len(self.settings.gate.rules) <= tail)

    def record(self, done: int, total: int) -> Look:
        """What stands beside rows of which `done` of `total` were measured."""
        took = time.monotonic() - self.started - self.spent
        saved = took * (total / done - 1) - self.spent
        return {"look": self.taken, "looks": self.planned, "share": done / total, "saved_s": round(saved, 1)}


def rules_that_end(settings: Params, variant: str, stage: str) -> list[Rule]:
    """The gate's rules that may end a stage of a variant. Empty with `stop: never`, for the reference, and where one of them counts
    from the floor or the baseline."""
    rules = [r for r in settings.gate.rules if applies(r, variant) and r.metric.split("/")[0] in FEEDS[stage]]
    elsewhere = any(r.above or r.against == "baseline" for r in rules)
    return [] if settings.amount.stop == "never" or variant == settings.reference or elsewhere else rules


def looks_of(settings: Params, variant: str, stage: str, units: int, measure: Callable[[Builder, Any], object]) -> Looks | None:
    """Up to four looks, each of which has documents or item families enough for a verdict; None where one at the end is all. units:
    of the whole."""
    rules, planned = rules_that_end(settings, variant, stage), min(MOST, units // MIN_CLUSTERS)
    return Looks(settings, rules, planned, measure) if rules and planned > 1 else None


def reference_answers(settings: Params) -> tuple[AnswersMeta, list[AnswerRow]] | None:
    """What the reference answered, for looks at a variant's answers; None where it has not yet, or another build of it has."""
    path, folder = artifacts.answers(settings.reference), artifacts.model_dir(settings.reference)
    if not artifacts.meta_of(path).exists():
        return None
    meta = records.read(artifacts.meta_of(path), AnswersMeta)
    now = records.read(folder / artifacts.MANIFEST, ModelManifest)["digest"]
    return (meta, records.read_rows(path, AnswerRow)) if meta["model"] == now else None


def stopped(look: Look | None) -> str:
    """How early the rows end, in words; empty where they do not."""
    if look is None or look["share"] == 1:
        return ""
    which = f"look {look['look']} of {look['looks']}, {look['saved_s']:.0f} s saved"
    return f", stopped at {100 * look['share']:.0f} %: its rules are decided ({which})"


def early(result: VariantResult, metric: str) -> str:
    """That a metric's rows ended early, and how to have more; empty where they did not."""
    for stage, look in result.get("looks", {}).items():
        if look["share"] < 1 and metric.split("/")[0] in FEEDS[stage]:
            how = f"`dvc repro -f -s {stage}@{result['variant']}`, or `stop: never` in the tier, then `make repro`"
            return f"; {stage} stopped at {100 * look['share']:.0f} %, which decided the rules of then; to go on: {how}"
    return ""
