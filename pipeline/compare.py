"""compare: rows -> metrics with intervals -> reports/metrics/<variant>.json, and where it broke -> artifacts/broke/<variant>.json

No model is loaded here; the arithmetic is in metrics/. Rows that were made with another build of a model, or against
another reference, are refused.
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
        for name, fault in (
            ("diverge", _tokens(b, variant, ref, metas)),
            ("evaluate", _answers(b, variant, ref, metas, settings)),
            ("benchmark", _timings(b, variant, metas, manifest)),
            ("replies", _free(b, variant, ref, metas)),
        ):
            if fault:
                faults.append((name, fault))
        if variant == ref:  # the floor is the reference's own figure: what it differs from itself
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
    """Stages and what each says, once: tokens and replies come from one process, which ends for both."""
    said: dict[str, str] = {}
    for stage, fault in faults:
        said.setdefault(re.sub(rf"^({variant}: )?(\w+ {variant}: )?", "", fault), stage)
    return "; ".join(f"{stage}: {fault}" for fault, stage in said.items()) or None


def _same_models(metas: dict[Path, Row], manifests: dict[str, Row], reference: Row) -> None:
    """Raise if rows were made with another build of a variant, or against another reference, than is here now."""
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


def _tokens(b: Builder, variant: str, ref: str, metas: dict[Path, Row]) -> str | None:
    path = artifacts.tokens(variant)
    if metas[path]["status"] != "ok":
        return str(metas[path]["reason"])
    rows = artifacts.read_columns(path)
    if metas[artifacts.tokens(ref)]["status"] == "ok":
        refuse_other_tokens(rows, artifacts.read_columns(artifacts.tokens(ref)))
    return token_metrics(b, rows)


def _free(b: Builder, variant: str, ref: str, metas: dict[Path, Row]) -> str | None:
    ours, theirs = metas[artifacts.generations(variant)], metas[artifacts.generations(ref)]
    for meta in (ours, theirs):
        if meta["status"] != "ok":
            return f"{meta['variant']}: {meta['reason']}"
    if ours["tokens"] != theirs["tokens"]:
        raise ArtifactError(f"replies of {variant} and {ref} were made with different limits; run `dvc repro`")
    rows = [artifacts.read_jsonl(artifacts.generations(v)) for v in (variant, ref)]
    pairs = generation.pair(*rows)
    tokens = artifacts.tokens(variant)
    columns = artifacts.read_columns(tokens) if metas[tokens]["status"] == "ok" else None
    b.curves["agreement_by_position"] = generation.by_position(b, pairs, columns, ours["tokens"])
    return generation.free_metrics(b, pairs, ours["tokens"], variant == ref)


def _answers(b: Builder, variant: str, ref: str, metas: dict[Path, Row], settings: params.Params) -> str | None:
    ours, theirs = metas[artifacts.answers(variant)], metas[artifacts.answers(ref)]
    for meta in (ours, theirs):
        if meta["status"] != "ok":
            return f"{meta['variant']}: {meta['reason']}"
    for key in ("sets", "batch_size", "seed"):
        if ours[key] != theirs[key]:
            raise ArtifactError(f"answers of {variant} and {ref} were made with different {key}; run `dvc repro`")
    try:
        pairs = pair(artifacts.read_jsonl(artifacts.answers(variant)), artifacts.read_jsonl(artifacts.answers(ref)))
        return answer_metrics(b, pairs, settings.evaluate.allow_truncated, theirs["once"])
    except KeyError as e:
        raise ArtifactError(f"an answer row of {variant} or {ref} has no {e}; delete the file and run `dvc repro`") from None


def _timings(b: Builder, variant: str, metas: dict[Path, Row], manifest: Row) -> str | None:
    path = artifacts.timings(variant)
    if metas[path]["status"] != "ok":
        return str(metas[path]["reason"])
    timing_metrics(b, artifacts.read_jsonl(path), metas[path])
    return None


def main(variant: str) -> None:
    """Turn VARIANT's rows into metrics with intervals, and say where it broke."""
    watch = artifacts.Stopwatch("compare", variant)
    settings = params.load()
    settings.variant(variant)
    result = compare(variant, settings)
    where = failure_analysis.write(variant, settings)
    artifacts.write_json(artifacts.metrics(variant), result)
    told = f"{result['status']}: {result['reason']}"
    if result["status"] == "ok":
        told = f"{len(result['metrics'])} metrics, {where['words']}"
    cli.say("compare", f"{variant}: {told}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
