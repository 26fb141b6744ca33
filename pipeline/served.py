"""What variants' servers did, as metrics: reports/serving/<variant>.json -> {metric/level: figure}.

`ttft_p99_ms/closed-4` is a level's, `knee` and `server_memory_bytes` are a whole run's.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import yaml

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.numbers.definitions import is_served
from pipeline.numbers.serving_figures import DEFINITIONS, QUANTILES, WHOLE, in_a_round, scenarios
from pipeline.numbers.stats import quantile_interval

Row = dict[str, Any]
Metrics = dict[str, dict[str, Any]]
PERCENTILE = re.compile(r"(?:ttft|ttfc|tpot|e2e)_(p\d+)_ms")  # of requests; gaps between tokens are many more


def levels(settings: Params) -> list[str]:
    """Names of the levels that the chosen tier measures a server at."""
    load = settings.amount.serving
    return scenarios(load.concurrency, load.rates) if load else []


def asked(variant: str, settings: Params) -> Row:
    """All of params.yaml that what a variant's server did depends on, but for its model."""
    load, common = settings.amount.serving, settings.serving.model_dump(exclude={"variants"})
    own = {"load": load.model_dump() if load else None, "seed": settings.seed, "threads": settings.threads}
    intervals = {"confidence": settings.compare.confidence, "between_runs": settings.compare.between_runs.time}
    return {**settings.serving.variants[variant].model_dump(), **common, **own, **intervals}


def write_asked(settings: Params) -> None:
    """Who is to be served, and how: what depends on servers depends on this file, so that none may be served at all."""
    wanted = artifacts.jsonable({name: asked(name, settings) for name in settings.serving.variants})
    text = yaml.safe_dump(wanted, sort_keys=False) if wanted else "# no variant is served (serving.variants in params.yaml)\n"
    artifacts.write_text(artifacts.SERVING_ASKED, text)


def check_metric(metric: str, settings: Params) -> None:
    """Raise `ParamsError` if a rule's metric will not be measured: no such level, none named, or nobody is served."""
    stem, _, level = metric.partition("/")
    known = levels(settings)
    if not settings.serving.variants:
        raise ParamsError(f"metric {metric!r} is a server's, and no variant is served; name one under serving.variants")
    if stem in WHOLE and level:
        raise ParamsError(f"metric {metric!r}: {stem} is a whole run's; write {stem!r}")
    if stem not in WHOLE and level not in known:
        raise ParamsError(
            f"metric {metric!r}: give one of the tier's levels, as in '{stem}/{known[0]}'{did_you_mean(level, known)}"
        )


def check_rule(rule: Rule, settings: Params) -> None:
    """Raise `ParamsError` for a rule on a server that decides over a variant which has none: it could only fail."""
    if not is_served(rule.metric) or not rule.required:
        return
    bare = [n for n in settings.gate.required if n not in settings.serving.variants and n in (rule.variants or [n])]
    if bare:
        raise ParamsError(
            f"metric {rule.metric!r}: required variant {bare[0]!r} is not served; give the rule `variants: [...]`, or serve it"
        )


def judged(settings: Params) -> set[str]:
    """Metrics of servers that rules ask for."""
    return {rule.metric for rule in settings.gate.rules if is_served(rule.metric)}


def told(settings: Params) -> list[str]:
    """Rules on a percentile that so few requests can never settle, in words: said before any work."""
    said = []
    for metric in sorted(judged(settings)):
        stem, _, level = metric.partition("/")
        at = PERCENTILE.fullmatch(stem)
        load = settings.amount.serving
        if at and load and not _has_interval(q := QUANTILES[at[1]], n := load.rounds * in_a_round(level, load.requests), settings):
            enough = next(k for k in itertools.count(n, max(1, n // 8)) if _has_interval(q, k, settings))
            said.append(
                f"{metric} will be INCONCLUSIVE: {n} requests bound no {at[1]}; about {enough} would (tier's serving.requests)"
            )
    return said


def _has_interval(q: float, n: int, settings: Params) -> bool:
    return quantile_interval(range(n), range(n), q, confidence=settings.compare.confidence).low is not None


def load(settings: Params) -> dict[str, Row]:
    """{variant: its figures} of those that are served and here. Raises `ArtifactError` for a file `serve` did not write."""
    found = {n: artifacts.read_json(artifacts.served(n)) for n in settings.serving.variants if artifacts.served(n).exists()}
    for name, figures in found.items():
        if not whole(figures):
            raise ArtifactError(f"{artifacts.served(name)} is damaged; delete it and run `dvc repro`")
    return found


def whole(figures: Any) -> bool:
    """Whether a parsed file is one that `serve` wrote."""
    return isinstance(figures, dict) and isinstance(figures.get("levels"), dict) and {"asked", "model", "status"} <= figures.keys()


def fault(variant: str, figures: Row | None, model: str, settings: Params) -> str | None:
    """Why a variant has no figures of a server, or None. model: digest of the variant as it is now."""
    if variant not in settings.serving.variants:
        return f"{variant} is not served (serving.variants in params.yaml)"
    if figures is None:
        return f"{artifacts.served(variant)} is missing; run `dvc repro`"
    if figures["asked"] != artifacts.jsonable(asked(variant, settings)):
        return f"{variant}'s server was measured for other params; run `dvc repro`"
    if figures["model"] != model:
        return f"{variant}'s server had another build of the model; run `dvc repro`"
    return None if figures["status"] in ("ok", "invalid") else f"the server is {figures['status']}: {figures['reason']}"


def metrics(variant: str, figures: Row | None, model: str, settings: Params) -> Metrics:
    """A variant's figures under the names that rules use. One that a rule asks for and that is not known is null, with why."""
    why = fault(variant, figures, model, settings)
    found: Metrics = {}
    if figures is not None and why is None:
        found = {f"{name}/{level}": m for level, own in figures["levels"].items() for name, m in own.items()}
        found |= {name: figures[name] for name in WHOLE}
    none = {"value": None, "low": None, "high": None, "n": 0, "reason": why or "the server's run has no such figure"}
    return {name: none | {"unit": DEFINITIONS[name.split("/")[0]].unit} for name in judged(settings)} | found


def current(results: dict[str, Row], settings: Params) -> tuple[dict[str, Row], dict[str, str]]:
    """({variant: its figures}, {variant: why there are none}) of all that were to be served. results: {variant: metrics}."""
    there = load(settings)
    faults = {n: fault(n, there.get(n), results[n]["model"], settings) for n in settings.serving.variants}
    return {n: f for n, f in there.items() if not faults[n]}, {n: why for n, why in faults.items() if why}


def add(results: dict[str, Row], settings: Params, servers: dict[str, Row] | None = None) -> None:
    """Put servers' figures beside those in process, if any rule asks for one. results: {variant: metrics/<variant>.json};
    servers: {variant: its figures}, those on file if not given. `client`: the machine that a server was asked from."""
    if not judged(settings):
        return
    servers = load(settings) if servers is None else servers
    for name, result in results.items():
        result["metrics"] |= metrics(name, servers.get(name), result["model"], settings)
        result["client"] = servers.get(name, {}).get("client")
