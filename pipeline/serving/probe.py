"""Probe what an endpoint can do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx2

from pipeline.core.explain import did_you_mean
from pipeline.core.records import Exchange, Finding, Probe
from pipeline.serving.client import DISPENSABLE, Endpoint, Request, ServerError, ask
from pipeline.serving.reply import part

NATURAL = 48  # tokens: whether ignore_eos works shows on a reply that ends by itself before this
TEXT = "The harbour master counted the boats that came in before the storm, and wrote their names into a book."
CHAT = [{"role": "user", "content": "Answer with one word: yes or no?"}]


def finding(value: bool | None, reason: str | None = None) -> Finding:
    return {"value": value, "reason": reason}


async def named(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, list[str]]:
    """(the endpoint with its model, names of all models). Raises `ServerError` if it is down, needs another key, or if it is not
    clear which model is meant."""
    url = endpoint.url
    try:
        response = await client.get(f"{url}/models")
        listed = response.json() if response.status_code == 200 else None
    except httpx2.HTTPError as e:
        reason = endpoint.clean(str(e)) or type(e).__name__
        raise ServerError(f"no server answers at {url} ({reason}); start it, or correct the URL") from None
    except ValueError:
        raise ServerError(f"{url}/models is not JSON; is this an OpenAI-compatible server?") from None
    if response.status_code in (401, 403):
        key = "refuses this API key" if endpoint.key else "requires an API key"
        raise ServerError(f"{url} {key}; set {endpoint.key_variable} to the right one")
    if response.status_code != 200:
        raise ServerError(f"{url}/models answers HTTP {response.status_code}; is this an OpenAI-compatible server?")
    models, model = [str(m["id"]) for m in part(listed, "data") or []], endpoint.model
    names = ", ".join(models[:5])
    if not models:
        raise ServerError(f"{url} serves no model; load one there")
    if model and model not in models:
        raise ServerError(f"{url} does not serve model {model!r}{did_you_mean(model, models)}; it has {names}")
    if not model and len(models) > 1:
        raise ServerError(f"{url} serves {len(models)} models: choose one with --model ({names})")
    return replace(endpoint, model=model or models[0]), models


async def probe(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, Probe]:
    """(the endpoint with its model and without refused fields, what it can do). Raises `ServerError` if it cannot be measured."""
    endpoint, models = await named(client, endpoint)
    api = "chat" if endpoint.chat else "completions"
    first = await ask(client, endpoint, Request(TEXT, 4))
    while more := _refused_fields(first.row) - endpoint.refused:
        endpoint = replace(endpoint, refused=endpoint.refused | more)
        first = await ask(client, endpoint, Request(TEXT, 4))
    row = first.row
    if not row["ok"]:
        how = {200: "does not stream", None: "does not answer"}.get(row["status"], "refuses")
        raise ServerError(f"{endpoint.url} {how} {api}: {row['error']}")
    without = f"requests go without {', '.join(sorted(endpoint.refused))}, which it refuses"
    is_counted, events, tokens = row["counted_by"] == "usage", len(row["t_chunks"]), row["output_tokens"]
    several = None if events == tokens else f"{tokens} tokens came in {events} events"
    abilities: Probe = {
        "url": endpoint.url, "model": endpoint.model, "models": models, "api": api,
        "all_fields": finding(False, without),
        "stream_usage": finding(is_counted, None if is_counted else "no usage came, though stream_options asked for it"),
        "one_token_an_event": finding(None, row["counted_by"]) if tokens is None else finding(not several, several),
        "ignore_eos": await _ignores_eos(client, endpoint),
    }  # fmt: skip
    if not endpoint.refused:
        del abilities["all_fields"]
    return endpoint, abilities


def _refused_fields(row: Exchange) -> frozenset[str]:
    """The dispensable field that a refusal names first; what it names later is advice."""
    error = row["error"] if row["status"] in (400, 422) else None
    return frozenset(re.findall(rf"\b({'|'.join(DISPENSABLE)})\b", error or "")[:1])


def lacking(abilities: Probe) -> list[str]:
    """One line for each ability that the endpoint lacks, or may lack."""
    asked = {k: v for k, v in abilities.items() if isinstance(v, dict)}
    return [f"{k}: {'unknown' if v['value'] is None else 'no'}: {v['reason']}" for k, v in asked.items() if not v["value"]]


async def _ignores_eos(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether ignore_eos makes a reply go on that would end by itself."""
    prompt: Any = CHAT  # a chat ends soon, and both APIs use the same sampler
    forced = await ask(client, endpoint, Request(prompt, NATURAL, forced=True))
    if forced.row["fault"] == "http" and not endpoint.chat:
        prompt = TEXT
        forced = await ask(client, endpoint, Request(prompt, NATURAL, forced=True))
    if not forced.row["ok"]:
        return finding(False, forced.row["error"])
    if forced.row["output_tokens"] is None:
        return finding(None, forced.row["counted_by"])
    natural = (await ask(client, endpoint, Request(prompt, NATURAL))).row
    if natural["finish"] == "length" or natural["output_tokens"] == NATURAL:
        return finding(None, f"the model's own reply is longer than {NATURAL} tokens; every reply's length is checked anyway")
    return finding(True)
