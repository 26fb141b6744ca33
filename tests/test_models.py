"""Models of many architectures: a slice of the matrix that `make models` makes whole (tests/bench/models.py)."""

import copy
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from conftest import ROOT
from model_house import change_json, tensors_of, write_gguf_parts, write_tensors
from store_house import stored
from test_engines import write_gguf

from pipeline import diverge, engines, quantize, quantizers, reference
from pipeline.core import artifacts, explain, isolate, venvs
from pipeline.core.errors import Unsupported
from pipeline.core.params import Variant
from pipeline.divergence.store import Window
from pipeline.evalset.calibration import Calibration
from pipeline.evalset.windows import prompt_ids
from pipeline.model import attestation, headers
from pipeline.model.config import appended, end_ids, text_config, window

WINDOWS = [  # that begin alike, of two lengths, the last scored from its middle on, as a trajectory is
    Window("s", f"w{r}", f"d{r}", tuple(3 + (7 * k * k + 31 * r * (k > 1) + k) % 500 for k in range(n)), first, "x")
    for r, (n, first) in enumerate([(200, 1), (200, 1), (60, 40)])
]
INT8 = Variant(quantizer="torchao", options={"scheme": "int8-weight-only"})
SLICE = ["gpt2", "gemma2", "gemma3", "qwen3_moe", "llama4_text", "mamba", "minimax"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model of the zoo, made once."""
    home = tmp_path_factory.mktemp("zoo")

    def folder(name: str) -> Path:
        return home / name if (home / name).exists() else zoo.make(name, home / name)

    return folder


@pytest.fixture(scope="module")
def loaded(model: Any) -> Any:
    """A model of the zoo in engine hf, loaded once."""
    return cache(lambda name: engines.load("hf", model(name), threads=1))


@pytest.fixture
def outline(tmp_path: Path) -> Any:
    """The folder of a model of the zoo without its values: what check reads is its config and its class."""

    def folder(name: str, **settings: Any) -> Path:
        zoo.config(name, **settings).save_pretrained(tmp_path / name)
        return tmp_path / name

    return folder


@pytest.mark.parametrize("name", SLICE)
def test_the_reference_through_its_own_store_is_exactly_itself(loaded: Any, tmp_path: Path, name: str) -> None:
    """Whatever a model's own class reads of its body's output besides hidden states, and whatever scales or caps its logits."""
    engine = loaded(name)
    store = stored(engine, WINDOWS, tmp_path / "store")
    assert store.manifest["kind"] == "hidden", store.manifest["why_not_hidden"]
    blocks = list(diverge.diverge(engine, store, batch_size=2, threads=1))
    assert sum(len(b["kld"]) for b in blocks) == sum(w.scored for w in WINDOWS)
    assert not any(value for b in blocks for value in b["kld"])


def test_a_class_that_needs_more_than_hidden_states_is_stored_as_logits_and_said(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded("gpt2")

    def needs_more(hidden: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(engine.head, "tensor", needs_more)
    store = stored(engine, WINDOWS, tmp_path / "store")
    assert store.manifest["kind"] == "logits"
    assert "no logits from hidden states alone (IndexError: tuple index" in store.manifest["why_not_hidden"]


def test_logits_a_step_of_rounding_apart_are_counted_and_more_is_inexact(loaded: Any) -> None:
    engine = loaded("gpt2")
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


def test_attention_is_the_best_the_model_has_and_what_it_has_not_is_refused_in_words(loaded: Any, model: Any) -> None:
    assert [loaded(name).attention for name in ("gpt2", "gemma2")] == ["sdpa", "eager"]
    with pytest.raises(Unsupported, match="this model has no attention: sdpa; take auto"):
        engines.load("hf", model("gemma2"), threads=1, attention="sdpa")


@pytest.mark.parametrize("name, tokens", [("gemma3", 256), ("gptj", 1024), ("mpt", 1024), ("opt", 1024)])
def test_the_window_is_the_text_part_s_whatever_its_name(outline: Any, name: str, tokens: int) -> None:
    assert window(text_config(outline(name))) == tokens


# --- what is packed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, method, count", [
    ("gpt2", "bnb", 8), ("gpt2", "torchao", 0), ("bloom", "torchao", 8), ("gpt_neox", "torchao", 8), ("mpt", "bnb", 8),
    ("qwen3_moe", "torchao", 8), ("llama", "torchao", 14), ("falcon", "torchao", 0), ("mamba", "torchao", 6),
])  # fmt: skip
def test_a_method_packs_the_matrices_of_its_kinds_whatever_they_are_called(
    outline: Any, name: str, method: str, count: int
) -> None:
    assert len(headers.linear_shapes(outline(name), explain.backend("quantizers", method).PACKS)) == count


def test_check_says_which_share_of_a_mixture_a_method_packs(outline: Any) -> None:
    """By hand: of 2 layers of q, k, v, o (64 x 64, 64 x 32 twice, 64 x 64) and 4 experts of 3 x 64 x 64 the first part only."""
    attention, experts = 2 * (2 * 64 * 64 + 2 * 64 * 32), 2 * 4 * 3 * 64 * 64
    said = quantizers.packs_only("torchao", outline("qwen3_moe"))
    assert said is not None and f"packs {100 * attention / (attention + experts):.0f} %" in said and "Qwen3MoeExperts" in said
    assert quantizers.packs_only("torchao", outline("llama")) is None
    assert quantizers.packs_only("rtn", outline("qwen3_moe")) is None


AO, BNB, RTN, ONNX = (
    ("torchao", {"scheme": "int8-weight-only"}), ("bnb", {"type": "int8"}), ("rtn", {"bits": 8, "group_size": 32}),
    ("onnx", {"precision": "int4"}),
)  # fmt: skip


@pytest.mark.parametrize("name, settings, method, why", [
    ("gpt2", {}, AO, "no matrix that quantizer 'torchao' packs"),
    ("deepseek_v3", {}, AO, None), ("deepseek_v3", {}, BNB, "int8 has no latent attention on a CPU"),
    ("mamba", {}, AO, None), ("mamba", {}, BNB, r"weights of backbone.layers.0.mixer.dt_proj itself.*keep: \['\*.dt_proj'\]"),
    ("mamba", {}, RTN, "dt_proj itself"), ("mamba", {}, ("rtn", RTN[1] | {"keep": ["*.dt_proj"]}), None),
    ("llama4_text", {}, AO, None), ("llama4_text", {}, BNB, "splits Llama4TextExperts into matrices that are not in"),
    ("minimax", {}, RTN, "knows no part mlp in the layers of model_type minimax"), ("mixtral", {}, RTN, None),
    ("llama", {}, ONNX, None), ("gemma2", {}, ONNX, None), ("gpt2", {}, ONNX, "builder has no GPT2LMHeadModel"),
    ("mistral-window", {}, ONNX, "all layers see a window of 64 tokens, which ONNX Runtime's builder does not keep"),
    ("mistral-window", {"sliding_window": 4096}, ONNX, None), ("gemma3_text", {}, ONNX, "one for each kind of layer"),
    ("phi", {}, ONNX, None),
    ("phi", {"num_attention_heads": 4}, ONNX, "turns heads by multiples of 16, and 8 of 16 are left over"),
    ("gpt_oss", {}, ("onnx", {"precision": "fp32"}), None), ("gpt_oss", {}, ONNX, "the base has no gate_up_proj_blocks"),
])  # fmt: skip
def test_what_a_method_cannot_do_with_a_model_is_said_at_check(
    outline: Any, name: str, settings: dict[str, Any], method: tuple[str, dict[str, Any]], why: str | None
) -> None:
    with pytest.raises(Unsupported, match=why) if why else nullcontext():
        quantizers.check_model(*method, outline(name, **settings))


def built(variant: Variant, base: Path, out: Path) -> Any:
    """The facts of a variant in a new folder."""
    out.mkdir()
    return quantize.quantize(variant, base, out, calibration=Calibration(Path("none")), seed=1)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_copies_of_a_tied_head_and_buffers_are_no_weights(tmp_path: Path, name: str) -> None:
    """16 bits a weight, and the same int8 variant, as without them; another head's values count."""
    import torch

    folder = zoo.make(name, tmp_path / "model", tie_word_embeddings=True)
    whole, packed, tensors = headers.count_weights(folder), built(INT8, folder, tmp_path / "whole"), tensors_of(folder)
    inner, head = ("model.embed_tokens", "lm_head") if name == "llama" else ("gpt_neox.embed_in", "lm_head")
    copy = tensors[f"{inner}.weight"].clone()
    masks = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    if name == "gpt_neox":
        masks = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 512, 512, dtype=torch.bool)}
    write_tensors(folder, tensors | masks | {f"{head}.weight": copy})
    assert headers.count_weights(folder) == whole and built(INT8, folder, tmp_path / "copied") == packed
    size = attestation.measure(folder, folder)
    assert size["bits_per_weight"] == 16 and size["quantized_share"] == 0
    write_tensors(folder, tensors | {f"{head}.weight": copy + 1})
    assert headers.count_weights(folder) == whole + copy.numel()


