"""Log-probabilities of given tokens, from servers that are made to write tokens of their own. There are two ways:

echo       the prompt comes back with its tokens' log-probabilities (vLLM, llama-cpp-python): one prefill
bias       a token at a time: `logit_bias` makes the given one the likeliest, and where a server tells log-probabilities as
           they were before that (llama.cpp's), this one's is the model's own: a decoding step each, if prefixes are cached

What comes back is compared with what was asked, token by token: a server may make other tokens of a text, keep less of a
prompt than it got, or not know the field.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any, Protocol

import httpx2

from pipeline.core.errors import Unsupported
from pipeline.serving.client import Endpoint, Row, ServerError
from pipeline.serving.reply import message_of

ROUNDING = 1e-3  # nats above 0 that a server's arithmetic may give a token which is all but certain
OPENINGS = (6, 10, 14)  # words of a text that are continued by a token
ALIGNED = 0.5  # nats: one model's two ways to the same likeliest token differ by less, another token's value by more
CERTAIN = 1e-6  # nats: no model is so sure of most tokens of a text
BIAS = 100  # the most that the API allows
UNTOLD = "\N{REPLACEMENT CHARACTER}"  # a token that is part of a character has no text of its own


class Words(Protocol):
    """A model's tokenizer."""

    def text(self, ids: Sequence[int]) -> str:
        """What a server that puts its own BOS in front must be sent to get these tokens."""

    def piece(self, token_id: int) -> str: ...

    def encoded(self, text: str) -> list[int]:
        """Tokens of a text, with the BOS that the tokenizer puts in front of one."""


Way = Callable[[httpx2.AsyncClient, Endpoint, Words, Sequence[int], int], Awaitable[list[float | None]]]


async def echo_ids(
    client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int
) -> list[float | None]:  # fmt: skip
    """Log-probabilities in nats of tokens first .. n - 1 of `ids`. Raises `ServerError` where they do not come, or are others'."""
    return await _echo(client, endpoint, words, ids, first, list(ids))


async def echo_text(
    client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int
) -> list[float | None]:  # fmt: skip
    """As `echo_ids`, for servers that take no ids. Raises `ServerError` also where the text would become other tokens."""
    text = words.text(ids)
    if words.encoded(text) != list(ids):
        raise ServerError("as text these tokens would become others (it starts or ends inside a word or a character)")
    return await _echo(client, endpoint, words, ids, first, text)


async def bias(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int) -> list[float | None]:
    """As `echo_ids`, by one request a token. None: a part of a character, which llama.cpp's server says nothing of."""
    found = list[float | None]()
    for k, wanted in enumerate(ids[first:], first):
        body = {"prompt": list(ids[:k]), "max_tokens": 1, "logprobs": 1, "logit_bias": {str(wanted): BIAS}, "cache_prompt": True}
        choice, prompt_tokens = await _post(client, endpoint, body)
        _check_length(prompt_tokens, k)
        name, value = _generated(choice)
        if name is None and UNTOLD in words.piece(wanted):
            found.append(None)
        elif name is None or not _is(name, wanted, words):
            raise ServerError(f"token {k} was to be {_shown(wanted, words)}: logit_bias is ignored, or no log-probability comes")
        else:
            found.append(_checked(value))
    _check_open([v for v in found if v is not None])
    return found


def _generated(choice: Row) -> tuple[Any, Any]:
    """(id or text, log-probability) of a reply's first token, in llama.cpp's form or that of completions; else (None, None)."""
    told: Row = choice["logprobs"] if isinstance(choice.get("logprobs"), dict) else {}
    content, tokens, values = told.get("content"), told.get("tokens"), told.get("token_logprobs")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return content[0].get("id", content[0].get("token")), content[0].get("logprob")
    both = isinstance(tokens, list) and isinstance(values, list) and tokens and values
    return (tokens[0], values[0]) if both else (None, None)  # type: ignore[index]


WAYS: dict[str, Way] = {"echo of token ids": echo_ids, "echo of text": echo_text, "logit_bias, a token at a time": bias}


async def find_way(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, text: str) -> tuple[str, dict[str, str]]:
    """(the first of WAYS that gives log-probabilities of this text's tokens, {way before it: why not}).

    Raises `Unsupported` with every reason if there is none.
    """
    ids, lacks = words.encoded(text), dict[str, str]()
    for name, way in WAYS.items():
        try:
            await way(client, endpoint, words, ids, 1)
            if way is not bias:  # there the generated token itself is what is scored
                await _check_aligned(client, endpoint, words, way, text)
            return name, lacks
        except ServerError as e:
            lacks[name] = str(e)
    told = "; ".join(f"{name}: {why}" for name, why in lacks.items())
    raise Unsupported(f"{endpoint.url} gives no log-probabilities of given tokens, so no ppl, ppl_ratio or delta_p ({told})")


