"""Bases that were published packed: each value by hand, from codes and scales that NumPy makes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_house import change_json, fetch, tensors_of, write_tensors

from pipeline.core.errors import DownloadError

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RNG = np.random.default_rng(20261201)


Packed = tuple[dict[str, Any], Any]  # tensors of a packed matrix, and its values


@pytest.fixture
def base(tiny_bf16: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bf16, tmp_path / "base"))


def repack(base: Path, settings: dict[str, Any], pack: Callable[[str, Any], Packed], chosen: str = "_proj") -> dict[str, Any]:
    """Pack a base's matrices of some names; returns the values that all its tensors then stand for."""
    packed, values = {}, {}
    for name, tensor in tensors_of(base).items():
        tensors, values[name] = pack(name, tensor) if chosen in name else ({name: tensor}, tensor)
        packed |= tensors
    write_tensors(base, packed)
    change_json(base / "config.json", quantization_config=settings)
    return values


def same(folder: Path, values: dict[str, Any]) -> bool:
    import torch

    written = tensors_of(folder)
    return written.keys() == values.keys() and all(torch.equal(written[name], value) for name, value in values.items())


def bf16(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()


def mxfp4(name: str, matrix: Any) -> Packed:
    """gpt-oss keeps the experts' matrices [experts, inputs, outputs], and packed [experts, outputs, groups of 32 inputs]."""
    import torch

    experts, inputs, outputs = matrix.shape
    codes = RNG.integers(0, 16, (experts, outputs, inputs // 32, 32), np.uint8)
    scales = RNG.integers(118, 126, (experts, outputs, inputs // 32), np.uint8)
    values = FP4[codes] * np.exp2(scales[..., None].astype(np.float32) - 127)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    packed = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    return packed, bf16(values.reshape(experts, outputs, inputs).transpose(0, 2, 1))


def fp8(name: str, matrix: Any, high: int = 48, wide: int = 40) -> Packed:
    """Scales of blocks; the last one of a row and a column may be cut short."""
    import torch

    rows, columns = matrix.shape
    codes = torch.from_numpy(RNG.normal(0, 100, (rows, columns)).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = np.exp(RNG.normal(-7, 1, (-(-rows // high), -(-columns // wide)))).astype(np.float32)
    of_each = scale[np.arange(rows)[:, None] // high, np.arange(columns) // wide]
    return {name: codes, f"{name}_scale_inv": torch.from_numpy(scale)}, bf16(codes.float().numpy() * of_each)


def packed_int(name: str, matrix: Any, bits: int, group: int, zeros: bool, ordered: bool) -> Packed:
    """Codes in 32-bit words along the inputs, the zero points along the outputs."""
    import torch

    rows, columns = matrix.shape
    low, high = -(1 << bits - 1), 1 << bits - 1
    codes = RNG.integers(low, high, (rows, columns))
    zero = RNG.integers(low // 2, high // 2, (rows, columns // group)) * zeros
    scale = bf16(np.exp(RNG.normal(-4, 1, zero.shape)))
    of = np.arange(columns) // group if ordered else RNG.permutation(np.arange(columns) // group)

    def pack(values: np.ndarray) -> Any:
        shifted = (values - low).astype(np.uint64)
        each = 32 // bits
        shifted = np.pad(shifted, ((0, 0), (0, -shifted.shape[1] % each))).reshape(len(values), -1, each)
        return torch.from_numpy((shifted << np.arange(0, 32, bits).astype(np.uint64)).sum(-1).astype(np.uint32).view(np.int32))

    stem = name.removesuffix("weight")
    tensors = {
        f"{stem}weight_packed": pack(codes),
        f"{stem}weight_scale": scale,
        f"{stem}weight_shape": torch.tensor([rows, columns]),
    }
    tensors |= {f"{stem}weight_zero_point": pack(zero.T).T} if zeros else {}
    tensors |= {} if ordered else {f"{stem}weight_g_idx": torch.from_numpy(of.astype(np.int32))}
    return tensors, bf16((codes - zero[:, of]) * scale.float().numpy()[:, of])


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def whole_scale(name: str, matrix: Any, dtype: str, shape: tuple[int, ...]) -> Packed:
    """One scale a row, or one in all."""
    import torch

    codes = torch.from_numpy(RNG.normal(0, 30, tuple(matrix.shape)).astype(np.float32)).to(getattr(torch, dtype))
    scale = np.exp(RNG.normal(-6, 1, shape)).astype(np.float32)
    return {name: codes, f"{name}_scale": torch.from_numpy(scale)}, bf16(codes.float().numpy() * scale)


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 40]}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Any], Packed]]] = {
    "FP8": (FP8, fp8),
    "INT4 (compressed-tensors)": (compressed("pack-quantized", **INT4), lambda n, m: packed_int(n, m, 4, 16, False, True)),
    "INT8 (compressed-tensors)": (
        compressed("pack-quantized", **(INT4 | {"num_bits": 8, "symmetric": False})),
        lambda n, m: packed_int(n, m, 8, 16, True, False),
    ),
    "FP8 (compressed-tensors)": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        lambda n, m: whole_scale(n, m, "float8_e4m3fn", (m.shape[0], 1)),
    ),
    " INT8 (compressed-tensors)": (
        compressed("int-quantized", type="int", num_bits=8, strategy="tensor"),
        lambda n, m: whole_scale(n, m, "int8", (1,)),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_base_is_written_as_the_values_that_its_codes_stand_for(base: Path, tmp_path: Path, name: str) -> None:
    import torch

    settings, pack = FORMATS[name]

    def with_scale_of_inputs(name: str, matrix: Any) -> Packed:
        tensors, values = pack(name, matrix)
        return tensors | {name.replace("weight", "input_scale"): torch.ones(1)}, values

    values = repack(base, settings, with_scale_of_inputs)
    with pytest.raises(DownloadError, match=r"`dequantize: true` under `model`"):
        fetch(base, tmp_path / "refused")
    assert fetch(base, tmp_path / "out", dequantize=True)["dequantized_from"] == name.strip()
    assert same(tmp_path / "out", values)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_experts_in_mxfp4_are_the_model_that_transformers_makes_of_them(base: Path, tmp_path: Path) -> None:
    """gpt-oss; its attention, router and embeddings are not packed. Its logits are those of transformers' own dequantization."""
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
        pad_token_id=2, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    GptOssForCausalLM(config).bfloat16().save_pretrained(base)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}

    def pack(name: str, tensor: Any) -> Packed:
        return mxfp4(name, tensor) if name.endswith("_proj") and tensor.dim() == 3 else ({name: tensor}, tensor)

    values = repack(base, settings, pack)
    assert fetch(base, tmp_path / "out", dequantize=True)["dequantized_from"] == "MXFP4" and same(tmp_path / "out", values)
    here, there = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in (tmp_path / "out", base))
    ids = torch.arange(40)[None]
    assert torch.equal(here(ids).logits, there(ids).logits)


def test_many_shards_are_written_and_scales_in_another_shard_are_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.model import streaming

    monkeypatch.setattr(streaming, "SHARD_BYTES", 40_000)
    values, tensors = repack(base, FP8, fp8), tensors_of(base)
    (base / "model.safetensors").unlink()
    shard_of = {name: f"{'scales' if 'scale' in name else 'codes'}.safetensors" for name in tensors}
    for shard in set(shard_of.values()):
        write_tensors(base, {name: tensor for name, tensor in tensors.items() if shard_of[name] == shard}, shard)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    fetch(base, tmp_path / "out", dequantize=True)
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(written) > 3 and same(tmp_path / "out", values)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == values.keys() and set(index.values()) == {f.name for f in written}


def test_a_code_without_its_scale_is_named(base: Path, tmp_path: Path) -> None:
    repack(base, {"quant_method": "fp8"}, lambda name, matrix: ({name: fp8(name, matrix)[0][name]}, None), "1.mlp.up_proj")
    with pytest.raises(DownloadError, match="up_proj.weight is packed and its scale is not among the weights"):
        fetch(base, tmp_path / "out", dequantize=True)


@pytest.mark.parametrize("settings, word", [
    ({"quant_method": "gptq", "bits": 4}, r"\(gptq\).*weights of gptq cannot be dequantized here; take the full-precision"),
    (compressed("nvfp4-pack-quantized", type="float", num_bits=4), "of format nvfp4-pack-quantized cannot"),
    (compressed("pack-quantized", type="int", num_bits=3), "of 3 bits cannot"),
])  # fmt: skip
def test_what_cannot_be_dequantized_is_refused_by_name(base: Path, tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    change_json(base / "config.json", quantization_config=settings)
    with pytest.raises(DownloadError, match=word):
        fetch(base, tmp_path / "out", dequantize=True)
