"""compare: rows -> metrics with intervals -> reports/metrics/<variant>.json, and failures -> artifacts/broke/<variant>.json

Rows of another build of a model or of another reference are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import ArtifactError
from pipeline.engines._speculation import drafting_variant, other_draft
from pipeline.evalset.tasks import load_task, local_tasks
from pipeline.gating.sequential import stopped
from pipeline.metrics import definitions, failure_analysis, generation
from pipeline.metrics.answers import AnswerPair, answer_metrics, of_same_items, pair
from pipeline.metrics.builder import Builder, size_metrics
from pipeline.metrics.speed import timing_metrics
from pipeline.metrics.tokens import of_same_documents, refuse_other_tokens, token_metrics

ROWS = (artifacts.answers, artifacts.tokens, artifacts.timings, artifacts.generations)


@dataclass(frozen=True)
class Measured:
    """A variant's manifest, and the meta files of its rows."""

    name: str
    manifest: records.ModelManifest
    answers: records.AnswersMeta
    tokens: records.TokensMeta
    timings: records.TimingsMeta
    replies: records.RepliesMeta

    @classmethod
    def read(cls, name: str) -> Measured:
        manifest = records.read(artifacts.model_dir(name) / artifacts.MANIFEST, records.ModelManifest)
        kinds: tuple[Any, ...] = (records.AnswersMeta, records.TokensMeta, records.TimingsMeta, records.RepliesMeta)
        return cls(name, manifest, *(records.read(artifacts.meta_of(make(name)), kind) for make, kind in zip(ROWS, kinds)))

    def refuse_others(self, store: str, reference: str) -> None:
        """Raise `ArtifactError` if rows are of another build, or of another store or reference. store, reference: digests."""
        for make, meta in zip(ROWS, (self.answers, self.tokens, self.timings, self.replies)):
            if meta["model"] != self.manifest["digest"]:
                raise ArtifactError(f"{make(self.name)} was made with another build of {self.name}; run `dvc repro`")
        against = (self.tokens["reference"], self.timings["reference"], self.replies["reference"])
        for make, made_with, now in zip(ROWS[1:], against, (store, reference, store)):
            if made_with != now:
                raise ArtifactError(f"{make(self.name)} was made against another reference; run `dvc repro`")
        draft = drafting_variant(self.manifest["engine_options"])
        if draft and other_draft(self.timings, draft):
            again = f"dvc repro -sf diverge@{self.name} benchmark@{self.name}"  # DVC does not know which variant drafts
            raise ArtifactError(f"{artifacts.timings(self.name)} was made with another build of its draft {draft}; run `{again}`")


@dataclass(frozen=True)
class Rows:
    """A variant's rows in pairs with the reference's; None if one of them has none."""

    columns: dict[str, list[Any]] | None
    answers: list[AnswerPair] | None
    replies: list[generation.Pair] | None


