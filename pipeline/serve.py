"""serve: a variant behind a server, under load -> artifacts/serving/<variant>.jsonl, reports/serving/<variant>.json

The server is started here on the variant's own files (launch), or found at its address (url). One row a request, failed
ones too; what the server lacks is found first and kept. A server that cannot run here is a result, `unsupported`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import hardware, served
from pipeline.core import artifacts, cli, params
from pipeline.core.errors import NoResult, ParamsError, Unsupported
from pipeline.core.explain import unknown
from pipeline.core.params import Compare, Params
from pipeline.core.sections import Load, Server, Serving
from pipeline.evalset import sets_digest
from pipeline.numbers.serving_figures import Objective, memory
from pipeline.serving import measure
from pipeline.serving.client import Endpoint, address, key_from
from pipeline.serving.measure import Plan
from pipeline.serving.session import counter, load_tokenizer, measured, started, unfinished

Row = dict[str, Any]
ELSEWHERE = "the server was not started here, so its memory is not seen"
NOT_SEEN = "the system does not say, or the server ended before it was asked"


def plan_of(load: Load, common: Serving, seed: int) -> Plan:
    """The tier's amounts as a plan; replies are of forced length wherever the server can."""
    limits = common.objective.model_dump() if common.objective else {}
    return Plan(**load.model_dump(), objective=Objective(**limits), seed=seed)


def serve(
    folder: Path, server: Server, plan: Plan, common: Serving, threads: int, options: dict[str, Any], path: Path
) -> tuple[Row, Plan, list[Row], Row | None]:
    """(what the server can do, the plan as it could be held, rows, facts of the launch). folder: the variant's model;
    options: its engine's, for a server that is launched; path: where the rows will be written."""
    assert common.timeout_s is not None  # params has seen to that
    words = load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
    counted = words is not None
    with started(server.launch, folder, plan, threads=threads, is_counted=counted, is_chat=server.chat, options=options) as own:
        url = own.url if own else address(server.url or "", server.key_env)
        key = own.key if own else key_from(server.key_env)
        endpoint = Endpoint(url, server.model, server.chat, common.timeout_s, key, counter(words), server.key_env)
        found, plan, rows = asyncio.run(measured(endpoint, plan, Path(common.prompts), words, False, path))
    return found, plan, rows, own.facts if own else None


def figures(rows: list[Row], plan: Plan, facts: Row | None, setup: Compare) -> Row:
    """Figures of each level, the knee and the server's memory."""
    found = measure.figures(rows, plan, setup.confidence, setup.between_runs.time)
    peak = memory(facts["peak_memory_bytes"] if facts else None, NOT_SEEN if facts else ELSEWHERE, setup.confidence)
    return {"levels": found["levels"], "knee": found["knee"], "server_memory_bytes": peak}


def status_of(rows: list[Row]) -> Row:
    """ok if any request that counts was complete; else the first one's error."""
    counted = [r for r in rows if not r["warmup"]]
    if any(r["ok"] for r in counted):
        return {"status": "ok", "reason": None}
    return {"status": "invalid", "reason": f"none of {len(counted)} requests was complete; the first said: {counted[0]['error']}"}


def write(variant: str, rows: list[Row], meta: Row, report: Row) -> None:
    """Rows, their side file, and the figures with what they were made from."""
    path = artifacts.serving(variant)
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta)
    inputs = {str(f): artifacts.sha256_file(f) for f in (path, artifacts.meta_of(path))}
    artifacts.write_json(artifacts.served(variant), report | {"inputs": inputs})
    unfinished(path).unlink(missing_ok=True)


def measure_variant(variant: str, settings: Params) -> Row:
    """Serve a variant, write what came of it, and return the figures. Raises `Unsupported` if it cannot be served here."""
    common, folder = settings.serving, artifacts.model_dir(variant)
    manifest, load = artifacts.read_manifest(folder), settings.amount.serving
    assert load is not None  # params has seen to that
    about: Row = {"variant": variant, "model": manifest["digest"], "asked": served.asked(variant, settings)}
    none: Row = {"launch": None, "probe": None, "levels": {}, "knee": None, "server_memory_bytes": None}
    hardware.note()
    try:
        if manifest["status"] != "ok":
            raise Unsupported(f"quantize: {manifest['status']}: {manifest['reason']}")
        artifacts.verify_files(folder, manifest)
        plan, own = plan_of(load, common, settings.seed), settings.variant(variant).engine_options
        server, path = common.variants[variant], artifacts.serving(variant)
        found, plan, rows, facts = serve(folder, server, plan, common, settings.thread_count, own, path)
    except NoResult as e:
        about |= {"status": e.status, "reason": f"{e} (after a change of this machine: dvc repro -sf serve@{variant})"}
        write(variant, [], about, about | none)
        return about
    about |= status_of(rows) | {"probe": found, "plan": asdict(plan)}
    about["client"] = hardware.describe(settings.thread_count)
    shown = {k: v for k, v in facts.items() if k not in ("log", "model_dir")} if facts else None  # reports are in git: no paths
    side = {"launch": facts, "prompts": sets_digest(Path(common.prompts)), "seed": settings.seed, "versions": artifacts.versions()}
    if facts:  # its port is another each time
        about["probe"] = {k: v for k, v in found.items() if k not in ("url", "models")}
    report = about | {"launch": shown} | figures(rows, plan, facts, settings.compare)
    write(variant, rows, about | side, report)
    return report | {"rows": len(rows), "complete": sum(r["ok"] for r in rows)}


def main(variant: str) -> None:
    """Measure VARIANT behind a server."""
    watch = artifacts.Stopwatch("serve", variant)
    settings = params.load()
    if variant not in settings.serving.variants:
        raise ParamsError(f"serving.variants: {unknown('variant', variant, list(settings.serving.variants))}")
    report = measure_variant(variant, settings)
    told = f"{report['status']}: {report['reason']}"
    if report["status"] == "ok":
        knee = report["knee"]
        at = f"knee at {knee['value']:g} at once" if knee["value"] is not None else f"no knee: {knee['warnings'][0]}"
        told = f"{report['rows']} requests, {report['complete']} complete; {at}"
    cli.say("serve", f"{variant}: {told}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
