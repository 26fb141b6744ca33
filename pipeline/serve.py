"""serve: a variant behind a server, under load -> artifacts/serving/<variant>.jsonl, reports/serving/<variant>.json

The server is launched on the variant's own files, or found at its URL. One row a request, failed ones too. A server that cannot
run here is a result: `unsupported`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import NoResult, ParamsError, Unsupported
from pipeline.core.explain import unknown
from pipeline.core.params import Compare, Load, Params, Server, Serving
from pipeline.evalset import sets_digest
from pipeline.metrics.serving import Objective, memory
from pipeline.serving import measure, results
from pipeline.serving.measure import Plan, endpoint_of, load_tokenizer, measured, unfinished
from pipeline.speed import hardware

Row = dict[str, Any]
ELSEWHERE = "the server was not started here, so its memory is not seen"
NOT_SEEN = "the system does not say, or the server ended before it was asked"


def plan_of(load: Load, common: Serving, seed: int) -> Plan:
    """The tier's amounts as a plan; replies have a forced length if the server can do that."""
    limits = common.objective.model_dump() if common.objective else {}
    return Plan(**load.model_dump(), objective=Objective(**limits), seed=seed)


def serve(
    folder: Path, server: Server, plan: Plan, common: Serving, threads: int, options: dict[str, Any], path: Path
) -> tuple[Row, Plan, list[Row], Row | None]:
    """(what the server can do, the plan as it was carried out, rows, facts of the launch). folder: the variant's model; options:
    its engine options, for a launched server; path: where the rows will be written."""
    assert common.timeout_s is not None  # params checks it
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
    with endpoint_of(
        server.url, server.launch, folder, plan, tokenizer=tokenizer, model=server.model, chat=server.chat,
        timeout_s=common.timeout_s, key_env=server.key_env, threads=threads, options=options,
    ) as (endpoint, facts):  # fmt: skip
        run = measured(endpoint, plan, Path(common.prompts), tokenizer, False, path)
        return *asyncio.run(run), facts


def figures(rows: list[Row], plan: Plan, facts: Row | None, setup: Compare) -> Row:
    """Metrics of each level, the saturation point and the server's memory."""
    report = measure.figures(rows, plan, setup.confidence, setup.between_runs.time)
    peak = memory(facts["peak_memory_bytes"] if facts else None, NOT_SEEN if facts else ELSEWHERE, setup.confidence)
    return {"levels": report["levels"], "knee": report["knee"], "server_memory_bytes": peak}


def write(variant: str, rows: list[Row], meta: Row, report: Row) -> None:
    """Write rows, their meta file, and the metrics with digests of what they were computed from."""
    path = artifacts.serving(variant)
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta)
    inputs = {str(f): artifacts.sha256_file(f) for f in (path, artifacts.meta_of(path))}
    artifacts.write_json(artifacts.served(variant), report | {"inputs": inputs})
    unfinished(path).unlink(missing_ok=True)


def measure_variant(variant: str, settings: Params) -> str:
    """Serve a variant and write the results; returns them in a sentence."""
    common, folder = settings.serving, artifacts.model_dir(variant)
    manifest, load = artifacts.read_manifest(folder), settings.amount.serving
    assert load is not None  # params checks it
    about: Row = {"variant": variant, "model": manifest["digest"], "asked": results.asked(variant, settings)}
    empty: Row = {"launch": None, "probe": None, "levels": {}, "knee": None, "server_memory_bytes": None}
    hardware.note()
    try:
        if manifest["status"] != "ok":
            raise Unsupported(f"quantize: {manifest['status']}: {manifest['reason']}")
        artifacts.verify_files(folder, manifest)
        plan, options = plan_of(load, common, settings.seed), settings.variant(variant).engine_options
        server, path = common.variants[variant], artifacts.serving(variant)
        abilities, plan, rows, facts = serve(folder, server, plan, common, settings.thread_count, options, path)
    except NoResult as e:
        about |= {"status": e.status, "reason": f"{e} (after a change of this machine: dvc repro -sf serve@{variant})"}
        write(variant, [], about, about | empty)
        return f"{about['status']}: {about['reason']}"
    why = measure.failure(rows)
    about |= {"status": "invalid" if why else "ok", "reason": why, "probe": abilities, "plan": asdict(plan)}
    about["client"] = hardware.describe(settings.thread_count)
    public = {k: v for k, v in facts.items() if k not in ("log", "model_dir")} if facts else None  # reports are in git: no paths
    side = {"launch": facts, "prompts": sets_digest(Path(common.prompts)), "seed": settings.seed, "versions": artifacts.versions()}
    if facts:  # its port changes with every launch
        about["probe"] = {k: v for k, v in abilities.items() if k not in ("url", "models")}
    report = about | {"launch": public} | figures(rows, plan, facts, settings.compare)
    write(variant, rows, about | side, report)
    complete = f"{len(rows)} requests, {sum(r['ok'] for r in rows)} complete"
    return f"invalid: {why}" if why else f"{complete}; {measure.saturation(report['knee'])}"


def main(variant: str) -> None:
    """Measure VARIANT behind a server."""
    watch = artifacts.Stopwatch("serve", variant)
    settings = params.load()
    if variant not in settings.serving.variants:
        raise ParamsError(f"serving.variants: {unknown('variant', variant, list(settings.serving.variants))}")
    cli.say("serve", f"{variant}: {measure_variant(variant, settings)}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
