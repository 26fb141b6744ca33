"""calibrate: text -> equal token rows for quantizers that look at activations -> artifacts/calibration/

Three sources: a text file; the base model's own fixed-seed continuations of that file's openings (what the model itself
finds likely, whatever it was trained on: Williams and Aletras 2024); a dataset of the Hugging Face hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, engines, params
from pipeline.calibration import cut
from pipeline.engines import Sampling
from pipeline.errors import DataError
from pipeline.evalset import Row, load_texts, sets_digest
from pipeline.overlap import measured_rows, refuse_overlap
from pipeline.params import HubText

OPENING = 16  # tokens of a text that a continuation starts from: enough to settle its language and kind
BATCH = 16


def encode(texts: list[Row]) -> list[list[int]]:
    """Each text's token ids, with an empty line after it and no special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(artifacts.BASE / "tokenizer.json"))
    return [tokenizer.encode(row["text"] + "\n\n", add_special_tokens=False).ids for row in texts]


def continuations(texts: list[Row], *, total: int, length: int, threads: int, seed: int) -> list[Row]:
    """The base model's own samples at temperature 1, opening by opening, until there are `total` tokens."""
    pieces = [ids[at : at + OPENING] for ids in encode(texts) for at in range(0, len(ids) - OPENING, 4 * OPENING)]
    openings = sorted(pieces, key=lambda ids: artifacts.digest([seed, ids]))
    engine: Any = engines.load("hf", artifacts.BASE, threads=threads)
    found: list[Row] = []
    made = 0
    with cli.progress(total, "calibrate: own samples", "token") as bar:
        for at in range(0, len(openings), BATCH):
            part = openings[at : at + BATCH]
            replies = engine.sample(part, length, Sampling(1.0, seed + at))
            for k, (opening, reply) in enumerate(zip(part, replies)):
                text = engine.tokenizer.decode([*opening, *reply], skip_special_tokens=True)
                found.append({"id": f"self-{at + k:04d}", "domain": "self", "text": text})
                made += len(opening) + len(reply)
            bar.update(sum(map(len, replies)))
            if made >= total:
                break
    return found


def hub_texts(hub: HubText) -> tuple[list[Row], int]:
    """The first documents of a dataset, and how many blank ones were left out.

    A dataset's own code never runs (`datasets` has dropped it); a name that cannot be had is an error in words.
    """
    import datasets

    try:
        data = datasets.load_dataset(hub.dataset, hub.name, split=hub.split, revision=hub.revision, streaming=True)
        taken = list(data.take(hub.documents))
    except Exception as e:  # the hub's, the network's, the parser's: all of them mean that there is no text
        first = (str(e).strip().splitlines() or ["no message"])[0]
        raise DataError(f"calibration.hub: {hub.dataset!r} could not be loaded ({type(e).__name__}: {first})") from None
    if taken and hub.column not in taken[0]:
        raise DataError(f"calibration.hub.column = {hub.column!r}: {hub.dataset!r} has {', '.join(taken[0])}")
    texts = [str(row[hub.column] or "") for row in taken]
    rows = [{"id": f"{hub.dataset}#{i}", "domain": "hub", "text": t} for i, t in enumerate(texts) if t.strip()]
    return rows, len(texts) - len(rows)


def gather(setup: params.Calibration, threads: int, seed: int) -> tuple[list[Row], dict[str, Any]]:
    """(texts, facts about them) of the source that params name."""
    facts: dict[str, Any] = {"source": setup.source}
    if setup.source == "hub":
        assert setup.hub is not None  # params.py has seen to that
        texts, blank = hub_texts(setup.hub)
        return texts, facts | setup.hub.model_dump() | {"documents_given": len(texts) + blank, "documents_blank": blank}
    path = Path(setup.set)
    texts = load_texts(path)
    facts |= {"set": str(path), "set_files": sets_digest(path)}
    if setup.source == "self":
        texts = continuations(texts, total=setup.rows * setup.tokens, length=setup.tokens, threads=threads, seed=seed)
    return texts, facts | {"documents_given": len(texts), "documents_blank": 0}


def main() -> None:
    """Make the calibration rows."""
    watch = artifacts.Stopwatch("calibrate")
    settings = params.load()
    setup = settings.calibration
    artifacts.verify_files(artifacts.BASE, base := artifacts.read_manifest(artifacts.BASE))
    texts, facts = gather(setup, settings.thread_count, settings.seed)
    measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
    refuse_overlap(texts, measured, f"calibration source {setup.source!r}")
    documents = encode(texts)
    rows = cut(documents, rows=setup.rows, tokens=setup.tokens, seed=settings.seed)
    if not rows:
        raise DataError(
            f"calibration source {setup.source!r}: {len(texts)} documents with {sum(map(len, documents))} tokens "
            f"({facts['documents_blank']} were blank) make no row of {setup.tokens}; give more text"
        )
    with artifacts.atomic_dir(artifacts.CALIBRATION) as out:
        artifacts.write_jsonl(out / "rows.jsonl", ({"token_ids": row} for row in rows))
        artifacts.write_jsonl(out / "texts.jsonl", texts)
        files = artifacts.files_of(out)
        artifacts.write_json(out / artifacts.MANIFEST, {
            "status": "ok", **facts, "seed": settings.seed, "base": base["digest"],
            "rows_asked": setup.rows, "rows_used": len(rows), "tokens_per_row": setup.tokens,
            "files": files, "digest": artifacts.digest(files), "versions": artifacts.versions(),
        })  # fmt: skip
    short = "" if len(rows) == setup.rows else f" ({setup.rows} were asked: give more text)"
    cli.say("calibrate", f"{len(rows)} rows of {setup.tokens} tokens from {setup.source}{short}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
