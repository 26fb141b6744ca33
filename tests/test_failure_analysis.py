"""A variant's failures: lists with texts and totals that cannot break the page, and the shape in which divergence is spread."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gate_house import builder
from scipy.stats import norm
from tokenizers import Tokenizer

from pipeline import compare
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.evalset.tasks import load_task
from pipeline.metrics import failure_analysis
from pipeline.reporting import failures
from pipeline.reporting.text import render

EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "evalsets").symlink_to(ROOT / "evalsets")


def answer(k: int, is_right: bool, margin: float) -> dict[str, Any]:
    item = load_task("facts")[1][k]
    wrong = next(i for i in range(len(item["choices"])) if i != item["answer"])
    scores = [-20.0] * len(item["choices"])
    scores[item["answer"]], scores[wrong] = -5.0, -5.0 - margin
    return {
        "task": "facts", "doc_id": k, "item": item["id"], "filter": "none", "loglikelihoods": scores, "acc": float(is_right),
        "prediction": item["answer"] if is_right else wrong, "target": item["answer"],
    }  # fmt: skip


def reply(k: int, text: str, ids: list[int]) -> dict[str, Any]:
    return {"id": f"t{k}", "prompt": EVIL, "token_ids": ids, "text": text, "cut": True}


class Failures:
    """Rows of `int8`, which lost 25 of 40 items and loops in all four replies; of the reference where `same`."""

    def __init__(self, tokenizer: Any, same: bool = False) -> None:
        ids = tokenizer.encode(f"The harbour {EVIL} was closed for the third day in a row. " * 6).ids
        own = {"set": "news", "domain": "news", "first": 1}
        self.windows: Any = [own | {"window": f"n{k}#0", "document": f"n{k}", "token_ids": ids[k : k + 80]} for k in range(30)]
        tokens = [(w, p, w["token_ids"][p]) for w in self.windows for p in range(1, 80)]
        self.columns: dict[str, list[Any]] = {
            "set": ["news"] * len(tokens), "document": [w["document"] for w, *_ in tokens], "token_id": [t for *_, t in tokens],
            "window": [w["window"] for w, *_ in tokens], "position": [p for _, p, _ in tokens], "top1": [1] * len(tokens),
            "kld": [0.0 if same else 0.1 * (1 + 0.5 * math.sin(p)) for _, p, _ in tokens], "top1_ref": [t for *_, t in tokens],
            "token_class": ["words"] * len(tokens), "logp": [-1.5] * len(tokens), "logp_ref": [-1.0] * len(tokens),
        }  # fmt: skip
        if not same:
            self.columns["kld"][7], self.columns["kld"][9] = 8.0, 9.0
        right = [answer(k, True, 2.0) for k in range(40)]
        self.answers: Any = [(r if same or k >= 25 else answer(k, False, -4.0), r) for k, r in enumerate(right)]
        rained = [reply(k, "And then it rained.", list(range(24))) for k in range(4)]
        self.replies: Any = [(r if same else reply(k, f"And then {EVIL}", [1, 2, 3] * 8), r) for k, r in enumerate(rained)]
        self.words, self.tasks = failure_analysis.Words(tokenizer), {"facts": load_task("facts")}

    def lists(self) -> Any:
        b = builder()
        return failure_analysis.lists(b, self.columns, self.windows, self.answers, self.replies, self.words, self.tasks)


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return Tokenizer.from_file(str(tiny / "tokenizer.json"))


def test_the_worst_tokens_come_first_with_their_context_and_the_total(tokenizer: Any) -> None:
    tokens = Failures(tokenizer).lists()["worst_tokens"]
    assert (tokens["shown"], tokens["total"]) == (failure_analysis.SHOWN, 30 * 79)
    first, second = tokens["rows"][:2]
    assert first["kld"] == 9.0 and second["kld"] == 8.0 and first["position"] == 10
    assert (first["context"] + first["token"]).startswith("The harb") and first["token"] == first["reference_says"]
    assert first["p_reference"] == pytest.approx(math.exp(-1)) and first["p_variant"] == pytest.approx(math.exp(-1.5))


def test_what_is_not_finite_stands_before_everything_else_and_other_tokens_than_the_windows_are_refused(tokenizer: Any) -> None:
    rows = Failures(tokenizer)
    rows.columns["kld"][20] = math.nan
    worst = failure_analysis.worst_tokens(rows.columns, rows.windows, rows.words)["rows"][0]
    assert worst["not_finite"] and worst["kld"] is None and worst["position"] == 21
    json.dumps(artifacts.jsonable(rows.lists()), allow_nan=False)
    rows.columns["token_id"][20] += 1
    with pytest.raises(ArtifactError, match="token 21 of window n0#0 is not the reference's"):
        rows.lists()


def test_flips_are_listed_with_prompt_and_both_answers_and_say_how_many_there_are(tokenizer: Any) -> None:
    lists = Failures(tokenizer).lists()
    wrong, right = lists["flips_to_wrong"], lists["flips_to_right"]
    assert (wrong["shown"], wrong["total"], wrong["of"]) == (20, 25, 40) and wrong["by_task"] == {"facts": 25}
    assert (right["shown"], right["total"]) == (0, 0)
    item, row = load_task("facts")[1][0], wrong["rows"][0]
    assert row["prompt"] == item["context"] and row["right"] == row["reference_answers"] == item["choices"][item["answer"]]
    assert row["variant_answers"] in item["choices"] and row["variant_answers"] != row["right"]


def test_worst_items_lost_most_of_their_margin(tokenizer: Any) -> None:
    listed = Failures(tokenizer).lists()["worst_items"]
    assert listed["total"] == 40 and [r["fall"] for r in listed["rows"]] == pytest.approx([6.0] * 20)
    assert [listed["rows"][0][f"margin_{who}"] for who in ("reference", "variant")] == pytest.approx([2.0, -4.0])


def test_replies_that_loop_are_shown_as_such(tokenizer: Any) -> None:
    replies = Failures(tokenizer).lists()["replies"]
    assert replies["total"] == replies["of"] == 4 and replies["rows"][0]["faults"] == ["loop"]
    assert replies["rows"][0]["reference_faults"] == []


def test_the_reference_differs_from_itself_nowhere(tokenizer: Any) -> None:
    lists = Failures(tokenizer, same=True).lists()
    assert lists["spread"]["kind"] == "none" and lists["flips_to_wrong"]["total"] == lists["replies"]["total"] == 0


def test_an_item_that_is_another_one_now_is_refused(tokenizer: Any) -> None:
    rows = Failures(tokenizer)
    rows.answers = [(r | {"item": "older"}, s) for r, s in rows.answers]
    with pytest.raises(ArtifactError, match="was 'older'"):
        rows.lists()


def test_rows_that_are_missing_leave_a_reason_and_without_a_tokenizer_ids_stand_for_words(tokenizer: Any) -> None:
    rows, ok = Failures(tokenizer), {"status": "ok", "reason": None}

    def measured(name: str, tokens: dict[str, Any]) -> compare.Measured:
        metas: list[Any] = [ok | {"variant": name} | more for more in ({}, tokens, {}, {})]
        return compare.Measured(name, {}, *metas)  # type: ignore[typeddict-item]

    int8 = measured("int8", {"status": "unsupported", "reason": "no such kernel"})
    b, read = builder(), compare.Rows(None, rows.answers, rows.replies)
    found = compare._failures(b, int8, measured("bf16", {}), read)
    assert found["spread"] is None and found["worst_tokens"] is None and found["flips_to_wrong"]["total"] == 25  # type: ignore[index]
    assert found["words"] == "not known: diverge: int8 is unsupported: no such kernel"
    assert found["notes"] == ["artifacts/base has no tokenizer.json: tokens are shown as ids"]
    rows.words = failure_analysis.Words(None)
    assert rows.lists()["worst_tokens"]["rows"][0]["token"] == f"<{rows.columns['token_id'][9]}>"


def test_capped_flips_come_from_every_task() -> None:
    def flip(k: int, task: str, is_right: bool) -> Any:
        row = {"task": task, "doc_id": k, "item": None, "acc": float(is_right), "loglikelihoods": None}
        return row | {"prediction": "x", "target": "y", "filter": "none"}

    pairs = [(flip(k, task, False), flip(k, task, True)) for task, count in (("long", 60), ("short", 3)) for k in range(count)]
    listed = failure_analysis.flips(pairs, {}, to_right=False)
    assert listed["total"] == 63 and listed["shown"] == 20 and sum(r["task"] == "short" for r in listed["rows"]) == 3
    assert "lm-eval's own" in str(listed["rows"][0]["unknown"])


def test_the_page_shows_every_list_with_its_total_and_escapes_everything(tokenizer: Any) -> None:
    lists = Failures(tokenizer).lists()
    about = {"variant": "int8", "reference": "bf16", "missing": {}, "notes": []}
    artifacts.write_json(artifacts.failures("int8"), about | lists | {"words": lists["spread"]["words"]})
    results: Any = {"bf16": {"metrics": {}, "curves": {}}, "int8": {"metrics": {}, "curves": {}}}
    context = {
        "failures": failures.of(results, "bf16"), "reference": "bf16", "visible": failures.visible,
        "clipped": failures.clipped, "fault_words": failures.FAULT_WORDS,
    }  # fmt: skip
    html, words = render("failures.html.j2", context), render("failures.md.j2", context)
    for text in ("8 of 2370 tokens", "4 of 40 items", "5 of 25 items shown, of 40 asked", "4 of 4 replies that differ"):
        assert text in html, text
    assert EVIL not in html and "&lt;script&gt;alert(1)" in html and "<script" not in html
    assert "<strong>bf16</strong>" not in html and html.count("<details") == html.count("</details>") == 6
    assert "<strong>int8</strong>: uniform shift; 25 answers became wrong, 0 right; 4 of 4 free replies differ" in html
    assert words.count("- **int8**:") == 1 and "worst 1 %" in words


def test_free_running_metrics_are_said_in_a_sentence() -> None:
    def metric(value: float | None, low: float = 0.0, high: float = 0.0) -> dict[str, Any]:
        return {"value": value, "low": low, "high": high, "n": 16}

    rates = {f"free_{k}": metric(0.0) for k in failures.FAULT_WORDS} | {"free_loop": metric(0.25)}
    m = rates | {
        "free_same": metric(0.125), "free_departure": metric(4, 2, 9), "free_garbled": metric(0.25),
        "free_garbled_delta": metric(18.75, -3, 40),
    }  # fmt: skip
    result: Any = {"metrics": m}
    said = failures.free_words(result)
    assert said is not None and "14 of 16 greedy replies leave" in said and "token 4 [2, 9]" in said
    assert "4 of 16 are garbled (a loop 4), +19 pp against the reference [-3, +40]" in said
    floor: Any = {"value": 0.75, "low": 0.5, "high": 0.9, "n": 16}
    assert "(4 of 16 of its own do at another batch size)" in str(failures.free_words(result, floor))
    result["metrics"] = {}
    assert failures.free_words(result) is None


# --- how divergence is spread: synthetic shapes -------------------------------------------------------------------

N, DOCS = 6000, 40


def judged(kld: Any, groups: dict[str, Any] | None = None, docs: Any = None) -> Any:
    documents = np.arange(len(kld)) % DOCS if docs is None else docs
    return failure_analysis.spread_of(builder(resamples=400), kld, documents, groups or {})


def lognormal(sigma: float, n: int = N) -> Any:
    """Quantiles of a lognormal in random order: its shape exactly, without sampling error."""
    values = np.exp(sigma * norm.ppf((np.arange(n) + 0.5) / n))
    return np.random.default_rng(1).permutation(values)


def clipped(share: float) -> Any:
    """Tokens alike but for a worst 1 % that carries a given share of all divergence."""
    kld = np.full(N, 0.01)
    worst = np.random.default_rng(2).permutation(N)[: N // 100]
    kld[worst] = share / (1 - share) * 0.01 * (N - len(worst)) / len(worst)
    return kld


def test_a_lognormal_spread_is_a_uniform_shift_and_its_figures_are_the_closed_forms() -> None:
    found = judged(lognormal(1.0))
    assert found["kind"] == "uniform" and found["settled"]
    assert found["worst_share"]["value"] == pytest.approx(norm.cdf(1.0 - norm.ppf(0.99)), rel=0.02)
    assert found["median_over_mean"] == pytest.approx(np.exp(-0.5), rel=0.01)
    assert "uniform shift" in found["words"]


@pytest.mark.parametrize(
    "share, kind",
    [(0.19, "uniform"), (0.21, "neither"), (0.35, "neither"), (0.49, "neither"), (0.51, "isolated"), (0.8, "isolated")],
)
def test_clipped_extremes_are_isolated_tokens_and_the_bounds_are_where_they_are_said_to_be(share: float, kind: str) -> None:
    found = judged(clipped(share))
    assert found["kind"] == kind and found["worst_share"]["value"] == pytest.approx(share)
    assert found["settled"] or share != 0.8
    names = {"uniform": "uniform shift", "isolated": "isolated tokens", "neither": "neither uniform nor isolated"}
    assert found["words"].startswith(names[kind]) and f"{100 * share:.0f} %" in found["words"]


def test_a_share_at_the_bound_is_named_but_not_called_settled() -> None:
    rng = np.random.default_rng(3)
    kld = clipped(0.52) * rng.uniform(0.2, 1.8, N)
    found = judged(kld)
    assert not found["settled"] and "not settled" in found["words"]
    assert judged(clipped(0.9))["settled"]


def test_a_long_tail_with_a_small_median_is_neither() -> None:
    half = np.where(np.random.default_rng(5).random(N) < 0.4, 0.02, 1e-5)  # two fifths moved, the others not
    found = judged(half)
    assert found["kind"] == "neither" and found["worst_share"]["value"] < failure_analysis.UNIFORM_SHARE


def test_the_verdict_does_not_depend_on_the_size_of_the_divergence() -> None:
    for make in (lognormal(1.0), clipped(0.8)):
        small, large = judged(make * 1e-6), judged(make * 10)
        assert small["kind"] == large["kind"] and small["worst_share"]["value"] == pytest.approx(large["worst_share"]["value"])


def test_too_few_tokens_say_so() -> None:
    found = judged(lognormal(1.0, 999))
    assert found["kind"] == "too few" and "999 tokens are too few" in found["words"] and found["worst_share"] is None
    assert judged(lognormal(1.0, 1000))["kind"] == "uniform"
    assert judged([])["kind"] == "too few"


def test_no_divergence_is_none_and_what_is_not_finite_comes_first() -> None:
    assert judged(np.zeros(N))["kind"] == "none"
    kld = lognormal(1.0)
    kld[[5, 6]] = np.inf, np.nan
    found = judged(kld)
    assert found["kind"] == "not finite" and "2 of 6000" in found["words"]


@pytest.mark.parametrize("times, stands_out", [(3.0, True), (1.5, False)])
def test_a_class_with_three_times_the_divergence_stands_out_one_with_half_again_does_not(times: float, stands_out: bool) -> None:
    labels = np.where(np.random.default_rng(4).random(N) < 0.1, "digits", "words")
    found = judged(lognormal(1.0) * np.where(labels == "digits", times, 1.0), {"token class": labels})
    digits = next(g for g in found["groups"] if g["group"] == "digits")
    assert digits["stands_out"] is stands_out and digits["ratio"] == pytest.approx(times, rel=0.3)
    assert ("concentrates on token class digits" if stands_out else "No token class stands out") in found["words"]


def test_a_domain_of_one_document_is_shown_and_nothing_is_claimed_of_it() -> None:
    docs = np.arange(N) % DOCS
    domain = np.where(docs == 0, "one", "many")
    found = judged(lognormal(1.0) * np.where(docs == 0, 9.0, 1.0), {"domain": domain}, docs)
    one = next(g for g in found["groups"] if g["group"] == "one")
    assert one["ratio"] > 5 and one["mean"]["low"] is None and not one["stands_out"]
    assert "nothing is claimed of 1 group " in found["words"]


def test_a_group_of_few_tokens_is_not_judged() -> None:
    labels = np.where(np.arange(N) < failure_analysis.FEW_IN_GROUP - 1, "rare", "common")
    assert not judged(lognormal(1.0), {"token class": labels})["groups"]
