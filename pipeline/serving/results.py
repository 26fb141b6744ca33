"""reports/serving/<variant>.json -> metrics of one level (`ttft_p99_ms/closed-4`) and of a whole run (`knee`)."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from pipeline.core import artifacts, records
from pipeline.core.params import Params
from pipeline.core.records import Json, ServerReport, VariantResult
from pipeline.metrics.builder import unknown
from pipeline.metrics.definitions import is_served
from pipeline.metrics.serving import PREFIX, scenarios


def levels(settings: Params) -> list[str]:
    """Names of the levels at which the tier measures a server."""
    load, prefix = settings.amount.serving, any(server.prefix for server in settings.serving.variants.values())
    return [*scenarios(load.concurrency, load.rates), *(PREFIX if prefix else ())] if load else []


def asked(variant: str, settings: Params) -> Json:
    """All settings, besides the model, that a server's results depend on."""
    load, common = settings.amount.serving, settings.serving.model_dump(exclude={"variants"})
    amounts = {"load": load.model_dump(exclude_none=True) if load else None, "seed": settings.seed, "threads": settings.threads}
    intervals = {"confidence": settings.compare.confidence, "between_runs": settings.compare.between_runs.time}
    server = settings.serving.variants[variant]
    return {**server.model_dump(exclude=None if server.prefix else {"prefix"}), **common, **amounts, **intervals}


def write_asked(settings: Params) -> None:
    """Write the requested server list. Later stages depend on this file, so the list may be empty."""
    servers = artifacts.jsonable({name: asked(name, settings) for name in settings.serving.variants})
    text = yaml.safe_dump(servers, sort_keys=False) if servers else "# no variant is served (serving.variants in params.yaml)\n"
    artifacts.write_text(artifacts.SERVING_ASKED, text)


def judged(settings: Params) -> set[str]:
    """Server metrics that rules judge."""
    return {rule.metric for rule in settings.gate.rules if is_served(rule.metric)}


def load(settings: Params) -> dict[str, ServerReport]:
    """The existing {variant: its server's results}."""
    paths = {name: artifacts.served(name) for name in settings.serving.variants}
    return {name: records.read(path, ServerReport) for name, path in paths.items() if path.exists()}


def fault(variant: str, result: ServerReport | None, model: str, settings: Params) -> str | None:
    """Why a variant's server results cannot be used, or None. model: current digest of the variant."""
    if variant not in settings.serving.variants:
        return f"{variant} is not served (serving.variants in params.yaml)"
    if result is None:
        return f"{artifacts.served(variant)} is missing; run `dvc repro`"
    if result["asked"] != artifacts.jsonable(asked(variant, settings)):
        return f"{variant}'s server was measured for other params; run `dvc repro`"
    if result["model"] != model:
        return f"{variant}'s server had another build of the model; run `dvc repro`"
    return None if result["status"] in ("ok", "invalid") else f"the server is {result['status']}: {result['reason']}"


def current(variants: Mapping[str, VariantResult], settings: Params) -> tuple[dict[str, ServerReport], dict[str, str]]:
    """Return ({variant: its server's results}, {variant: why it has none}). variants: {variant: its metrics file}."""
    existing = load(settings)
    faults = {n: fault(n, existing.get(n), variants[n]["model"], settings) for n in settings.serving.variants}
    return {n: r for n, r in existing.items() if not faults[n]}, {n: why for n, why in faults.items() if why}


def add(variants: Mapping[str, VariantResult], settings: Params, servers: Mapping[str, ServerReport] | None = None) -> None:
    """Add server metrics to {variant: its metrics file} if a rule judges one; unknown ones are null with a reason. `client` is the
    machine that sent the requests. servers: {variant: its server's results}, by default those on disk."""
    if not (names := judged(settings)):
        return
    servers = load(settings) if servers is None else servers
    for name, variant in variants.items():
        server = servers.get(name)
        why, metrics = fault(name, server, variant["model"], settings), variant["metrics"]
        metrics |= {n: unknown(n, why or "the server's run has no such metric", settings.compare.confidence) for n in names}
        if server and not why:
            metrics |= {f"{n}/{level}": m for level, by_name in server["levels"].items() for n, m in by_name.items()}
            whole = {"knee": server["knee"], "server_memory_bytes": server["server_memory_bytes"], **server.get("tokens", {})}
            metrics |= {n: m for n, m in whole.items() if m}
        variant["client"] = server.get("client") if server else None