def test_a_model_that_takes_pictures_is_packed_and_answers(model: Any, tmp_path: Path) -> None:
    facts = built(INT8, model("gemma3"), tmp_path / "out")
    quantize.answer(INT8, tmp_path / "out", facts, 1)
    assert facts["modules"] == len(headers.linear_shapes(model("gemma3"), explain.backend("quantizers", "torchao").PACKS))


def test_weights_saved_without_the_model_s_prefix_are_the_same_weights(model: Any, tmp_path: Path) -> None:
    whole, bare = model("llama"), Path(shutil.copytree(model("llama"), tmp_path / "bare"))
    write_tensors(bare, {name.removeprefix("model."): tensor for name, tensor in tensors_of(bare).items()})
    assert headers.linear_shapes(bare) == headers.linear_shapes(whole)
    assert attestation.measure(bare, whole)["quantized_share"] == attestation.measure(whole, bare)["quantized_share"] == 0


ATTENTION = [(64, 64), (32, 64), (32, 64), (64, 64)]  # outputs and inputs of q, k, v, o
PACKED = {  # matrices of one of two layers, and how many values stay at 16 bits: embeddings, head, norms, routers, biases
    "llama": ([*ATTENTION, (128, 64), (128, 64), (64, 128)], 2 * 512 * 64 + 64 + 2 * 2 * 64),
    "qwen3_moe": (ATTENTION + 4 * 3 * [(64, 64)], 2 * 512 * 64 + 64 + 2 * (2 * 64 + 2 * 16 + 4 * 64)),
    "gpt2": ([(192, 64), (64, 64), (256, 64), (64, 256)], (512 + 1024 + 2) * 64 + 2 * (4 * 64 + 192 + 64 + 256 + 64)),
}


