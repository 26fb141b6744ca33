"""A server's log-probabilities become metrics only if they are those of the given tokens, and of the model itself."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.core import artifacts
from pipeline.core.errors import ParamsError, Unsupported
from pipeline.core.params import Compare
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import SERVED_TOKENS
from pipeline.metrics.tokens import token_metrics
from pipeline.serving import logprobs, measure
from pipeline.serving.client import ServerError
from tests import serving_server
from tests.serving_server import KEY, Body, Handler, Server
from tests.test_token_metrics import tokens as token_rows
from tools import score_url as score
from tools import serve_url as command

ROOT = Path(__file__).resolve().parent.parent
WORDS = list(dict.fromkeys(["[UNK]", "a", "b", *measure.TEXT.replace(".", " .").replace(",", " ,").split()]))
A, B, BOOK = 1, 2, WORDS.index("book")
# The model: after `a` comes `b` with 1/2, after `b` comes `a` with 1/4, and a word repeats itself with 1/8.
P = {(A, B): 0.5, (B, A): 0.25, (A, A): 0.125, (B, B): 0.125}
P_REF = {(A, B): 0.25, (B, A): 0.25, (A, A): 0.25, (B, B): 0.125}
TEXTS = {"one": "a b a b a b a b", "two": "a a b a b b a a b", "three": "b b b a b a b a b a", "four": "a b b a b a a b a"}
N = len(TEXTS)
PAIRS = {name: list(pairwise([A if w == "a" else B for w in text.split()])) for name, text in TEXTS.items()}
TOKENS = sum(map(len, PAIRS.values()))
Play = Callable[[Handler, Body], None]
Scored = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    """params.yaml, four documents of one window each, a word tokenizer, and a key."""
    monkeypatch.setenv("QUANTGATE_API_KEY", KEY)
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["diverge"]["corpus"], data["compare"]["resamples"] = "texts.jsonl", 200
    Path("params.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    lines = [json.dumps({"id": name, "domain": "d", "text": text}) + "\n" for name, text in TEXTS.items()]
    Path("texts.jsonl").write_text("".join(lines), encoding="utf-8")
    raw = Tokenizer(models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.save("tokenizer.json")


def reference(change: Callable[[list[dict[str, Any]]], object] = lambda _: None, **meta: Any) -> None:
    """Write the reference's rows of these texts."""
    rows = [
        {"window": f"{name}#0", "position": k, "token_id": pair[1], "logp_ref": math.log(P_REF[pair])}
        for name, pairs in PAIRS.items() for k, pair in enumerate(pairs, 1)
    ]  # fmt: skip
    change(rows)
    path = artifacts.tokens("bf16")
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    artifacts.write_json(artifacts.meta_of(path), {"status": "ok", "reason": None, "model": "bf16-1", **meta})


def logp_of(before: int, own: int) -> float:
    """Of words that are neither `a` nor `b`, `book` is the likeliest."""
    return math.log(P.get((before, own), 0.9 if own == BOOK != before else 0.1))


def said_of(ids: Sequence[int]) -> list[float | None]:
    return [None, *(logp_of(*pair) for pair in pairwise(ids))]


def echo(
    h: Handler, body: Body, *, ids: Sequence[int] | None = None, by_name: bool = False, is_counted: bool = True, **logprobs: Any
) -> None:
    """vLLM's reply: the prompt's tokens and a generated one, or that one alone."""
    if not body.get("echo"):
        h.json(200, {"choices": [{"text": " book", "logprobs": {"tokens": ["book"], "token_logprobs": [math.log(0.9)]}}]})
        return
    ids = body["prompt"] if ids is None else ids
    names = [WORDS[i] if by_name else f"token_id:{i}" for i in ids]
    reported = {"tokens": [*names, "z"], "token_logprobs": [*said_of(ids), -9.0]} | logprobs
    usage = {"usage": {"prompt_tokens": len(ids), "completion_tokens": 1}} if is_counted else {}
    h.json(200, {"choices": [{"text": "", "logprobs": {k: v for k, v in reported.items() if v != "none"}}], **usage})


def by_name(h: Handler, body: Body) -> None:
    """A server that names tokens by their text and counts none."""
    echo(h, body, by_name=True, is_counted=False)


