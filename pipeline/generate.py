"""generate: a variant's own greedy replies to the trajectory prompts -> artifacts/generations/<variant>.jsonl

Teacher-forced figures feed the variant the reference's words; here it has to live with its own. What bounds it: decoding,
shared by a batch where the engine has batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, engines, params
from pipeline.engines import Sampling
from pipeline.errors import ArtifactError, NoResult
from pipeline.evalset import Row, load_prompts

BATCH = 16  # prompts at a time, padded on the left; the reference runs a second time in batches half as large
GREEDY = Sampling(temperature=0.0)


def asked(reference: Path, prompts: list[Row]) -> list[Row]:
    """{id, domain, prompt, ids} of the prompts whose continuations the reference's store holds: the same ones, in its order."""
    known = {row["id"]: row for row in prompts}
    windows = [w for w in artifacts.read_jsonl(reference / "windows.jsonl") if w["set"] == "trajectory"]
    lost = [w["document"] for w in windows if w["document"] not in known]
    if lost:
        raise ArtifactError(f"{reference} continues prompt {lost[0]!r}, which is not in the prompts' file; run `dvc repro`")
    rows = [(known[w["document"]], w["token_ids"][: w["first"]]) for w in windows]
    return [{"id": row["id"], "domain": row["domain"], "prompt": _text(row), "ids": ids} for row, ids in rows]


def _text(row: Row) -> str:
    """What a person wrote of a prompt: a chat template's own words would pass for the prompt's script."""
    return str(row["prompt"]) if "prompt" in row else "\n".join(m["content"] for m in row["messages"])


def replies(engine: Any, prompts: list[list[int]], most: int, batch: int) -> list[list[int]]:
    """Greedy replies of at most `most` tokens, an end token included: in batches where the engine has them, else one at a time."""
    found: list[list[int]] = []
    with cli.progress(len(prompts), "generate", "prompt") as bar:
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            if hasattr(engine, "sample"):
                found += engine.sample(part, most, GREEDY)
            else:
                found += [[token for token, _ in engine.stream(ids, most, GREEDY)] for ids in part]
            bar.update(len(part))
    return found


def generate(engine: Any, prompts: list[Row], most: int, is_reference: bool) -> list[Row]:
    """One row a prompt: id, domain, prompt, prompt_tokens, token_ids, text, cut (stopped at the limit, not by itself).

    The reference's rows also hold `again`: its reply at another batch size. Where that departs, so would the reference
    from itself, and no variant can be blamed for as much.
    """
    ids = [row["ids"] for row in prompts]
    own = replies(engine, ids, most, BATCH)
    other = min(BATCH, len(ids)) // 2  # of a single prompt there is no other batch
    again = replies(engine, ids, most, other) if is_reference and other else []
    rows, ends = [], engine.end_ids
    for k, (row, reply) in enumerate(zip(prompts, own)):
        text = engine.tokenizer.decode(reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        rows.append({
            "id": row["id"], "domain": row["domain"], "prompt": row["prompt"], "prompt_tokens": len(row["ids"]),
            "token_ids": reply, "text": text,
            "cut": len(reply) >= most and reply[-1] not in ends, **({"again": again[k]} if again else {}),
        })  # fmt: skip
    return rows


def main(variant: str) -> None:
    """Let VARIANT answer the trajectory prompts in its own words."""
    watch = artifacts.Stopwatch("generate", variant)
    settings = params.load()
    chosen, setup = settings.variant(variant), settings.diverge.trajectories
    folder, path = artifacts.model_dir(variant), artifacts.generations(variant)
    manifest, store = artifacts.read_manifest(folder), artifacts.read_manifest(artifacts.REFERENCE)
    prompts = asked(artifacts.REFERENCE, load_prompts(Path(setup.prompts)))
    rows: list[Row] = []
    status, why = manifest["status"], manifest["reason"]
    if status == "ok":
        artifacts.verify_files(folder, manifest)
        try:
            engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
            rows = generate(engine, prompts, setup.tokens, variant == settings.reference)
        except NoResult as e:
            status, why = e.status, str(e)
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), {
        "variant": variant, "model": manifest["digest"], "status": status, "reason": why, "reference": store["digest"],
        "tokens": setup.tokens, "batch": BATCH if rows and hasattr(engine, "sample") else 1, "versions": artifacts.versions(),
    })  # fmt: skip
    told = f"{len(rows)} replies of up to {setup.tokens} tokens" if status == "ok" else f"{status}: {why}"
    cli.say("generate", f"{variant}: {told}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
