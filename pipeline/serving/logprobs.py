"""Ask a server for the log-probabilities of given tokens and, in their places, of the likeliest.

A server is built to generate tokens; there are four ways to score given ones:

echo      the server returns the prompt with its tokens' log-probabilities (vLLM): one prefill
prompted  the same in the field `prompt_logprobs`, by token ids (vLLM)
bias      one token at a time: `logit_bias` forces the given token. A server that reports log-probabilities from before the bias
          (llama.cpp's) reports the model's: one decoding step each, if prefixes are cached
unforced  as bias, without forcing: the likeliest in each place, not the given token

Every reply is compared with the request token by token: a server may tokenize differently, truncate a prompt, or ignore a field.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

from httpx2 import AsyncClient, HTTPError

from pipeline.core import artifacts, cli
from pipeline.core.errors import DataError, Unsupported
from pipeline.core.records import Finding, Json, ScoreRow
from pipeline.divergence.lower_bound import ROUNDING, rounding
from pipeline.divergence.store import Window
from pipeline.model.config import leading
from pipeline.serving import measure
from pipeline.serving.client import Endpoint, ServerError, connected
from pipeline.serving.measure import closed
from pipeline.serving.reply import message_of, part

OPENINGS = (6, 10, 14)  # words of a text that the server continues by a token
ALIGNED = 0.5  # nats: two values of one token differ by less, values of different tokens by more
CERTAIN = 1e-6  # nats: no model is this sure of most tokens of a text
BIAS = 100  # the API's maximum
PIECE = "\N{REPLACEMENT CHARACTER}"  # the text of a token that is part of a character


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer.json, or a model folder's."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(f"--tokenizer {path}: {file} does not exist; name a tokenizer.json or a folder that has one")
    return Tokenizer.from_file(str(file))


class Words:
    """A tokenizer.json and its config, with the interface that `corpus_windows` expects."""

    def __init__(self, path: Path) -> None:
        self.raw = load_tokenizer(path)
        self.raw.no_truncation()
        self.raw.no_padding()
        config = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
        special = artifacts.read_json(config) if config.exists() else None
        self.bos_token_id, self.pad_token_id = (self._id(part(special, name)) for name in ("bos_token", "pad_token"))
        if special is None:  # take the token that it puts before a text
            self.bos_token_id = next(iter(self("").input_ids), None)

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def _id(self, name: Any) -> int | None:
        text = part(name, "content") or name
        return self.raw.token_to_id(text) if isinstance(text, str) else None

    def piece(self, token_id: int) -> str:
        return str(self.raw.decode([token_id], skip_special_tokens=False))

    def named(self, token_id: int) -> str:
        return f"{token_id} ({self.piece(token_id)!r})"

    def encoded(self, text: str) -> list[int]:
        return [*leading(self), *self(text, add_special_tokens=False).input_ids]


Place = dict[str, float]  # {token id: log-probability in nats} of the likeliest tokens; empty if the server does not name ids
Given = tuple[list[float | None], list[Place]]  # of tokens first .. n - 1: their log-probabilities; the likeliest in their places
Way = Callable[[AsyncClient, Endpoint, Words, Sequence[int], int, int], Awaitable[Given]]


async def _post(client: AsyncClient, endpoint: Endpoint, body: Json) -> tuple[Json, Any]:
    """Return (the choice of a greedy, unstreamed reply; its number of prompt tokens or None). Raises `ServerError`."""
    sent = endpoint.takes({"model": endpoint.model, "temperature": 0.0, **body})
    try:
        response = await asyncio.wait_for(client.post(f"{endpoint.url}/completions", json=sent), endpoint.timeout_s)
        reply = response.json()
    except asyncio.TimeoutError:
        raise ServerError(f"no reply within {endpoint.timeout_s:g} s") from None
    except HTTPError as e:
        raise ServerError(f"no reply: {endpoint.clean(str(e)) or type(e).__name__}") from None
    except (ValueError, RecursionError):
        raise ServerError(f"HTTP {response.status_code} without readable JSON") from None
    error = part(reply, "error")
    if response.status_code != 200 or error:
        reason = endpoint.clean(message_of(error or part(reply, "detail") or "no reason given"))
        raise ServerError(f"HTTP {response.status_code}: {' '.join(reason.split())[:200]}")
    choice = part(reply, "choices", 0)
    if not isinstance(choice, dict):
        raise ServerError("the reply has no choice")
    return choice, part(reply, "usage", "prompt_tokens")


async def echoed(client: AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int, top: int) -> Given:
    """Log-probabilities in nats of tokens first .. n - 1 of `ids`, and of the `top` likeliest in their places. Raises `ServerError`
    if the server gives none, or those of other tokens."""
    # max_tokens 1, not 0: llama-cpp-python takes 0 for no limit. Ids are required: a token's text in a prompt can differ from its
    # text alone.
    body = {"prompt": list(ids), "max_tokens": 1, "echo": True, "logprobs": top, "return_tokens_as_token_ids": True}
    choice, prompt_tokens = await _post(client, endpoint, body)
    tokens, values, likeliest = (part(choice, "logprobs", k) for k in ("tokens", "token_logprobs", "top_logprobs"))
    if not isinstance(values, list) or not values or not isinstance(tokens, list) or len(tokens) != len(values):
        raise ServerError("completions with echo and logprobs do not give the prompt's log-probabilities")
    if values[0] is not None:
        raise ServerError("echo is ignored: the log-probabilities are not the prompt's, whose first token has none")
    _check_length(prompt_tokens, len(ids))
    if len(tokens) != len(ids):
        del tokens[-1], values[-1]  # the generated token
    if len(tokens) != len(ids):
        raise ServerError(f"{len(tokens)} of {len(ids)} tokens came back: the server truncates, or has another tokenizer")
    for k, (got, wanted) in enumerate(zip(tokens, ids)):
        if not _is(got, wanted):
            raise ServerError(f"token {k} came back as another than {words.named(wanted)}, or not by its id")
    return _whole([_checked(v) for v in values[first:]], [_likeliest(part(likeliest, k)) for k in range(first, len(ids))])


async def prompted(client: AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int, top: int) -> Given:
    """Like `echoed`, by vLLM's `prompt_logprobs`, whose places hold the given token too."""
    choice, prompt_tokens = await _post(client, endpoint, {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": top})
    _check_length(prompt_tokens, len(ids))
    reported = part(choice, "prompt_logprobs")
    if not isinstance(reported, list) or len(reported) != len(ids) or not all(isinstance(p, dict) for p in reported[first:]):
        raise ServerError("prompt_logprobs is ignored, or does not give the likeliest in the place of each token")
    places = [{i: _checked(part(v, "logprob")) for i, v in place.items()} for place in reported[first:]]
    return _whole([_checked(place.get(str(i))) for place, i in zip(places, ids[first:])], places)


async def bias(
    client: AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int, top: int, *, forced: bool = True
) -> Given:  # fmt: skip
    """Like `echoed`, by one request per token. None for a part of a character: llama.cpp's server reports nothing for it.
    forced: by `logit_bias`; otherwise all log-probabilities are None, and only the likeliest come."""
    logps, places = list[float | None](), list[Place]()
    for k, wanted in enumerate(ids[first:], first):
        force = {"logit_bias": {str(wanted): BIAS}} if forced else {}
        body = {"prompt": list(ids[:k]), "max_tokens": 1, "logprobs": top, "cache_prompt": True, "return_tokens_as_token_ids": True}
        choice, prompt_tokens = await _post(client, endpoint, body | force)
        _check_length(prompt_tokens, k)
        name, value, likeliest = _generated(choice)
        places.append(_likeliest(likeliest))
        if not forced:
            logps.append(None)
            if not places[-1]:
                raise ServerError("the likeliest tokens do not come by their ids")
        elif name is None and PIECE in words.piece(wanted):
            whole = words(" a", add_special_tokens=False).input_ids[0]  # forcing this one, the reply names the likeliest
            choice, _ = await _post(client, endpoint, body | {"logit_bias": {str(whole): BIAS}})
            places[-1] = _likeliest(_generated(choice)[2])
            logps.append(None)
        elif name is None or not _is(name, wanted):
            raise ServerError(f"token {k} is not {words.named(wanted)}: the server ignores logit_bias or sends no log-probability")
        else:
            logps.append(_checked(value))
    return _whole(logps, places)


def _generated(choice: Json) -> tuple[Any, Any, Any]:
    """(id or text, log-probability, the likeliest) of a reply's first token, in llama.cpp's or the completions format; or Nones."""
    reported = part(choice, "logprobs")
    if token := part(reported, "content", 0):
        name = part(token, "id")
        return part(token, "token") if name is None else name, part(token, "logprob"), part(token, "top_logprobs")
    return part(reported, "tokens", 0), part(reported, "token_logprobs", 0), part(reported, "top_logprobs", 0)


def _likeliest(reported: Any) -> Place:
    """The likeliest tokens of a place, a list from llama.cpp and a mapping in completions; empty unless each has an id."""
    if isinstance(reported, dict):
        pairs = [(str(name), value) for name, value in reported.items()]
    else:
        pairs = [(f"token_id:{part(t, 'id')}", part(t, "logprob")) for t in reported or ()]
    names = [re.fullmatch(r"token_id:(\d+)", name) for name, _ in pairs]
    return {name[1]: _checked(value) for name, (_, value) in zip(names, pairs) if name} if all(names) else {}


WAYS: dict[str, Way] = {
    "echo of token ids": echoed, "prompt_logprobs": prompted, "logit_bias, a token at a time": bias,
    "the next token's likeliest, a token at a time": partial(bias, forced=False),
}  # fmt: skip
SAID = "the {top} likeliest of each place, by {way}"
TOPS = (20, 5, 1)  # how many of the likeliest to ask for, tried in turn: vLLM's default limit, OpenAI's limit, one


class Found(NamedTuple):
    """way: the first of WAYS that works, with the most of TOPS; lacks: {each way before it: why it does not work}."""

    way: str
    top: int
    lacks: dict[str, str]


async def ability(client: AsyncClient, endpoint: Endpoint, words: Words | None) -> Finding:
    """Whether the server gives log-probabilities of given tokens, how, and how many."""
    if words is None:
        return measure.finding(None, "name the model's tokenizer.json with --tokenizer to find out")
    try:
        found = await find_way(client, endpoint, words, measure.TEXT)
    except Unsupported as e:
        return measure.finding(False, str(e))
    return measure.finding(True, SAID.format(**found._asdict()))


async def find_way(client: AsyncClient, endpoint: Endpoint, words: Words, text: str) -> Found:
    """Find out how the server scores `text`. Raises `Unsupported` with all reasons if it does not."""
    ids, reasons = words.encoded(text), ""
    for top in TOPS:
        failed = dict[str, str]()
        for name, way in WAYS.items():
            try:
                await way(client, endpoint, words, ids, 1, top)
                if way in (echoed, prompted):  # the others score the generated token itself
                    await _check_aligned(client, endpoint, words, text, way)
                return Found(name, top, failed)
            except ServerError as e:
                failed[name] = str(e)
        reasons = reasons or "; ".join(f"{name}: {why}" for name, why in failed.items())
    raise Unsupported(f"the server gives no log-probabilities of given tokens, nor the likeliest by their ids ({reasons})")


async def _check_aligned(client: AsyncClient, endpoint: Endpoint, words: Words, text: str, way: Way) -> None:
    """Raise `ServerError` unless a generated token comes back with the log-probability that it was generated with. The echo of
    llama-cpp-python 0.3.36 is off by one token: all tokens are there, but every value is wrong."""
    compared = 0
    for count in OPENINGS:
        opening = " ".join(text.split()[:count])
        ids = words.encoded(opening)
        choice, _ = await _post(client, endpoint, {"prompt": ids, "max_tokens": 1, "logprobs": 1})
        value, longer = _generated(choice)[1], words.encoded(f"{opening}{part(choice, 'text')}")
        if longer[:-1] != ids or not isinstance(value, (int, float)):
            continue  # the token merges with the last word, or has no log-probability: nothing to compare
        again = (await way(client, endpoint, words, longer, 1, 1))[0][-1]
        compared += 1
        if again is None or not abs(again - value) <= ALIGNED:
            raise ServerError(f"echo's values are misaligned: a token generated with {value:.4g} nats comes back with {again:.4g}")
    if not compared:
        raise ServerError("cannot tell whether echo's values are aligned: no generated token could be compared")


def _check_length(counted: Any, sent: int) -> None:
    if isinstance(counted, int) and counted != sent:
        raise ServerError(f"the server counts {counted} tokens in a prompt of {sent}: it truncates, or has another tokenizer")


def _is(got: Any, wanted: int) -> bool:
    """Whether a server's name for a token, an id or `token_id:17`, means `wanted`."""
    return not isinstance(got, bool) and got in (wanted, f"token_id:{wanted}")


def _checked(value: Any) -> float:
    """A log-probability in nats. Raises `ServerError` if it is missing, not finite, or above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ServerError("a token came without its log-probability")
    if not math.isfinite(value) or value > ROUNDING:
        raise ServerError(f"a token has the invalid log-probability {value}")
    return float(value)


def _whole(logps: list[float | None], places: list[Place]) -> Given:
    """Return both. Raises `ServerError` if most tokens are certain or the probabilities of a place sum to more than 1: such values
    are not the model's."""
    scored = [v for v in logps if v is not None] or [max(place.values()) for place in places if place]
    off = rounding([v for place in places for v in place.values()])
    if over := [total for place in places if (total := sum(math.exp(v - off) for v in place.values())) > 1]:
        raise ServerError(f"probabilities of one place sum to {max(over):.4g}: they are not a distribution's")
    if scored and median(scored) > -CERTAIN:
        raise ServerError("most log-probabilities are 0: they are from after the choice was narrowed to one token, not the model's")
    return logps, places


async def scored(endpoint: Endpoint, windows: Sequence[Window], words: Words, at_once: int) -> tuple[Json, list[ScoreRow]]:
    """Return ({url, model, and the fields of `Found`}, one row per window). Raises `ServerError` without a server or its model,
    `Unsupported` if it gives no log-probabilities."""
    async with connected(endpoint) as client:
        endpoint, _ = await measure.named(client, endpoint)
        found = await find_way(client, endpoint, words, measure.TEXT)

        async def ask(w: Window) -> ScoreRow:
            error, logps, top, t_submit = None, None, None, time.monotonic()
            try:
                logps, top = await WAYS[found.way](client, endpoint, words, w.token_ids, w.first, found.top)
            except ServerError as e:
                error = endpoint.clean(str(e))
            return {
                "set": w.set, "document": w.document, "window": w.window, "first": w.first, "token_ids": list(w.token_ids),
                "ok": error is None, "error": error, "logps": logps, "top": top, "t_submit": t_submit, "t_end": time.monotonic(),
            }  # fmt: skip

        with cli.progress(len(windows), "score", "window") as bar:
            rows = await closed(ask, windows, at_once, bar.update)
    return {"url": endpoint.url, "model": endpoint.model, **found._asdict()}, rows
