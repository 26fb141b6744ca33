"""reference: fixed-seed trajectories and an exact reference store -> artifacts/reference/

Windows and shards of states are written one by one to artifacts/partial/; a killed run continues from there if model, sets, seed,
code and versions are the same, and makes a damaged shard again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError, InvalidVariant
from pipeline.core.params import Diverge
from pipeline.core.records import ModelManifest, PromptRow, States
from pipeline.divergence.store import Batch, Checkpoints, Window, key_of, refuse_if_too_large, shards
from pipeline.engines import ROWS, Sampling
from pipeline.evalset import choose, load_prompts, load_texts, sets_digest
from pipeline.evalset.windows import corpus_windows, prompt_ids, refuse_chats

CODE = (  # a change of it may change the store
    "engines/__init__.py", "engines/_gptq.py", "engines/_head.py", "engines/hf.py",
    "evalset/__init__.py", "evalset/windows.py", "reference.py", "divergence/store.py",
)  # fmt: skip
TOGETHER = 8  # prompts continued at a time
OTHERWISE = "rounded_otherwise"  # number of a shard's logits that the model's own pass rounds to a neighbour
INEXACT = "inexact.txt"  # the piece with the reason why logits are stored


def trajectories(
    engine: Any, prompts: Sequence[PromptRow], setup: params.Trajectories, seed: int, skipped: Counter[str]
) -> list[Window]:
    """Let the reference continue each prompt; only its own tokens are scored, in their context."""
    windows = []
    encoded = [prompt_ids(row, engine.tokenizer) for row in prompts]  # all before the first is continued: one may be invalid
    with cli.progress(len(prompts), "trajectories", "prompt") as bar:
        for at in range(0, len(prompts), TOGETHER):
            part = encoded[at : at + TOGETHER]
            replies = engine.sample(part, setup.tokens, Sampling(setup.temperature, seed + at))
            for row, prompt, reply in zip(prompts[at:], part, replies):
                if reply:
                    tokens = tuple(prompt + reply)
                    windows.append(Window("trajectory", row["id"], row["id"], tokens, len(prompt), row["domain"]))
                else:
                    skipped["no reply"] += 1
            bar.update(len(part))
    return windows


class Inexact(Exception):
    """The head alone does not give the model's own logits."""


def write_store(
    engine: Any, windows: list[Window], out: Path, batch_size: int, pieces: Checkpoints, *, model: str = "", seed: int = 0
) -> States:
    """Write windows, states and head; every state is replayed and compared with the model's own logits. If one differs by more than
    a step of rounding, or the head cannot be split off, logits are stored instead, with the reason in the manifest. pieces:
    finished shards, until all are there; model, seed: those that made the windows."""
    reason, head_bytes = None, 0
    try:
        if pieces.has(INEXACT):
            raise Inexact((pieces.folder / INEXACT).read_text(encoding="utf-8"))
        shard_of = _write_shards(engine, windows, batch_size, pieces, "hidden", out)
        head_bytes = _save_head(engine, out / "head")
    except Inexact as e:
        reason = str(e)
        pieces.drop("hidden-*")
        with pieces.write(INEXACT) as tmp:
            tmp.write_text(reason, encoding="utf-8")
        shard_of = _write_shards(engine, windows, batch_size, pieces, "logits", out)
    (out / "states").mkdir()
    for name in shard_of:
        artifacts.link_file(pieces.folder / Path(name).name, out / name)
    artifacts.write_jsonl(out / "windows.jsonl", (asdict(w) for w in windows))
    tokens, state_bytes = sum(w.scored for w in windows), sum(_tensor_bytes(out / name) for name in shard_of)
    return {
        "kind": "logits" if reason else "hidden", "why_not_hidden": reason, "rows_per_block": ROWS,
        "windows": len(windows), "tokens": tokens, "state_bytes": state_bytes, "bytes_per_token": state_bytes / tokens,
        "rounded_otherwise": sum(_rounded_otherwise(out / name) for name in shard_of),
        "head_bytes": head_bytes, "shards": shard_of, "model": model, "seed": seed, "key": key_of(model, seed, windows),
    }  # fmt: skip


