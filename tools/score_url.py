"""Score the corpus with a server's model, token by token: `quantgate serve URL --score`.

It scores the windows that `diverge` scores. The true tokens' log-probabilities give the perplexity and, with the reference's rows
of the same tokens, its ratio and the change of the true token's probability. Divergence needs the whole vocabulary; with the
reference's store of the same windows, the likeliest tokens give a lower bound of it.
Writes artifacts/serving/<name>.scores.jsonl (one row per window), its .meta.json and <name>.scores.figures.json.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import typer

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import DataError, Unsupported
from pipeline.core.records import Json, Launch, Metrics, Outcome, ScoreRow
from pipeline.divergence.store import Store
from pipeline.evalset import choose, load_texts, sets_digest
from pipeline.evalset.windows import corpus_windows
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import SERVED_TOKENS
from pipeline.metrics.served_tokens import add_served
from pipeline.serving.client import Endpoint, ServerError
from pipeline.serving.logprobs import Words, scored
from pipeline.serving.measure import Plan
from pipeline.speed import hardware

PAIRED = ("ppl_ratio", "delta_p_mean", "delta_p_rms")
COLUMNS = ("metric", "value", "low", "high", "n", "unit")
ABOUT = "texts only; compare's delta_p_mean and delta_p_rms include the reference's own continuations"
TOP_K = "an endpoint gives the likeliest tokens' log-probabilities, not the whole vocabulary's: served_kld_lower_bound"
Connect = Callable[..., AbstractContextManager[tuple[Endpoint, Launch | None]]]  # measure.endpoint_of with a server
Reference = dict[tuple[str, int], tuple[int, float]]  # {(window, position): (token id, the reference's log-probability)}


def reference_rows(variant: str) -> Reference | str:
    """The reference's rows, or why there are none."""
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
    why = reference if isinstance(reference, str) else "no scored token is among the reference's rows: other texts or windows"
    tokens = [
        (row["document"], logp, pairs.get((row["window"], k)), row["token_ids"][k])
        for row in rows for k, logp in enumerate(row["logps"] or (), row["first"]) if logp is not None
    ]  # fmt: skip
    logp, documents = np.array([t[1] for t in tokens], float), np.array([t[0] for t in tokens])
    if tokens:
        b.mean("ppl", -logp, np.ones(len(logp)), documents, transform="exp")
    else:
        b.bare("ppl", None, 0, "none", "no token was scored")
    if differing := sum(pair is not None and pair[0] != token for _, _, pair, token in tokens):
        why = f"{differing} tokens differ from the reference's rows: another tokenizer, or other texts"
    has_pair = np.array([pair is not None and not differing for _, _, pair, _ in tokens], bool)
    if has_pair.any():
        logp_ref = np.array([pair[1] for _, _, pair, _ in tokens if pair is not None])
        logp, documents, ones = logp[has_pair], documents[has_pair], np.ones(has_pair.sum())
        change = np.exp(logp) - np.exp(logp_ref)
        b.mean("ppl_ratio", logp_ref - logp, ones, documents, transform="exp")
        b.mean("delta_p_mean", change, ones, documents)
        b.mean("delta_p_rms", change**2, ones, documents, transform="sqrt")
    else:
        for name in PAIRED:
            b.bare(name, None, 0, "paired by token", why)
    b.bare("kld_mean", None, 0, "none", TOP_K)
    _note(b, b.metrics, _left_out(rows))
    _note(b, PAIRED, [f"{(~has_pair).sum()} scored tokens have no row of the reference"] if not has_pair.all() else [])
    return b.metrics


def _left_out(rows: Sequence[ScoreRow]) -> list[str]:
    failed = [r for r in rows if not r["ok"]]
    logps = [v for r in rows for v in r["logps"] or ()]
    parts = sum(v is None for v in logps) % max(1, len(logps))  # not if all are None: the server gives only the likeliest
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
    rows, state = list[ScoreRow](), Outcome(status="ok", reason=None)
    plan = Plan([at_once], prompt_tokens=max(len(w.token_ids) for w in windows), output_tokens=1)
    try:
        with connect(plan, tokenizer=words.raw) as (endpoint, launch):
            about["launch"] = launch
            server, rows = asyncio.run(scored(endpoint, windows, words, at_once))
            about |= server
    except Unsupported as e:
        state = Outcome(status=e.status, reason=str(e))
    b = Builder(settings.compare, settings.seed)
    metrics = metrics_of(rows, reference_rows(settings.reference), b)
    if rows and (artifacts.REFERENCE / artifacts.MANIFEST).exists():
        add_served(b, rows, Store(artifacts.REFERENCE))
    for name in (n for n in SERVED_TOKENS if n not in metrics):
        b.bare(name, None, 0, "none", f"{artifacts.REFERENCE} is missing; run `dvc repro reference`")
    if lack := state["reason"]:
        for metric in metrics.values():
            metric["warnings"] = [lack]
    failed, written = [r for r in rows if not r["ok"]], path.with_suffix(".figures.json")
    named = [{"window": r["window"], "document": r["document"], "error": r["error"]} for r in failed]
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), {**state, **about})
    artifacts.write_json(written, {**state, "windows": len(rows), "failed": named, "about": ABOUT, "metrics": metrics})
    if lack:
        raise Unsupported(lack)
    if len(failed) == len(rows):
        raise ServerError(f"none of {len(rows)} windows was scored; the first failed with: {failed[0]['error']} (all: {written})")
    show(rows, metrics)
    cli.say("score", f"{len(rows) - len(failed)} of {len(rows)} windows scored by {about['way']}; {written}")
    if failed:
        raise typer.Exit(1)


def show(rows: Sequence[ScoreRow], metrics: Metrics) -> None:
    """Print the metrics, and the failed or left-out windows and tokens."""
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
