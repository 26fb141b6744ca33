"""floor: what "no difference" measures here, the reference against itself -> reports/floor.json

The shape of a 16-bit product decides the order of its sums. Each run below recomputes the reference store in another way; the
largest difference is the floor. Rounding is measured separately: the same weights, computed in float32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError, Unsupported
from pipeline.core.records import ModelManifest
from pipeline.divergence.distributions import F32, compare_parts
from pipeline.divergence.store import Batch, Store, Window, batches
from pipeline.engines import ROWS, Blocks
from pipeline.metrics.builder import Builder

RUNS = {
    "rerun": "a second run in a fresh process",
    "batch": "each window in a batch of another size",
    "length": "each window cut by a quarter, so that its products have another shape",
    "threads": "another number of threads",
    "stepwise": "prefill, then token by token through the cache, against one pass",
}
GOLDEN = 0.618  # any number of its multiples, modulo 1, are evenly spread


def choose(windows: Sequence[Window], tokens: int, seed: int) -> list[int]:
    """Indices of whole windows, alternately texts and trajectories, with at most `tokens` scored tokens in all."""
    order = list(range(len(windows)))
    random.Random(seed).shuffle(order)
    kinds = [[i for i in order if (windows[i].set == "trajectory") == replies] for replies in (False, True)]
    taken: list[int] = []
    left = tokens
    for i in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
        if i is not None and (windows[i].scored <= left or not taken):
            taken.append(i)
            left -= windows[i].scored
    return sorted(taken)


def rerun(engine: Any, parts: list[Batch], chosen: Sequence[int], whole: bool) -> Blocks:
    """The same windows in the same batches as in the store."""
    for part in (part for part in parts if any(i in chosen for i, _ in part)):
        starts = [w.first - 1 if i in chosen else len(w.token_ids) - 1 for i, w in part]  # the others: no rows
        blocks = engine.logit_blocks([w.token_ids for _, w in part], starts, ROWS, whole)
        yield from ((part[k][0], at, logits) for k, at, logits in blocks)


def rebatched(engine: Any, parts: list[Batch], chosen: Sequence[int], whole: bool) -> Blocks:
    """A window that shared its batch, alone; one that was alone, beside a copy of itself."""
    for i, w, alone in ((i, w, len(part) == 1) for part in parts for i, w in part if i in chosen):
        starts = [w.first - 1] + [len(w.token_ids) - 1] * alone
        yield from ((i, at, x) for _, at, x in engine.logit_blocks([w.token_ids] * len(starts), starts, ROWS, whole))


def shortened(engine: Any, windows: Sequence[Window], chosen: Sequence[int], whole: bool) -> Blocks:
    """Each window without its last quarter, on which nothing before it depends."""
    for i in chosen:
        w, n = windows[i], len(windows[i].token_ids)
        ids = w.token_ids[: max(w.first + 1, n - n // 4)]
        yield from ((i, at, x) for _, at, x in engine.logit_blocks([ids], [w.first - 1], ROWS, whole))


def stepwise(engine: Any, windows: Sequence[Window], chosen: Sequence[int], tokens: int) -> Blocks:
    """As many tokens of each window as `tokens` allows, at depths spread over the windows."""
    each = max(1, tokens // len(chosen))
    for k, i in enumerate(chosen):
        w = windows[i]
        start = w.first - 1 + int(max(0, w.scored - each) * (k * GOLDEN % 1))
        yield i, start, engine.logits_stepwise(w.token_ids[: min(start + each, len(w.token_ids) - 1)], start)


class Rows(NamedTuple):
    """Of each row against the store's: KLD in nats, whether the likeliest token differs, document."""

    kld: list[float]
    flip: list[bool]
    document: list[str]


