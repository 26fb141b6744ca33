"""Score the corpus with a server's model, token by token: `quantgate serve URL --score`.

It scores the windows that `diverge` scores. At best a server gives the true tokens' log-probabilities: enough for the perplexity
and, beside the reference's rows of the same tokens, for its ratio and the change of the true token's probability. Divergence needs
the whole vocabulary's. A server is built to write tokens of its own; there are two ways to get those of given tokens:

echo  the server returns the prompt with its tokens' log-probabilities (vLLM): one prefill
bias  one token at a time: `logit_bias` forces the given token, and a server that reports log-probabilities from before the bias
      (llama.cpp's) reports the model's own: a decoding step each, if prefixes are cached

Every reply is compared with the request token by token: a server may tokenize otherwise, truncate a prompt, or ignore a field.
Writes artifacts/serving/<name>.scores.jsonl (one row a window), its .meta.json and <name>.scores.figures.json.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import typer
from typing_extensions import TypedDict

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import DataError, Unsupported
from pipeline.core.records import Json, Launch, Metrics, Outcome
from pipeline.divergence.store import Window
from pipeline.evalset import choose, load_texts, sets_digest
from pipeline.evalset.windows import corpus_windows
from pipeline.metrics.builder import Builder
from pipeline.model.config import leading
from pipeline.serving import measure
from pipeline.serving.client import Endpoint, ServerError, connected
from pipeline.serving.measure import Plan, closed
from pipeline.serving.reply import message_of, part
from pipeline.speed import hardware

ROUNDING = 1e-3  # nats above 0 that rounding may give an almost certain token
OPENINGS = (6, 10, 14)  # words of a text that the server continues by a token
ALIGNED = 0.5  # nats: a token's own two values differ by less, values of different tokens by more
CERTAIN = 1e-6  # nats: no model is this sure of most tokens of a text
BIAS = 100  # the API's maximum
PIECE = "\N{REPLACEMENT CHARACTER}"  # a token that is part of a character has no text of its own
PAIRED = ("ppl_ratio", "delta_p_mean", "delta_p_rms")
COLUMNS = ("metric", "value", "low", "high", "n", "unit")
ABOUT = "texts only; compare's delta_p_mean and delta_p_rms include the reference's own continuations"
TOP_K = "an endpoint gives the likeliest tokens' log-probabilities, not the whole vocabulary's"  # so there is no KLD
Connect = Callable[..., AbstractContextManager[tuple[Endpoint, Launch | None]]]  # measure.endpoint_of with a server
Reference = dict[tuple[str, int], tuple[int, float]]  # {(window, position): (token id, the reference's log-probability)}


class ScoreRow(TypedDict):
    """A window that a server scored. logps: in nats, of tokens `first` and later; null for a part of a character."""

    set: str
    document: str
    window: str
    first: int
    token_ids: list[int]
    ok: bool
    error: str | None
    logps: list[float | None] | None
    t_submit: float
    t_end: float


# ---- the log-probabilities of given tokens -----------------------------------------------------------------------------------


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


async def echoed(
    client: httpx2.AsyncClient, endpoint: Endpoint, words: Words, ids: Sequence[int], first: int
) -> list[float | None]:  # fmt: skip
    """Log-probabilities in nats of tokens first .. n - 1 of `ids`. Raises `ServerError` if the server gives none, or another's."""
    # One token, not none: llama-cpp-python takes 0 for no limit. By id: the texts of its tokens are not always those of the tokens
    # alone, so a server that does not name ids is not asked further.
    body = {"prompt": list(ids), "max_tokens": 1, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice, prompt_tokens = await _post(client, endpoint, body)
    tokens, values = (part(choice, "logprobs", k) for k in ("tokens", "token_logprobs"))
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
        elif name is None or not _is(name, wanted):
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


def _check_open(scored: Sequence[float]) -> None:
    """Raise `ServerError` if most tokens are certain: then the server reports values from after the bias, not the model's."""
    if scored and median(scored) > -CERTAIN:
        raise ServerError("most log-probabilities are 0: they are from after the choice was narrowed to one token, not the model's")


# ---- a corpus, and its metrics -------------------------------------------------------------------------------------------------


async def scored(endpoint: Endpoint, windows: Sequence[Window], words: Words, at_once: int) -> tuple[Json, list[ScoreRow]]:
    """({url, model, way, lacks: why the ways before it fail}, one row a window). Raises `ServerError` without a server or its
    model, `Unsupported` if it gives no log-probabilities."""
    async with connected(endpoint) as client:
        endpoint, _ = await measure.named(client, endpoint)
        name, lacks = await find_way(client, endpoint, words, measure.TEXT)

        async def ask(w: Window) -> ScoreRow:
            error, logps, t_submit = None, None, time.monotonic()
            try:
                logps = await WAYS[name](client, endpoint, words, w.token_ids, w.first)
            except ServerError as e:
                error = endpoint.clean(str(e))
            return {
                "set": w.set, "document": w.document, "window": w.window, "first": w.first, "token_ids": list(w.token_ids),
                "ok": error is None, "error": error, "logps": logps, "t_submit": t_submit, "t_end": time.monotonic(),
            }  # fmt: skip

        with cli.progress(len(windows), "score", "window") as bar:
            rows = await closed(ask, windows, at_once, bar.update)
    return {"url": endpoint.url, "model": endpoint.model, "way": name, "lacks": lacks}, rows


def reference_rows(variant: str) -> Reference | str:
    """The reference's rows, or why there are none to compare with."""
    path = artifacts.tokens(variant)
    if not path.exists():
        return f"{path} is missing; run `dvc repro diverge@{variant}`"
    meta, manifest = artifacts.read_json(artifacts.meta_of(path)), artifacts.model_dir(variant) / artifacts.MANIFEST
    if meta["status"] != "ok":
        return f"{path} has no rows: {meta['reason']}"
    if manifest.exists() and artifacts.read_json(manifest)["digest"] != meta["model"]:
        return f"{path} was made with another build of {variant}; run `dvc repro diverge@{variant}`"
    c = artifacts.read_columns(path)
    return {(w, p): (t, v) for w, p, t, v in zip(c["window"], c["position"], c["token_id"], c["logp_ref"])}


@np.errstate(over="ignore")  # with few documents an interval may be unbounded
def metrics_of(rows: Sequence[ScoreRow], reference: Reference | str, b: Builder) -> Metrics:
    """Perplexity, and its comparison with the reference's rows of the same tokens; documents are resampled as in `compare`."""
    pairs: Reference = {} if isinstance(reference, str) else reference
    tokens = [
        (row["document"], logp, pairs.get((row["window"], k)), row["token_ids"][k])
        for row in rows for k, logp in enumerate(row["logps"] or (), row["first"]) if logp is not None
    ]  # fmt: skip
    logp, documents = np.array([t[1] for t in tokens], float), np.array([t[0] for t in tokens])
    if tokens:
        b.mean("ppl", -logp, np.ones(len(logp)), documents, transform="exp")
    else:
        b.bare("ppl", None, 0, "none", "no token was scored")
    differing = sum(pair is not None and pair[0] != token for _, _, pair, token in tokens)
    why = reference if isinstance(reference, str) else "no scored token is among the reference's rows: other texts or windows"
    if differing:
        why = f"{differing} tokens differ from the reference's rows: another tokenizer, or other texts"
    has_pair = np.array([pair is not None and not differing for _, _, pair, _ in tokens], bool)
    if has_pair.any():
        logp_ref = np.array([pair[1] for _, _, pair, _ in tokens if pair is not None])
        logp, documents, ones = logp[has_pair], documents[has_pair], np.ones(has_pair.sum())
        change = np.exp(logp) - np.exp(logp_ref)
        b.mean("ppl_ratio", logp_ref - logp, ones, documents, transform="exp")
        b.mean("delta_p_mean", change, ones, documents)
        b.mean("delta_p_rms", change**2, ones, documents, transform="sqrt")
    for name in PAIRED if not has_pair.any() else ():
        b.bare(name, None, 0, "paired by token", why)
    b.bare("kld_mean", None, 0, "none", TOP_K)
    _note(b, b.metrics, _left_out(rows))
    _note(b, PAIRED, [f"{(~has_pair).sum()} scored tokens have no row of the reference"] if not has_pair.all() else [])
    return b.metrics


def _left_out(rows: Sequence[ScoreRow]) -> list[str]:
    failed = [r for r in rows if not r["ok"]]
    logps = [v for r in rows for v in r["logps"] or ()]
    parts = sum(v is None for v in logps)
    notes = [f"{len(failed)} of {len(rows)} windows failed and are left out: {failed[0]['error']}"] if failed else []
    return notes + ([f"{parts} of {len(logps)} tokens are left out: the server reports no parts of characters"] if parts else [])


def _note(b: Builder, names: Iterable[str], notes: Sequence[str]) -> None:
    """Add notes to each metric that has a value."""
    for metric in (b.metrics[name] for name in names):
        if metric["value"] is not None:
            metric["warnings"] = [*metric["warnings"], *notes]


def run(connect: Connect, tokenizer: Path, at_once: int, path: Path) -> None:
    """Score the tier's texts, `at_once` windows at once, and write rows (to `path`) and metrics. If the server cannot, write the
    reason and raise `Unsupported`."""
    settings, words = params.load(), Words(tokenizer)
    setup, skipped = settings.diverge, Counter[str]()
    texts = choose(load_texts(Path(setup.corpus)), settings.amount.documents, settings.seed)
    windows = corpus_windows(texts, words, setup.window, skipped)
    if not windows:
        raise DataError(f"{setup.corpus} makes no window of 8 tokens; add text or choose a larger tier")
    about: Json = {
        "tokenizer": artifacts.sha256_file(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer),
        "sets": sets_digest(Path(setup.corpus)), "window": setup.window, "documents": len(texts), "seed": settings.seed,
        "reference": settings.reference, "at_once": at_once, "skipped": dict(skipped),
        "client": {**hardware.describe(0), "threads": None}, "versions": artifacts.versions(), "launch": None,
    }  # fmt: skip
    rows, lack = list[ScoreRow](), None
    plan = Plan([at_once], prompt_tokens=max(len(w.token_ids) for w in windows), output_tokens=1)
    try:
        with connect(plan, tokenizer=words.raw) as (endpoint, launch):
            about["launch"] = launch
            server, rows = asyncio.run(scored(endpoint, windows, words, at_once))
            about |= server
    except Unsupported as e:
        lack = e
    metrics = metrics_of(rows, reference_rows(settings.reference), Builder(settings.compare, settings.seed))
    for metric in metrics.values() if lack else ():
        metric["warnings"] = [str(lack)]
    state: Outcome = {"status": lack.status if lack else "ok", "reason": str(lack) if lack else None}
    failed = [r for r in rows if not r["ok"]]
    named = [{"window": r["window"], "document": r["document"], "error": r["error"]} for r in failed]
    written = path.with_suffix(".figures.json")
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), {**state, **about})
    artifacts.write_json(written, {**state, "windows": len(rows), "failed": named, "about": ABOUT, "metrics": metrics})
    if lack:
        raise lack
    if len(failed) == len(rows):
        raise ServerError(f"none of {len(rows)} windows was scored; the first failed with: {failed[0]['error']} (all: {written})")
    show(rows, metrics)
    cli.say("score", f"{len(rows) - len(failed)} of {len(rows)} windows scored by {about['way']}; {written}")
    if failed:
        raise typer.Exit(1)


def show(rows: Sequence[ScoreRow], metrics: Metrics) -> None:
    """Print the metrics, and what failed or is left out."""
    lines = []
    for name, m in metrics.items():
        values = ["–" if x is None else f"{x:.4g}" for x in (m["value"], m["low"], m["high"])]
        lines.append(dict(zip(COLUMNS, [name, *values, str(m["n"]), m["unit"]])))
    cli.table(COLUMNS, lines, left=("metric", "unit"))
    for row in rows:
        if row["error"]:
            cli.say("score", f"window {row['window']} failed: {row['error']}")
    for why in dict.fromkeys(m["warnings"][0] for m in metrics.values() if m["value"] is None):
        cli.say("score", f"{', '.join(k for k, m in metrics.items() if why in m['warnings'])}: {why}")
    for note in _left_out([r for r in rows if r["ok"]]):
        cli.say("score", note)
