"""Whether variants can be served as params.yaml asks: said by check before any work; no server is started or asked."""

from __future__ import annotations

from pipeline.core.errors import QuantgateError, Unsupported
from pipeline.core.params import Params
from pipeline.core.sections import Server
from pipeline.numbers.definitions import is_served
from pipeline.serving import launch
from pipeline.serving.client import address, key_from


def faults(settings: Params) -> list[str]:
    """Servers that cannot be meant, in words: of a kind that does not read the variant, or with an address or key that is none."""
    found = []
    for name, server in settings.serving.variants.items():
        try:
            _check(server, settings.variant(name).engine)
        except QuantgateError as e:
            found.append(f"params.yaml: serving.variants.{name}: {e}")
    return found


def told(settings: Params) -> list[str]:
    """Servers that can only be `unsupported` here, in words: a result, and no fault, since the run goes on without them."""
    found = []
    for name, server in settings.serving.variants.items():
        try:
            if server.launch:
                launch.refuse_here(server.launch, settings.variant(name).engine_options)
        except Unsupported as e:
            gate = ", and a required rule judges it: the gate will FAIL" if _decides(name, settings) else ""
            found.append(f"serving.variants.{name} will be unsupported: {e}{gate}")
    return found


def _check(server: Server, engine: str) -> None:
    if server.launch:
        launch.check_engine(server.launch, engine)
    else:
        address(server.url or "", server.key_env)
        key_from(server.key_env)


def _decides(variant: str, settings: Params) -> bool:
    rules = [r for r in settings.gate.rules if is_served(r.metric) and r.required]
    return variant in settings.gate.required and any(variant in (r.variants or [variant]) for r in rules)
