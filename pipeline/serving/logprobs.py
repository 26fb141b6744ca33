"""Get the log-probabilities of given tokens from a server, which is built to write its own. There are two ways:

echo  the server returns the prompt with its tokens' log-probabilities (vLLM, llama-cpp-python): one prefill
bias  one token at a time: `logit_bias` forces the given token, and a server that reports log-probabilities from before the bias
      (llama.cpp's) reports the model's own: a decoding step each, if prefixes are cached

Every reply is compared with the request token by token: a server may tokenize a text differently, truncate a prompt, or ignore the
field.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import httpx2

from pipeline.core import artifacts
from pipeline.core.errors import DataError, Unsupported
from pipeline.core.records import Json
from pipeline.model.config import leading
from pipeline.serving.client import Endpoint, ServerError
from pipeline.serving.reply import message_of, part

ROUNDING = 1e-3  # nats above 0 that rounding may give an almost certain token
OPENINGS = (6, 10, 14)  # words of a text that the server continues by a token
ALIGNED = 0.5  # nats: a token's own two values differ by less, values of different tokens by more
CERTAIN = 1e-6  # nats: no model is this sure of most tokens of a text
BIAS = 100  # the API's maximum
PIECE = "\N{REPLACEMENT CHARACTER}"  # a token that is part of a character has no text of its own


def load_tokenizer(path: Path) -> Any:
    """A tokenizer.json, or a model folder's."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(f"--tokenizer {path}: {file} does not exist; name a tokenizer.json or a folder that has one")
    return Tokenizer.from_file(str(file))


class Words:
    """A tokenizer.json and its config, with the interface that `corpus_windows` needs too."""

    def __init__(self, path: Path) -> None:
        self.raw = load_tokenizer(path)
        self.raw.no_truncation()
        self.raw.no_padding()
        config = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
        special = artifacts.read_json(config) if config.exists() else None
        self.bos_token_id, self.pad_token_id = (self._id(part(special, name)) for name in ("bos_token", "pad_token"))
        if special is None:  # then take what it puts before a text for its BOS
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


Way = Callable[[httpx2.AsyncClient, Endpoint, Words, Sequence[int], int], Awaitable[list[float | None]]]


async def _post(client: httpx2.AsyncClient, endpoint: Endpoint, body: Json) -> tuple[Json, Any]:
    """(the choice of a greedy, unstreamed reply; its number of prompt tokens or None). Raises `ServerError`."""
    sent = endpoint.takes({"model": endpoint.model, "temperature": 0.0, **body})
    try:
        response = await asyncio.wait_for(client.post(f"{endpoint.url}/completions", json=sent), endpoint.timeout_s)
        reply = response.json()
    except asyncio.TimeoutError:
        raise ServerError(f"no reply within {endpoint.timeout_s:g} s") from None
    except httpx2.HTTPError as e:
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


async def echo(
    client: httpx2.AsyncClient, endpoint: Endpoint, prompt: str | list[int], **fields: Any
) -> tuple[list[Any] | None, list[Any], Any]:
    """(tokens or None, their log-probabilities, number of prompt tokens or None) of a prompt and the one token generated after it.
    Raises `ServerError` if the reply has no log-probabilities of the prompt."""
    # One token, not none: llama-cpp-python takes 0 for no limit.
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, **fields}
    choice, prompt_tokens = await _post(client, endpoint, body)
    tokens, values, likeliest = (part(choice, "logprobs", k) for k in ("tokens", "token_logprobs", "top_logprobs"))
    if not values and likeliest:
        raise ServerError("the server sent only the likeliest tokens' log-probabilities (top_logprobs), not the prompt's")
    if not isinstance(values, list) or not values:
        raise ServerError("completions with echo and logprobs do not give the prompt's log-probabilities")
    if values[0] is not None:
        raise ServerError("echo is ignored: the log-probabilities are not the prompt's, whose first token has none")
    return tokens if isinstance(tokens, list) else None, values, prompt_tokens


async def echoed(
    client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int
) -> list[float | None]:  # fmt: skip
    """Log-probabilities in nats of tokens first .. n - 1 of `ids`. Raises `ServerError` if the server gives none, or another's."""
    # By id, where a server knows the field (vLLM): the texts of its tokens are not always those of the tokens alone.
    tokens, values, prompt_tokens = await echo(client, endpoint, list(ids), return_tokens_as_token_ids=True)
    if tokens is None or len(tokens) != len(values):
        raise ServerError("completions with echo and logprobs do not give the prompt's log-probabilities")
    _check_length(prompt_tokens, len(ids))
    if len(tokens) != len(ids):
        del tokens[-1], values[-1]  # the generated token
    if len(tokens) != len(ids):
        raise ServerError(f"{len(tokens)} of {len(ids)} tokens came back: the server truncates, or has another tokenizer")
    for k, (got, wanted) in enumerate(zip(tokens, ids)):
        if not _is(got, wanted, words):
            raise ServerError(f"token {k} came back as another than {words.named(wanted)}; is that the model's tokenizer?")
    scored = [_checked(v) for v in values[first:]]
    _check_open(scored)
    return list(scored)