def compare(name: str, settings: params.Params) -> tuple[records.VariantResult, records.Failures]:
    """A variant's results with all metrics, and its failures."""
    variant, reference = Measured.read(name), Measured.read(settings.reference)
    store = records.read(artifacts.REFERENCE / artifacts.MANIFEST, records.StoreManifest)
    for measured in (variant, reference):
        measured.refuse_others(store["digest"], reference.manifest["digest"])
    if store["model"] != reference.manifest["digest"]:
        raise ArtifactError(f"{artifacts.REFERENCE} was made with another build of the reference; run `dvc repro`")
    floors, rows = floors_of(reference.manifest["digest"], store["digest"]), _rows(variant, reference)
    b, manifest = Builder(settings.compare, settings.seed), variant.manifest
    status, faults = manifest["status"], {"quantize": manifest["reason"]}
    if status == "ok":
        faults = _measure(b, variant, reference, rows, settings.evaluate.allow_truncated)
        if name == reference.name:  # the noise floor is the reference's metric: its difference to itself
            b.metrics |= floors
        else:
            definitions.mark_floor_limited(b.metrics, floors)
        if any(faults.values()):
            statuses = {m["status"] for m in (variant.answers, variant.tokens, variant.timings, variant.replies)}
            status = next((s for s in ("crashed", "invalid", "unsupported") if s in statuses), "invalid")
    files = [make(v) for make in ROWS for v in dict.fromkeys((name, reference.name))]
    origin: records.Dequantized = {"dequantized_from": manifest["dequantized_from"]} if "dequantized_from" in manifest else {}
    result: records.VariantResult = {
        "variant": name, "reference": reference.name, "status": status, "reason": _reason(faults, name),
        "quantizer": manifest["quantizer"], "asked": manifest["asked"], "options": manifest["options"],
        "engine": manifest["engine"], "engine_options": manifest["engine_options"],
        "model": manifest["digest"], "base": manifest["base"], **origin,  # type: ignore[typeddict-item]  # no client in it
        "machine": variant.timings.get("machine"), "kernels": variant.tokens.get("kernels"),
        "inputs": {str(f): artifacts.sha256_file(f) for f in [*files, artifacts.FLOOR]}, "versions": variant.tokens["versions"],
        "metrics": b.metrics, "curves": b.curves, "bounds": b.bounds,
    }  # fmt: skip
    stages = {"diverge": variant.tokens.get("look"), "evaluate": variant.answers.get("look")}
    if looks := {stage: look for stage, look in stages.items() if look}:
        result["looks"] = looks
    return result, _failures(b, variant, reference, rows)


def floors_of(model: str, store: str) -> records.Metrics:
    """The noise floor's metrics. Raises `ArtifactError` if they are of another reference or store. model, store: digests."""
    floor = records.read(artifacts.FLOOR, records.Floor)
    if (floor["model"], floor["store"]) != (model, store):
        raise ArtifactError(f"{artifacts.FLOOR} was measured with another reference; run `dvc repro floor`")
    return floor["metrics"]


def _rows(variant: Measured, reference: Measured) -> Rows:
    """All rows except timings. Raises `ArtifactError` if the two were not measured in the same way."""
    columns = paired_answers = paired_replies = None
    names = variant.name, reference.name
    if variant.tokens["status"] == "ok":
        columns = artifacts.read_columns(artifacts.tokens(variant.name))
        if reference.tokens["status"] == "ok":
            theirs = artifacts.read_columns(artifacts.tokens(reference.name))
            refuse_other_tokens(columns, of_same_documents(columns, theirs) if stopped(variant.tokens.get("look")) else theirs)
    if not _failed(variant.answers, reference.answers):
        for key in ("sets", "batch_size", "seed"):
            if variant.answers[key] != reference.answers[key]:
                raise ArtifactError(f"answers of {names[0]} and {names[1]} were made with different {key}; run `dvc repro`")
        mine, others = (records.read_rows(artifacts.answers(name), records.AnswerRow) for name in names)
        paired_answers = pair(mine, of_same_items(mine, others) if stopped(variant.answers.get("look")) else others)
    if not _failed(variant.replies, reference.replies):
        if variant.replies["tokens"] != reference.replies["tokens"]:
            raise ArtifactError(f"replies of {names[0]} and {names[1]} were made with different limits; run `dvc repro`")
        paired_replies = generation.pair(*(records.read_rows(artifacts.generations(name), records.ReplyRow) for name in names))
    return Rows(columns, paired_answers, paired_replies)


def _failed(*metas: records.RowsMeta) -> records.RowsMeta | None:
    """The first of these that has no rows."""
    return next((meta for meta in metas if meta["status"] != "ok"), None)


