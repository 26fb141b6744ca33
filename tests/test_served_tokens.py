"""A server's likeliest tokens bound its divergence from below, whatever it leaves out or rounds: they can fail a variant and never
pass one."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_house import write_manifest
from scipy.special import log_softmax, rel_entr
from store_house import DOCUMENTS, stored

from pipeline import engines, serve
from pipeline.core import artifacts
from pipeline.core.errors import ParamsError
from pipeline.core.params import Compare, Rule
from pipeline.divergence.distributions import compare_logits
from pipeline.divergence.lower_bound import UNDERFLOW, kld_lower_bound, rounding
from pipeline.divergence.store import Store
from pipeline.evalset.windows import corpus_windows
from pipeline.gating.rules import bound_of
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import LOWER_BOUNDS, SERVED_TOKENS
from pipeline.metrics.served_tokens import add_served, compared
from pipeline.preflight import servers
from tests import serving_server
from tests.serving_server import Body, Handler, Server, plain
from tests.test_serve import HERE, Change, judged, project, report, rules, set_params

__all__ = ["project"]
AGREES, BOUND = {"metric": "served_top1_agreement", "margin": "30 pp"}, {"metric": "served_kld_lower_bound", "margin": "0.02 nats"}
SCORING: Change = lambda d: d["tiers"][d["tier"]]["serving"].update(score="all", concurrency=[1], rounds=1)  # noqa: E731
Logits = np.ndarray[Any, np.dtype[np.float32]]


@pytest.mark.parametrize("decimals", [0, 1, 2, 3, 6, None])
@pytest.mark.parametrize("k", [0, 1, 5, 63, 64])
def test_the_bound_lies_below_the_full_divergence_in_every_row(k: int, decimals: int | None) -> None:
    rng = np.random.default_rng([k, decimals or 9])
    ref = rng.normal(0, rng.choice([0.3, 2, 8], (400, 1)), (400, 64)).astype(np.float32)
    var = (ref + rng.normal(0, rng.choice([0, 1e-3, 0.1, 2], (400, 1)), ref.shape)).astype(np.float32)
    full = compare_logits(ref, var, np.zeros(400, int)).kld
    logq = log_softmax(var.astype(float), axis=1)
    if decimals is not None:
        logq = np.round(logq, decimals)
    kept = np.argsort(-logq, axis=1)[:, :k]
    p, q = (np.take_along_axis(x, kept, 1) for x in (np.exp(log_softmax(ref.astype(float), axis=1)), logq))
    bound = kld_lower_bound(p, q, rounding(q.ravel().tolist()))
    assert (bound <= full + 1e-12).all() and (bound >= 0).all()
    assert k < 63 or decimals in (0, 1, 2) or bound.mean() > 0.95 * full.mean(), "and near it"


def test_without_rounding_it_is_the_divergence_of_the_lumped_cells() -> None:
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.2 * math.log(0.2 / 0.15) + 0.3 * math.log(0.3 / 0.6)
    bound = kld_lower_bound(np.array([[0.5, 0.2]]), np.log([[0.25, 0.15]]), 0.0)
    assert bound == pytest.approx(by_hand, rel=1e-9) and kld_lower_bound(np.zeros((1, 0)), np.zeros((1, 0)), 0.0) == 0


@pytest.mark.parametrize("p, q", [(0.5, 0.25), (0.5, 0.495), (0.9, 0.99), (1.0, 0.6), (0.0, 0.3)])
def test_rounding_counts_as_the_nearest_distribution_that_it_allows(p: float, q: float) -> None:
    nearest = np.clip(p, q * math.exp(-0.05), min(1.0, q * math.exp(0.05)))  # with two cells there is no other choice
    expected = rel_entr([p, 1 - p], [nearest, 1 - nearest]).sum()
    assert kld_lower_bound(np.array([[p]]), np.log([[q]]), 0.05)[0] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_how_far_values_are_rounded_is_seen_and_an_underflow_is_not_taken_for_zero() -> None:
    assert [rounding(v) for v in ([-1.0, -3.0], [-1.5, -2.0], [-1.25, -0.5], [-1.2512])] == [0.5, 0.05, 0.005, 1e-3]
    assert kld_lower_bound(np.array([[1e-3]]), np.array([[-3.4e38]]), 1e-3) <= 1e-3 * (math.log(1e-3) - UNDERFLOW)


@pytest.fixture(scope="module")
def home(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[Logits], Path]:
    """A store of 12 documents' openings, and the reference's logits of their tokens."""
    engine, folder = engines.load("hf", tiny, threads=1), tmp_path_factory.mktemp("store")
    texts: Any = [{**DOCUMENTS[0], "id": f"d{k}", "text": f"{k} {DOCUMENTS[0]['text'][:60]}"} for k in range(12)]
    windows = corpus_windows(texts, engine.tokenizer, 12)
    windows = [w for w in windows if w.window.endswith("#0")]
    store = stored(engine, windows, folder / "s")
    return store, [np.concatenate([x for _, x in store.logit_blocks(k)]) for k in range(len(windows))], tiny


def other(logits: Logits, by: float) -> Logits:
    """Logits of another model: each moved by at most `by`."""
    return (logits + by * np.sin(np.arange(logits.shape[1]) * 7.3)).astype(np.float32)


def scored(store: Store, logits: list[Logits], k: int = 5) -> list[Any]:
    rows = []
    for w, values in zip(store.windows, logits):
        logq = log_softmax(values.astype(float), axis=1)
        tops = [{str(i): float(v[i]) for i in np.argsort(-v)[:k]} for v in logq]
        logps = [float(v[i]) for v, i in zip(logq, w.token_ids[w.first :])]
        rows.append({"ok": True, "document": w.document, "window": w.window, "first": w.first, "token_ids": list(w.token_ids),
                     "logps": logps, "top": tops})  # fmt: skip
    return rows


def metrics_of(rows: list[Any], store: Store) -> dict[str, Any]:
    b = Builder(Compare(resamples=200), seed=1)
    add_served(b, rows, store)
    return dict(b.metrics)


def test_windows_are_bounded_row_by_row_and_their_means_are_metrics(home: Any) -> None:
    store, logits, _ = home
    served = [other(x, 1.0) for x in logits]
    rows = scored(store, served)
    rows[0]["top"][0]["99999"] = -9.0  # padding of a vocabulary, which the reference does not have
    full = [compare_logits(a, b, np.zeros(len(a), int)) for a, b in zip(logits, served)]
    bounds, same = zip(*(compared(row, store, k) for k, row in enumerate(rows)))
    assert all((b <= f.kld + 1e-9).all() for b, f in zip(bounds, full))
    assert [s for part in same for s in part] == [a == b for f in full for a, b in zip(f.top1_ref, f.top1)]
    found = metrics_of(rows, store)
    assert found["served_kld_lower_bound"]["value"] == pytest.approx(np.concatenate(bounds).mean())
    assert found["served_top1_agreement"]["value"] == np.mean([s for part in same for s in part])
    assert all(m["n"] == sum(map(len, same)) and m["clusters"] == 12 and not m["warnings"] for m in found.values())


def test_what_does_not_come_is_said_and_never_agrees(home: Any) -> None:
    store, logits, _ = home
    rows = scored(store, logits)
    rows[0]["ok"], rows[0]["logps"], rows[0]["top"], rows[1]["window"] = False, None, None, "of another text"
    rows[2]["logps"][3], rows[2]["top"][3] = None, {}
    found = metrics_of(rows, store)
    n = sum(len(row["logps"]) for row in rows[2:])
    assert [found[name]["n"] for name in SERVED_TOKENS] == [n, n - 1] and found["served_top1_agreement"]["value"] == 1
    words = ("1 of 12 windows were not", "1 of 11 scored windows are not in", f"1 of {n} tokens")
    assert all(warning.startswith(w) for warning, w in zip(found["served_top1_agreement"]["warnings"][-3:], words))
    nothing = metrics_of(rows[:1], store)
    assert all(m["value"] is None and m["n"] == 0 and m["warnings"] for m in nothing.values())


def test_rules_that_a_lower_bound_cannot_serve_are_named_before_any_work() -> None:
    settings = set_params(HERE, rules(BOUND, AGREES), SCORING)
    (line,) = servers.inconclusive(settings)
    assert line.startswith("served_kld_lower_bound will be INCONCLUSIVE or FAIL")
    for name in SERVED_TOKENS:
        servers.check_metric(name, settings)
        with pytest.raises(ParamsError, match="add `score: all`"):
            servers.check_metric(name, set_params(HERE, rules(BOUND)))
    with pytest.raises(ParamsError, match="bounds no change"):
        bound_of(Rule(metric=LOWER_BOUNDS[0], margin="0.02 nats", against="baseline"))


def model(after: dict[tuple[int, ...], Logits], forces: bool) -> Callable[[Handler, Body], None]:
    """A server of a model with these logits after each prefix. forces: obey `logit_bias`, as llama.cpp's does."""

    def play(h: Handler, body: Body) -> None:
        if "logprobs" not in body or "echo" in body or "stream" in body:
            plain(h, body) if body.get("stream") else h.json(400, {"error": "unknown field"})
            return
        unknown = np.cos(np.arange(next(iter(after.values())).size) * len(body["prompt"]))
        logq = log_softmax(after.get(tuple(body["prompt"]), unknown).astype(float))
        likeliest = np.argsort(-logq).tolist()
        own = int(next(iter(body["logit_bias"]))) if forces and "logit_bias" in body else likeliest[0]
        top = [{"id": i, "logprob": round(logq[i], 4)} for i in likeliest[: body["logprobs"]]]
        said = {"id": own, "token": "x", "logprob": logq[own], "top_logprobs": top}
        h.json(200, {"choices": [{"text": "x", "logprobs": {"content": [said]}}], "usage": {"prompt_tokens": len(body["prompt"])}})

    return play


