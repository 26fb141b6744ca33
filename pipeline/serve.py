"""serve: a variant behind a server, under load -> artifacts/serving/<variant>.jsonl, reports/serving/<variant>.json

The server is launched on the variant's files, or found at its URL. One row per request, failed ones too. A server that cannot run
here is a result: `unsupported`. If the tier sets `score`, the server also scores windows of the reference's store, one row per
window in artifacts/serving/<variant>.scores.json.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.core import artifacts, cli, explain, params
from pipeline.core.errors import DataError, NoResult, ParamsError, Unsupported
from pipeline.core.params import Params
from pipeline.core.records import Launch, Probe, RequestRow, ScoreRow, ServerMeta, ServerReport
from pipeline.divergence.store import Store
from pipeline.evalset import sets_digest
from pipeline.metrics.builder import Builder, unknown
from pipeline.metrics.definitions import SERVED_TOKENS
from pipeline.metrics.served_tokens import add_served
from pipeline.metrics.serving import Objective, memory, tipped
from pipeline.serving import logprobs, measure, results
from pipeline.serving.measure import Plan
from pipeline.speed import hardware


def serve(
    variant: str, settings: Params, store: Store | None
) -> tuple[Probe, Plan, list[RequestRow], list[ScoreRow], Launch | None]:
    """Return (what the server can do, the plan as carried out, rows of requests, rows of windows, facts of the launch). Replies
    have a forced length if the server can do that. store: holds the windows; the tier says how many to score, evenly spaced."""
    common, load, folder = settings.serving, settings.amount.serving, artifacts.model_dir(variant)
    assert load is not None and common.timeout_s is not None and common.objective is not None  # params checks it
    server, options = common.variants[variant], settings.variant(variant).engine_options
    plan = Plan(**load.model_dump(exclude={"score"}), objective=Objective(**common.objective.model_dump()), seed=settings.seed)
    tokenizer = logprobs.load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
    windows, scores = store.windows if store else [], list[ScoreRow]()
    if isinstance(load.score, int) and load.score < len(windows):
        windows = [windows[k * len(windows) // load.score] for k in range(load.score)]
    room = replace(plan, prompt_tokens=max(plan.prompt_tokens, *(len(w.token_ids) for w in windows), 0))
    with measure.endpoint_of(
        server.url, server.launch, folder, room, tokenizer=tokenizer, model=server.model, chat=server.chat,
        timeout_s=common.timeout_s, key_env=server.key_env, threads=settings.thread_count, options=options, prefix=server.prefix,
    ) as (endpoint, launch):  # fmt: skip
        path = artifacts.serving(variant)
        run = measure.measured(endpoint, plan, Path(common.prompts), tokenizer, path, server.prefix, server.launch)
        abilities, plan, rows = asyncio.run(run)
        try:
            if windows:
                at_once, words = max(plan.concurrency, default=1), logprobs.Words(folder)
                how, scores = asyncio.run(logprobs.scored(endpoint, windows, words, at_once))
                abilities["prompt_logprobs"] = measure.finding(True, logprobs.SAID.format(**how))
        except (Unsupported, DataError) as e:
            abilities["prompt_logprobs"] = measure.finding(False, str(e))
        return abilities, plan, rows, scores, launch


def write(rows: list[RequestRow], scores: list[ScoreRow], meta: ServerMeta, report: ServerReport) -> None:
    """Write rows, their meta file, and the report with digests of both."""
    path = artifacts.serving(meta["variant"])
    windows = path.with_suffix(".scores.json")
    artifacts.write_jsonl(path, rows)
    artifacts.write_text(windows, json.dumps(scores))  # "[]" without any: DVC warns of an empty file
    artifacts.write_json(artifacts.meta_of(path), meta)
    report["inputs"] = {str(f): artifacts.sha256_file(f) for f in (path, artifacts.meta_of(path), *([windows] if scores else ()))}
    artifacts.write_json(artifacts.served(meta["variant"]), report)
    measure.unfinished(path).unlink(missing_ok=True)


def measure_variant(variant: str, settings: Params) -> str:
    """Serve a variant and write the results; returns them in one sentence."""
    folder, setup = artifacts.model_dir(variant), settings.compare
    manifest = artifacts.read_manifest(folder)
    about: ServerMeta = {
        "variant": variant, "model": manifest["digest"], "asked": results.asked(variant, settings), "status": "ok", "reason": None,
    }  # fmt: skip
    hardware.note()
    try:
        if manifest["status"] != "ok":
            raise Unsupported(f"quantize: {manifest['status']}: {manifest['reason']}")
        artifacts.verify_files(folder, manifest)
        load = settings.amount.serving
        store = Store(artifacts.REFERENCE) if load and load.score else None
        abilities, plan, rows, scores, launch = serve(variant, settings, store)
    except NoResult as e:
        about["status"], about["reason"] = e.status, f"{e} (after a change of this machine: dvc repro -sf serve@{variant})"
        nothing: ServerReport = {
            **about, "launch": None, "probe": None, "levels": {}, "knee": None, "server_memory_bytes": None, "inputs": {}
        }  # fmt: skip
        write([], [], about, nothing)
        return f"{about['status']}: {about['reason']}"
    levels, knee = measure.metrics_of(rows, plan, setup.confidence, setup.between_runs.time)
    if why := measure.failure(rows) or tipped(levels):
        about["status"], about["reason"] = "invalid", why
    about["probe"], about["plan"], about["client"] = abilities, asdict(plan), {**hardware.describe(settings.thread_count)}
    public, peak, why_not = None, None, "the server was not started here, so its memory is not seen"
    if launch:  # reports are in git: no paths, and no port, which changes with every launch
        abilities.pop("url"), abilities.pop("models")
        public, peak = launch.copy(), launch["peak_memory_bytes"]
        public.pop("log"), public.pop("model_dir")
        why_not = "the system does not say, or the server ended before it was asked"
    sets = sets_digest(Path(settings.serving.prompts))
    meta: ServerMeta = {**about, "launch": launch, "prompts": sets, "seed": settings.seed, "versions": artifacts.versions()}
    used = memory(peak, why_not, setup.confidence)
    report: ServerReport = {**about, "launch": public, "levels": levels, "knee": knee, "server_memory_bytes": used, "inputs": {}}
    if store:
        meta["reference"] = report["reference"] = store.manifest["digest"]
        b, way = Builder(setup, settings.seed), abilities["prompt_logprobs"]["reason"] or ""
        if scores:
            add_served(b, scores, store)
        report["tokens"] = b.metrics or {name: unknown(name, way, setup.confidence) for name in SERVED_TOKENS}
    write(rows, scores, meta, report)
    return f"invalid: {why}" if why else measure.summary(rows, knee)


def main(variant: str) -> None:
    """Measure VARIANT behind a server."""
    watch = artifacts.Stopwatch("serve", variant)
    settings = params.load()
    if variant not in settings.serving.variants:
        raise ParamsError(f"serving.variants: {explain.unknown('variant', variant, list(settings.serving.variants))}")
    cli.say("serve", f"{variant}: {measure_variant(variant, settings)}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
