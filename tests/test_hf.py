"""The transformers engine: what it says is what the model says, and the head by itself says the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import engines
from pipeline.core.errors import InvalidVariant, ParamsError
from pipeline.engines import Sampling, hf
from pipeline.engines._head import Head

IDS = [5, 9, 200, 31, 77, 400, 12, 8, 301, 44]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Any:
    return engines.load("hf", tiny, threads=1)


@pytest.fixture(scope="module")
def engine16(tiny_bf16: Path) -> Any:
    return engines.load("hf", tiny_bf16, threads=1)


def test_logits_are_the_models_own(engine: Any, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert (engine.logits(IDS) == expected).all()


def test_blocks_are_rows_of_the_whole(engine: Any) -> None:
    whole = engine.logits(IDS)
    found = list(engine.logit_blocks([IDS, IDS[::-1]], [2, 0], 4))
    assert [(i, at, len(block)) for i, at, block in found] == [(0, 2, 4), (0, 6, 3), (1, 0, 4), (1, 4, 4), (1, 8, 1)]
    np.testing.assert_allclose(np.concatenate([b for i, _, b in found if i == 0]), whole[2:-1], atol=1e-4)


@pytest.mark.parametrize("which", ["engine", "engine16"])
def test_a_saved_head_gives_the_models_logits(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Loaded again, those of the head in memory bit for bit; the model's own to a step of rounding."""
    engine = request.getfixturevalue(which)
    hidden, logits = engine.own_logits([IDS])
    engine.head.save(tmp_path)
    replayed = Head.load(tmp_path).tensor(hidden[0])
    assert torch.equal(replayed, engine.head.tensor(hidden[0]))
    assert (replayed - logits[0]).abs().max() <= torch.finfo(logits.dtype).eps * logits.abs().max()
    assert torch.equal(engine.own_logits([IDS])[1], logits), "taking the head off changed the model"


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_heads_that_cap_or_scale_their_logits_replay_too(family: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **{"Granite": {"logits_scaling": 3.0}, "Cohere": {"logit_scale": 0.25}, "Gemma2": {"final_logit_softcapping": 0.2}}[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        hidden, logits = model.model(ids).last_hidden_state[0], model(ids).logits[0]
    Head.of(model).save(tmp_path)
    replayed = Head.load(tmp_path).tensor(hidden)
    assert torch.equal(replayed, Head.of(model).tensor(hidden))
    assert torch.allclose(replayed, logits, atol=1e-5)
    with torch.inference_mode():
        plain = hidden @ model.get_output_embeddings().weight.T
    assert not torch.allclose(plain, logits, atol=1e-3), "this family would not show the difference"


def test_greedy_stream_is_what_transformers_generates(engine: Any) -> None:
    expected = engine.model.generate(
        torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS), dtype=torch.long), max_new_tokens=12, min_new_tokens=12,
        do_sample=False, pad_token_id=0,
    )[0, len(IDS) :].tolist()  # fmt: skip
    out = list(engine.stream(IDS, 12, Sampling(stop=False)))
    same = [a == b for a, b in zip([t for t, _ in out], expected)]
    assert len(out) == 12 and all(same[: expected.index(2) if 2 in expected else 12])
    times = [t for _, t in out]
    assert times == sorted(times)


def test_sampling_repeats_with_its_seed_and_changes_with_another(engine: Any) -> None:
    prompts = [IDS, IDS[:4], IDS[2:]]
    once = engine.sample(prompts, 12, Sampling(1.0, 3))
    assert once == engine.sample(prompts, 12, Sampling(1.0, 3)) != engine.sample(prompts, 12, Sampling(1.0, 4))
    streams = [[t for t, _ in engine.stream(IDS, 12, Sampling(1.0, s))] for s in (1, 1, 2)]
    assert streams[0] == streams[1] != streams[2]
    assert not any(2 in reply[:-1] for reply in engine.sample([IDS] * 8, 200, Sampling(1.0, 1))), "a reply ends at its end token"


def test_weights_that_do_not_fit_are_an_error(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidVariant, match=r"missing_keys.*layers.1.mlp.up_proj"):
        engines.load("hf", tmp_path, threads=1)


def test_an_unknown_engine_or_option_suggests_the_nearest(tiny: Path) -> None:
    with pytest.raises(ParamsError, match="did you mean 'llamacpp'"):
        engines.load("llamacpp9", tiny, threads=1)
    with pytest.raises(ParamsError, match="did you mean 'attention'"):
        engines.load("hf", tiny, threads=1, atention="sdpa")


@pytest.mark.parametrize("device, order", [("cuda:0", ["finished", "clock"]), ("cpu", ["clock"])])
def test_the_clock_is_read_when_a_gpu_has_finished(monkeypatch: pytest.MonkeyPatch, device: str, order: list[str]) -> None:
    said: list[str] = []
    monkeypatch.setattr(hf.time, "monotonic", lambda: said.append("clock") or 1.0)
    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: said.append("finished")))
    assert hf.HfEngine._now(SimpleNamespace(device=device, torch=torch)) == 1.0  # type: ignore[arg-type]
    assert said == order