def biased(h: Handler, body: Body) -> None:
    """llama.cpp's: no echo, ids in its replies, log-probabilities from before the bias."""
    if "logit_bias" not in body:
        h.json(200, {"choices": [{"text": " b", "logprobs": {"content": [{"id": B, "token": " b", "logprob": -1.0}]}}]})
        return
    ((wanted, by),) = body["logit_bias"].items()
    assert by == 100 and body["max_tokens"] == 1 and body["cache_prompt"]
    value = logp_of(body["prompt"][-1], int(wanted))
    likeliest = [{"id": 7, "logprob": -0.01}]
    h.json(200, {
        "choices": [{"text": "", "logprobs": {"content": [{"id": int(wanted), "logprob": value, "top_logprobs": likeliest}]}}],
        "usage": {"prompt_tokens": len(body["prompt"])},
    })  # fmt: skip


def by_field(h: Handler, body: Body) -> None:
    """vLLM's `prompt_logprobs`, of a server that refuses echo and more than five."""
    if body.get("echo") or max(body.get("logprobs", 0), body.get("prompt_logprobs", 0)) > 5:
        h.json(400, {"error": "no echo, and at most 5"})
    elif "prompt_logprobs" not in body:
        echo(h, body)
    else:
        ids = body["prompt"]
        places = [{str(own): {"logprob": logp_of(before, own), "rank": 1}} for before, own in pairwise(ids)]
        h.json(200, {"choices": [{"text": "", "prompt_logprobs": [None, *places]}], "usage": {"prompt_tokens": len(ids)}})


@pytest.fixture
def scored(server: Server, monkeypatch: pytest.MonkeyPatch) -> Scored:
    """Score a server that always plays this; returns the file of metrics."""

    def score_it(play: Play, **more: Any) -> dict[str, Any]:
        monkeypatch.setattr(serving_server, "plain", play)
        server.locked = True
        try:
            command.main(**{"url": server.url, "tokenizer": Path("tokenizer.json"), "is_scored": True, "timeout": 20.0, **more})
        finally:
            files = [f for f in Path().rglob("*") if f.is_file()]
            assert not any(KEY.encode() in f.read_bytes() for f in files), "the key is never written"
        return report()

    return score_it


def report() -> dict[str, Any]:
    return dict(artifacts.read_json(Path("artifacts/serving/server.scores.figures.json")))


def rows() -> list[dict[str, Any]]:
    return artifacts.read_jsonl(Path("artifacts/serving/server.scores.jsonl"))


def by_hand(names: Sequence[str] = tuple(TEXTS)) -> dict[str, float]:
    pairs = [pair for name in names for pair in PAIRS[name]]
    nll, ref = ([-math.log(p[x]) for x in pairs] for p in (P, P_REF))
    moved = [P[x] - P_REF[x] for x in pairs]
    return {
        "ppl": math.exp(sum(nll) / len(pairs)), "ppl_ratio": math.exp((sum(nll) - sum(ref)) / len(pairs)),
        "delta_p_mean": sum(moved) / len(pairs), "delta_p_rms": math.sqrt(sum(m * m for m in moved) / len(pairs)),
    }  # fmt: skip


@pytest.mark.parametrize("play, way", [
    (echo, "echo of token ids"), (biased, "logit_bias, a token at a time"), (by_field, "prompt_logprobs"),
])  # fmt: skip
def test_metrics_are_those_of_the_known_distribution_whatever_the_way(scored: Scored, play: Play, way: str) -> None:
    reference()
    found = scored(play)
    assert found["status"] == "ok" and found["windows"] == N and found["failed"] == []
    for name, value in by_hand().items():
        metric = found["metrics"][name]
        assert metric["value"] == pytest.approx(value, rel=1e-12) and metric["n"] == TOKENS, name
        assert metric["low"] < metric["value"] < metric["high"] and metric["unit"] and f"{N} clusters" in metric["method"]
    assert all(found["metrics"][name]["value"] is None for name in SERVED_TOKENS), "no store"
    kld = found["metrics"]["kld_mean"]
    assert kld["value"] is None and kld["low"] is None and kld["warnings"] == [score.TOP_K]
    assert artifacts.read_json(Path("artifacts/serving/server.scores.meta.json"))["way"] == way
    assert [r["logps"] for r in rows()] == [said_of(r["token_ids"])[1:] for r in rows()]
    assert [(r["document"], r["window"], r["first"]) for r in rows()] == [(name, f"{name}#0", 1) for name in TEXTS]