async def bias(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int) -> list[float | None]:
    """Like `echoed`, by one request for each token. None for a part of a character: llama.cpp's server reports nothing for it."""
    logps = list[float | None]()
    for k, wanted in enumerate(ids[first:], first):
        body = {"prompt": list(ids[:k]), "max_tokens": 1, "logprobs": 1, "logit_bias": {str(wanted): BIAS}, "cache_prompt": True}
        choice, prompt_tokens = await _post(client, endpoint, body)
        _check_length(prompt_tokens, k)
        name, value = _generated(choice)
        if name is None and PIECE in words.piece(wanted):
            logps.append(None)
        elif name is None or not _is(name, wanted, words):
            raise ServerError(f"token {k} is not {words.named(wanted)}: the server ignores logit_bias or sends no log-probability")
        else:
            logps.append(_checked(value))
    _check_open([v for v in logps if v is not None])
    return logps


def _generated(choice: Json) -> tuple[Any, Any]:
    """(id or text, log-probability) of a reply's first token, in llama.cpp's or the completions format; else (None, None)."""
    reported = part(choice, "logprobs")
    if token := part(reported, "content", 0):
        name = part(token, "id")
        return part(token, "token") if name is None else name, part(token, "logprob")
    return part(reported, "tokens", 0), part(reported, "token_logprobs", 0)


WAYS: dict[str, Way] = {"echo of token ids": echoed, "logit_bias, a token at a time": bias}


async def find_way(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, text: str) -> tuple[str, dict[str, str]]:
    """(the first of WAYS that works on this text, {each way before it: why it does not}). Raises `Unsupported` with all reasons if
    none works."""
    ids, failed = words.encoded(text), dict[str, str]()
    for name, way in WAYS.items():
        try:
            await way(client, endpoint, words, ids, 1)
            if way is echoed:  # bias scores the generated token itself
                await _check_aligned(client, endpoint, words, text)
            return name, failed
        except ServerError as e:
            failed[name] = str(e)
    reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
    raise Unsupported(f"{endpoint.url} gives no log-probabilities of given tokens, so no ppl, ppl_ratio or delta_p ({reasons})")


async def _check_aligned(client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, text: str) -> None:
    """Raise `ServerError` unless echo returns a generated token with the log-probability that it was generated with. The echo of
    llama-cpp-python 0.3.36 is off by one token: all tokens are there, every value is wrong."""
    compared = 0
    for count in OPENINGS:
        opening = " ".join(text.split()[:count])
        ids = words.encoded(opening)
        choice, _ = await _post(client, endpoint, {"prompt": ids, "max_tokens": 1, "logprobs": 1})
        value, longer = _generated(choice)[1], words.encoded(f"{opening}{part(choice, 'text')}")
        if longer[:-1] != ids or not isinstance(value, (int, float)):
            continue  # the token merges with the last word, or has no log-probability: nothing to compare
        again = (await echoed(client, endpoint, words, longer, 1))[-1]
        compared += 1
        if again is None or not abs(again - value) <= ALIGNED:
            raise ServerError(f"echo's values are misaligned: a token generated with {value:.4g} nats comes back with {again:.4g}")
    if not compared:
        raise ServerError("cannot tell whether echo's values are aligned: no generated token could be compared")


def _check_length(counted: Any, sent: int) -> None:
    if isinstance(counted, int) and counted != sent:
        raise ServerError(f"the server counts {counted} tokens in a prompt of {sent}: it truncates, or has another tokenizer")


def _is(got: Any, wanted: int, words: Words) -> bool:
    """Whether a server's name for a token (an id, `token_id:17`, its text) means `wanted`. Any part of a character matches any
    other. Surrounding white space is ignored: some servers write ▁, some leave it out."""
    if not isinstance(got, str):
        return not isinstance(got, bool) and bool(got == wanted)
    if got.startswith("token_id:"):
        return got == f"token_id:{wanted}"
    piece = words.piece(wanted)
    return PIECE in piece or got.replace("▁", " ").strip() == piece.strip()


def _checked(value: Any) -> float:
    """A log-probability in nats. Raises `ServerError` if it is missing, not finite, or above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ServerError("a token came without its log-probability")
    if not math.isfinite(value) or value > ROUNDING:
        raise ServerError(f"a token has the invalid log-probability {value}")
    return float(value)


def _check_open(scored: Sequence[float]) -> None:
    """Raise `ServerError` if most tokens are certain: then the server reports values from after the bias, not the model's."""
    if scored and median(scored) > -CERTAIN:
        raise ServerError("most log-probabilities are 0: they are from after the choice was narrowed to one token, not the model's")
