"""calibrate: text -> token rows of equal length for quantizers that need activations -> artifacts/calibration/

Three sources: a text file; the base model's own fixed-seed continuations of that file's openings (Williams and Aletras 2024);
a dataset of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params
from pipeline.core.errors import DataError
from pipeline.core.params import HubText
from pipeline.core.records import TextRow
from pipeline.engines import Sampling
from pipeline.evalset import load_texts, sets_digest
from pipeline.evalset.calibration import AnyRow, cut, measured_rows, overlap, refuse_overlap
from pipeline.model.config import leading

OPENING = 16  # tokens of a text that a continuation starts from: enough to determine its language and kind
BATCH = 16
Facts = dict[str, object]  # the manifest's facts about the source


def encode(texts: Sequence[TextRow]) -> list[list[int]]:
    """Token ids of each text and an empty line after it, without special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(artifacts.BASE / "tokenizer.json"))
    return [tokenizer.encode(row["text"] + "\n\n", add_special_tokens=False).ids for row in texts]


def continuations(
    texts: list[TextRow], measured: list[AnyRow], *, total: int, length: int, threads: int, seed: int
) -> tuple[list[TextRow], int]:
    """(the base model's own samples at temperature 1 until `total` tokens, how many were left out because they overlap measured
    texts). They begin with the tokenizer's BOS, if it adds one."""
    engine: Any = engines.load("hf", artifacts.BASE, threads=threads)
    lead = leading(engine.tokenizer)
    pieces = [ids[at : at + OPENING] for ids in encode(texts) for at in range(0, len(ids) - OPENING, 4 * OPENING)]
    openings = sorted(pieces, key=lambda ids: artifacts.digest([seed, ids]))
    length = min(length, engine.max_length - OPENING - len(lead))
    samples: list[TextRow] = []
    made = dropped = 0
    batch = max(1, min(BATCH, -(-total // (OPENING + length))))
    with cli.progress(total, "calibrate: own samples", "token") as bar:
        for at in range(0, len(openings), batch):
            part = openings[at : at + batch]
            replies = engine.sample([lead + ids for ids in part], length, Sampling(1.0, seed + at))
            written = [engine.tokenizer.decode(o + r, skip_special_tokens=True) for o, r in zip(part, replies)]
            rows: list[TextRow] = [{"id": f"self-{at + k:04d}", "domain": "self", "text": text} for k, text in enumerate(written)]
            kept = [row for row in rows if not overlap([row], measured)]
            dropped += len(rows) - len(kept)
            samples += kept
            new = sum(map(len, encode(kept)))
            made += new
            bar.update(new)
            if made >= total:
                break
    return samples, dropped


def hub_texts(hub: HubText) -> tuple[list[TextRow], Facts]:
    """(the first documents of a dataset, facts: commit, number of blank ones). A dataset's own code never runs."""
    import datasets
    from huggingface_hub import HfApi

    local = Path(hub.dataset).is_dir()
    if local and not Path(hub.dataset).resolve().is_relative_to(Path("evalsets").resolve()):
        raise DataError(f"calibration.hub.dataset: {hub.dataset!r} lies outside evalsets/, where a change would go unseen")
    try:
        commit = None if local else HfApi().dataset_info(hub.dataset, revision=hub.revision).sha
        data = datasets.load_dataset(hub.dataset, hub.name, split=hub.split, revision=commit, streaming=True)
        taken = list(data.take(hub.documents))
    except Exception as e:  # the hub's, the network's, the parser's
        raise DataError(f"calibration.hub: {hub.dataset!r} could not be loaded ({isolate.brief(e)})") from None
    rows: list[TextRow] = []
    for i, row in enumerate(taken):
        if hub.column not in row:
            raise DataError(f"calibration.hub.column = {hub.column!r}: {hub.dataset!r} has {', '.join(row)}")
        text = row[hub.column] or ""
        if not isinstance(text, str):
            raise DataError(f"calibration.hub.column = {hub.column!r} does not hold text (row {i}); name a column of text")
        if text.strip():
            rows.append({"id": f"{hub.dataset}#{i}", "domain": "hub", "text": text})
    return rows, {"commit": commit, "documents_given": len(taken), "documents_blank": len(taken) - len(rows)}


def gather(setup: params.Calibration, measured: list[AnyRow], threads: int, seed: int) -> tuple[list[TextRow], Facts]:
    """(texts, facts about them) of the source in params; none is also measured on."""
    facts: Facts = {"source": setup.source}
    if setup.source == "hub":
        assert setup.hub is not None  # checked by params.py
        texts, more = hub_texts(setup.hub)
        refuse_overlap(texts, measured, f"calibration dataset {setup.hub.dataset!r}")
        return texts, facts | setup.hub.model_dump() | more
    path = Path(setup.set)
    texts = load_texts(path)
    facts |= {"set": str(path), "set_files": sets_digest(path), "documents_blank": 0}
    refuse_overlap(texts, measured, str(path))
    if setup.source == "text":
        return texts, facts | {"documents_given": len(texts)}
    total = setup.rows * setup.tokens
    texts, dropped = continuations(texts, measured, total=total, length=setup.tokens, threads=threads, seed=seed)
    return texts, facts | {"documents_given": len(texts) + dropped, "documents_measured_on": dropped}


def main() -> None:
    """Make the calibration rows."""
    watch = artifacts.Stopwatch("calibrate")
    settings = params.load()
    setup = settings.calibration
    artifacts.verify_files(artifacts.BASE, base := artifacts.read_manifest(artifacts.BASE))
    measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
    texts, facts = gather(setup, measured, settings.thread_count, settings.seed)
    documents = encode(texts)
    rows = cut(documents, rows=setup.rows, tokens=setup.tokens, seed=settings.seed)
    if not rows:
        given = f"{len(texts)} documents with {sum(map(len, documents))} tokens ({facts['documents_blank']} were blank)"
        raise DataError(f"calibration source {setup.source!r}: {given} make no row of {setup.tokens}; give more text")
    with artifacts.atomic_dir(artifacts.CALIBRATION) as out:
        artifacts.write_jsonl(out / "rows.jsonl", ({"token_ids": row} for row in rows))
        artifacts.write_jsonl(out / "texts.jsonl", texts)
        files = artifacts.files_of(out)
        artifacts.write_json(out / artifacts.MANIFEST, {
            "status": "ok", **facts, "seed": settings.seed, "base": base["digest"],
            "rows_asked": setup.rows, "rows_used": len(rows), "tokens_per_row": setup.tokens,
            "files": files, "digest": artifacts.digest(files), "versions": artifacts.versions(),
        })  # fmt: skip
    short = "" if len(rows) == setup.rows else f" ({setup.rows} were requested: give more text)"
    cli.say("calibrate", f"{len(rows)} rows of {setup.tokens} tokens from {setup.source}{short}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
