"""Check the server settings in params.yaml before any server is started or asked."""

from __future__ import annotations

import itertools
import re

from pipeline.core.errors import ParamsError, QuantgateError, Unsupported
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.metrics.definitions import LOWER_BOUNDS, QUANTILES, SERVED_TOKENS, SERVED_WHOLE, is_served
from pipeline.metrics.serving import PREFIX, in_a_round
from pipeline.serving import launch, results
from pipeline.serving.client import address, key_from
from pipeline.stats.intervals import quantile_interval

PERCENTILE = re.compile(r"(?:ttft|ttfc|tpot|e2e)_(p\d+)_ms")  # over requests; gaps between tokens are many more


def faults(settings: Params) -> list[str]:
    """Server settings that cannot work: wrong launcher for the format, malformed URL or key."""
    messages = []
    for name, server in settings.serving.variants.items():
        try:
            if server.launch:
                launch.check_engine(server.launch, settings.variant(name).engine)
            else:
                address(server.url or "", server.key_env)
                key_from(server.key_env)
        except QuantgateError as e:
            messages.append(f"params.yaml: serving.variants.{name}: {e}")
    return messages


def unsupported(settings: Params) -> list[str]:
    """Servers that this machine cannot start. This is a result, not a fault: the run goes on without them."""
    messages = []
    for name, server in settings.serving.variants.items():
        try:
            if server.launch:
                launch.check_supported(server.launch, settings.variant(name).engine_options)
        except Unsupported as e:
            rules = [r for r in settings.gate.rules if is_served(r.metric) and r.required and name in (r.variants or [name])]
            required = name in settings.gate.required and rules
            gate = ", and a required rule judges it: the gate will FAIL" if required else ""
            messages.append(f"serving.variants.{name} will be unsupported: {e}{gate}")
    return messages


def check_metric(metric: str, settings: Params) -> None:
    """Raise `ParamsError` if a rule's metric will not be measured: no variant is served, or the level is missing or unknown."""
    stem, _, level = metric.partition("/")
    levels = results.levels(settings)
    if not settings.serving.variants:
        raise ParamsError(f"metric {metric!r} needs a server, and no variant is served; name one under serving.variants")
    if stem in SERVED_TOKENS and not (settings.amount.serving and settings.amount.serving.score):
        raise ParamsError(f"metric {metric!r} needs a server's log-probabilities; add `score: all` to the tier's `serving`")
    if stem in SERVED_WHOLE and level:
        raise ParamsError(f"metric {metric!r}: {stem} belongs to the whole run; write {stem!r}")
    if stem not in SERVED_WHOLE and level not in levels:
        hint = did_you_mean(level, levels)
        raise ParamsError(f"metric {metric!r}: give one of the tier's levels, as in '{stem}/{levels[0]}'{hint}")


def check_rule(rule: Rule, settings: Params) -> None:
    """Raise `ParamsError` for a required rule on a required variant that is not served: it could only fail."""
    if not is_served(rule.metric) or not rule.required:
        return
    without = [n for n in settings.gate.required if n not in settings.serving.variants and n in (rule.variants or [n])]
    if without:
        raise ParamsError(f"metric {rule.metric!r}: required variant {without[0]!r} is not served; give the rule `variants: [...]`")


def inconclusive(settings: Params) -> list[str]:
    """Rules on a percentile for which the tier has too few requests, and rules that can never pass."""
    required = {r.metric for r in settings.gate.rules if r.required}
    messages = [
        f"{m} will be INCONCLUSIVE or FAIL: a lower bound cannot pass; it only fails merges under gate.inconclusive: passes"
        for m in LOWER_BOUNDS if m in required
    ]  # fmt: skip
    for metric in sorted(results.judged(settings)):
        stem, _, level = metric.partition("/")
        percentile, load = PERCENTILE.fullmatch(stem), settings.amount.serving
        if not percentile or not load or level in PREFIX:
            continue
        q, n, c = QUANTILES[percentile[1]], load.rounds * in_a_round(level, load.requests), settings.compare.confidence
        more = itertools.count(n, max(1, n // 8))
        enough = next(k for k in more if quantile_interval(range(k), range(k), q, confidence=c).low is not None)
        if enough > n:
            few = f"{n} requests are too few for a {percentile[1]} interval; about {enough} are enough"
            messages.append(f"{metric} will be INCONCLUSIVE: {few} (tier's serving.requests)")
    return messages
