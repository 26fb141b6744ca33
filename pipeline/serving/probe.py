"""Probe what an endpoint can do. A finding is {value: true, false or null (unknown), reason}."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx2

from pipeline.core.explain import did_you_mean
from pipeline.serving import logprobs
from pipeline.serving.client import DISPENSABLE, Answer, Endpoint, Request, Row, ServerError, ask

NATURAL = 48  # tokens: whether ignore_eos works shows on a reply that ends by itself before this
TEXT = "The harbour master counted the boats that came in before the storm, and wrote their names into a book."
CHAT = [{"role": "user", "content": "Answer with one word: yes or no?"}]
TOP_K = "an endpoint gives the likeliest tokens' log-probabilities, not the whole vocabulary's"  # so there is no KLD

Finding = dict[str, Any]


def finding(value: bool | None, reason: str | None = None) -> Finding:
    return {"value": value, "reason": reason}


async def models(client: httpx2.AsyncClient, endpoint: Endpoint) -> list[str]:
    """Names of the models that an endpoint serves. Raises `ServerError` if it is down, or needs another key."""
    try:
        response = await client.get(f"{endpoint.url}/models")
        listed = response.json() if response.status_code == 200 else {}
    except httpx2.HTTPError as e:
        reason = endpoint.clean(str(e)) or type(e).__name__
        raise ServerError(f"no server answers at {endpoint.url} ({reason}); start it, or correct the URL") from None
    except ValueError:
        raise ServerError(f"{endpoint.url}/models is not JSON; is this an OpenAI-compatible server?") from None
    if response.status_code in (401, 403):
        key = "refuses this API key" if endpoint.key else "requires an API key"
        raise ServerError(f"{endpoint.url} {key}; set {endpoint.key_variable} to the right one")
    if response.status_code != 200:
        raise ServerError(f"{endpoint.url}/models answers HTTP {response.status_code}; is this an OpenAI-compatible server?")
    return [str(m["id"]) for m in listed.get("data") or []]


def chosen(model: str, available: list[str], url: str) -> str:
    """`model`, or the only available one if it is empty. Raises `ServerError` if the choice is unclear."""
    names = ", ".join(available[:5])
    if not available:
        raise ServerError(f"{url} serves no model; load one there")
    if model and model not in available:
        raise ServerError(f"{url} does not serve model {model!r}{did_you_mean(model, available)}; it has {names}")
    if not model and len(available) > 1:
        raise ServerError(f"{url} serves {len(available)} models: choose one with --model ({names})")
    return model or available[0]


async def probe(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, Row]:
    """(the endpoint with its model and without refused fields, what it can do). Raises `ServerError` if it cannot be measured."""
    names = await models(client, endpoint)
    endpoint = replace(endpoint, model=chosen(endpoint.model, names, endpoint.url))
    api = "chat" if endpoint.chat else "completions"
    abilities: Row = {"url": endpoint.url, "model": endpoint.model, "models": names, "api": api}
    first = await ask(client, endpoint, Request(TEXT, 4))
    while more := _refused_fields(first.row) - endpoint.refused:
        endpoint = replace(endpoint, refused=endpoint.refused | more)
        first = await ask(client, endpoint, Request(TEXT, 4))
    if not first.row["ok"]:
        how = {200: "does not stream", None: "does not answer"}.get(first.row["status"], "refuses")
        raise ServerError(f"{endpoint.url} {how} {api}: {first.row['error']}")
    if endpoint.refused:
        abilities["all_fields"] = finding(False, f"requests go without {', '.join(sorted(endpoint.refused))}, which it refuses")
    usage = first.row["counted_by"] == "usage"
    abilities["stream_usage"] = finding(usage, None if usage else "no usage came, though stream_options asked for it")
    events, tokens = len(first.row["t_chunks"]), first.row["output_tokens"]
    several = None if events == tokens else f"{tokens} tokens came in {events} events"
    abilities["one_token_an_event"] = finding(*((None, first.row["counted_by"]) if tokens is None else (not several, several)))
    abilities["ignore_eos"] = await _ignores_eos(client, endpoint)
    abilities["seed"] = await _seed(client, endpoint)
    abilities["prefix_cache"] = await _prefix_cache(client, endpoint)
    abilities["ppl"] = abilities["delta_p"] = abilities["prompt_logprobs"] = await _prompt_logprobs(client, endpoint)
    abilities["kld"] = finding(False, TOP_K)  # never an approximation under the same name
    return endpoint, abilities


def _refused_fields(row: Row) -> frozenset[str]:
    """The dispensable field that a refusal names first; what it names later is advice."""
    error = row["error"] if row["status"] in (400, 422) else ""
    return frozenset(re.findall(rf"\b({'|'.join(DISPENSABLE)})\b", error)[:1])


def lacking(abilities: Row) -> list[str]:
    """One line for each ability that the endpoint lacks, or may lack."""
    asked = {k: v for k, v in abilities.items() if isinstance(v, dict) and k != "prefix_cache"}  # nobody misses that one
    return [f"{k}: {'unknown' if v['value'] is None else 'no'}: {v['reason']}" for k, v in asked.items() if not v["value"]]


def _refused(answer: Answer) -> Finding | None:
    return None if answer.row["ok"] else finding(False, answer.row["error"])


async def _ignores_eos(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether ignore_eos makes a reply go on that would end by itself."""
    prompt: Any = CHAT  # a chat ends soon, and both APIs use the same sampler
    forced = await ask(client, endpoint, Request(prompt, NATURAL, forced=True))
    if forced.row["fault"] == "http" and not endpoint.chat:
        prompt = TEXT
        forced = await ask(client, endpoint, Request(prompt, NATURAL, forced=True))
    if refused := _refused(forced):
        return refused
    if forced.row["output_tokens"] is None:
        return finding(None, forced.row["counted_by"])
    natural = await ask(client, endpoint, Request(prompt, NATURAL))
    if natural.row["finish"] == "length" or natural.row["output_tokens"] == NATURAL:
        return finding(None, f"the model's own reply is longer than {NATURAL} tokens; every reply's length is checked anyway")
    return finding(True)


async def _seed(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether the same seed gives the same text and another seed another."""
    options = [{"temperature": 1.0, "seed": seed} for seed in (7, 7, 8, 9)]
    answers = [await ask(client, endpoint, Request(TEXT, 16, options=o)) for o in options]
    if refused := next((r for a in answers if (r := _refused(a))), None):
        return refused
    a, again, *others = [x.reasoning + x.text for x in answers]
    if a != again:
        return finding(False, "two requests with the same seed gave different texts")
    if all(a == o for o in others):
        return finding(None, "three seeds gave the same text: the server may ignore temperature")
    return finding(True)


async def _prefix_cache(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether a repeated prompt is answered from a cache."""
    rows = [(await ask(client, endpoint, Request(TEXT * 3, 1))).row for _ in "ab"]
    cached = rows[1]["cached_tokens"]
    return finding(None, "the server does not say") if cached is None else finding(cached > 0, None if cached else "none was used")


async def _prompt_logprobs(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether echo returns the prompt's tokens with their log-probabilities."""
    try:
        _, values, _ = await logprobs.echo(client, endpoint, TEXT)
    except ServerError as e:
        return finding(False, str(e))
    if len(values) < 3 or not all(isinstance(v, (int, float)) for v in values[1:-1]):
        return finding(False, "a token of the prompt came without a log-probability")
    return finding(True, f"echo: {len(values) - 2} tokens of a prompt were scored")