def _write_shards(
    engine: Any, windows: list[Window], batch_size: int, pieces: Checkpoints, kind: str, out: Path
) -> dict[str, list[int]]:
    """{shard's name in the store: indices of its windows}; computes only missing shards."""
    # per scored position of a 16-bit model: 2·d bytes of states, 2·vocab of logits
    width = engine.model.config.get_text_config().hidden_size if kind == "hidden" else engine.vocab_size
    position_bytes = int(width) * int(engine.model.dtype.itemsize)
    head_bytes = engine.vocab_size * position_bytes if kind == "hidden" else 0
    planned = {f"{kind}-{k:05d}.safetensors": shard for k, shard in enumerate(shards(windows, batch_size, position_bytes))}
    missing = [w for name, shard in planned.items() if not pieces.has(name) for batch in shard for _, w in batch]
    refuse_if_too_large(sum(w.scored for w in missing) * position_bytes + head_bytes, out)
    indices = {}
    with cli.progress(len(windows), f"reference store ({kind})", "window") as bar:
        for name, shard in planned.items():
            if not pieces.has(name):
                with pieces.write(name) as tmp:
                    _write_shard(engine, shard, kind, tmp)
            indices[f"states/{name}"] = [i for batch in shard for i, _ in batch]
            bar.update(len(indices[f"states/{name}"]))
    return indices


def _write_shard(engine: Any, shard: list[Batch], kind: str, path: Path) -> None:
    from safetensors.torch import save_file

    states, differ = {}, 0
    for batch in shard:
        for (i, w), hidden, logits in zip(batch, *engine.own_logits([w.token_ids for _, w in batch])):
            scored = slice(w.first - 1, -1)
            if not bool(engine.torch.isfinite(logits).all()):
                raise InvalidVariant(f"the reference's logits are not finite in window {w.window}")
            if kind == "hidden":
                differ += _replay(engine, hidden[scored], logits[scored], w.window)
            states[str(i)] = (hidden if kind == "hidden" else logits)[scored].contiguous().cpu()
    save_file(states, path, metadata={OTHERWISE: str(differ)})


def _replay(engine: Any, hidden: Any, logits: Any, window: str) -> int:
    """Number of logits that the head alone rounds differently than the model's own pass; `Inexact` beyond a step of rounding."""
    step, differ = engine.torch.finfo(logits.dtype).eps, 0
    for at in range(0, len(hidden), ROWS):
        expected = logits[at : at + ROWS]
        try:
            replayed = engine.head.tensor(hidden[at : at + ROWS])
        except Exception as e:  # a model's class that reads more of its body than hidden states may raise anything
            raise Inexact(f"the model's class gives no logits from hidden states alone ({type(e).__name__}: {e})") from None
        if engine.torch.equal(replayed, expected):
            continue
        error = (replayed.float() - expected.float()).abs()
        if not bool((error.amax(1) <= step * expected.float().abs().amax(1)).all()):
            raise Inexact(f"window {window}: the head's replay differs from the model's own logits")
        differ += int((error > 0).sum())
    return differ


def _save_head(engine: Any, folder: Path) -> int:
    """Write the head and return its size in bytes; `Inexact` if it is another when read again."""
    from pipeline.engines._head import Head

    size = int(engine.head.save(folder))
    try:
        same = Head.load(folder).equals(engine.head) or engine.device != "cpu"
    except Exception as e:
        raise Inexact(f"the head cannot be loaded by itself ({type(e).__name__}: {e})") from None
    if not same:
        raise Inexact("the head by itself is another when it is loaded")
    return size


def _rounded_otherwise(shard: Path) -> int:
    from safetensors import safe_open

    with safe_open(shard, framework="np") as file:
        return int(file.metadata()[OTHERWISE])


