"""diverge: a variant's next-token distributions against the reference's -> artifacts/tokens/<variant>.parquet

What bounds it: the variant's prefill; the reference is replayed from its store at the price of its output head, and
the comparison itself runs in NumPy on blocks that fit the cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pipeline import artifacts, attest, cli, engines, llamacpp_compat, params
from pipeline.engines import Engine
from pipeline.errors import ArtifactError, InvalidVariant, ParamsError, Unsupported
from pipeline.metrics import TokenRows, compare_logits
from pipeline.store import ROWS, Store, batches

# Quantizers that leave every weight as it is, so that a difference of exactly zero to the reference is no fault.
LOSSLESS = ("cast",)

CACHE_ROWS = 16  # what a dozen temporary arrays of one vocabulary each leave in the cache

COLUMNS = ("set", "document", "window", "position", "token_id")


def diverge(engine: Engine, store: Store, *, batch_size: int, threads: int) -> dict[str, list[Any]]:
    """One row per scored token, as columns; see `metrics.compare_logits` for what they hold."""
    if engine.vocab_size != store.manifest["vocab"]:
        raise ArtifactError(
            f"the variant's vocabulary has {engine.vocab_size} entries, the reference's {store.manifest['vocab']}: "
            "their distributions cannot be compared"
        )
    columns: dict[str, list[Any]] = {}
    whole = store.manifest["kind"] == "logits"  # kept because blocks did not give them back: compare like with like
    total = sum(w.scored for w in store.windows)
    with ThreadPoolExecutor(threads) as pool, cli.progress(total, "diverge", "token") as bar:
        for part in batches(store.windows, batch_size):
            reference = {i: store.logit_blocks(i) for i, _ in part}
            ids = [w.token_ids for _, w in part]
            for k, at, logits in engine.logit_blocks(ids, [w.first - 1 for _, w in part], ROWS, whole):
                index, window = part[k]
                first, expected = next(reference[index])
                if first != at:
                    raise ArtifactError(f"window {window.window}: engine and store disagree about positions ({at}, {first})")
                true_ids = np.asarray(window.token_ids[at + 1 : at + 1 + len(logits)])
                rows = _compare(pool, expected, logits, true_ids)
                for p, token in enumerate(true_ids):
                    for name, value in zip(COLUMNS, (window.set, window.document, window.window, at + 1 + p, int(token))):
                        columns.setdefault(name, []).append(value)
                for name, values in asdict(rows).items():
                    columns.setdefault(name, []).extend(values.tolist())
                bar.update(len(logits))
    return columns


def _compare(pool: ThreadPoolExecutor, ref: Any, var: Any, true_ids: Any) -> TokenRows:
    """`compare_logits` a few rows at a time, shared out over threads: NumPy works on one core and frees the interpreter.

    Measured on 2 cores at a vocabulary of 49 152: 1.6 ms a token with 128 rows at once, 0.57 ms with 16.
    """
    parts = [slice(at, at + CACHE_ROWS) for at in range(0, len(ref), CACHE_ROWS)]
    done = list(pool.map(lambda s: compare_logits(ref[s], var[s], true_ids[s]), parts))
    return TokenRows(**{name: np.concatenate([getattr(d, name) for d in done]) for name in asdict(done[0])})


def check(columns: dict[str, list[Any]], *, is_reference: bool, lossless: bool) -> None:
    """Raise where the figures cannot be: a reference that differs from itself, a quantized model that does not."""
    kld = np.asarray(columns["kld"])
    if is_reference and not (kld == 0).all():
        raise ArtifactError(f"the reference differs from its own store in {(kld != 0).sum()} of {len(kld)} tokens; rebuild it")
    if not is_reference and not lossless and (kld == 0).all():
        raise InvalidVariant(f"a quantized variant equals the reference in all {len(kld)} tokens: it was not quantized")


def write(columns: dict[str, list[Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with artifacts.atomic_file(path) as tmp:
        pq.write_table(pa.table(columns), tmp)


def _write_nothing(path: Path, meta: dict[str, Any]) -> None:
    """No rows, and why."""
    write({name: [] for name in COLUMNS}, path)
    artifacts.write_json(artifacts.meta_of(path), meta)
    cli.say("diverge", f"{meta['variant']}: {meta['status']}: {meta['reason']}")


def main(
    variant: str,
    llamacpp_compatible: Annotated[
        Path | None, typer.Option(help="A text: measure on it as llama-perplexity does, write nothing.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="With it: the variant to compare with (default: the reference).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With it: print JSON.")] = False,
) -> None:
    """Compare VARIANT's next-token distributions with the reference's."""
    if llamacpp_compatible is not None:
        llamacpp_compat.main(variant, llamacpp_compatible, against, as_json)
        return
    if against is not None or as_json:
        raise ParamsError("--against and --json belong to --llamacpp-compatible TEXT; name the text, or leave them out")
    watch = artifacts.Stopwatch("diverge", variant)
    settings = params.load()
    chosen = settings.variant(variant)
    folder, path = artifacts.model_dir(variant), artifacts.tokens(variant)
    manifest = artifacts.read_manifest(folder)
    meta: dict[str, Any] = {"variant": variant, "model": manifest["digest"]}
    if manifest["status"] != "ok":
        _write_nothing(path, meta | {"status": manifest["status"], "reason": manifest["reason"]})
        return
    artifacts.verify_files(folder, manifest)
    store = Store(artifacts.REFERENCE)
    try:
        engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
    except Unsupported as e:
        _write_nothing(path, meta | {"status": "unsupported", "reason": str(e)})
        return
    try:
        attest.check_kernels(engine.kernels(), manifest)
        attest.check_probe(engine, manifest)
    except InvalidVariant as e:
        _write_nothing(path, meta | {"status": "invalid", "reason": str(e)})
        return
    columns = diverge(engine, store, batch_size=settings.diverge.batch_size, threads=settings.thread_count)
    try:
        check(columns, is_reference=variant == settings.reference, lossless=manifest["quantizer"] in LOSSLESS)
        status, why = "ok", None
    except InvalidVariant as e:
        status, why = "invalid", str(e)
    write(columns, path)
    n, mean = len(columns["kld"]), float(np.mean(columns["kld"]))
    artifacts.write_json(artifacts.meta_of(path), meta | {
        "status": status, "reason": why, "reference": store.manifest["digest"], "tokens": n,
        "kernels": engine.kernels(), "versions": artifacts.versions(),
    })  # fmt: skip
    seconds = watch.done()
    told = f"{status}: {why}" if why else f"mean KLD {mean:.3g} nats over {n} tokens"
    cli.say("diverge", f"{variant}: {told}, {seconds:.1f} s ({n / seconds:.0f} tok/s)")


if __name__ == "__main__":
    cli.run(main)
