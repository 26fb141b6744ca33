"""`python -m pipeline.serving URL --score`: score the corpus with a server's model, token by token.

It scores the windows that `diverge` scores. At best a server gives the true tokens' log-probabilities. That is enough for the
perplexity and, beside the reference's rows of the same tokens, for its ratio and the change of the true token's probability.
Divergence needs the log-probabilities of the whole vocabulary.

Writes artifacts/serving/<name>.scores.jsonl (one row a window), its .meta.json and <name>.scores.figures.json.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import typer

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import DataError, ParamsError, Unsupported
from pipeline.divergence.store import Window
from pipeline.evalset import choose, load_texts, sets_digest
from pipeline.evalset.windows import corpus_windows
from pipeline.metrics.builder import Builder, Metrics
from pipeline.model.config import leading
from pipeline.serving import probe
from pipeline.serving.client import Answer, Endpoint, Request, Row, ServerError, connected
from pipeline.serving.load import closed
from pipeline.serving.logprobs import WAYS, find_way
from pipeline.serving.measure import Plan, endpoint_of, load_tokenizer
from pipeline.speed import hardware

HOME = artifacts.ARTIFACTS / "serving"
PAIRED = ("ppl_ratio", "delta_p_mean", "delta_p_rms")
COLUMNS = ("metric", "value", "low", "high", "n", "unit")
ABOUT = "texts only; compare's delta_p_mean and delta_p_rms include the reference's own continuations"


class Tokens:
    """A tokenizer.json and its config, with the interface that `corpus_windows` and `logprobs.Words` need."""

    def __init__(self, path: Path) -> None:
        self.raw = load_tokenizer(path)
        self.raw.no_truncation()
        self.raw.no_padding()
        config = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
        special = artifacts.read_json(config) if config.exists() else {}
        self.bos_token_id, self.pad_token_id = self._id(special.get("bos_token")), self._id(special.get("pad_token"))
        if not config.exists():  # then take what it puts before a text for its BOS
            self.bos_token_id = next(iter(self("").input_ids), None)

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def _id(self, name: Any) -> int | None:
        text = name.get("content") if isinstance(name, dict) else name
        return self.raw.token_to_id(text) if isinstance(text, str) else None

    def text(self, ids: Sequence[int]) -> str:
        return str(self.raw.decode(list(ids)[len(leading(self)) :], skip_special_tokens=False))  # the server adds the BOS

    def piece(self, token_id: int) -> str:
        return str(self.raw.decode([token_id], skip_special_tokens=False))

    def encoded(self, text: str) -> list[int]:
        return [*leading(self), *self(text, add_special_tokens=False).input_ids]


async def scored(endpoint: Endpoint, windows: Sequence[Window], words: Tokens, at_once: int) -> tuple[Row, list[Row]]:
    """({url, model, way, lacks: why the ways before it fail}, one row a window). logps: in nats, of tokens first .. n - 1. Raises
    `ServerError` without a server or its model, `Unsupported` if it gives no log-probabilities."""
    async with connected(endpoint) as client:
        endpoint = replace(endpoint, model=probe.chosen(endpoint.model, await probe.models(client, endpoint), endpoint.url))
        name, lacks = await find_way(client, endpoint, words, probe.TEXT)

        async def ask(request: Request) -> Answer:
            t_submit, logps, error = time.monotonic(), None, None
            try:  # a window of a text is scored from its second token on
                logps = await WAYS[name](client, endpoint, words, request.prompt, 1)  # type: ignore[arg-type]
            except ServerError as e:
                error = endpoint.clean(str(e))
            times = {"t_submit": t_submit, "t_end": time.monotonic()}
            return Answer({"ok": error is None, "error": error, "logps": logps, **times}, "", "")

        with cli.progress(len(windows), "score", "window") as bar:
            rows = await closed(ask, [Request(w.token_ids, 1) for w in windows], at_once, tick=bar.update)
    about = {"url": endpoint.url, "model": endpoint.model, "way": name, "lacks": lacks}
    labels = ("set", "document", "window", "first", "token_ids")
    return about, [{k: getattr(w, k) for k in labels} | row for w, row in zip(windows, rows)]


def reference_rows(variant: str) -> dict[tuple[str, int], tuple[int, float]] | str:
    """{(window, position): (token id, the reference's log-probability)}, or why there are no rows to compare with."""
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
def figures(rows: Sequence[Row], reference: dict[tuple[str, int], tuple[int, float]] | str, b: Builder) -> Metrics:
    """Perplexity, and its comparison with the reference's rows of the same tokens; documents are resampled as in `compare`."""
    tokens = [
        (row["document"], logp, reference.get((row["window"], k)) if isinstance(reference, dict) else None, row["token_ids"][k])
        for row in rows if row["ok"] for k, logp in enumerate(row["logps"], row["first"]) if logp is not None
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
        ours, documents, ones = logp[has_pair], documents[has_pair], np.ones(has_pair.sum())
        change = np.exp(ours) - np.exp(logp_ref)
        b.mean("ppl_ratio", logp_ref - ours, ones, documents, transform="exp")
        b.mean("delta_p_mean", change, ones, documents)
        b.mean("delta_p_rms", change**2, ones, documents, transform="sqrt")
    for name in PAIRED if not has_pair.any() else ():
        b.bare(name, None, 0, "paired by token", why)
    b.bare("kld_mean", None, 0, "none", probe.TOP_K)
    _note(b, b.metrics, _left_out(rows))
    _note(b, PAIRED, [f"{(~has_pair).sum()} scored tokens have no row of the reference"] if not has_pair.all() else [])
    return b.metrics


def _left_out(rows: Sequence[Row]) -> list[str]:
    failed = [r for r in rows if not r["ok"]]
    logps = [v for r in rows if r["ok"] for v in r["logps"]]
    parts = sum(v is None for v in logps)
    notes = [f"{len(failed)} of {len(rows)} windows failed and are left out: {failed[0]['error']}"] if failed else []
    return notes + ([f"{parts} of {len(logps)} tokens are left out: the server reports no parts of characters"] if parts else [])


def _note(b: Builder, names: Iterable[str], notes: Sequence[str]) -> None:
    """Add notes to each metric that has a value."""
    for metric in (b.metrics[name] for name in names):
        if metric["value"] is not None:
            metric["warnings"] = (*metric["warnings"], *notes)


def check_asked(tokenizer: Path | None, is_chat: bool, only_probe: bool) -> Path:
    """The tokenizer's path. Raises `ParamsError` for options that do not go together."""
    if is_chat or only_probe:
        raise ParamsError(f"--score uses completions and does nothing else; leave {'--chat' if is_chat else '--probe'} out")
    if tokenizer is None:
        raise ParamsError("--score sends token ids: name the model's tokenizer.json, or its folder, with --tokenizer")
    return tokenizer


def run(
    url: str, kind: str, model_dir: Path | None, tokenizer: Path, *, model: str, at_once: int, timeout: float, key_env: str,
    threads: int, name: str,
) -> None:  # fmt: skip
    """Score the tier's texts and write rows and metrics. If the server cannot, write the reason and raise `Unsupported`."""
    settings, words = params.load(), Tokens(tokenizer)
    setup, documents, skipped = settings.diverge, settings.amount.documents, Counter[str]()
    texts = choose(load_texts(Path(setup.corpus)), documents, settings.seed)
    windows = corpus_windows(texts, words, setup.window, skipped)
    if not windows:
        raise DataError(f"{setup.corpus} makes no window of 8 tokens; add text or choose a larger tier")
    about: Row = {
        "tokenizer": artifacts.sha256_file(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer),
        "sets": sets_digest(Path(setup.corpus)), "window": setup.window, "documents": len(texts), "seed": settings.seed,
        "reference": settings.reference, "at_once": at_once, "skipped": dict(skipped),
        "client": hardware.describe(0) | {"threads": None}, "versions": artifacts.versions(), "launch": None,
    }  # fmt: skip
    rows, lack, launch = list[Row](), None, None
    plan = Plan([at_once], prompt_tokens=max(len(w.token_ids) for w in windows), output_tokens=1)
    try:
        with endpoint_of(
            url, kind, model_dir, plan, tokenizer=words.raw, model=model, timeout_s=timeout, key_env=key_env, threads=threads
        ) as (endpoint, launch):
            server, rows = asyncio.run(scored(endpoint, windows, words, at_once))
            about |= server
    except Unsupported as e:
        lack = e
    metrics = figures(rows, reference_rows(settings.reference), Builder(settings.compare, settings.seed))
    path = write(name, rows, about | {"launch": launch}, metrics, lack)
    if lack:
        raise lack
    show(rows, metrics, about["way"], path)


def write(name: str, rows: Sequence[Row], about: Row, metrics: Metrics, lack: Unsupported | None) -> Path:
    """Write rows, their meta file and the metrics; returns the metrics' path. lack: why there are none."""
    path = HOME / f"{name}.scores.jsonl"
    state = {"status": lack.status if lack else "ok", "reason": str(lack) if lack else None}
    for metric in metrics.values() if lack else ():
        metric["warnings"] = (str(lack),)
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), state | about)
    failed = [{k: r[k] for k in ("window", "document", "error")} for r in rows if not r["ok"]]
    report = {"windows": len(rows), "failed": failed, "about": ABOUT, "metrics": metrics}
    artifacts.write_json(path.with_suffix(".figures.json"), state | report)
    return path.with_suffix(".figures.json")


def show(rows: Sequence[Row], metrics: Metrics, way: str, path: Path) -> None:
    """Print the metrics and failures. Raises `ServerError` if every window failed, and exits 1 if one did."""
    failed = [r for r in rows if not r["ok"]]
    if len(failed) == len(rows):
        raise ServerError(f"none of {len(rows)} windows was scored; the first failed with: {failed[0]['error']} (all: {path})")
    lines = []
    for name, m in metrics.items():
        values = ["–" if m[k] is None else f"{m[k]:.4g}" for k in ("value", "low", "high")]
        lines.append(dict(zip(COLUMNS, [name, *values, str(m["n"]), m["unit"]])))
    cli.table(COLUMNS, lines, left=("metric", "unit"))
    for row in failed:
        cli.say("score", f"window {row['window']} failed: {row['error']}")
    for why in dict.fromkeys(str(m["warnings"][0]) for m in metrics.values() if m["value"] is None):
        cli.say("score", f"{', '.join(k for k, m in metrics.items() if why in m['warnings'])}: {why}")
    for note in _left_out([r for r in rows if r["ok"]]):
        cli.say("score", note)
    cli.say("score", f"{len(rows) - len(failed)} of {len(rows)} windows scored by {way}; {path}")
    if failed:
        raise typer.Exit(1)
