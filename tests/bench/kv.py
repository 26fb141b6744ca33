"""What a quantized key-value cache costs: divergence by tokens of context, retrieval by depth, bytes of a token.

    python tests/bench/kv.py VARIANT KV ... [--windows N] [--items N] [--threads N]

A built variant (`dvc repro quantize@VARIANT`) with each KV against itself without, in its own engine and the same passes: nothing
but the cache differs. A window is 2048 tokens of one domain's documents of the corpus, joined; intervals resample windows.
--items: of task retrieval. Each finished window is a row of artifacts/kv-VARIANT.jsonl, from which a killed run goes on.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import harness
import numpy as np
import typer

from pipeline import engines, evaluate
from pipeline.core import artifacts, cli, params
from pipeline.core.params import Params
from pipeline.divergence.distributions import compare_parts
from pipeline.engines import ROWS, Sampling
from pipeline.evalset import load_texts
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder

LENGTH, LENGTHS = 2048, (64, 192)  # tokens of a window; of the two contexts between which a token's bytes are taken
EDGES = (1, 32, 128, 256, 512, 1024, 2048)  # tokens of context


def windows(tokenizer: Any, most: int) -> dict[str, list[int]]:
    texts: dict[str, list[str]] = {}
    for row in load_texts(Path("evalsets/corpus")):
        texts.setdefault(row["domain"], []).append(row["text"].strip())
    ids = {domain: tokenizer("\n\n".join(parts), verbose=False).input_ids[:LENGTH] for domain, parts in texts.items()}
    return dict([(domain, part) for domain, part in ids.items() if len(part) == LENGTH][:most])


def divergence(packed: dict[str, Any], plain: Any, ids: list[int]) -> dict[str, list[float]]:
    """{kv: KL(without kv || with it) at positions 1 .. n - 1}"""
    found: dict[str, list[float]] = {kv: [] for kv in packed}
    with ThreadPoolExecutor(1) as pool:
        for blocks in zip(*(engine.logit_blocks([ids], [0], ROWS) for engine in (plain, *packed.values()))):
            true = np.asarray(ids[blocks[0][1] + 1 :][: len(blocks[0][2])])
            for kv, (_, _, logits) in zip(packed, blocks[1:]):
                found[kv] += compare_parts(pool, blocks[0][2], logits, true).kld.tolist()
    return found


def token_bytes(engine: Any) -> float:
    """Bytes that one more token takes in the cache."""
    held = []
    for n in LENGTHS:
        list(engine.stream([5 + k % 500 for k in range(n)], 1, Sampling(stop=False)))
        held.append(engine.trace.cache_bytes)
    return float(held[1] - held[0]) / (LENGTHS[1] - LENGTHS[0])


def retrieval(settings: Params, packed: dict[str, Any], plain: Any, items: int) -> None:
    """Accuracy by depth of each, and its difference to the cache without kv."""
    with tempfile.TemporaryDirectory() as tmp:
        ask = [
            evaluate.evaluate(e, settings.evaluate, {"retrieval": items}, settings.seed, Path(tmp))
            for e in (plain, *packed.values())
        ]
    for kv, rows in zip(packed, ask[1:]):
        b = Builder(settings.compare, settings.seed)
        answer_metrics(b, pair(rows, ask[0]), True)
        for name, m in sorted(b.metrics.items()):
            if name.startswith(("acc/ret", "acc_d")):
                print(
                    harness.row(kv, name, m["n"], *("–" if m[k] is None else f"{m[k]:.3g}" for k in ("value", "low", "high"))),
                    flush=True,
                )


def main(
    variant: str, kinds: list[str], most: Annotated[int, typer.Option("--windows")] = 8, items: int = 0, threads: int = 1
) -> None:
    settings = params.load()
    chosen, folder = settings.variant(variant), artifacts.model_dir(variant)
    packed: dict[str, Any] = {kv: engines.load(chosen.engine, folder, threads=threads, kv=kv) for kv in kinds}
    plain = packed[kinds[0]].plain()
    for kv, engine in {"without": plain, **packed}.items():
        print(f"{variant}, kv {kv}: {token_bytes(engine):.1f} bytes a token, {engine.trace.element_bytes} a number", flush=True)
    path = artifacts.ARTIFACTS / f"kv-{variant}.jsonl"
    rows = artifacts.read_jsonl(path) if path.exists() else []
    for domain, ids in windows(plain.tokenizer, most).items():
        if domain not in {row["domain"] for row in rows}:
            rows.append({"domain": domain, "kld": divergence(packed, plain, ids)})
            artifacts.write_jsonl(path, rows)
    b = Builder(settings.compare, settings.seed)
    print(harness.head("tokens of context", "n", *kinds))
    for first, after in pairwise(EDGES):
        cells = []
        for kv in kinds:
            kld = [np.asarray(row["kld"][kv][first - 1 : after - 1]) for row in rows]
            where = np.repeat([row["domain"] for row in rows], [len(k) for k in kld])
            e = b.resampled(f"kld_mean/{kv}/{first}", np.concatenate(kld), np.ones(len(where)), where)
            cells.append(f"{e.value:.3g} [{e.low:.3g}, {e.high:.3g}]")
        print(harness.row(f"{first} to {after - 1}", len(where), *cells), flush=True)
    if items:
        retrieval(settings, packed, plain, items)


if __name__ == "__main__":
    cli.run(main)
