"""compare: rows -> metrics with intervals -> reports/metrics/<variant>.json, and failures -> artifacts/broke/<variant>.json

Rows of another build of a model, or of another reference, are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import ArtifactError
from pipeline.metrics import failure_analysis, generation, noise_floor
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder, size_metrics
from pipeline.metrics.speed import timing_metrics
from pipeline.metrics.tokens import refuse_other_tokens, token_metrics

Row = dict[str, Any]
ROWS = (artifacts.answers, artifacts.tokens, artifacts.timings, artifacts.generations)


def compare(variant: str, settings: params.Params) -> Row:
    """All metrics of a variant, with what they were made from."""
    ref = settings.reference
    both = list(dict.fromkeys((variant, ref)))
    files = [make(v) for make in ROWS for v in both]
    manifests = {v: artifacts.read_manifest(artifacts.model_dir(v)) for v in both}
    metas = {f: artifacts.read_json(artifacts.meta_of(f)) for f in files}
    manifest, theirs = manifests[variant], manifests[ref]
    _same_models(metas, manifests, theirs)
    floors = _floors(theirs)
    b = Builder(settings.compare, settings.seed)
    status, faults = manifest["status"], [("quantize", manifest["reason"])] if manifest["status"] != "ok" else []
    if status == "ok":
        size_metrics(b, manifest, theirs)
        parts = (
            ("diverge", artifacts.tokens, [variant], _tokens), ("evaluate", artifacts.answers, both, _answers),
            ("benchmark", artifacts.timings, [variant], _timings), ("replies", artifacts.generations, both, _free),
        )  # fmt: skip
        for stage, make, names, measure in parts:
            made = [metas[make(name)] for name in names]
            fault = next((f"{m['variant']}: {m['reason']}" for m in made if m["status"] != "ok"), None)
            if fault := fault or measure(b, variant, metas, settings):
                faults.append((stage, fault))
        if variant == ref:  # the floor is the reference's own metric: its difference to itself
            b.metrics |= floors
        else:
            noise_floor.mark(b.metrics, floors)
        own = {metas[make(variant)]["status"] for make in ROWS}
        if faults:
            status = next((s for s in ("crashed", "invalid", "unsupported") if s in own), "invalid")
    return {
        "variant": variant, "reference": ref, "status": status, "reason": _reason(faults, variant),
        "quantizer": manifest["quantizer"], "asked": manifest["asked"], "options": manifest["options"],
        "engine": manifest["engine"], "engine_options": manifest["engine_options"],
        "model": manifest["digest"], "base": manifest["base"], **{k: manifest[k] for k in ("dequantized_from",) if k in manifest},
        "machine": metas[artifacts.timings(variant)].get("machine"),
        "kernels": metas[artifacts.tokens(variant)].get("kernels"),
        "inputs": {str(f): artifacts.sha256_file(f) for f in [*files, artifacts.FLOOR]},
        "versions": metas[artifacts.tokens(variant)].get("versions") or manifest["versions"],
        "metrics": b.metrics, "curves": b.curves, "bounds": b.bounds,
    }  # fmt: skip


def _reason(faults: list[tuple[str, str]], variant: str) -> str | None:
    """Each stage's fault, once: tokens and replies come from one process, which ends for both."""
    by_fault: dict[str, str] = {}
    for stage, fault in faults:
        by_fault.setdefault(re.sub(rf"^({variant}: )?(\w+ {variant}: )?", "", fault), stage)
    return "; ".join(f"{stage}: {fault}" for fault, stage in by_fault.items()) or None


def _same_models(metas: dict[Path, Row], manifests: dict[str, Row], reference: Row) -> None:
    """Raise `ArtifactError` if rows are of another build of a variant, or of another reference, than is here now."""
    store = artifacts.read_manifest(artifacts.REFERENCE)
    for path, meta in metas.items():
        if meta["model"] != manifests[meta["variant"]]["digest"]:
            raise ArtifactError(f"{path} was made with another build of {meta['variant']}; run `dvc repro`")
        expected = {
            artifacts.tokens: store["digest"],
            artifacts.generations: store["digest"],
            artifacts.timings: reference["digest"],
        }
        for make, digest in expected.items():
            if path == make(meta["variant"]) and meta.get("reference", digest) != digest:
                raise ArtifactError(f"{path} was made against another reference; run `dvc repro`")
    if store["model"] != reference["digest"]:
        raise ArtifactError(f"{artifacts.REFERENCE} was made with another build of the reference; run `dvc repro`")


def _floors(reference: Row) -> Row:
    """The noise floor's metrics; raises if they are another reference's or another store's."""
    floor, store = artifacts.read_json(artifacts.FLOOR), artifacts.read_manifest(artifacts.REFERENCE)
    if (floor.get("model"), floor.get("store")) != (reference["digest"], store["digest"]):
        raise ArtifactError(f"{artifacts.FLOOR} was measured with another reference; run `dvc repro floor`")
    return dict(floor["metrics"])


def _tokens(b: Builder, variant: str, metas: dict[Path, Row], settings: params.Params) -> str | None:
    rows, theirs = artifacts.read_columns(artifacts.tokens(variant)), artifacts.tokens(settings.reference)
    if metas[theirs]["status"] == "ok":
        refuse_other_tokens(rows, artifacts.read_columns(theirs))
    return token_metrics(b, rows)


def _free(b: Builder, variant: str, metas: dict[Path, Row], settings: params.Params) -> str | None:
    paths = [artifacts.generations(name) for name in (variant, settings.reference)]
    most, others = (metas[path]["tokens"] for path in paths)
    if most != others:
        raise ArtifactError(f"replies of {variant} and {settings.reference} were made with different limits; run `dvc repro`")
    pairs, tokens = generation.pair(*map(artifacts.read_jsonl, paths)), artifacts.tokens(variant)
    columns = artifacts.read_columns(tokens) if metas[tokens]["status"] == "ok" else None
    b.curves["agreement_by_position"] = generation.by_position(b, pairs, columns, most)
    return generation.free_metrics(b, pairs, most, variant == settings.reference)


def _answers(b: Builder, variant: str, metas: dict[Path, Row], settings: params.Params) -> str | None:
    ref, paths = settings.reference, [artifacts.answers(name) for name in (variant, settings.reference)]
    ours, theirs = (metas[path] for path in paths)
    for key in ("sets", "batch_size", "seed"):
        if ours[key] != theirs[key]:
            raise ArtifactError(f"answers of {variant} and {ref} were made with different {key}; run `dvc repro`")
    try:
        pairs = pair(*map(artifacts.read_jsonl, paths))
        return answer_metrics(b, pairs, settings.evaluate.allow_truncated, theirs["once"])
    except KeyError as e:
        raise ArtifactError(f"an answer row of {variant} or {ref} has no {e}; delete the file and run `dvc repro`") from None


def _timings(b: Builder, variant: str, metas: dict[Path, Row], settings: params.Params) -> str | None:
    path = artifacts.timings(variant)
    timing_metrics(b, artifacts.read_jsonl(path), metas[path])
    return None


def main(variant: str) -> None:
    """Turn VARIANT's rows into metrics with intervals, and analyse its failures."""
    watch = artifacts.Stopwatch("compare", variant)
    settings = params.load()
    settings.variant(variant)
    result = compare(variant, settings)
    failures = failure_analysis.write(variant, settings)
    artifacts.write_json(artifacts.metrics(variant), result)
    counts = f"{len(result['metrics'])} metrics, {failures['words']}"
    outcome = counts if result["status"] == "ok" else f"{result['status']}: {result['reason']}"
    cli.say("compare", f"{variant}: {outcome}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
