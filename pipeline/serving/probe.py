"""What an endpoint can do, found by asking it: before anything is measured, and kept with the figures.

Every finding is {value: true, false or null, reason}; null means that it could not be told, and the reason says why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx2

from pipeline.core.explain import did_you_mean
from pipeline.serving.client import DISPENSABLE, Answer, Endpoint, Request, Row, ServerError, ask

NATURAL = 48  # tokens: a reply that ends by itself before this shows whether ignore_eos is honoured
TEXT = "The harbour master counted the boats that came in before the storm, and wrote their names into a book."
CHAT = [{"role": "user", "content": "Answer with one word: yes or no?"}]
TOP_K = "an endpoint gives the likeliest tokens' log-probabilities, not the whole vocabulary's"

Finding = dict[str, Any]


def finding(value: bool | None, reason: str | None = None) -> Finding:
    return {"value": value, "reason": reason}


async def models(client: httpx2.AsyncClient, endpoint: Endpoint) -> list[str]:
    """Names of the models an endpoint serves. Raises `ServerError` if it is not up, or wants another key."""
    try:
        response = await client.get(f"{endpoint.url}/models")
        listed = response.json() if response.status_code == 200 else {}
    except httpx2.HTTPError as e:
        said = endpoint.clean(str(e)) or type(e).__name__
        raise ServerError(f"no server answers at {endpoint.url} ({said}); start it, or correct it") from None
    except ValueError:
        raise ServerError(f"{endpoint.url}/models is not JSON; is the address that of an OpenAI-compatible server?") from None
    if response.status_code in (401, 403):
        key = "refuses this API key" if endpoint.key else "wants an API key"
        raise ServerError(f"{endpoint.url} {key}; put the right one into {endpoint.key_variable}")
    if response.status_code != 200:
        raise ServerError(f"{endpoint.url}/models answers HTTP {response.status_code}; is that an OpenAI-compatible server?")
    return [str(m["id"]) for m in listed.get("data") or []]


def chosen(asked: str, served: list[str], url: str) -> str:
    """The model to measure: the one asked for, or the only one there is."""
    if not served:
        raise ServerError(f"{url} serves no model; load one there")
    if asked and asked not in served:
        raise ServerError(f"model {asked!r} is not served at {url}{did_you_mean(asked, served)}; it has {', '.join(served[:5])}")
    if not asked and len(served) > 1:
        raise ServerError(f"{url} serves {len(served)} models: choose one with --model ({', '.join(served[:5])})")
    return asked or served[0]


async def probe(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, Row]:
    """(the endpoint with its model, what it can do). Raises `ServerError` if it cannot be measured at all."""
    served = await models(client, endpoint)
    endpoint = replace(endpoint, model=chosen(endpoint.model, served, endpoint.url))
    found: Row = {"url": endpoint.url, "model": endpoint.model, "models": served, "api": "chat" if endpoint.chat else "completions"}
    first = await ask(client, endpoint, Request(TEXT, 4))
    while more := _refused_fields(first.row) - endpoint.refused:
        endpoint = replace(endpoint, refused=endpoint.refused | more)
        first = await ask(client, endpoint, Request(TEXT, 4))
    if not first.row["ok"]:
        how = {200: "does not stream", None: "does not answer"}.get(first.row["status"], "refuses")
        raise ServerError(f"{endpoint.url} {how} {found['api']}: {first.row['error']}")
    if endpoint.refused:
        found["all_fields"] = finding(False, f"it was asked without {', '.join(sorted(endpoint.refused))}, which it refuses")
    usage = first.row["counted_by"] == "usage"
    found["stream_usage"] = finding(usage, None if usage else "no usage came, though stream_options asked for it")
    found["one_token_an_event"] = finding(*_single(first.row))
    found["ignore_eos"] = await _ignores_eos(client, endpoint)
    found["seed"] = await _seed(client, endpoint)
    found["prefix_cache"] = await _prefix_cache(client, endpoint)
    found["prompt_logprobs"] = await prompt_logprobs(client, endpoint)
    able, why = found["prompt_logprobs"]["value"], found["prompt_logprobs"]["reason"]
    found["kld"] = finding(False, TOP_K)  # never an approximation under the same name
    found["ppl"] = found["delta_p"] = finding(able, why)
    return endpoint, found


def _refused_fields(row: Row) -> frozenset[str]:
    """The dispensable field that a server names first, where it calls a request a bad one: what follows is its advice."""
    said = row["error"] if row["status"] in (400, 422) else ""
    return frozenset(re.findall(rf"\b({'|'.join(DISPENSABLE)})\b", said)[:1])


def lacking(found: Row) -> list[str]:
    """One line for each thing the endpoint lacks, or for which that could not be told."""
    kinds = {k: v for k, v in found.items() if isinstance(v, dict) and k != "prefix_cache"}  # that one is not missed
    return [f"{k}: {'cannot be told' if v['value'] is None else 'no'}: {v['reason']}" for k, v in kinds.items() if not v["value"]]


def _single(row: Row) -> tuple[bool | None, str | None]:
    events, tokens = len(row["t_chunks"]), row["output_tokens"]
    if tokens is None:
        return None, row["counted_by"]
    return events == tokens, None if events == tokens else f"{tokens} tokens came in {events} events"


def _refused(answer: Answer) -> Finding | None:
    return None if answer.row["ok"] else finding(False, answer.row["error"])


async def _ignores_eos(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether a reply that ends by itself goes on when it is told to."""
    prompt: Any = CHAT  # a chat ends soon; both ways of asking lead to the same sampler
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
        return finding(None, f"the model's own reply does not end within {NATURAL} tokens; every reply's length is checked anyway")
    return finding(True)


