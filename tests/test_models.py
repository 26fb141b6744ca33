"""Models of many architectures: a slice of the matrix that `make models` makes whole (tests/bench/models.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zoo

from pipeline import diverge, engines, reference
from pipeline.core import artifacts
from pipeline.core.errors import Unsupported
from pipeline.store import Store, Window

WINDOWS = [  # of two lengths, the last scored from its middle on, as a trajectory is
    Window("s", f"w{r}", f"d{r}", tuple(3 + (7 * k * k + 31 * r + k) % 500 for k in range(n)), first, "x")
    for r, (n, first) in enumerate([(200, 1), (200, 1), (60, 40)])
]
SLICE = ["gpt2", "opt", "bloom", "gemma2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "llama4_text", "mamba", "minimax"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model of the zoo, made once."""
    home = tmp_path_factory.mktemp("zoo")

    def folder(name: str) -> Path:
        return home / name if (home / name).exists() else zoo.make(name, home / name)

    return folder


def stored(engine: Any, out: Path) -> Store:
    """The store of `WINDOWS`."""
    out.mkdir(parents=True)
    facts = reference.write_store(engine, WINDOWS, out, 4)
    files = artifacts.files_of(out)
    rest = {"vocab": engine.vocab_size, "files": files, "digest": artifacts.digest(files)}
    artifacts.write_json(out / artifacts.MANIFEST, facts | rest)
    return Store(out)


@pytest.mark.parametrize("name", SLICE)
def test_the_reference_through_its_own_store_is_exactly_itself(model: Any, tmp_path: Path, name: str) -> None:
    """Whatever a model's own class reads of its body's output besides hidden states, and whatever scales or caps its logits."""
    engine: Any = engines.load("hf", model(name), threads=2)
    store = stored(engine, tmp_path / "store")
    assert store.manifest["kind"] == "hidden", store.manifest["why_not_hidden"]
    blocks = list(diverge.diverge(engine, store, batch_size=4, threads=2))
    assert sum(len(b["kld"]) for b in blocks) == sum(w.scored for w in WINDOWS)
    assert not any(value for b in blocks for value in b["kld"])


def test_a_class_that_needs_more_than_hidden_states_is_stored_as_logits_and_said(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = engines.load("hf", model("gpt2"), threads=2)

    def needs_more(hidden: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(engine.head, "tensor", needs_more)
    store = stored(engine, tmp_path / "store")
    assert store.manifest["kind"] == "logits"
    assert "no logits from hidden states alone (IndexError: tuple index" in store.manifest["why_not_hidden"]


def test_logits_a_step_of_rounding_apart_are_counted_and_more_is_inexact(model: Any, tmp_path: Path) -> None:
    engine: Any = engines.load("hf", model("gpt2"), threads=2)
    hidden, logits = (t[0] for t in engine.own_logits([WINDOWS[0].token_ids]))
    assert reference._replay(engine, hidden, logits, "w") == 0
    step = engine.torch.finfo(logits.dtype).eps
    near = logits.clone()
    near[3, 7] += step * float(logits[3, 7].abs())
    assert float(near[3, 7]) != float(logits[3, 7])
    assert reference._replay(engine, hidden, near, "w") == 1
    far = logits.clone()
    far[3, 7] += 4 * step * float(logits[3].abs().max())
    with pytest.raises(reference.Inexact, match="window w"):
        reference._replay(engine, hidden, far, "w")


def test_attention_is_the_best_the_model_has_and_what_it_has_not_is_refused_in_words(model: Any) -> None:
    assert [engines.load("hf", model(n), threads=2).attention for n in ("gpt2", "gemma2")] == ["sdpa", "eager"]  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="this model has no attention: sdpa; take auto"):
        engines.load("hf", model("bloom"), threads=2, attention="sdpa")


@pytest.mark.parametrize("name, window", [("gemma3", 256), ("gptj", 1024), ("mpt", 1024), ("opt", 1024)])
def test_the_window_is_the_text_part_s_whatever_its_name(model: Any, name: str, window: int) -> None:
    assert engines.load("hf", model(name), threads=2).max_length == window