def test_metrics_are_computed_as_compare_computes_them() -> None:
    rng = np.random.default_rng(3)
    logp, logp_ref = np.log(rng.uniform(0.05, 0.95, (2, 400)))
    theirs = token_rows(rng.uniform(0, 1, 400), logp=logp, logp_ref=logp_ref)
    documents = sorted(set(theirs["document"]))
    own, pairs = [], {}
    for name in documents:
        at = [k for k, d in enumerate(theirs["document"]) if d == name]
        values = [float(logp[k]) for k in at]
        own.append({"ok": True, "document": name, "window": name, "first": 1, "token_ids": [0] * (len(at) + 1), "logps": values})
        pairs |= {(name, j): (0, float(logp_ref[k])) for j, k in enumerate(at, 1)}
    b = Builder(Compare(resamples=200), seed=1)
    token_metrics(b, theirs)
    found = score.metrics_of(own, pairs, Builder(Compare(resamples=200), seed=1))
    for name in ("ppl", *score.PAIRED):
        for key in ("value", "low", "high"):
            assert found[name][key] == pytest.approx(b.metrics[name][key], rel=1e-9), (name, key)
        assert (found[name]["n"], found[name]["unit"]) == (b.metrics[name]["n"], b.metrics[name]["unit"])


def test_the_first_concurrency_is_kept_and_what_another_server_gave_does_not_stand_for_one_that_lacks_it(
    scored: Scored, server: Server
) -> None:
    assert scored(echo)["status"] == "ok" and server.most == 1
    scored(echo, concurrency="3,8")
    assert 1 <= server.most <= 3
    with pytest.raises(Unsupported):
        scored(lambda h, _: h.json(400, {"error": "no echo"}))
    assert rows() == [] and report()["metrics"]["ppl"]["value"] is None


def on(document: str, fault: Play) -> Play:
    """A server with that fault on one document only."""
    whole = [A if w == "a" else B for w in TEXTS[document].split()]
    return lambda h, body: fault(h, body) if body["prompt"] == whole else echo(h, body)


@pytest.mark.parametrize("fault, words", [
    (lambda h, b: echo(h, b, ids=[B, *b["prompt"][1:]]), "token 0 came back as another than 1 ('a')"),
    (lambda h, b: echo(h, b, ids=[*b["prompt"][:3], B, *b["prompt"][4:]]), "token 3 came back as another than 1 ('a')"),
    (lambda h, b: echo(h, b, ids=b["prompt"][:5]), "counts 5 tokens in a prompt of 9"),
    (lambda h, b: echo(h, b, ids=b["prompt"][4:], is_counted=False), "5 of 9 tokens came back"),
    (lambda h, b: echo(h, b, ids=[0, *b["prompt"]], is_counted=False), "10 of 9 tokens came back"),
    (lambda h, b: echo(h, b, ids=b["prompt"][1:], is_counted=False), "token 1 came back as another"),
    (lambda h, b: echo(h, b, token_logprobs=[None, *[-1.0] * 4, None, *[-1.0] * 4]), "without its log-probability"),
    (lambda h, b: echo(h, b, token_logprobs=[None, *[-1.0] * 7, math.nan, -1.0]), "invalid log-probability nan"),
    (lambda h, b: echo(h, b, token_logprobs=[None, *[-1.0] * 7, -math.inf, -1.0]), "invalid log-probability -inf"),
    (lambda h, b: echo(h, b, token_logprobs=[None, *[-1.0] * 7, 0.5, -1.0]), "invalid log-probability 0.5"),
    (lambda h, b: echo(h, b, token_logprobs=[None, *[0.0] * 9]), "narrowed to one"),
    (lambda h, b: echo(h, b, top_logprobs=[None, *[{"token_id:1": -0.1234, "token_id:2": -0.2345}] * 9]), "sum to 1.6"),
    (lambda h, b: echo(h, b, token_logprobs=[-1.0] * 10), "whose first token has none"),
    (lambda h, b: h.json(500, {"error": {"message": f"out of memory for {h.headers['Authorization']}"}}), "for Bearer ***"),
    (lambda h, _: h.reset(), "no reply"),
])  # fmt: skip
def test_a_window_that_fails_is_named_and_left_out_of_every_metric(
    scored: Scored, capsys: pytest.CaptureFixture[str], fault: Play, words: str
) -> None:
    reference()
    with pytest.raises(typer.Exit) as e:
        scored(on("two", fault))
    assert e.value.exit_code == 1
    found, expected = report(), by_hand(("one", "three", "four"))
    assert [f["window"] for f in found["failed"]] == ["two#0"] and words in found["failed"][0]["error"]
    for name, value in expected.items():
        assert found["metrics"][name]["value"] == pytest.approx(value)
        assert any(f"1 of {N} windows failed" in w for w in found["metrics"][name]["warnings"])
    assert [r["ok"] for r in rows()] == [True, False, True, True] and rows()[1]["logps"] is None
    assert "window two#0 failed" in capsys.readouterr().out


