"""A variant's own greedy replies to the trajectory prompts, part of `diverge` -> artifacts/generations/<variant>.jsonl

Teacher-forced figures feed the variant the reference's words; here it has to live with its own. What bounds it: decoding,
shared by a batch where the engine has batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import ArtifactError
from pipeline.core.records import Json as Row
from pipeline.core.records import PromptRow
from pipeline.engines import Sampling
from pipeline.evalset import load_prompts

BATCH = 16  # prompts at a time, padded on the left; the reference runs a second time in batches half as large
GREEDY = Sampling(temperature=0.0)


def asked(reference: Path, prompts: list[PromptRow]) -> list[Row]:
    """{id, domain, prompt, ids} of the prompts whose continuations the reference's store holds: the same ones, in its order."""
    known = {row["id"]: row for row in prompts}
    windows = [w for w in artifacts.read_jsonl(reference / "windows.jsonl") if w["set"] == "trajectory"]
    lost = [w["document"] for w in windows if w["document"] not in known]
    if lost:
        raise ArtifactError(f"{reference} continues prompt {lost[0]!r}, which is not in the prompts' file; run `dvc repro`")
    rows = [(known[w["document"]], w["token_ids"][: w["first"]]) for w in windows]
    return [{"id": row["id"], "domain": row["domain"], "prompt": _text(row), "ids": ids} for row, ids in rows]


def _text(row: PromptRow) -> str:
    """What a person wrote of a prompt: a chat template's own words would pass for the prompt's script."""
    return str(row["prompt"]) if "prompt" in row else "\n".join(m["content"] for m in row["messages"])


def replies(engine: Any, prompts: list[list[int]], most: int, batch: int) -> list[list[int]]:
    """Greedy replies of at most `most` tokens, an end token included: in batches where the engine has them, else one at a time."""
    found: list[list[int]] = []
    with cli.progress(len(prompts), "replies", "prompt") as bar:
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


def write(variant: str, engine: Any | None, settings: params.Params, meta: Row) -> Row:
    """Let the variant's engine answer in its own words and write what it said; without an engine no rows, and meta says why.

    meta: variant, model, status, reason, reference, versions. Returns what was written beside the rows.
    """
    setup, path = settings.diverge.trajectories, artifacts.generations(variant)
    rows: list[Row] = []
    if engine is not None:
        prompts = asked(artifacts.REFERENCE, load_prompts(Path(setup.prompts)))
        meta = dict(meta)
        with artifacts.recording(meta):
            rows = generate(engine, prompts, setup.tokens, variant == settings.reference)
    meta = meta | {"tokens": setup.tokens, "batch": BATCH if rows and hasattr(engine, "sample") else 1}
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta)
    return meta | {"rows": len(rows)}