async def _seed(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether one seed gives one text, and another seed another."""
    options = [{"temperature": 1.0, "seed": seed} for seed in (7, 7, 8, 9)]
    answers = [await ask(client, endpoint, Request(TEXT, 16, options=o)) for o in options]
    if refused := next((r for a in answers if (r := _refused(a))), None):
        return refused
    a, again, *others = [x.reasoning + x.text for x in answers]
    if a != again:
        return finding(False, "two requests with one seed gave two texts")
    if all(a == o for o in others):
        return finding(None, "three seeds gave one text: temperature may be ignored too")
    return finding(True)


async def _prefix_cache(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether a prompt that was seen before is answered from a cache."""
    rows = [(await ask(client, endpoint, Request(TEXT * 3, 1))).row for _ in "ab"]
    cached = rows[1]["cached_tokens"]
    return finding(None, "the server does not say") if cached is None else finding(cached > 0, None if cached else "none was used")


async def prompt_logprobs(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether the true tokens of a prompt come back with their log-probabilities."""
    try:
        scores = await score(client, endpoint, TEXT)
    except ServerError as e:
        return finding(False, str(e))
    return finding(True, f"echo: {len(scores)} tokens of a prompt were scored")


async def score(client: httpx2.AsyncClient, endpoint: Endpoint, prompt: str | list[int]) -> list[float]:
    """Log-probability in nats of each token of `prompt` after the first, by `echo` and `logprobs`: enough for perplexity
    and for the change of the true token's probability. Raises `ServerError` where the endpoint has no such thing."""
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0.0}
    try:
        response = await client.post(f"{endpoint.url}/completions", json=endpoint.takes(body))
        told = response.json()["choices"][0].get("logprobs") or {}
        values, at = told["token_logprobs"], told.get("text_offset")
    except httpx2.HTTPError as e:
        raise ServerError(f"completions with echo failed: {endpoint.clean(str(e)) or type(e).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ServerError("completions with echo and logprobs do not give the prompt's log-probabilities") from None
    if not isinstance(values, list) or len(values) < 3 or values[0] is not None or (at and at[0] != 0):
        raise ServerError("echo is ignored: the log-probabilities that came are not the prompt's")
    scores = values[1:-1]  # the first token has none; the last is the one that was generated
    if any(not isinstance(v, (int, float)) for v in scores):
        raise ServerError("a token of the prompt came without a log-probability")
    return [float(v) for v in scores]