@pytest.mark.parametrize("forces", [True, False])
@pytest.mark.parametrize("by, verdicts", [(0.0, ("PASS", "INCONCLUSIVE", "INCONCLUSIVE")), (3.0, ("FAIL", "FAIL", "FAIL"))])
def test_other_weights_behind_the_right_name_fail(
    server: Server, home: Any, monkeypatch: pytest.MonkeyPatch, by: float, verdicts: tuple[str, ...], forces: bool
) -> None:
    store, logits, tiny = home
    shutil.copytree(store.folder, artifacts.REFERENCE)
    folder = artifacts.model_dir("q8")
    shutil.copy(tiny / "tokenizer.json", folder)
    write_manifest(folder, digest="q8-1")
    served = [other(x, by) for x in logits]
    after = {w.token_ids[:j]: x[j - w.first] for w, x in zip(store.windows, served) for j in range(w.first, len(w.token_ids))}
    monkeypatch.setattr(serving_server, "plain", model(after, forces))
    settings = set_params({"q8": {"url": server.url}}, rules(BOUND, AGREES), SCORING)
    serve.main("q8")
    found = judged(settings)
    assert tuple(found[name][0] for name in ("served_top1_agreement", "served_kld_lower_bound", "")) == verdicts, (
        found,
        report()["tokens"],
    )
    way = report()["probe"]["prompt_logprobs"]["reason"]
    assert ("logit_bias" if forces else "the next token's likeliest") in way and "20 likeliest" in way
    assert report()["reference"] == "s" and len(json.loads(artifacts.serving("q8").with_suffix(".scores.json").read_text())) == 12
