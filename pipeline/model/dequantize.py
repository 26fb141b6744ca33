"""Write bases that were published with packed weights (MXFP4, FP8, INT4 of compressed-tensors) as bfloat16.

Tensor by tensor, not by transformers, which holds the whole model and assumes equal blocks for the scales of FP8: DeepSeek's 576
rows in blocks of 128 end in half a block."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.artifacts import read_json, write_json
from pipeline.core.errors import DownloadError
from pipeline.core.records import Json
from pipeline.model.config import nested
from pipeline.model.streaming import chunks, write

if TYPE_CHECKING:
    from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # of the 16 codes of E2M1
# Ends of the names of tensors that belong to a weight.
BESIDE = ("weight_scale_inv", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "proj_scales", "proj_scale_inv")
UNUSED = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale")  # of activations
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def packed_as(config: Json) -> str | None:
    """The format of a config's packed weights, or None."""
    settings = _settings(config)
    if not settings:
        return None
    method = str(settings.get("quant_method", "a method that is not named"))
    if method == "compressed-tensors":
        kinds = {f"{w['type']}{w['num_bits']}".upper().replace("FLOAT", "FP") for w in _weights(settings)}
        return f"{' and '.join(sorted(kinds))} (compressed-tensors)"
    return {"mxfp4": "MXFP4", "fp8": "FP8"}.get(method, method)


def why_not(config: Json) -> str | None:
    """Why packed weights cannot be dequantized here, or None."""
    settings = _settings(config)
    if settings.get("quant_method") in ("mxfp4", "fp8"):
        return None
    if settings.get("quant_method") != "compressed-tensors":
        return f"weights of {packed_as(config)} cannot be dequantized here"
    default, groups = settings.get("format"), settings.get("config_groups", {})
    formats = {default, *(g.get("format") or default for g in groups.values())}
    if odd := sorted(str(f) for f in formats - {*FORMATS, "mixed-precision"}):
        return f"compressed-tensors of format {odd[0]} cannot be dequantized here ({', '.join(FORMATS)} can)"
    if odd := sorted({w["num_bits"] for w in _weights(settings)} - {4, 8}):
        return f"compressed-tensors of {odd[0]} bits cannot be dequantized here (4 and 8 can)"
    return None


def dequantize(folder: Path) -> None:
    """Replace a folder's packed weights by their values in bfloat16, and remove the quantization from config.json. Other weights
    stay as they are. Raises `DownloadError` if a scale is missing."""
    from safetensors import safe_open

    config = read_json(folder / "config.json")
    block, shards = _block(_settings(config)), sorted(folder.glob("*.safetensors"))
    opened: list[Any] = [safe_open(shard, framework="pt") for shard in shards]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor | None:
        return where[name].get_tensor(name) if name in where else None

    kept = {name: where[name].get_tensor(name) for name in where if not name.endswith(BESIDE + UNUSED)}  # mapped, not read
    shapes = dict(_described(name, tensor, read) for name, tensor in kept.items())
    values = (_values(name, tensor, read, block) for name, tensor in kept.items())
    with tempfile.TemporaryDirectory(dir=folder) as out:
        write(Path(out), shapes, ((name, part) for name, tensor in values for part in chunks(tensor)), {"format": "pt"})
        for file in [*shards, *folder.glob("*.safetensors.index.json")]:
            file.unlink()
        for file in Path(out).iterdir():
            file.rename(folder / file.name)
    for part in [config, *nested(config)]:
        part.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", config | {"dtype": "bfloat16"})


def _settings(config: Json) -> Json:
    return next((part["quantization_config"] for part in [config, *nested(config)] if part.get("quantization_config")), {})


def _weights(settings: Json) -> list[Json]:
    return [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]


