"""A variant's failures, from its rows -> artifacts/broke/<variant>.json

How divergence is spread (uniform shift, isolated tokens, or one kind of text), and the worst tokens, items and replies with their
texts. The lists are some hundred kB a variant: they stay out of git, the report shows their heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.core import artifacts, params
from pipeline.metrics import divergence_shape, generation, worst_cases
from pipeline.metrics.answers import pair
from pipeline.metrics.definitions import position_parts

Row = dict[str, Any]
READ = {"diverge": artifacts.tokens, "evaluate": artifacts.answers, "replies": artifacts.generations}


def locate(variant: str, settings: params.Params) -> Row:
    """Everything that reports/ and MLflow show of a variant's failures; a list is null where its rows are missing, with why."""
    names = (variant, settings.reference)
    missing = {}
    for stage, make in READ.items():
        metas = [artifacts.read_json(artifacts.meta_of(make(name))) for name in names]
        if fault := next((f"{m['variant']} is {m['status']}: {m['reason']}" for m in metas if m["status"] != "ok"), None):
            missing[stage] = fault
    words = worst_cases.Words(artifacts.BASE)
    lists: Row = dict.fromkeys(("spread", "worst_tokens", "worst_items", "flips_to_wrong", "flips_to_right", "replies"))
    if "diverge" not in missing:
        lists |= _tokens(variant, settings, words)
    if "evaluate" not in missing:
        pairs = worst_cases.scored_pairs(pair(*(artifacts.read_jsonl(artifacts.answers(name)) for name in names)))
        questions = worst_cases.Questions()
        lists["worst_items"] = worst_cases.worst_items(pairs, questions)
        lists["flips_to_wrong"] = worst_cases.flips(pairs, questions, to_right=False)
        lists["flips_to_right"] = worst_cases.flips(pairs, questions, to_right=True)
    if "replies" not in missing:
        replies = (artifacts.read_jsonl(artifacts.generations(name)) for name in names)
        lists["replies"] = worst_cases.worst_replies(generation.pair(*replies))
    spread = lists["spread"]
    return {
        "variant": variant, "reference": settings.reference, "missing": missing, "notes": [words.missing] if words.missing else [],
        **lists, "words": spread["words"] if spread else f"not known: diverge: {missing['diverge']}",
    }  # fmt: skip


def _tokens(variant: str, settings: params.Params, words: worst_cases.Words) -> Row:
    columns = artifacts.read_columns(artifacts.tokens(variant))
    windows = artifacts.read_jsonl(artifacts.REFERENCE / "windows.jsonl")
    judged = divergence_shape.judge(
        columns["kld"], columns["document"],
        {"domain": columns["set"], "token class": columns["token_class"], "position": position_parts(columns["position"])},
        confidence=settings.compare.confidence, resamples=settings.compare.resamples,
        rng=np.random.default_rng([settings.seed, *b"spread"]),
    )  # fmt: skip
    return {"spread": judged, "worst_tokens": worst_cases.worst_tokens(columns, windows, words)}


def write(variant: str, settings: params.Params) -> Row:
    """Write artifacts/broke/<variant>.json; returns what it holds."""
    failures = locate(variant, settings)
    artifacts.write_json(artifacts.failures(variant), failures)
    return failures