@pytest.mark.filterwarnings("ignore")  # gptqmodel's own, at load
@pytest.mark.parametrize("name", PACKED)
def test_fused_experts_and_turned_matrices_run_packed_in_engine_hf(model: Any, name: str) -> None:
    """Each matrix is packed once, in the bits counted by hand, runs in gptqmodel's kernel, is within half a step of 8 bits (and a
    bfloat16's) of the model's own, and all are together to the last bit what the model's class makes of these matrices.

    Near the model's own logits they need not be: of a random mixture some tokens take another expert, and are then far off.
    """
    import torch

    matrices, rest = PACKED[name]
    weights = 2 * sum(outputs * inputs for outputs, inputs in matrices)
    bits = 2 * sum(outputs * inputs * (8 + 24 / 32) + 32 * inputs for outputs, inputs in matrices)  # of groups, of input columns
    variant = Variant(quantizer="rtn", options={"bits": 8, "group_size": 32})
    facts = built(variant, model(name), Path("out"))
    quantize.answer(variant, Path("out"), facts, 1)
    engine: Any = engines.load("hf", Path("out"), threads=1)
    assert facts["bits_per_weight"] == pytest.approx((bits + 16 * rest) / (weights + rest), abs=1e-9)
    assert facts["quantized_share"] == pytest.approx(weights / (weights + rest), abs=1e-9)
    assert facts["modules"] == 2 * len(matrices) == sum(n for kind, n in engine.kernels().items() if "[" not in kind)
    base: Any = engines.load("hf", model(name), threads=1)
    plain = dict(base.model.named_parameters())
    with torch.no_grad():
        for module, part in engine.model.named_modules():
            if hasattr(part, "qweight"):
                matrix = _matrix(plain, module)
                rounded = part.dequantize_weight().to(matrix.dtype)  # [inputs, outputs]
                rounded = rounded if name == "gpt2" else rounded.T
                assert 0 < (rounded - matrix).abs().max() < (1 / 255 + 1 / 256) * matrix.abs().max()
                matrix.copy_(rounded)
    ids = list(range(5, 60))
    assert (engine.logits(ids) == base.logits(ids)).all()


