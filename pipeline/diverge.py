"""diverge: a variant's next-token distributions against the reference's -> artifacts/tokens/<variant>.parquet,
and its own replies (engines/_generation.py), from one load of its model.

The reference is replayed from its store. Rows are written in groups, so that memory does not grow with their number."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params, quiet, records
from pipeline.core.errors import ArtifactError, InvalidVariant
from pipeline.core.records import DivergeMeta, ModelManifest, Outcome, StoreManifest, TokensMeta
from pipeline.divergence.distributions import F32, TokenRows, compare_parts
from pipeline.divergence.store import Batch, Store, batches
from pipeline.engines import ROWS, Engine, _generation
from pipeline.evalset import in_parts
from pipeline.evalset.token_classes import classes
from pipeline.gating.sequential import Looks, looks_of, stopped
from pipeline.metrics.builder import Builder
from pipeline.metrics.tokens import NEEDED, TRAJECTORY, token_metrics
from pipeline.model import attestation

ATTESTED = 256  # tokens on which a packed cache is compared with one of 16 bits
GROUP_ROWS = 8192  # rows held before they are written

Columns = Mapping[str, Any]  # {name: values}, those of records.TOKEN_COLUMNS
Block = tuple[int, F32]  # first position, logits [n, vocab]


def diverge(engine: Engine, store: Store, *, batch_size: int, threads: int, looks: Looks | None = None) -> Iterator[Columns]:
    """One row per scored token, as columns, in blocks of at most ROWS positions of a window. looks: when to end."""
    if engine.vocab_size != store.manifest["vocab"]:
        sizes = f"{engine.vocab_size} entries, the reference's {store.manifest['vocab']}"
        raise ArtifactError(f"the variant's vocabulary has {sizes}: their distributions cannot be compared")
    whole = store.manifest["kind"] == "logits"  # the head alone did not reproduce them: compare like with like
    special = set(engine.tokenizer.all_special_ids)
    total = sum(w.scored for w in store.windows)
    held: list[Columns] = []
    parts = until_decided(engine, store, batch_size, looks, held) if looks else in_batches(engine, store, batch_size)
    with ThreadPoolExecutor(threads) as pool, cli.progress(total, "diverge", "token") as bar:
        for part in parts:
            reference = {i: store.logit_blocks(i) for i, _ in part}
            kinds = {i: classes(w.token_ids, engine.tokenizer.decode, special, w.domain or w.set) for i, w in part}
            for k, at, rows in compared(engine, part, [reference[i] for i, _ in part], whole, pool):
                index, window = part[k]
                scored = slice(at + 1, at + 1 + len(rows.kld))
                labels = {name: [getattr(window, name)] * len(rows.kld) for name in ("set", "document", "window")}
                labels["token_class"] = kinds[index][scored]
                ids_at = {"position": np.arange(scored.start, scored.stop), "token_id": np.asarray(window.token_ids[scored])}
                block = labels | ids_at | asdict(rows)
                if looks:
                    held.append(block)
                yield block
                bar.update(len(rows.kld))
            for i, window in part:
                if next(reference[i], None) is not None:
                    raise ArtifactError(f"window {window.window}: the engine gave logits for only some of its positions")


def compared(
    engine: Any, part: Batch, reference: list[Iterator[Block]], whole: bool, pool: Executor
) -> Iterator[tuple[int, int, TokenRows]]:
    """(index in the batch, first position, rows), compared inside the engine if it can, else from its logits."""
    ids, starts = [w.token_ids for _, w in part], [w.first - 1 for _, w in part]
    if hasattr(engine, "compare_blocks"):
        yield from engine.compare_blocks(ids, starts, reference)
        return
    for k, at, logits in engine.logit_blocks(ids, starts, ROWS, whole):
        first, expected = next(reference[k], (-1, logits))
        if (first, len(expected)) != (at, len(logits)):
            raise ArtifactError(f"window {part[k][1].window}: engine and store disagree about positions ({at}, {first})")
        yield k, at, compare_parts(pool, expected, logits, np.asarray(ids[k][at + 1 : at + 1 + len(logits)]))


def in_batches(engine: Any, store: Store, size: int, documents: set[str] | None = None) -> Iterator[Batch]:
    """Windows (of some documents, or all) in batches of equal length, or all at once if the engine takes any lengths."""
    parts = batches(store.windows, size, documents)
    return iter([[*chain(*parts)]]) if getattr(engine, "any_lengths", False) else parts


def until_decided(engine: Any, store: Store, batch_size: int, looks: Looks, held: list[Columns]) -> Iterator[Batch]:
    """Batches of one look's documents after another's, until `held`, the rows so far, decides."""
    domains = {w.document: f"{w.set == TRAJECTORY} {w.domain or w.set}" for w in store.windows}
    part = in_parts(domains, looks.planned, store.manifest["seed"])
    for k in range(looks.planned):
        yield from in_batches(engine, store, batch_size, {document for document, its in part.items() if its == k})
        if looks.decided(held):
            return


def in_order(blocks: Iterable[Columns], store: Store, batch_size: int) -> list[Columns]:
    """Blocks of rows in the reference's order."""
    at = {w.window: k for k, (_, w) in enumerate(chain(*batches(store.windows, batch_size)))}
    return sorted(blocks, key=lambda block: at[block["window"][0]])