def _tensor_bytes(path: Path) -> int:  # without the header: eight bytes of its length, and itself
    with path.open("rb") as f:
        return path.stat().st_size - 8 - int.from_bytes(f.read(8), "little")


def keep_windows(pieces: Checkpoints, make: Callable[[Counter[str]], list[Window]]) -> tuple[list[Window], dict[str, int]]:
    """The windows of this run, and {reason: number of skipped ones}; a continued run finds those it had made."""

    def made() -> object:
        skipped: Counter[str] = Counter()
        return {"windows": [asdict(w) for w in make(skipped)], "skipped": skipped}

    kept = pieces.json("windows.json", made)
    return [Window.of(row) for row in kept["windows"]], kept["skipped"]


def inputs(settings: params.Params, model: str) -> dict[str, object]:
    """Everything that a store's bytes depend on; `model`: the reference's digest."""
    setup, amount, here = settings.diverge, settings.amount, Path(__file__).parent
    return {
        "model": model, "variant": settings.variant(settings.reference).model_dump(), "seed": settings.seed,
        "threads": settings.thread_count, "diverge": setup.model_dump(),
        "documents": amount.documents, "trajectories": amount.trajectories, "sets": _sets(setup),
        "code": {name: artifacts.sha256_file(here / name) for name in CODE}, "versions": artifacts.versions(),
    }  # fmt: skip


def _sets(setup: Diverge) -> dict[str, str]:
    return sets_digest(Path(setup.corpus)) | sets_digest(Path(setup.trajectories.prompts))


def run() -> None:
    watch = artifacts.Stopwatch("reference")
    settings = params.load()
    setup, seed = settings.diverge, settings.seed
    variant, folder = settings.variant(settings.reference), artifacts.model_dir(settings.reference)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    if manifest["status"] != "ok":
        raise ArtifactError(f"the reference {settings.reference!r} is {manifest['status']}: {manifest['reason']}")
    artifacts.verify_files(folder, manifest)
    prompts = choose(load_prompts(Path(setup.trajectories.prompts)), settings.amount.trajectories, seed)
    documents = choose(load_texts(Path(setup.corpus)), settings.amount.documents, seed)
    refuse_chats(prompts, folder)
    engine: Any = engines.load(variant.engine, folder, threads=settings.thread_count, **variant.engine_options)

    def make(skipped: Counter[str]) -> list[Window]:
        windows = corpus_windows(documents, engine.tokenizer, min(setup.window, engine.max_length), skipped)
        return windows + trajectories(engine, prompts, setup.trajectories, seed, skipped)

    pieces = Checkpoints.of("reference", inputs(settings, manifest["digest"]))
    windows, skipped = keep_windows(pieces, make)
    with artifacts.atomic_dir(artifacts.REFERENCE) as out:
        states = write_store(engine, windows, out, setup.batch_size, pieces, model=manifest["digest"], seed=seed)
        files = artifacts.files_of(out)
        store: records.StoreManifest = {
            "status": "ok", "variant": settings.reference, **states, "skipped": skipped,
            "trust_remote_code": manifest["trust_remote_code"],
            "temperature": setup.trajectories.temperature, "vocab": engine.vocab_size, "sets": _sets(setup),
            "threads": settings.thread_count, "files": files, "digest": artifacts.digest(files),
            "versions": artifacts.versions(),
        }  # fmt: skip
        artifacts.write_json(out / artifacts.MANIFEST, store)
    pieces.clear()
    left_out = f" ({', '.join(f'{n} {why}' for why, n in skipped.items())} left out)" if skipped else ""
    what = f"{states['tokens']} scored tokens in {states['windows']} windows{left_out}"
    size = f"{(states['state_bytes'] + states['head_bytes']) / 1e6:.1f} MB of {states['kind']} states and head"
    cli.say("reference", f"{what}, {size}, {watch.done():.1f} s")


def main() -> None:
    """Write the reference's store."""
    isolate.isolated(run, what="reference")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