def _matrix(weights: dict[str, Any], module: str) -> Any:
    """The model's own matrix of a packed module; of experts, transformers holds gate and up of all in one tensor."""
    if f"{module}.weight" in weights:
        return weights[f"{module}.weight"]
    experts, expert, part = module.rsplit(".", 2)
    if part in ("down_proj", "w2"):
        return weights[f"{experts}.down_proj"][int(expert)]
    both = weights[f"{experts}.gate_up_proj"][int(expert)]
    return both.chunk(2)[part in ("up_proj", "w3")]


# --- what other engines lose -------------------------------------------------------------------------------------


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that were given to a converter which knows the tests' tokenizer, in an environment that is here."""
    asked: list[Path] = []

    def convert(model_dir: Path, out: Path, *options: str) -> None:
        asked.append(model_dir)
        write_gguf(model_dir, out)

    monkeypatch.setattr("pipeline.quantizers.gguf._convert", convert)
    monkeypatch.setattr(isolate, "isolated", lambda work, *given, what: work(*given))
    monkeypatch.setattr(venvs, "FILES", ROOT / "envs")
    monkeypatch.setattr(venvs, "HOME", tmp_path / "environments")
    (venvs.folder("gguf")).mkdir(parents=True)
    (venvs.folder("gguf") / venvs.READY).touch()
    return asked


@pytest.mark.parametrize("settings, why", [
    ({}, None),
    ({"sliding_window": 64}, "2 of 2 layers see a window of 64 tokens, and llama.cpp keeps none: GGUF would be another model"),
    ({"sliding_window": 8192}, None),  # longer than any text that is read
    ({"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"]}, "1 of 2 layers see a window of 64"),
    ({"query_pre_attn_scalar": 256, "head_dim": 16}, "attention is scaled for heads of 256, and llama.cpp scales by 0"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False, which llama.cpp does not read for llama"),
    ({"num_key_value_heads": 4}, "llama.cpp cannot read this model as GGUF .*'blk.0.attn_k.weight' has wrong shape"),
])  # fmt: skip
def test_a_model_that_llama_cpp_cannot_read_or_makes_another_of_is_refused_at_check(
    model: Any, tmp_path: Path, converter: list[Path], settings: dict[str, Any], why: str | None
) -> None:
    folder = Path(shutil.copytree(model("llama"), tmp_path / "model"))
    change_json(folder / "config.json", **settings)
    for _ in range(2):
        with pytest.raises(Unsupported, match=why) if why else nullcontext():
            quantizers.check_model("gguf", {"type": "BF16"}, folder)
    assert len(converter) == 1  # asked once


def test_a_4_bit_product_of_blocks_that_a_matrix_does_not_fill_is_refused_at_check(
    outline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = outline("llama", intermediate_size=96)
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: True)
    with pytest.raises(Unsupported, match="multiples of 32 outputs and 64 inputs, and model.layers.0.mlp.down_proj has 64 and 96"):
        quantizers.check_model("bnb", {"type": "nf4"}, folder)
    quantizers.check_model("bnb", {"type": "int8"}, folder)
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: False)
    quantizers.check_model("bnb", {"type": "nf4"}, folder)