def measure_rows(b: Builder, held: list[Columns]) -> None:
    """Add the metrics of blocks of rows."""
    token_metrics(b, {name: np.concatenate([block[name] for block in held]) for name in NEEDED})


@dataclass
class Seen:
    """Sums over the rows that were written."""

    tokens: int = 0
    differing: int = 0  # tokens whose divergence is not exactly 0
    kld_sum: float = 0.0

    def add(self, kld: Any) -> None:
        self.tokens += len(kld)
        self.differing += int((np.asarray(kld) != 0).sum())
        self.kld_sum += float(np.sum(kld))


def check(seen: Seen, *, is_reference: bool, lossless: bool) -> None:
    """Raise for impossible results: a reference that differs from itself, a quantized model that does not differ from it."""
    if not seen.tokens:
        raise InvalidVariant("no token was scored")
    if is_reference and seen.differing:
        differ = f"the reference differs from its own store in {seen.differing} of {seen.tokens} tokens"
        raise ArtifactError(f"{differ}; delete {artifacts.REFERENCE} and run `dvc repro reference`")
    if not is_reference and not lossless and not seen.differing:
        raise InvalidVariant(f"a quantized variant equals the reference in all {seen.tokens} tokens: it was not quantized")


def write(blocks: Iterable[Columns], path: Path) -> Seen:
    """Write blocks of rows to a parquet file in groups of GROUP_ROWS."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in records.TOKEN_COLUMNS.items()])
    seen, held = Seen(), []
    with pq.ParquetWriter(path, schema) as file:
        for block in blocks:
            seen.add(block["kld"])
            held.append(pa.table({field.name: pa.array(block[field.name], field.type) for field in schema}, schema))
            if sum(map(len, held)) >= GROUP_ROWS:
                file.write_table(pa.concat_tables(held))
                held.clear()
        if held:
            file.write_table(pa.concat_tables(held))
    return seen


def measure(variant: str, settings: params.Params, about: DivergeMeta) -> str:
    """Write the variant's token rows and its own replies, from one load of its model; return a summary."""
    chosen, folder, path = settings.variant(variant), artifacts.model_dir(variant), artifacts.tokens(variant)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
    attestation.check_kernels(engine.kernels(), manifest)
    store = Store(artifacts.REFERENCE)
    outcome: Outcome = {"status": "ok", "reason": None}
    size, texts = settings.diverge.batch_size, {w.document for w in store.windows if w.set != TRAJECTORY}
    looks = looks_of(settings, variant, "diverge", len(texts), measure_rows)
    started = time.monotonic()
    with artifacts.atomic_file(path) as tmp:
        blocks = diverge(engine, store, batch_size=size, threads=settings.thread_count, looks=looks)
        seen = write(in_order(blocks, store, size) if looks else blocks, tmp)
        rate = seen.tokens / (time.monotonic() - started)
        with artifacts.recording(outcome):
            packs = engines.packs_cache(chosen.engine_options)
            check(seen, is_reference=variant == settings.reference, lossless=chosen.quantizer == "cast" and not packs)
            if packs and hasattr(engine, "plain"):  # vLLM reports its cache's type when it is loaded
                attestation.check_cache(engine, max((w.token_ids for w in store.windows), key=len)[:ATTESTED])
    ran: TokensMeta = {
        **about, **outcome,  # type: ignore[typeddict-item]  # no look in it
        "tokens": seen.tokens, "kernels": engine.kernels(), "attention": getattr(engine, "attention", None),
    }  # fmt: skip
    if looks:
        ran["look"] = looks.record(seen.tokens, store.manifest["tokens"])
    artifacts.write_json(artifacts.meta_of(path), ran)
    kld = f"mean KLD {seen.kld_sum / max(1, seen.tokens):.3g} nats over {seen.tokens} tokens ({rate:.0f} tok/s)"
    return f"{outcome['reason'] or kld}{stopped(ran.get('look'))}; {_generation.write(variant, engine, settings, about)}"


def measured(variant: str, settings: params.Params) -> str:
    """`measure` in its own process; if that fails, write files without rows that hold the reason."""
    folder, path = artifacts.model_dir(variant), artifacts.tokens(variant)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    meta: DivergeMeta = {
        "variant": variant, "model": manifest["digest"],
        "reference": records.read(artifacts.REFERENCE / artifacts.MANIFEST, StoreManifest)["digest"],
        "status": "ok", "reason": None, "versions": artifacts.versions(),
    }  # fmt: skip
    with artifacts.recording(meta):
        artifacts.check_model(folder, manifest)
        return isolate.isolated(measure, variant, settings, meta, what=f"diverge {variant}")
    with artifacts.atomic_file(path) as tmp:
        write([], tmp)
    artifacts.write_json(artifacts.meta_of(path), meta)
    _generation.write(variant, None, settings, meta)
    return f"{meta['status']}: {meta['reason']}"


def main(variant: str) -> None:
    """Compare VARIANT's next-token distributions with the reference's."""
    quiet.before_sharing_cores()
    watch = artifacts.Stopwatch("diverge", variant)
    settings = params.load()
    settings.variant(variant)
    cli.say("diverge", f"{variant}: {measured(variant, settings)}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
