"""llama-perplexity's protocol: which tokens are scored, by which tokenizer, and the textbook's values for them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from gate_house import write_manifest
from scipy.special import log_softmax, rel_entr, softmax
from test_engines import write_gguf

from pipeline import engines
from pipeline.core import artifacts
from pipeline.core.errors import DataError, InvalidVariant
from pipeline.core.params import Compare
from pipeline.divergence.distributions import compare_logits
from tools import llamacpp_compat
from tools.llamacpp_compat import Scores, Tokens, score, summarize, tokenize, windows

N = 32  # window of the tests that run a model


def test_windows_score_as_many_tokens_as_llama_perplexity_and_drop_the_rest() -> None:
    whole = windows(range(1300))
    assert [w.token_ids for w in whole] == [tuple(range(512)), tuple(range(512, 1024))]
    assert [(w.first, w.scored) for w in whole] == [(257, 255), (257, 255)]
    for n_ctx, scored in ((32, 15), (33, 16)):
        assert {w.scored for w in windows(range(3 * n_ctx + 1), n_ctx=n_ctx)} == {n_ctx - 1 - n_ctx // 2} == {scored}
    with pytest.raises(DataError, match="1023 tokens.*at least 1024"):
        windows(range(1023))


class Letters:
    """A tokenizer of letters, with `bos` in front unless None."""

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


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(variant, base): random models with different weights and one vocabulary."""
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


TEXT = "The council of the town met and spoke of rain, of roads and of bread. " * 90


def test_a_token_without_a_finite_divergence_makes_no_average() -> None:
    ref, var, ids = made_up()
    var[3, :] = np.nan
    with pytest.raises(InvalidVariant, match="1 of 40 tokens"):
        summarize(Scores(compare_logits(ref, var, ids), np.arange(40)), Compare(), 1)


@pytest.fixture
def workplace(tiny: Path, tmp_path: Path) -> Path:
    """A folder with params.yaml and two variants: bf16 (transformers) and gguf-q8_0 (llama.cpp), of the same weights."""
    pytest.importorskip("llama_cpp")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    for name in ("bf16", "gguf-q8_0"):
        folder = artifacts.model_dir(name)
        shutil.copytree(tiny, folder)
        if name != "bf16":
            write_gguf(folder, folder / "model.gguf")
            (folder / "model.safetensors").unlink()
        write_manifest(folder, digest=name)
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