def test_tokens_of_a_window_that_fails_midway_are_not_half_counted(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_later(h: Handler, body: Body) -> None:
        if len(body["prompt"]) == 8 and "logit_bias" in body:  # only one window is this long
            body = body | {"logit_bias": {"2": 100}} if body["logit_bias"] == {"1": 100} else body | {"logit_bias": {"1": 100}}
        biased(h, body)

    monkeypatch.setattr(measure, "TEXT", "a b a b")
    with pytest.raises(typer.Exit):
        scored(other_later)
    assert [(r["ok"], r["logps"] is None) for r in rows()] == [(True, False)] + [(False, True)] * 3
    assert report()["metrics"]["ppl"]["n"] == 7 and "token 8 is not" in report()["failed"][0]["error"]


def test_no_window_at_all_is_an_error_after_everything_is_written(scored: Scored) -> None:
    windows = [[A if w == "a" else B for w in text.split()] for text in TEXTS.values()]
    with pytest.raises(ServerError, match=r"none of 4 windows was scored; the first failed with: HTTP 503: busy"):
        scored(lambda h, b: h.json(503, {"error": "busy"}) if b["prompt"] in windows else echo(h, b))
    assert len(rows()) == N and report()["metrics"]["ppl"]["value"] is None and len(report()["failed"]) == N


def shifted(h: Handler, body: Body) -> None:
    """llama-cpp-python's echo: each token has the value of the place after it."""
    ids = body["prompt"]
    echo(h, body, token_logprobs=[None, *(logp_of(i, i) - 0.01 * i for i in ids[1:]), -9.0] if body.get("echo") else [])


def grown(h: Handler, body: Body) -> None:
    echo(h, body) if body.get("echo") else h.json(200, {"choices": [{"text": "s", "logprobs": None}]})


def after_bias(h: Handler, body: Body) -> None:
    wanted = int(next(iter(body.get("logit_bias", {"7": 0}))))
    left = -0.3 if wanted == WORDS.index("storm") else -1e-30  # so unlikely that even the bias leaves room for others
    h.json(200, {"choices": [{"logprobs": {"content": [{"id": wanted, "logprob": left}]}}]})


@pytest.mark.parametrize("play, words", [
    (by_name, "token 0 came back as another than .*, or not by its id"),
    (lambda h, b: echo(h, b, token_logprobs=[-0.5], tokens=["token_id:2"]), "echo is ignored"),
    (lambda h, b: h.json(400, {"error": "Only no echo is supported"}), "HTTP 400: Only no echo is supported"),
    (lambda h, b: h.json(200, {"choices": [{"text": "b", "logprobs": None}]}), "do not give the prompt's log-probabilities"),
    (lambda h, b: h.json(200, ["b"]), "no choice"),
    (lambda h, b: echo(h, b, tokens=["b"]), "do not give the prompt's log-probabilities"),
    # values of another token or not of the model
    (shifted, r"misaligned: a token generated with -0\.1054 nats comes back with -2"), (after_bias, "narrowed to one"),
    (grown, "no generated token could be compared"),
])  # fmt: skip
def test_what_a_server_lacks_is_one_line_and_null_with_that_reason(scored: Scored, play: Play, words: str) -> None:
    reference()
    with pytest.raises(Unsupported, match=words) as e:
        scored(play)
    written, reason = report(), str(e.value)
    assert "\n" not in reason and written["status"] == "unsupported" and written["reason"] == reason and rows() == []
    assert all(m["value"] is None and m["warnings"] == [reason] for m in written["metrics"].values())


def test_parts_of_characters_may_lack_a_log_probability_and_are_counted(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = logprobs.Words.piece
    monkeypatch.setattr(logprobs.Words, "piece", lambda self, i: "\N{REPLACEMENT CHARACTER}" if i == A else piece(self, i))

    def silent(h: Handler, body: Body) -> None:
        if body.get("logit_bias") == {str(A): 100}:
            h.json(200, {"choices": [{"text": "", "logprobs": None}]})
        else:
            biased(h, body)

    reference()
    metrics = scored(silent)["metrics"]
    kept = [-math.log(P[x]) for pairs in PAIRS.values() for x in pairs if x[1] != A]
    assert metrics["ppl"]["value"] == pytest.approx(math.exp(sum(kept) / len(kept))) and metrics["ppl"]["n"] == len(kept)
    left_out = f"{TOKENS - len(kept)} of {TOKENS} tokens are left out: the server reports no parts"
    assert left_out in metrics["delta_p_rms"]["warnings"][-1]
    assert rows()[0]["logps"][1] is None and rows()[0]["logps"][0] == math.log(0.5)


def other_build() -> None:
    reference()
    artifacts.write_json(artifacts.model_dir("bf16") / artifacts.MANIFEST, {"digest": "bf16-2"})


@pytest.mark.parametrize("make, words", [
    (lambda: None, "bf16.parquet is missing"),
    (lambda: reference(lambda rows: rows[5].update(token_id=77)), "1 tokens differ"),
    (lambda: reference(lambda rows: [row.update(window="other") for row in rows]), "other texts or windows"),
    (other_build, "another build of bf16"), (lambda: reference(status="invalid", reason="NaN"), "has no rows: NaN"),
])  # fmt: skip
def test_without_the_reference_s_rows_of_these_tokens_perplexity_stands_alone(
    scored: Scored, make: Callable[[], object], words: str
) -> None:
    make()
    metrics = scored(echo)["metrics"]
    assert metrics["ppl"]["value"] == pytest.approx(by_hand()["ppl"])
    for name in score.PAIRED:
        assert metrics[name]["value"] is None and metrics[name]["n"] == 0 and words in metrics[name]["warnings"][0], metrics[name]


def test_tokens_that_the_reference_lacks_are_counted(scored: Scored) -> None:
    reference(lambda rows: rows.__delitem__(slice(15, None)))  # `one` and `two` are left
    metrics = scored(echo)["metrics"]
    assert metrics["ppl"]["n"] == TOKENS and metrics["ppl"]["value"] == pytest.approx(by_hand()["ppl"])
    assert metrics["ppl_ratio"]["n"] == 15 and metrics["ppl_ratio"]["value"] == pytest.approx(by_hand(("one", "two"))["ppl_ratio"])
    assert f"{TOKENS - 15} scored tokens have no row of the reference" in metrics["ppl_ratio"]["warnings"]
    assert not any("no row" in w for w in metrics["ppl"]["warnings"])


def test_a_bos_is_found_where_the_config_or_the_tokenizer_says_so_() -> None:
    from tokenizers.processors import TemplateProcessing

    raw = Tokenizer.from_file("tokenizer.json")
    raw.post_processor = TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    raw.enable_truncation(3)
    raw.save("tokenizer.json")
    for config in (None, {"bos_token": "[UNK]"}, {"bos_token": {"content": "[UNK]"}}):
        if config:
            Path("tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        words = logprobs.Words(Path("tokenizer.json"))
        assert words.bos_token_id == 0 and words.encoded("a b a b") == [0, A, B, A, B]
        assert words.piece(B) == "b"


@pytest.mark.parametrize("options, error, words", [
    ({"tokenizer": None}, ParamsError, "--tokenizer"), ({"chat": True}, ParamsError, "leave --chat out"),
    ({"only_probe": True}, ParamsError, "leave --probe out"), ({}, ServerError, "no server answers at"),
])  # fmt: skip
def test_wrong_options_and_nobody_there_are_one_line(options: dict[str, Any], error: type[Exception], words: str) -> None:
    asked = {"url": "http://127.0.0.1:9", "tokenizer": Path("tokenizer.json"), "is_scored": True, **options}
    with pytest.raises(error, match=words):
        command.main(**asked)
