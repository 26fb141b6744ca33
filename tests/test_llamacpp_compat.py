"""llama-perplexity's protocol: which tokens are scored, whose tokens they are, and the textbook's figures for them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from scipy.special import log_softmax, rel_entr, softmax
from test_engines import write_gguf

from pipeline import engines
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, DataError, InvalidVariant, QuantgateError
from pipeline.core.params import Compare
from pipeline.divergence.distributions import compare_logits
from pipeline.engines import Sampling
from tools import llamacpp_compat
from tools.llamacpp_compat import Scores, Tokens, read_text, score, summarize, tokenize, windows

N = 32  # window of the tests that run a model


# --- windows -----------------------------------------------------------------------------------------------------


def test_windows_score_as_many_tokens_as_llama_perplexity_and_drop_the_rest() -> None:
    whole = windows(range(1300))
    assert [w.token_ids for w in whole] == [tuple(range(512)), tuple(range(512, 1024))]
    assert [(w.first, w.scored) for w in whole] == [(257, 255), (257, 255)]
    for n_ctx, scored in ((32, 15), (33, 16)):
        assert {w.scored for w in windows(range(3 * n_ctx + 1), n_ctx=n_ctx)} == {n_ctx - 1 - n_ctx // 2} == {scored}
    with pytest.raises(DataError, match="1023 tokens.*at least 1024"):
        windows(range(1023))


def test_a_bos_takes_the_place_of_each_window_s_first_token_and_moves_nothing() -> None:
    plain, begun = windows(range(100), n_ctx=N), windows(range(100), n_ctx=N, bos=777)
    assert [w.token_ids for w in begun] == [(777, *w.token_ids[1:]) for w in plain]
    assert [w.first for w in begun] == [w.first for w in plain]


# --- text --------------------------------------------------------------------------------------------------------


def test_one_final_newline_is_dropped_and_a_missing_or_malformed_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\na\r\nb\n\n")
    assert read_text(tmp_path / "t") == "\na\r\nb\n"
    (tmp_path / "t").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"t is not UTF-8 \(byte 2\)"):
        read_text(tmp_path / "t")
    with pytest.raises(DataError, match="nowhere does not exist"):
        read_text(tmp_path / "nowhere")


class Letters:
    """A tokenizer of letters; `bos` in front where it is given."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id, self.lead = 1, [] if bos is None else [bos]

    def __call__(self, text: str, verbose: bool = True) -> Any:
        return type("Encoded", (), {"input_ids": self.lead + [ord(c) for c in text]})

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)


class Named:
    """An engine with such a tokenizer."""

    def __init__(self, bos: int | None = None) -> None:
        self.tokenizer = Letters(bos)


class WithOwn(Named):
    """An engine whose own tokenizer reads 'x' as 'y' and begins a text with `own_bos`."""

    def __init__(self, bos: int | None, own_bos: int | None) -> None:
        super().__init__(bos)
        self.own = Letters(own_bos)

    def tokenize(self, text: str) -> list[int]:
        return list(self.own(text.replace("x", "y")).input_ids)

    def leading_token(self) -> int | None:
        return next(iter(self.own.lead), None)


@pytest.mark.parametrize("bos", [None, 1])
def test_where_all_tokenizers_agree_their_tokens_are_taken(bos: int | None) -> None:
    both: dict[str, Any] = {"a": Named(bos), "b": WithOwn(bos, bos)}
    assert tokenize(both, "cab") == Tokens([*([] if bos is None else [bos]), 99, 97, 98], bos, "llama.cpp and transformers")
    assert tokenize({"a": both["a"]}, "cab").tokenizer == "transformers"