async def _check_aligned(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, way: Way, text: str) -> None:
    """Raise `ServerError` unless a token that was generated after some words of a text comes back with the log-probability it
    was generated with. The echo of llama-cpp-python 0.3.36 is one token out of place: all tokens are there, every value wrong.
    """
    told = 0
    for count in OPENINGS:
        opening = " ".join(text.split()[:count])
        ids = words.encoded(opening)
        prompt = opening if way is echo_text else ids
        choice, _ = await _post(client, endpoint, {"prompt": prompt, "max_tokens": 1, "logprobs": 1})
        value, longer = _generated(choice)[1], words.encoded(f"{opening}{choice.get('text')}")
        if longer[:-1] != ids or not isinstance(value, (int, float)):
            continue  # it grows together with the last word, or has no log-probability: nothing to compare
        again = (await way(client, endpoint, words, longer, 1))[-1]
        told += 1
        if again is None or not abs(again - value) <= ALIGNED:
            raise ServerError(
                f"echo's values are out of place: a token generated with {value:.4g} nats comes back with {again:.4g}"
            )
    if not told:
        raise ServerError("whether echo's values are in place cannot be told: no token that was generated could be compared")


async def _post(client: httpx2.AsyncClient, endpoint: Endpoint, body: Row) -> tuple[Row, Any]:
    """(the one choice of a greedy reply that is not streamed, its number of prompt tokens or None). Raises `ServerError`."""
    asked = {"model": endpoint.model, "temperature": 0.0, **body}
    try:
        response = await asyncio.wait_for(
            client.post(f"{endpoint.url}/completions", json=endpoint.takes(asked)), endpoint.timeout_s
        )
        found = response.json()
    except asyncio.TimeoutError:
        raise ServerError(f"no reply within {endpoint.timeout_s:g} s") from None
    except httpx2.HTTPError as e:
        raise ServerError(f"no reply: {endpoint.clean(str(e)) or type(e).__name__}") from None
    except (ValueError, RecursionError):
        raise ServerError(f"HTTP {response.status_code}, and no JSON that can be read") from None
    found = found if isinstance(found, dict) else {}
    if response.status_code != 200 or found.get("error"):
        said = endpoint.clean(message_of(found.get("error") or found.get("detail") or "no reason given"))
        raise ServerError(f"HTTP {response.status_code}: {' '.join(said.split())[:200]}")
    choices, usage = found.get("choices"), found.get("usage")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError("the reply has no choice")
    return choices[0], usage.get("prompt_tokens") if isinstance(usage, dict) else None


async def _echo(
    client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int, prompt: str | list[int]
) -> list[float | None]:
    # A reply of no tokens is not asked for: for llama-cpp-python that means one without an end. vLLM knows the last field:
    # its tokens' texts are not always those of the tokens alone.
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice, prompt_tokens = await _post(client, endpoint, body)
    told: Row = choice["logprobs"] if isinstance(choice.get("logprobs"), dict) else {}
    tokens, values = told.get("tokens"), told.get("token_logprobs")
    if not values and told.get("top_logprobs"):
        raise ServerError("only the likeliest tokens' log-probabilities came (top_logprobs), not the prompt's own tokens'")
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values) or not values:
        raise ServerError("completions with echo and logprobs do not give the prompt's log-probabilities")
    if values[0] is not None:
        raise ServerError("echo is ignored: the log-probabilities that came are not the prompt's, whose first token has none")
    _check_length(prompt_tokens, len(ids))
    end = len(ids) if len(tokens) == len(ids) else -1  # the last is the one that was generated, where it is there
    _check_tokens(tokens[:end], ids, words)
    scored = [_checked(v) for v in values[:end][first:]]
    _check_open(scored)
    return list(scored)


def _check_length(told: Any, asked: int) -> None:
    if isinstance(told, int) and told != asked:
        raise ServerError(f"the server made {told} tokens of a prompt of {asked}: it cuts prompts, or has another tokenizer")


def _check_tokens(told: Sequence[Any], ids: Sequence[int], words: Words) -> None:
    """Raise `ServerError` unless the tokens that came back, by id or by text, are those that were asked."""
    if len(told) != len(ids):
        raise ServerError(f"{len(told)} tokens came back of {len(ids)}: the server cuts prompts, or has another tokenizer")
    for k, (got, wanted) in enumerate(zip(told, ids)):
        if not _is(got, wanted, words):
            raise ServerError(f"token {k} came back as another than {_shown(wanted, words)}; is that the model's tokenizer?")


def _shown(token_id: int, words: Words) -> str:
    return f"{token_id} ({words.piece(token_id)!r})"


def _is(got: Any, wanted: int, words: Words) -> bool:
    """Whether a server's name of a token (an id, `token_id:17`, its text) is that of `wanted`; parts of characters count as
    such, and what is white space around a token is not compared: some write it as ▁, some leave it out."""
    if not isinstance(got, str):
        return not isinstance(got, bool) and bool(got == wanted)
    if got.startswith("token_id:"):
        return got == f"token_id:{wanted}"
    piece = words.piece(wanted)
    return UNTOLD in piece or got.replace("▁", " ").strip() == piece.strip()


def _checked(told: Any) -> float:
    """A log-probability in nats. Raises `ServerError` for what is none: not there, not finite, or above 0."""
    if isinstance(told, bool) or not isinstance(told, (int, float)):
        raise ServerError("a token came without its log-probability")
    if not math.isfinite(told) or told > ROUNDING:
        raise ServerError(f"a token has the log-probability {told}, which is none")
    return float(told)


def _check_open(scored: Sequence[float]) -> None:
    """Raise `ServerError` where most tokens are certain: that is what was narrowed to one choice, not the model's own."""
    if scored and median(scored) > -CERTAIN:
        raise ServerError("most log-probabilities are 0: they are those of a choice that was narrowed to one, not the model's")