def test_a_recurrent_state_is_computed_anew_where_a_text_begins_as_the_last_did(tmp_path: Path, tiny: Path) -> None:
    """A state cannot be cut back to the tokens that two texts share."""
    shutil.copytree(tiny, tmp_path / "model")
    write_mamba(tiny, tmp_path / "model" / "model.gguf")
    one, fresh = (engines.load("llamacpp", tmp_path / "model", threads=1) for _ in range(2))
    first, second = ([3, 4, *range(last, last + 20)] for last in (50, 90))
    blocks = [list(engine.logit_blocks([ids], [1], 128)) for engine, ids in ((one, first), (one, second), (fresh, second))]
    assert (blocks[1][0][2] == blocks[2][0][2]).all() and (blocks[0][0][2] != blocks[1][0][2]).any()


def write_mamba(model_dir: Path, out: Path) -> None:
    """A Mamba of one layer with random weights, as GGUF, with a model's tokenizer."""
    import gguf
    import numpy as np

    d, inner, state, rank, kernel = 16, 32, 4, 2, 4
    vocab = artifacts.read_json(model_dir / "tokenizer.json")["model"]
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].__getitem__)
    writer = gguf.GGUFWriter(out, "mamba")
    for key, value in {"context_length": 128, "embedding_length": d, "block_count": 1, "feed_forward_length": 0, "head_count": 0,
                       "ssm_conv_kernel": kernel, "ssm_inner_size": inner, "ssm_state_size": state, "ssm_time_step_rank": rank,
                       "layer_norm_rms_eps": 1e-5, "tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": tokens,
                       "token_merges": [" ".join(m) for m in vocab["merges"]]}.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), d), "output_norm.weight": (d,), "blk.0.attn_norm.weight": (d,),
              "blk.0.ssm_in.weight": (2 * inner, d), "blk.0.ssm_conv1d.weight": (inner, kernel), "blk.0.ssm_conv1d.bias": (inner,),
              "blk.0.ssm_x.weight": (rank + 2 * state, inner), "blk.0.ssm_dt.weight": (inner, rank), "blk.0.ssm_dt.bias": (inner,),
              "blk.0.ssm_a": (inner, state), "blk.0.ssm_d": (inner,), "blk.0.ssm_out.weight": (d, inner)}  # fmt: skip
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, -np.abs(values) if name == "blk.0.ssm_a" else values)
    write_gguf_parts(writer)


def test_end_tokens_are_those_of_the_base_and_its_tokenizer(tmp_path: Path) -> None:
    """A list in generation_config goes before config.json's; the tokenizer's own end is one in any case."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": [6, 7]}}')
    tokenizer = SimpleNamespace(eos_token_id=2)
    assert end_ids(tmp_path, tokenizer) == {2, 6, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 14]}')
    assert end_ids(tmp_path, tokenizer) == {2, 3, 14}


def test_an_end_that_a_tokenizer_appends_stands_in_no_text_that_goes_on() -> None:
    from conftest import make_tokenizer
    from tokenizers import processors

    tokenizer = make_tokenizer()
    text = {"id": "p", "prompt": "What is two?"}
    plain = tokenizer(text["prompt"], add_special_tokens=False).input_ids
    assert appended(tokenizer) == 0 and prompt_ids(text, tokenizer) == plain
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert tokenizer(text["prompt"]).input_ids == [1, *plain, 2]
    assert appended(tokenizer) == 1 and prompt_ids(text, tokenizer) == [1, *plain]


def test_a_choice_is_scored_after_its_context_without_an_end_between(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import processors

    from pipeline.engines._lm_eval import lm_for

    engine = loaded("gpt2")
    monkeypatch.setattr(engine, "tokenizer", copy.deepcopy(engine.tokenizer))
    before = lm_for(engine, 1).encoded("What is two?", " four")
    engine.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    lm = lm_for(engine, 1)
    assert lm.encoded("What is two?", " four") == before and 2 not in before[0] + before[1]
    ids, mask = lm.tok_batch_encode(["What is two?", "Two"])
    assert not (ids[mask.bool()] == 2).any()