@pytest.mark.parametrize("loaded, words", [
    ({"a": Named(), "b": WithOwn(None, None)}, r"token 3 of the text, in 'abcxab', is \[120\] by a's .* and \[121\] by b's "),
    ({"b": WithOwn(None, 1)}, "begins a text with token None, b's model.gguf with 1"),
])  # fmt: skip
def test_a_token_or_bos_on_which_llama_cpp_disagrees_is_named_with_its_place(loaded: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        tokenize(loaded, "abcxab")


# --- scores ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(variant, base): random models of other weights and one vocabulary."""
    other = make_model(tmp_path_factory.mktemp("other") / "model", seed=5)
    return engines.load("hf", other, threads=1), engines.load("hf", tiny, threads=1)


IDS = [5 + 11 * k % 500 for k in range(3 * N + 7)]


def test_scores_are_the_textbook_s_at_the_second_half_of_each_window(pair: tuple[Any, Any]) -> None:
    found = score(*pair, windows(IDS, n_ctx=N), threads=2)
    assert found.window.tolist() == [0] * 15 + [1] * 15 + [2] * 15
    expected: dict[str, list[Any]] = {"kld": [], "logp": [], "top1": []}
    for k in range(3):
        ids = IDS[k * N : (k + 1) * N]
        var, ref = (e.logits(ids)[N // 2 : N - 1].astype(float) for e in pair)
        expected["kld"] += rel_entr(softmax(ref, -1), softmax(var, -1)).sum(-1).tolist()
        expected["logp"] += log_softmax(var, -1)[np.arange(15), ids[N // 2 + 1 :]].tolist()
        expected["top1"] += var.argmax(-1).tolist()
    np.testing.assert_allclose(found.rows.kld, expected["kld"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.rows.logp, expected["logp"], rtol=1e-3, atol=1e-4)
    assert found.rows.top1.tolist() == expected["top1"]


def test_a_model_against_itself_is_exactly_no_different(pair: tuple[Any, Any]) -> None:
    figures = summarize(score(pair[0], pair[0], windows(IDS, n_ctx=N), threads=1), Compare(), 1)
    assert figures["kld_mean"]["value"] == figures["kld_max"]["value"] == figures["delta_p_rms"]["value"] == 0
    assert figures["ppl_ratio"]["value"] == figures["top1_agreement"]["value"] == 1


def test_a_window_longer_than_the_model_and_another_vocabulary_are_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(DataError, match="windows of 2048 tokens are longer than the model's 1024"):
        score(*pair, windows(IDS * 50, n_ctx=2048), threads=1)
    small = type("Small", (), {"vocab_size": 7})
    with pytest.raises(ArtifactError, match="vocabularies of 7 and 512"):
        score(small(), pair[1], windows(IDS, n_ctx=N), threads=1)


# --- figures -----------------------------------------------------------------------------------------------------


def made_up(n: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    ref = rng.normal(0, 2, (n, 50)).astype(np.float32)
    return ref, ref + rng.normal(0, 0.7, ref.shape).astype(np.float32), rng.integers(0, 50, n)


def test_figures_and_their_standard_errors_are_llama_cpp_s_formulas() -> None:
    ref, var, ids = made_up()
    figures = summarize(Scores(compare_logits(ref, var, ids), np.repeat(range(4), 10)), Compare(), 1)
    n, rows = 40, np.arange(40)
    p, q = softmax(ref.astype(float), -1), softmax(var.astype(float), -1)
    kld, nll, nll_ref = rel_entr(p, q).sum(-1), -np.log(q[rows, ids]), -np.log(p[rows, ids])
    moved = q[rows, ids] - p[rows, ids]
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    covariance = ((nll * nll_ref).mean() - nll.mean() * nll_ref.mean()) / (n - 1)
    ratio = np.exp(nll.mean() - nll_ref.mean())
    rms = np.sqrt((moved**2).mean())
    expected = {
        "ppl": (np.exp(nll.mean()), np.exp(nll.mean()) * np.sqrt(nll.var() / (n - 1))),
        "ppl_ratio": (ratio, ratio * np.sqrt(nll.var() / (n - 1) + nll_ref.var() / (n - 1) - 2 * covariance)),
        "kld_mean": (kld.mean(), np.sqrt(kld.var() / (n - 1))),
        "delta_p_rms": (rms, 0.5 / rms * np.sqrt((moved**2).var() / (n - 1))),
        "top1_agreement": (same, np.sqrt(same * (1 - same) / (n - 1))),
        "kld_p90": (np.sort(kld)[35] + 0.1 * (np.sort(kld)[36] - np.sort(kld)[35]), None),
        "kld_median": (np.sort(kld)[19:21].mean(), None),
    }
    for name, (value, error) in expected.items():
        assert figures[name]["value"] == pytest.approx(value, rel=1e-4), name
        assert figures[name]["standard_error"] == (None if error is None else pytest.approx(error, rel=1e-3)), name
        low = figures[name]["low"]  # a quantile of 40 values in 4 windows has none
        assert figures[name]["n"] == n and (low is None) == (name == "kld_p90"), name
        assert low is None or low <= figures[name]["value"] * (1 + 1e-9), name


def test_whole_windows_are_resampled() -> None:
    """Tokens that agree inside their window: 4 values, not 40, stand behind the interval."""
    ref, var, ids = made_up(4)
    rows = compare_logits(*(np.repeat(x, 10, axis=0) for x in (ref, var, ids)))
    kld = summarize(Scores(rows, np.repeat(range(4), 10)), Compare(), 1)["kld_mean"]
    alone = summarize(Scores(rows, np.arange(40)), Compare(), 1)["kld_mean"]
    assert kld["clusters"] == 4 and any("4 clusters are few" in w for w in kld["warnings"])
    assert kld["high"] - kld["low"] > 1.5 * (alone["high"] - alone["low"])


def test_a_token_without_a_finite_divergence_makes_no_average() -> None:
    ref, var, ids = made_up()
    var[3, :] = np.nan
    with pytest.raises(InvalidVariant, match="1 of 40 tokens"):
        summarize(Scores(compare_logits(ref, var, ids), np.arange(40)), Compare(), 1)


# --- the command, and llama.cpp itself ---------------------------------------------------------------------------

TEXT = "The council of the town met and spoke of rain, of roads and of bread. " * 90


@pytest.fixture
def workplace(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml and two variants: bf16 (transformers) and gguf-q8_0 (llama.cpp), of the same weights."""
    pytest.importorskip("llama_cpp")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    for name in ("bf16", "gguf-q8_0"):
        folder = artifacts.model_dir(name)
        shutil.copytree(tiny, folder)
        if name != "bf16":
            write_gguf(folder, folder / "model.gguf")
            (folder / "model.safetensors").unlink()
        manifest = {"status": "ok", "reason": None, "digest": name, "files": artifacts.files_of(folder)}
        artifacts.write_json(folder / artifacts.MANIFEST, manifest)
    return tmp_path


def test_llama_cpp_against_transformers_on_the_same_weights_says_almost_nothing(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llamacpp_compat.main("gguf-q8_0", Path("text.txt"), None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["against"] == "bf16" and found["tokenizer"] == "llama.cpp and transformers"
    assert found["tokens"] == 255 * found["windows"] == found["figures"]["kld_mean"]["n"]
    assert found["tokens_dropped"] + 512 * found["windows"] == found["text_tokens"]
    assert 0 < found["figures"]["kld_mean"]["value"] < 1e-4  # keys and values are kept in 16 bits there
    assert found["figures"]["top1_agreement"]["value"] > 0.98
    assert not artifacts.tokens("gguf-q8_0").exists(), "nothing of the pipeline is written"
    llamacpp_compat.show(found)
    out = capsys.readouterr().out
    assert "gguf-q8_0 against bf16" in out and "kld_mean" in out and "windows of 512" in out and "llama.cpp and" in out


def test_llama_cpp_s_tokenizer_reads_no_special_tokens_out_of_a_text(workplace: Path) -> None:
    engine: Any = engines.load("llamacpp", artifacts.model_dir("gguf-q8_0"), threads=1)
    assert engine.leading_token() is None
    assert engine.tokenize(TEXT) == engine.tokenizer(TEXT).input_ids and engine.tokenize("") == []
    with pytest.raises(DataError, match=r"token 1 of the text.* is \[2\] by"):
        tokenize({"gguf": engine}, "a<|im_end|>")


def test_a_model_file_that_asks_for_a_bos_is_heard(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    monkeypatch.chdir(tmp_path)
    plain = gguf.GGUFWriter.add_eos_token_id

    def and_bos(writer: Any, token: int) -> None:
        plain(writer, token)
        writer.add_add_bos_token(True)

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", and_bos)
    shutil.copytree(tiny, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model/model.gguf")
    engine: Any = engines.load("llamacpp", tmp_path / "model", threads=1)
    assert engine.leading_token() == 1 and engine.tokenize("a")[0] == 1
    with pytest.raises(DataError, match="begins a text with token None, gguf's model.gguf with 1"):
        tokenize({"gguf": engine}, "a")


@pytest.mark.parametrize("ends_at", [None, 3])
def test_what_the_cache_takes_is_known_after_a_request_however_it_ends(workplace: Path, ends_at: int | None) -> None:
    engine: Any = engines.load("llamacpp", artifacts.model_dir("gguf-q8_0"), threads=1)
    if ends_at is not None:
        engine.end_ids = {[t for t, _ in engine.stream(IDS, 8, Sampling(stop=False))][ends_at]}
    engine.kv_bytes_per_token = None
    assert 1 <= len(list(engine.stream(IDS, 8, Sampling()))) <= 8
    plain = 2 * 2 * 32 * 2  # keys and values, of 2 layers, 2 heads of 16, in 2 bytes
    assert plain <= engine.kv_bytes_per_token < 1.5 * plain


@pytest.mark.parametrize("manifest, against, words", [
    ({}, "gguf-q8_0", "cannot compare 'gguf-q8_0' with itself"), ({}, "bf61", "did you mean 'bf16'"),
    ({"status": "unsupported", "reason": "no kernel"}, None, "is unsupported: no kernel"),
    ({"files": {}}, None, "was added after its manifest was written"),
])  # fmt: skip
def test_variants_that_cannot_be_compared_are_one_line(
    workplace: Path, manifest: dict[str, Any], against: str | None, words: str
) -> None:
    path = artifacts.model_dir("gguf-q8_0") / artifacts.MANIFEST
    artifacts.write_json(path, artifacts.read_json(path) | manifest)
    with pytest.raises(QuantgateError, match=words):
        llamacpp_compat.main("gguf-q8_0", Path("text.txt"), against)


# --- what llama-perplexity prints (tests/bench) ------------------------------------------------------------------

PRINTED = """
Mean PPL(Q)                   :  24.112233 ±   1.203300
Mean PPL(base)                :  19.500000 ±   0.950000
Mean ln(PPL(Q)/PPL(base))     :  -0.212300 ±   0.011900
Mean PPL(Q)/PPL(base)         :   0.808721 ±   0.009600
Mean    KLD:   0.292933 ±   0.007270
Maximum KLD:   2.242450
99.9%   KLD:   1.579600
99.0%   KLD:   1.203010
95.0%   KLD:   0.716334
90.0%   KLD:   0.546030
Median  KLD:   0.245826
Mean    Δp: -2.907 ± 0.318 %
RMS Δp    : 10.574 ± 0.593 %
Same top p: 67.745 ± 1.460 %
"""


def test_each_of_our_metrics_is_read_from_llama_perplexity_s_own_line_and_a_missing_one_is_an_error() -> None:
    spec = importlib.util.spec_from_file_location("llamacpp_tools", ROOT / "tests/bench/llamacpp_tools.py")
    assert spec and spec.loader
    printed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(printed)
    found = printed.parse_divergence(PRINTED)
    assert found["ppl"] == (24.112233, 1.2033) and found["ppl_log_ratio"] == (-0.2123, 0.0119)
    assert found["kld_mean"] == (0.292933, 0.00727) and found["kld_p999"] == (1.5796, None)
    assert found["top1_agreement"] == pytest.approx((0.67745, 0.0146)) and found["delta_p_mean"][0] == pytest.approx(-0.02907)
    ref, var, ids = made_up()
    assert found.keys() == summarize(Scores(compare_logits(ref, var, ids), np.arange(40)), Compare(), 1).keys()
    for line in filter(None, PRINTED.split("\n")):
        with pytest.raises(QuantgateError, match="printed no"):
            printed.parse_divergence(PRINTED.replace(line, line.replace(":", " nan")))