def compared(blocks: Blocks, store: Store, threads: int) -> Rows:
    """The rows of a run. Raises `ArtifactError` if its positions are not those of the store."""
    rows = Rows([], [], [])
    held = -1
    reference: F32 = np.zeros((0, 0), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        for index, at, logits in blocks:
            w = store.windows[index]
            if index != held:
                held, reference = index, np.concatenate([block for _, block in store.logit_blocks(index)])
            expected = reference[at - w.first + 1 :][: len(logits)]
            true_ids = np.asarray(w.token_ids[at + 1 : at + 1 + len(logits)])
            if not len(expected) == len(logits) == len(true_ids):
                raise ArtifactError(f"window {w.window}: the run gave {len(logits)} rows at {at}, the store {len(expected)}")
            done = compare_parts(pool, expected, logits, true_ids)
            rows.kld.extend(done.kld.tolist())
            rows.flip.extend((done.top1 != done.top1_ref).tolist())
            rows.document.extend([w.document] * len(done.kld))
    return rows


def add(b: Builder, suffix: str, rows: Rows | str) -> None:
    """Add `kld_<suffix>` and `flip_<suffix>`; null with the reason without rows, or if a token has no finite divergence."""
    n = 0 if isinstance(rows, str) else len(rows.kld)
    if not isinstance(rows, str):
        bad = int((~np.isfinite(rows.kld)).sum())
        if n and not bad:
            b.mean(f"kld_{suffix}", rows.kld, np.ones(n), rows.document)
            b.mean(f"flip_{suffix}", rows.flip, np.ones(n), rows.document)
            return
        rows = f"{bad} of {n} tokens have no finite divergence"
    for name in (f"kld_{suffix}", f"flip_{suffix}"):
        b.bare(name, None, n, "not measured", rows)


def add_largest(b: Builder, name: str) -> None:
    """Add the floor: the run with the largest value; null if one failed. A run that is impossible here is a warning."""
    runs = {run: b.metrics[f"{name}/{run}"] for run in RUNS}
    values = {run: m["value"] for run, m in runs.items() if m["value"] is not None}
    missing = {run: f"{run}: {m['warnings'][0]}" for run, m in runs.items() if m["value"] is None}
    broken = [why for run, why in missing.items() if runs[run]["n"]]
    if broken or not values:
        b.bare(name, None, 0, "largest of the runs", *(broken or ["no run could be made"]))
        return
    run = max(values, key=values.__getitem__)
    largest = b.metrics[name] = runs[run].copy()
    largest["method"] = f"largest of {len(values)} runs, {run}: {largest['method']}"
    largest["warnings"] = [*largest["warnings"], *missing.values()]


def measure(engine: Any, store: Store, chosen: Sequence[int], b: Builder, *, batch_size: int, steps: int, threads: int) -> None:
    """Add every metric of the floor to `b`. Afterwards the engine computes in float32, where it can."""
    whole = store.manifest["kind"] == "logits"
    parts, windows = list(batches(store.windows, batch_size)), store.windows
    with cli.progress(len(RUNS) + 1, "floor", "run") as bar:

        def take(suffix: str, blocks: Blocks) -> None:
            add(b, suffix, compared(blocks, store, threads))
            bar.update()

        take("floor/rerun", rerun(engine, parts, chosen, whole))
        take("floor/batch", rebatched(engine, parts, chosen, whole))
        take("floor/length", shortened(engine, windows, chosen, whole))
        take("floor/stepwise", stepwise(engine, windows, chosen, steps))
        if engine.device == "cpu":
            engine.use_threads(1 if threads > 1 else 2)
            take("floor/threads", rerun(engine, parts, chosen, whole))
            engine.use_threads(threads)
        else:
            add(b, "floor/threads", f"the reference runs on {engine.device}, whatever the number of threads")
        try:
            engine.to_float32()
        except Unsupported as e:
            add(b, "rounding", str(e))
        else:
            take("rounding", rerun(engine, parts, chosen, whole))
    for name in ("kld_floor", "flip_floor"):
        add_largest(b, name)


def run() -> None:
    watch = artifacts.Stopwatch("floor")
    settings = params.load()
    asked, threads, variant = settings.amount.floor, settings.thread_count, settings.variant(settings.reference)
    folder = artifacts.model_dir(settings.reference)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    artifacts.verify_files(folder, manifest)
    store = Store(artifacts.REFERENCE)
    if store.manifest["model"] != manifest["digest"]:
        raise ArtifactError(f"{artifacts.REFERENCE} was made with another build of {settings.reference}; run `dvc repro`")
    engine = engines.load(variant.engine, folder, threads=threads, **variant.engine_options)
    chosen = choose(store.windows, asked.tokens, settings.seed)
    b = Builder(settings.compare, settings.seed)
    measure(engine, store, chosen, b, batch_size=settings.diverge.batch_size, steps=asked.stepwise, threads=threads)
    result: records.Floor = {
        "reference": settings.reference, "model": manifest["digest"], "store": store.manifest["digest"],
        "runs": RUNS, "windows": [store.windows[i].window for i in chosen], "threads": threads,
        "metrics": b.metrics, "versions": artifacts.versions(),
    }  # fmt: skip
    artifacts.write_json(artifacts.FLOOR, result)
    values = [b.metrics[name] for name in ("kld_floor", "kld_rounding")]
    texts = [f"unknown ({'; '.join(m['warnings'])})" if m["value"] is None else f"{m['value']:.3g}" for m in values]
    what = f"kld_floor {texts[0]}, kld_rounding {texts[1]} nats over {len(chosen)} windows"
    cli.say("floor", f"{what}, {watch.done():.1f} s")


def main() -> None:
    """Measure the reference against itself."""
    isolate.isolated(run, what="floor")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
