"""reports/serving/<variant>.json -> metrics of a level (`ttft_p99_ms/closed-4`) and of a whole run (`knee`)."""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.metrics.definitions import SERVED, SERVED_WHOLE, is_served
from pipeline.metrics.serving import scenarios

Row = dict[str, Any]
Metrics = dict[str, dict[str, Any]]


def levels(settings: Params) -> list[str]:
    """Names of the levels at which the tier measures a server."""
    load = settings.amount.serving
    return scenarios(load.concurrency, load.rates) if load else []


def asked(variant: str, settings: Params) -> Row:
    """All settings that a server's results depend on, besides the model."""
    load, common = settings.amount.serving, settings.serving.model_dump(exclude={"variants"})
    amounts = {"load": load.model_dump() if load else None, "seed": settings.seed, "threads": settings.threads}
    intervals = {"confidence": settings.compare.confidence, "between_runs": settings.compare.between_runs.time}
    return {**settings.serving.variants[variant].model_dump(), **common, **amounts, **intervals}


def write_asked(settings: Params) -> None:
    """Write the requested server list. Later stages depend on this file, so the list may be empty."""
    servers = artifacts.jsonable({name: asked(name, settings) for name in settings.serving.variants})
    text = yaml.safe_dump(servers, sort_keys=False) if servers else "# no variant is served (serving.variants in params.yaml)\n"
    artifacts.write_text(artifacts.SERVING_ASKED, text)


def judged(settings: Params) -> set[str]:
    """Server metrics that rules judge."""
    return {rule.metric for rule in settings.gate.rules if is_served(rule.metric)}


def load(settings: Params) -> dict[str, Row]:
    """{variant: its server's results} that exist. Raises `ArtifactError` for a file that `serve` did not write."""
    existing = {n: artifacts.read_json(artifacts.served(n)) for n in settings.serving.variants if artifacts.served(n).exists()}
    for name, result in existing.items():
        if not is_valid(result):
            raise ArtifactError(f"{artifacts.served(name)} is damaged; delete it and run `dvc repro`")
    return existing


def is_valid(result: Any) -> bool:
    """Whether a parsed file is one that `serve` wrote."""
    return isinstance(result, dict) and isinstance(result.get("levels"), dict) and {"asked", "model", "status"} <= result.keys()


def fault(variant: str, result: Row | None, model: str, settings: Params) -> str | None:
    """Why a variant's server results cannot be used, or None. model: digest of the variant as it is now."""
    if variant not in settings.serving.variants:
        return f"{variant} is not served (serving.variants in params.yaml)"
    if result is None:
        return f"{artifacts.served(variant)} is missing; run `dvc repro`"
    if result["asked"] != artifacts.jsonable(asked(variant, settings)):
        return f"{variant}'s server was measured for other params; run `dvc repro`"
    if result["model"] != model:
        return f"{variant}'s server had another build of the model; run `dvc repro`"
    return None if result["status"] in ("ok", "invalid") else f"the server is {result['status']}: {result['reason']}"


def metrics(variant: str, result: Row | None, model: str, settings: Params) -> Metrics:
    """A variant's server metrics as rules name them. Metrics that rules judge and that are unknown are null with a reason."""
    why = fault(variant, result, model, settings)
    known: Metrics = {}
    if result is not None and why is None:
        known = {f"{name}/{level}": m for level, by_name in result["levels"].items() for name, m in by_name.items()}
        known |= {name: result[name] for name in SERVED_WHOLE}
    null = {"value": None, "low": None, "high": None, "n": 0, "reason": why or "the server's run has no such metric"}
    return {name: null | {"unit": SERVED[name.split("/")[0]].unit} for name in judged(settings)} | known


def current(variants: dict[str, Row], settings: Params) -> tuple[dict[str, Row], dict[str, str]]:
    """({variant: its server's results}, {variant: why it has none}). variants: {variant: its metrics file}."""
    existing = load(settings)
    faults = {n: fault(n, existing.get(n), variants[n]["model"], settings) for n in settings.serving.variants}
    return {n: r for n, r in existing.items() if not faults[n]}, {n: why for n, why in faults.items() if why}


def add(variants: dict[str, Row], settings: Params, servers: dict[str, Row] | None = None) -> None:
    """Add server metrics to {variant: its metrics file}, if any rule judges one; `client` is the machine that asked. servers:
    {variant: its server's results}, by default those on disk."""
    if not judged(settings):
        return
    servers = load(settings) if servers is None else servers
    for name, variant in variants.items():
        variant["metrics"] |= metrics(name, servers.get(name), variant["model"], settings)
        variant["client"] = servers.get(name, {}).get("client")
