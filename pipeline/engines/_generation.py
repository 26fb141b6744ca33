"""A variant's own greedy replies to the trajectory prompts, part of `diverge` -> artifacts/generations/<variant>.jsonl

Teacher-forced metrics feed the variant the reference's words; here it continues its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.records import DivergeMeta, PromptRow, RepliesMeta, ReplyRow, WindowRow
from pipeline.engines import Sampling
from pipeline.engines._speculation import without_draft
from pipeline.evalset import load_prompts

BATCH = 16  # prompts at a time, padded on the left; the reference runs a second time in batches half as large
GREEDY = Sampling(temperature=0.0)


class Prompt(NamedTuple):
    """text: without a chat template's words, which would count for the prompt's script; ids: tokens."""

    id: str
    domain: str
    text: str
    ids: list[int]


def asked(reference: Path, rows: list[PromptRow]) -> list[Prompt]:
    """The prompts whose continuations the reference's store holds, in its order."""
    by_id, prompts = {row["id"]: row for row in rows}, list[Prompt]()
    for w in records.read_rows(reference / "windows.jsonl", WindowRow):
        if w["set"] != "trajectory":
            continue
        if (name := w["document"]) not in by_id:
            raise ArtifactError(f"{reference} continues prompt {name!r}, which is not in the prompts' file; run `dvc repro`")
        row = by_id[name]
        text = row["prompt"] if "prompt" in row else "\n".join(m["content"] for m in row["messages"])
        prompts.append(Prompt(name, row["domain"], text, w["token_ids"][: w["first"]]))
    return prompts


def replies(engine: Any, prompts: Sequence[list[int]], most: int, batch: int) -> list[list[int]]:
    """Greedy replies of at most `most` tokens, end token included, in batches if the engine has them."""
    answers: list[list[int]] = []
    with cli.progress(len(prompts), "replies", "prompt") as bar:
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            if side_by_side(engine):
                answers += engine.sample(part, most, GREEDY)
            else:
                answers += [[token for token, _ in engine.stream(ids, most, GREEDY)] for ids in part]
            bar.update(len(part))
    return answers


def side_by_side(engine: Any) -> bool:
    """Whether an engine answers in batches; a draft guesses for one request at a time."""
    return hasattr(engine, "sample") and not getattr(engine, "speculate", None)


def generate(engine: Any, prompts: list[Prompt], most: int, is_reference: bool) -> list[ReplyRow]:
    """One row per prompt. The reference's also hold `again`, its reply at another batch size: a difference there cannot be blamed
    on a variant."""
    ids = [prompt.ids for prompt in prompts]
    answers = replies(engine, ids, most, BATCH)
    other = min(BATCH, len(ids)) // 2  # of a single prompt there is no other batch
    again = replies(engine, ids, most, other) if is_reference and other else []
    rows: list[ReplyRow] = []
    for k, (prompt, reply) in enumerate(zip(prompts, answers)):
        text = engine.tokenizer.decode(reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        rows.append({
            "id": prompt.id, "domain": prompt.domain, "prompt": prompt.text, "prompt_tokens": len(prompt.ids),
            "token_ids": reply, "text": text, "cut": len(reply) >= most and reply[-1] not in engine.end_ids,
        })  # fmt: skip
        if again:
            rows[-1]["again"] = again[k]
        if speculate := getattr(engine, "speculate", None):
            rows[-1]["undrafted"] = without_draft(engine, prompt.ids, speculate["tokens"], most)
    return rows


def write(variant: str, engine: Any | None, settings: params.Params, about: DivergeMeta) -> str:
    """Write the replies of a variant's engine; without an engine there are no rows, and `about` says why. Returns a summary."""
    setup = settings.diverge.trajectories
    meta: RepliesMeta = {**about, "tokens": setup.tokens, "batch": 1}
    rows: list[ReplyRow]
    with artifacts.recording(meta, artifacts.generations(variant)) as rows:
        if engine is not None:
            prompts = asked(artifacts.REFERENCE, load_prompts(Path(setup.prompts)))
            rows += generate(engine, prompts, setup.tokens, variant == settings.reference)
            meta["batch"] = BATCH if rows and side_by_side(engine) else 1
    return meta["reason"] or f"{len(rows)} replies of its own"
