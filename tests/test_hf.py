"""The transformers engine: what it says is what the model says, and the head by itself says the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache, QuantizedLayer

from pipeline import engines
from pipeline.core.errors import InvalidVariant, Unsupported
from pipeline.engines import Sampling, hf
from pipeline.engines._head import Head
from pipeline.engines._lm_eval import lm_for
from pipeline.model import attestation

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


@pytest.mark.parametrize("spread", ["over two places", "all of it elsewhere"])
def test_a_model_that_accelerate_spreads_gives_the_same_logits(engine16: Any, tiny_bf16: Path, tmp_path: Path, spread: str) -> None:
    """As `device_map: auto` does over cards and, where they are too small, the memory; here a layer lies on the disk, then all in
    memory while the model runs elsewhere."""
    from accelerate import cpu_offload
    from transformers import AutoModelForCausalLM

    layers = range(engine16.model.config.num_hidden_layers)
    places = {f"model.layers.{n}": "disk" if n else "cpu" for n in layers}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    over_two = {"device_map": places, "offload_folder": tmp_path} if spread == "over two places" else {}
    model = AutoModelForCausalLM.from_pretrained(tiny_bf16, dtype="auto", **over_two).eval()
    if not over_two:
        cpu_offload(model, torch.device("cpu"))
    engine = hf.HfEngine(model, engine16.tokenizer, "cpu", engine16.end_ids)
    assert any(w.is_meta for w in model.parameters())
    for made, expected in zip(engine.logit_blocks([IDS], [2], 4), engine16.logit_blocks([IDS], [2], 4)):
        assert (made[2] == expected[2]).all()
    assert (engine.logits_stepwise(IDS, 3) == engine16.logits_stepwise(IDS, 3)).all()
    assert engine.head.equals(engine16.head)
    engine.head.save(tmp_path / "head")
    assert Head.load(tmp_path / "head").equals(engine16.head)
    with pytest.raises(Unsupported, match="kept in the machine's memory"):
        engine.to_float32()


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


@pytest.mark.parametrize("device, order", [("cuda:0", ["finished", "clock"]), ("cpu", ["clock"])])
def test_the_clock_is_read_when_a_gpu_has_finished(monkeypatch: pytest.MonkeyPatch, device: str, order: list[str]) -> None:
    said: list[str] = []
    monkeypatch.setattr(hf.time, "monotonic", lambda: said.append("clock") or 1.0)
    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: said.append("finished")))
    assert hf.HfEngine._now(SimpleNamespace(device=device, torch=torch)) == 1.0  # type: ignore[arg-type]
    assert said == order


# --- a cache that packs keys and values --------------------------------------------------------------------------


class Eighths(QuantizedLayer):
    """transformers' layer with its packing in place of HQQ's: steps of 1/8 in 8 bits."""

    def _quantize(self, tensor: Any, axis: int) -> Any:
        return (tensor * 8).round().to(torch.int8), {"scale": torch.ones(1)}

    def _dequantize(self, qtensor: Any) -> Any:
        return qtensor[0].float() / 8


@pytest.fixture(params=["fp8", "int8"])
def packed(request: pytest.FixtureRequest, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hf, "RESIDUAL", 8)
    monkeypatch.setattr(hf, "PROMPT", 4)
    if request.param == "int8":
        monkeypatch.setattr(
            "transformers.QuantizedCache",
            lambda *_, **how: Cache(layers=[Eighths(residual_length=how["residual_length"]) for _ in "ab"]),
        )
    return engines.load("hf", tiny, threads=1, kv=request.param)


@pytest.mark.parametrize("start, n", [(0, 40), (11, 40), (20, 29), (39, 40)])
def test_a_packed_cache_scores_as_one_token_at_a_time_reads_it(packed: Any, engine: Any, start: int, n: int) -> None:
    """A prompt in one pass, then decoding, by the model's own forward; the whole window in one pass reads no packed state."""
    ids = (IDS * 4)[:n]
    prompt = start + 1 if start else 4
    logits, cache = packed.forward([ids[:prompt]], None)
    rows = list(logits[0, start:])
    for token in ids[prompt:]:
        logits, cache = packed.forward([[token]], cache)
        rows.append(logits[0, -1])
    found = list(packed.logit_blocks([[*ids, 0]], [start], 16))
    assert [at for _, at, _ in found] == list(range(start, n, 16)) and all(len(block) == 16 for *_, block in found[:-1])
    scored = np.concatenate([block for *_, block in found])
    off = np.abs(scored - torch.stack(rows).numpy()).max()  # a sum in another order may fall on the other side of a step
    whole = engine.logits(ids)[start:]
    np.testing.assert_allclose(scored[0], whole[0], atol=1e-5)
    assert off < 1e-3 and (n - start < 9 or np.abs(scored - whole).max() > 10 * off)


def test_replies_and_choices_read_the_packed_cache_too(packed: Any, engine: Any) -> None:
    """Choices that begin alike are scored as each alone; bytes of a token are a quarter of 32 bits', beside a scale a layer."""
    lm = lm_for(packed, 1)
    requests = [(None, IDS, [7, 9, k, 3]) for k in (11, 12)]
    alone = [lm._loglikelihood_tokens([request])[0][0] for request in requests]
    assert [value for value, _ in lm._loglikelihood_tokens(requests)] == pytest.approx(alone, abs=1e-5)
    prompt = IDS * 4
    streamed = [t for t, _ in packed.stream(prompt, 6, Sampling(stop=False))]
    assert packed.trace.cache_bytes == pytest.approx(packed.trace.cache_tokens * 2 * 2 * 2 * 16, rel=0.5)
    assert packed.sample([prompt, prompt], 6, Sampling())[1] == streamed[: len(packed.sample([prompt], 6, Sampling())[0])]
    attestation.check_cache(packed, prompt)


def test_a_cache_that_says_it_packs_and_does_not_is_found(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_cache_bytes", lambda cache: 256 * cache.get_seq_length())
    with pytest.raises(InvalidVariant, match=r"not quantized: a token takes 256 bytes, without kv 256"):
        attestation.check_cache(packed, IDS * 4)
    monkeypatch.setattr(packed, "new_cache", lambda: None)
    with pytest.raises(InvalidVariant, match=r"not quantized: without kv 39 tokens have the same logits"):
        attestation.check_cache(packed, IDS * 4)


def test_a_cache_that_cannot_be_packed_costs_that_variant_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **how: Any) -> Any:
        raise ImportError

    monkeypatch.setattr("transformers.QuantizedCache", absent)
    with pytest.raises(Unsupported, match="packs keys and values to int4 with hqq; pip install hqq"):
        engines.load("hf", tiny, threads=1, kv="int4")