def _measure(b: Builder, variant: Measured, reference: Measured, rows: Rows, allow_truncated: bool) -> dict[str, str | None]:
    """Compute all metrics. Returns {stage: why it has none, or None}."""
    size_metrics(b, variant.manifest, reference.manifest)
    stages: dict[str, tuple[records.RowsMeta, ...]] = {
        "diverge": (variant.tokens,), "evaluate": (variant.answers, reference.answers), "benchmark": (variant.timings,),
        "replies": (variant.replies, reference.replies),
    }  # fmt: skip
    faults = {k: f"{meta['variant']}: {meta['reason']}" if (meta := _failed(*metas)) else None for k, metas in stages.items()}
    if rows.columns is not None:
        with b.at_look(variant.tokens.get("look")):
            faults["diverge"] = token_metrics(b, rows.columns)
    if rows.answers is not None:
        with b.at_look(variant.answers.get("look")):
            faults["evaluate"] = answer_metrics(b, rows.answers, allow_truncated, reference.answers["once"])
    if not faults["benchmark"]:
        timing_metrics(b, records.read_rows(artifacts.timings(variant.name), records.TimingRow), variant.timings)
    if rows.replies is not None:
        most = variant.replies["tokens"]
        with b.at_look(variant.tokens.get("look")):
            b.curves["agreement_by_position"] = generation.by_position(b, rows.replies, rows.columns, most)
        faults["replies"] = generation.free_metrics(b, rows.replies, most, variant.name == reference.name)
    return faults


def _reason(faults: dict[str, str | None], variant: str) -> str | None:
    """All faults, each once: tokens and replies come from one process and end with it."""
    by_fault: dict[str, str] = {}
    for stage, fault in faults.items():
        if fault:
            by_fault.setdefault(re.sub(rf"^({variant}: )?(\w+ {variant}: )?", "", fault), stage)
    return "; ".join(f"{stage}: {fault}" for fault, stage in by_fault.items()) or None


def _failures(b: Builder, variant: Measured, reference: Measured, rows: Rows) -> records.Failures:
    """The failures in the rows, with the texts of tokens and items."""
    from tokenizers import Tokenizer

    stages: dict[str, tuple[records.RowsMeta, ...]] = {
        "diverge": (variant.tokens, reference.tokens), "evaluate": (variant.answers, reference.answers),
        "replies": (variant.replies, reference.replies),
    }  # fmt: skip
    failed = {stage: meta for stage, metas in stages.items() if (meta := _failed(*metas))}
    missing = {stage: f"{meta['variant']} is {meta['status']}: {meta['reason']}" for stage, meta in failed.items()}
    columns = None if "diverge" in missing else rows.columns
    windows = records.read_rows(artifacts.REFERENCE / "windows.jsonl", records.WindowRow) if columns else []
    tasks = {name: load_task(name) for name in local_tasks().keys() & {row["task"] for row, _ in rows.answers or []}}
    path = artifacts.BASE / "tokenizer.json"
    notes = [] if path.exists() else [f"{artifacts.BASE} has no tokenizer.json: tokens are shown as ids"]
    words = failure_analysis.Words(Tokenizer.from_file(str(path)) if path.exists() else None)
    lists = failure_analysis.lists(b, columns, windows, rows.answers, rows.replies, words, tasks)
    spread = lists["spread"]
    return {
        "variant": variant.name, "reference": reference.name, "missing": missing, "notes": notes, **lists,
        "words": spread["words"] if spread else f"not known: diverge: {missing['diverge']}",
    }  # fmt: skip


def main(variant: str) -> None:
    """Turn VARIANT's rows into metrics with intervals, and analyse its failures."""
    watch = artifacts.Stopwatch("compare", variant)
    settings = params.load()
    settings.variant(variant)
    result, failures = compare(variant, settings)
    artifacts.write_json(artifacts.failures(variant), failures)
    artifacts.write_json(artifacts.metrics(variant), result)
    counts = f"{len(result['metrics'])} metrics, {failures['words']}"
    outcome = counts if result["status"] == "ok" else f"{result['status']}: {result['reason']}"
    cli.say("compare", f"{variant}: {outcome}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
