"""reference: fixed-seed trajectories and an exact reference store -> artifacts/reference/"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, engines, params
from pipeline.engines import Sampling
from pipeline.errors import ArtifactError, DataError, InvalidVariant, Unsupported
from pipeline.evalset import Row, load_prompts, load_texts, sets_digest
from pipeline.params import Diverge, HowMany, Tier
from pipeline.store import ROWS, Window, batches, estimate_bytes, refuse_if_too_large


def corpus_windows(documents: list[Row], tokenizer: Any, length: int) -> list[Window]:
    """Cut each document into windows of at most `length` tokens; a rest of fewer than 8 tokens is left out.

    Where the tokenizer puts a BOS in front of a text, every window gets it, unscored: a model that expects it would
    otherwise be measured in contexts that it never meets.
    """
    lead = tuple(t for t in tokenizer("").input_ids if t == tokenizer.bos_token_id)[:1]
    step = length - len(lead)
    found = []
    for document in documents:
        ids = tokenizer(document["text"], add_special_tokens=False).input_ids
        for k, at in enumerate(range(0, len(ids), step)):
            piece = lead + tuple(ids[at : at + step])
            if len(piece) - len(lead) >= 8:
                found.append(Window(document["domain"], f"{document['id']}#{k}", document["id"], piece, 1))
    return found


def choose(rows: list[Row], count: HowMany, seed: int) -> list[Row]:
    """A fixed-seed subset in file order, spread evenly over the domains; smaller counts are subsets of larger ones."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    taken: Counter[str] = Counter()
    turn = {}
    for i in order:  # the first of every domain, then the second of every domain, ...
        turn[i] = taken[rows[i]["domain"]]
        taken[rows[i]["domain"]] += 1
    return [rows[i] for i in sorted(sorted(order, key=turn.__getitem__)[: None if isinstance(count, str) else count])]


def prompt_ids(row: Row, tokenizer: Any) -> list[int]:
    """A prompt's tokens: plain text as it is, a chat through the model's own template."""
    if "messages" not in row:
        return list(tokenizer(row["prompt"]).input_ids)
    if not tokenizer.chat_template:
        raise DataError(f"prompt {row['id']} is a chat and the model has no chat template; choose plain prompts")
    text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def trajectories(engine: Any, prompts: list[Row], setup: params.Trajectories, seed: int, batch: int = 8) -> list[Window]:
    """Let the reference continue each prompt; only its own tokens are scored, in the context they came from."""
    found = []
    with cli.progress(len(prompts), "trajectories", "prompt") as bar:
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            ids = [prompt_ids(row, engine.tokenizer) for row in part]
            replies = engine.sample(ids, setup.tokens, Sampling(setup.temperature, seed + at))
            for row, prompt, reply in zip(part, ids, replies):
                if reply:
                    tokens = tuple(prompt + reply)
                    found.append(Window("trajectory", row["id"], row["id"], tokens, len(prompt)))
            bar.update(len(part))
    return found


def write_store(engine: Any, windows: list[Window], out: Path, batch_size: int) -> dict[str, Any]:
    """Write windows, states and head; every state is replayed and compared with the model's own logits bit for bit.

    If one logit differs, or the engine cannot split its head off, logits are stored instead, and the manifest says so.
    """
    from safetensors.torch import save_file

    exact, why = True, None
    states: dict[str, Any] = {}
    with cli.progress(len(windows), "reference store", "window") as bar:
        for part in batches(windows, batch_size):
            for (i, w), h, logits in zip(part, *engine.own_logits([w.token_ids for _, w in part])):
                kept = h[w.first - 1 : -1]
                if not _replays(engine, kept, logits[w.first - 1 : -1]):
                    exact, why = False, f"window {w.window}: the head's replay differs from the model's own logits"
                if not bool(engine.torch.isfinite(logits).all()):
                    raise InvalidVariant(f"the reference's logits are not finite in window {w.window}")
                states[str(i)] = kept.contiguous().cpu()
                bar.update()
    if exact:
        head_bytes = engine.head.save(out / "head")
    else:
        refuse_if_too_large(estimate_bytes(windows, engine.vocab_size, 4), out)
        head_bytes = 0
        for part in batches(windows, batch_size):
            for (i, w), _, logits in zip(part, *engine.own_logits([w.token_ids for _, w in part])):
                states[str(i)] = logits[w.first - 1 : -1].contiguous().cpu()
    save_file(states, out / "states.safetensors")
    artifacts.write_jsonl(out / "windows.jsonl", (asdict(w) for w in windows))
    return {
        "kind": "hidden" if exact else "logits", "why_not_hidden": why, "rows_per_block": ROWS,
        "windows": len(windows), "tokens": sum(w.scored for w in windows),
        "state_bytes": sum(t.numel() * t.element_size() for t in states.values()), "head_bytes": head_bytes,
    }  # fmt: skip


def _replays(engine: Any, kept: Any, logits: Any) -> bool:
    return all(
        engine.torch.equal(engine.head.tensor(kept[at : at + ROWS]), logits[at : at + ROWS]) for at in range(0, len(kept), ROWS)
    )


def make_windows(engine: Any, setup: Diverge, amount: Tier, seed: int) -> list[Window]:
    documents = choose(load_texts(Path(setup.corpus)), amount.documents, seed)
    prompts = choose(load_prompts(Path(setup.trajectories.prompts)), amount.trajectories, seed)
    windows = corpus_windows(documents, engine.tokenizer, min(setup.window, engine.max_length))
    return windows + trajectories(engine, prompts, setup.trajectories, seed)


def main() -> None:
    """Write the reference's store."""
    watch = artifacts.Stopwatch("reference")
    settings = params.load()
    variant = settings.variant(settings.reference)
    folder = artifacts.model_dir(settings.reference)
    manifest = artifacts.read_manifest(folder)
    if manifest["status"] != "ok":
        raise ArtifactError(f"the reference {settings.reference!r} is {manifest['status']}: {manifest['reason']}")
    artifacts.verify_files(folder, manifest)
    engine: Any = engines.load(variant.engine, folder, threads=settings.thread_count, **variant.engine_options)
    if not hasattr(engine, "hidden"):
        raise Unsupported(f"engine {variant.engine!r} gives no hidden states; choose a reference that runs in 'hf'")
    setup = settings.diverge
    with artifacts.atomic_dir(artifacts.REFERENCE) as out:
        windows = make_windows(engine, setup, settings.amount, settings.seed)
        refuse_if_too_large(estimate_bytes(windows, engine.model.config.hidden_size, 4), out)
        facts = write_store(engine, windows, out, setup.batch_size)
        files = artifacts.files_of(out)
        artifacts.write_json(out / artifacts.MANIFEST, {
            "status": "ok", "variant": settings.reference, "model": manifest["digest"], "seed": settings.seed, **facts,
            "trust_remote_code": manifest["trust_remote_code"],
            "temperature": setup.trajectories.temperature, "vocab": engine.vocab_size,
            "sets": sets_digest(Path(setup.corpus)) | sets_digest(Path(setup.trajectories.prompts)),
            "threads": settings.thread_count, "files": files, "digest": artifacts.digest(files),
            "versions": artifacts.versions(),
        })  # fmt: skip
    cli.say(
        "reference",
        f"{facts['tokens']} scored tokens in {facts['windows']} windows, {facts['state_bytes'] / 1e6:.1f} MB of "
        f"{facts['kind']} states + {facts['head_bytes'] / 1e6:.1f} MB head, {watch.done():.1f} s",
    )


if __name__ == "__main__":
    cli.run(main)
