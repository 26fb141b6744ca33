"""A server's log-probabilities against the reference's store -> a lower bound of its divergence, and agreement of the likeliest.

A server gives only the likeliest tokens, not the whole vocabulary, so the divergence itself stays unknown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from pipeline.core.records import ScoreRow
from pipeline.divergence.lower_bound import kld_lower_bound, rounding
from pipeline.divergence.store import Store
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import SERVED_TOKENS


def compared(row: ScoreRow, store: Store, index: int) -> tuple[NDArray[np.float64], list[bool | None]]:
    """For each scored token of a window: the lower bound of KL(reference || server) in nats; whether the likeliest is the same,
    None where the server names none."""
    assert row["logps"] is not None and row["top"] is not None  # every scored window has both
    tops, vocab, first = row["top"], store.manifest["vocab"], row["first"]
    given = [{} if v is None else {str(i): v} for i, v in zip(row["token_ids"][first:], row["logps"])]
    places = [{int(i): v for i, v in (top | true).items() if int(i) < vocab} for top, true in zip(tops, given)]
    off, bounds, same = rounding([v for place in places for v in place.values()]), list[NDArray[np.float64]](), list[bool | None]()
    for at, logits in store.logit_blocks(index):
        here = slice(at + 1 - first, at + 1 - first + len(logits))
        ids, logq = np.zeros((2, len(logits), max(map(len, places[here]))))
        logq[:] = -np.inf
        for k, place in enumerate(places[here]):
            ids[k, : len(place)], logq[k, : len(place)] = list(place), list(place.values())
        logp = np.take_along_axis(logits, ids.astype(int), 1) - logsumexp(logits.astype(float), axis=1, keepdims=True)
        bounds.append(kld_lower_bound(np.where(logq > -np.inf, np.exp(logp), 0.0), logq, off))
        likeliest = [min(place, key=lambda i: (-place[i], i)) if top else None for place, top in zip(places[here], tops[here])]
        same += [None if own is None else own == best for own, best in zip(likeliest, logits.argmax(1).tolist())]
    return np.concatenate(bounds), same


def add_served(b: Builder, rows: Sequence[ScoreRow], store: Store) -> None:
    """Add SERVED_TOKENS over the scored windows that the store holds; documents are resampled as in `compare`."""
    held = {(w.window, w.token_ids): k for k, w in enumerate(store.windows)}
    bounds, same, documents = list[float](), list[bool | None](), list[str]()
    found = [(row, held.get((row["window"], tuple(row["token_ids"])))) for row in rows if row["ok"]]
    for row, index in found:
        if index is not None:
            at_least, agree = compared(row, store, index)
            bounds, same, documents = bounds + at_least.tolist(), same + agree, documents + [row["document"]] * len(agree)
    known = np.array([agree is not None for agree in same], bool)
    counts = {
        f"of {len(rows)} windows were not scored and are left out": len(rows) - len(found),
        f"of {len(found)} scored windows are not in the reference's store": sum(index is None for _, index in found),
        f"of {len(same)} tokens come without the likeliest: their bound is lower, and agreement leaves them out": sum(~known),
    }  # fmt: skip
    notes = [f"{n} {words}" for words, n in counts.items() if n]
    for name, values, of in zip(SERVED_TOKENS, (bounds, same), (np.ones(len(same), bool), known)):
        if of.any():
            b.mean(name, np.array(values)[of].astype(float), np.ones(of.sum()), np.array(documents)[of])
            b.metrics[name]["warnings"] += notes
        else:
            b.bare(name, None, 0, "none", *notes)