def _described(name: str, tensor: Tensor, read: Any) -> tuple[str, tuple[str, tuple[int, ...]]]:
    if name.endswith("_blocks"):
        return name.removesuffix("_blocks"), ("bfloat16", (tensor.shape[0], 2 * tensor[0, 0].numel(), tensor.shape[1]))
    if name.endswith("weight_packed"):
        stem = name.removesuffix("_packed")
        return stem, ("bfloat16", tuple(int(n) for n in _needed(read(f"{stem}_shape"), name)))
    return name, ("bfloat16" if _is_packed(tensor) else str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _is_packed(tensor: Tensor) -> bool:
    return str(tensor.dtype) in ("torch.int8", "torch.float8_e4m3fn", "torch.float8_e5m2")


def _values(name: str, tensor: Tensor, read: Any, block: tuple[int, int] | None) -> tuple[str, Tensor]:
    """A tensor's name and values in the model, unchanged if it is not packed."""
    import torch

    if name.endswith("_blocks"):  # gpt-oss: [experts, outputs, groups, 16 bytes]; its unpacked matrices are transposed
        stem = name.removesuffix("_blocks")
        scales = _needed(read(f"{stem}_scales"), name)
        values = torch.empty(tensor.shape[0], 2 * tensor[0, 0].numel(), tensor.shape[1], dtype=torch.bfloat16)
        for expert, (codes, scale) in enumerate(zip(tensor, scales)):
            nibbles = torch.stack((codes & 15, codes >> 4), dim=-1)  # two codes a byte, the low one first
            e2m1 = torch.tensor(FP4)[nibbles.int()].flatten(-2)
            values[expert] = torch.ldexp(e2m1, scale.int().unsqueeze(-1) - 127).flatten(-2).T  # biased powers of two
        return stem, values
    if name.endswith("weight_packed"):
        stem = name.removesuffix("_packed")
        outputs, inputs = (int(n) for n in _needed(read(f"{stem}_shape"), name))
        scale, zero = _needed(read(f"{stem}_scale"), name), read(f"{stem}_zero_point")
        bits = next(b for b in (4, 8) if -(-inputs * b // 32) == tensor.shape[1])
        codes = _unpack(tensor, bits)[:, :inputs]
        if zero is not None:
            zero = _unpack(zero.T.contiguous(), bits).T[:outputs]
        return stem, _scaled(codes, scale, zero, read(f"{stem}_g_idx"), block)
    if _is_packed(tensor):
        scale = next((s for end in ("_scale_inv", "_scale") if (s := read(name + end)) is not None), None)
        return name, _scaled(tensor, _needed(scale, name), read(f"{name}_zero_point"), None, block)
    return name, tensor


def _needed(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise DownloadError(f"{name} is packed and its scale is not among the weights; fetch them again")
    return tensor


def _block(settings: Json) -> tuple[int, int] | None:
    structures = (w["block_structure"] for w in _weights(settings) if w.get("block_structure"))
    block = settings.get("weight_block_size") or next(structures, None)
    return (int(block[0]), int(block[1])) if block else None


def _unpack(words: Tensor, bits: int) -> Tensor:
    import torch

    codes = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)
    return ((codes & (1 << bits) - 1) - (1 << bits - 1)).flatten(-2)


def _scaled(codes: Tensor, scale: Tensor, zero: Tensor | None, groups: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    """(codes - zero) * scale in bfloat16. The last block of a row or column may be short. groups: of each input, if not in
    order."""
    import torch

    if scale.dtype == torch.uint8:  # E8M0
        scale = torch.ldexp(torch.ones(()), scale.int() - 127)

    def spread(part: Tensor) -> Tensor:
        part = part.float()
        if part.numel() == 1:
            return part.reshape(())
        rows, columns = codes.shape[-2:]
        part = part.unsqueeze(-1) if part.dim() < codes.dim() else part
        high, wide = block if block and part.shape[-1] > 1 else (-(-rows // part.shape[-2]), -(-columns // part.shape[-1]))
        part = part.repeat_interleave(high, -2)[..., :rows, :]
        return part[..., groups.long()] if groups is not None else part.repeat_interleave(wide, -1)[..., :columns]

    values = codes.float() if zero is None else codes.float() - spread(zero)
    return (values * spread(scale)).to(torch.bfloat16)
