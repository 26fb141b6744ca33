"""Settings, texts and intervals that `sensitivity`, `search` and `certify` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.core import artifacts
from pipeline.core.errors import DataError, ParamsError, QuantgateError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import Proposal, TextRow, WholeEstimate
from pipeline.evalset import choose, load_texts
from pipeline.evalset.calibration import measured_rows, refuse_overlap
from pipeline.gating.rules import bound_of
from pipeline.layers import mixes
from pipeline.metrics.builder import whole
from pipeline.model.headers import count_weights
from pipeline.stats.intervals import cluster_bootstrap


def setup_of(settings: Params) -> Smallest:
    if settings.smallest is None:
        raise ParamsError("params.yaml has no section `smallest`; docs/smallest.md says what it holds")
    mixes.check(settings.smallest)
    return settings.smallest


def digest_of(order: Sequence[str], proposals: Sequence[Proposal]) -> str:
    """Identity of a frozen list: its order, and each candidate's options."""
    options = {p["name"]: p["options"] for p in proposals}
    return artifacts.digest([order, [options.get(name) for name in order]])


def faults(settings: Params) -> Iterator[str]:
    """Reasons why `make smallest` cannot find anything, by the files' headers and earlier results."""
    if (setup := settings.smallest) is None:
        return
    try:
        mixes.check(setup)
        texts = load_texts(Path(setup.texts))
        measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
        refuse_overlap(texts, [*measured, *load_texts(Path(settings.calibration.set))], f"smallest.texts: {setup.texts}")
    except QuantgateError as e:
        yield str(e)
        return
    if not (artifacts.BASE / "config.json").exists() or (least := mixes.least_bytes(setup, artifacts.BASE)) is None:
        return
    if not (whole_bytes := 2 * count_weights(artifacts.BASE)):  # its weights were removed: `download` brings them
        return
    if setup.budget_mb is not None and setup.budget_mb * 1e6 < least:
        yield f"smallest.budget_mb: {setup.budget_mb:g} is below the smallest there is, all at the lowest: {least / 1e6:.1f} MB"
    rules = [r for r in settings.gate.rules if r.metric == "size_ratio" and r.required and r.against == "reference"]
    for bound in map(bound_of, rules):
        if least / whole_bytes > bound.threshold:
            yield f"smallest: nothing can pass size_ratio {bound.text}: the lowest level has {least / whole_bytes:.3f}"


def texts_of(setup: Smallest, folder: Path, seed: int) -> tuple[list[TextRow], list[list[int]]]:
    """The documents to choose by, and the first tokens of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=artifacts.trusts_code(folder))
    rows = choose(load_texts(Path(setup.texts)), setup.documents, seed)
    ids = [tokenizer(row["text"], add_special_tokens=False).input_ids[: setup.tokens] for row in rows]
    if short := [row["id"] for row, tokens in zip(rows, ids) if len(tokens) < setup.tokens]:
        raise DataError(f"smallest.tokens: {short[0]} has fewer than {setup.tokens} tokens; lower it")
    return rows, ids


def estimate(rows: Sequence[float], settings: Params, name: str) -> WholeEstimate:
    """Mean over documents, with its interval; whole documents are the independent units."""
    rng = np.random.default_rng([settings.seed, *name.encode()])
    asked, n = settings.compare, len(rows)
    by = cluster_bootstrap(rows, np.ones(n), np.arange(n), confidence=asked.confidence, resamples=asked.resamples, rng=rng)
    return whole(by)
