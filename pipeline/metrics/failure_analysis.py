"""Where a variant broke, from its rows alone -> artifacts/broke/<variant>.json

A verdict in words (uniform shift, isolated tokens, or one kind of text), and the worst tokens, items and replies with their
texts. No model is loaded; that the rows are of these builds, `compare` has seen before. The lists are some hundred kB a
variant: they stay out of git, the report shows their heads.
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
    """Everything that reports/ and MLflow show of where a variant broke; a list is null where its rows are missing, with why."""
    ref = settings.reference
    metas = {stage: [artifacts.read_json(artifacts.meta_of(make(v))) for v in (variant, ref)] for stage, make in READ.items()}
    missing = {stage: _fault(own) for stage, own in metas.items()}
    words = worst_cases.Words(artifacts.BASE)
    found: Row = {"variant": variant, "reference": ref, "missing": {k: v for k, v in missing.items() if v}, "notes": []}
    if words.missing:
        found["notes"].append(words.missing)
    found |= _tokens(variant, settings, words) if not missing["diverge"] else {"spread": None, "worst_tokens": None}
    found |= _items(variant, ref) if not missing["evaluate"] else dict.fromkeys(("worst_items", "flips_to_wrong", "flips_to_right"))
    found["replies"] = None if missing["replies"] else worst_cases.worst_replies(_paired(artifacts.generations, variant, ref))
    found["words"] = found["spread"]["words"] if found["spread"] else f"not known: diverge: {missing['diverge']}"
    return found


def _fault(metas: list[Row]) -> str | None:
    """Why a stage's rows of the variant and the reference cannot be used, or None."""
    return next((f"{m['variant']} is {m['status']}: {m['reason']}" for m in metas if m["status"] != "ok"), None)


def _tokens(variant: str, settings: params.Params, words: worst_cases.Words) -> Row:
    columns = artifacts.read_columns(artifacts.tokens(variant))
    windows = artifacts.read_jsonl(artifacts.REFERENCE / "windows.jsonl")
    judged = divergence_shape.judge(
        columns["kld"], columns["document"],
        {
            "domain": columns["set"], "token class": columns["token_class"],
            "position": position_parts(columns["position"]),
        },
        confidence=settings.compare.confidence, resamples=settings.compare.resamples,
        rng=np.random.default_rng([settings.seed, *b"spread"]),
    )  # fmt: skip
    return {"spread": judged, "worst_tokens": worst_cases.worst_tokens(columns, windows, words)}


def _items(variant: str, ref: str) -> Row:
    rows = [artifacts.read_jsonl(artifacts.answers(v)) for v in (variant, ref)]
    pairs, questions = worst_cases.scored_pairs(pair(*rows)), worst_cases.Questions()
    return {
        "worst_items": worst_cases.worst_items(pairs, questions),
        "flips_to_wrong": worst_cases.flips(pairs, questions, to_right=False),
        "flips_to_right": worst_cases.flips(pairs, questions, to_right=True),
    }


def _paired(make: Any, variant: str, ref: str) -> list[tuple[Row, Row]]:
    return generation.pair(artifacts.read_jsonl(make(variant)), artifacts.read_jsonl(make(ref)))


def write(variant: str, settings: params.Params) -> Row:
    """Say where the variant broke, and write it."""
    found = locate(variant, settings)
    artifacts.write_json(artifacts.failures(variant), found)
    return found
