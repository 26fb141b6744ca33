"""locate: where a variant broke, from its rows alone -> artifacts/broke/<variant>.json

A verdict in words (uniform shift, isolated tokens, or one kind of text), and the worst tokens, items and replies with their
texts. No model is loaded. The lists are some hundred kB a variant: they stay out of git, the report shows their heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import artifacts, cli, free_figures, params, spread, worst
from pipeline.errors import ArtifactError
from pipeline.figures import pair
from pipeline.metrics import position_parts

Row = dict[str, Any]
READ = {"diverge": artifacts.tokens, "evaluate": artifacts.answers, "generate": artifacts.generations}


def locate(variant: str, settings: params.Params) -> Row:
    """Everything that reports/ and MLflow show of where a variant broke; a list is null where its rows are missing, with why."""
    ref = settings.reference
    metas = {stage: [artifacts.read_json(artifacts.meta_of(make(v))) for v in (variant, ref)] for stage, make in READ.items()}
    _fresh(metas)
    missing = {stage: _fault(own) for stage, own in metas.items()}
    words = worst.Words(artifacts.BASE)
    found: Row = {"variant": variant, "reference": ref, "missing": {k: v for k, v in missing.items() if v}, "notes": []}
    if words.missing:
        found["notes"].append(words.missing)
    found |= _tokens(variant, settings, words) if not missing["diverge"] else {"spread": None, "worst_tokens": None}
    found |= _items(variant, ref) if not missing["evaluate"] else dict.fromkeys(("worst_items", "flips_to_wrong", "flips_to_right"))
    found["replies"] = None if missing["generate"] else worst.worst_replies(_paired(artifacts.generations, variant, ref))
    found["words"] = found["spread"]["words"] if found["spread"] else f"not known: diverge: {missing['diverge']}"
    return found


def _fault(metas: list[Row]) -> str | None:
    """Why a stage's rows of the variant and the reference cannot be used, or None."""
    return next((f"{m['variant']} is {m['status']}: {m['reason']}" for m in metas if m["status"] != "ok"), None)


def _fresh(metas: dict[str, list[Row]]) -> None:
    """Raise if rows were made with another build of a model, or against another reference, than is here now."""
    store = artifacts.read_manifest(artifacts.REFERENCE)["digest"]
    for stage, own in metas.items():
        for meta in own:
            build = artifacts.read_manifest(artifacts.model_dir(meta["variant"]))["digest"]
            if meta["model"] != build or (stage != "evaluate" and meta.get("reference", store) != store):
                raise ArtifactError(f"{READ[stage](meta['variant'])} was made with another build of a model; run `dvc repro`")


def _tokens(variant: str, settings: params.Params, words: worst.Words) -> Row:
    columns = artifacts.read_columns(artifacts.tokens(variant))
    windows = artifacts.read_jsonl(artifacts.REFERENCE / "windows.jsonl")
    judged = spread.judge(
        columns["kld"], columns["document"],
        {
            "domain": columns["set"], "token class": columns["token_class"],
            "position": position_parts(columns["position"]),
        },
        confidence=settings.compare.confidence, resamples=settings.compare.resamples,
        rng=np.random.default_rng([settings.seed, *b"spread"]),
    )  # fmt: skip
    return {"spread": judged, "worst_tokens": worst.worst_tokens(columns, windows, words)}


def _items(variant: str, ref: str) -> Row:
    rows = [artifacts.read_jsonl(artifacts.answers(v)) for v in (variant, ref)]
    pairs, questions = worst.scored_pairs(pair(*rows)), worst.Questions()
    return {
        "worst_items": worst.worst_items(pairs, questions),
        "flips_to_wrong": worst.flips(pairs, questions, to_right=False),
        "flips_to_right": worst.flips(pairs, questions, to_right=True),
    }


def _paired(make: Any, variant: str, ref: str) -> list[tuple[Row, Row]]:
    return free_figures.pair(artifacts.read_jsonl(make(variant)), artifacts.read_jsonl(make(ref)))


def main(variant: str) -> None:
    """Say where VARIANT broke."""
    watch = artifacts.Stopwatch("locate", variant)
    settings = params.load()
    settings.variant(variant)
    found = locate(variant, settings)
    artifacts.write_json(artifacts.broke(variant), found)
    cli.say("locate", f"{variant}: {found['words']}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
