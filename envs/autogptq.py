"""AutoGPTQ quantizes a folder, on CUDA only: `python autogptq.py request.json`, in the environment of autogptq.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import old_stack


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    """Request: base, out, rows (token ids), bits, group_size, act_order, damping, batch_size."""
    import torch

    old_stack.check_config(request["base"])
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig

    asked = BaseQuantizeConfig(
        bits=request["bits"],
        group_size=request["group_size"],
        desc_act=request["act_order"],
        damp_percent=request["damping"],
        model_file_base_name="model",
    )
    try:
        # its default; scales are stored in this type
        model = AutoGPTQForCausalLM.from_pretrained(request["base"], asked, torch_dtype=torch.float16)
    except TypeError as e:  # its list of architectures
        raise old_stack.Unsupported(f"AutoGPTQ: {e}") from None
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in request["rows"]]
    model.quantize(rows, batch_size=request["batch_size"], cache_examples_on_gpu=False)
    config = model.model.config.to_dict()
    old_stack.cast(model.model, torch.bfloat16)  # as the other backends leave embeddings and norms
    model.save_quantized(request["out"])
    drop_extras(Path(request["out"]) / "model.safetensors", model.model, Path(request["base"]))
    old_stack.cast(model.model, torch.float16)
    packed = sum(hasattr(m, "qweight") for m in model.model.modules())
    return {"config": config, "modules": packed, "probe": old_stack.answer(model.model, request)}


def drop_extras(file: Path, model: Any, base: Path) -> None:
    """It writes tied weights twice and gives every layer a bias: a checkpoint has the tensors that its base has."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    known: set[str] = set()
    for shard in base.glob("*.safetensors"):
        with safe_open(shard, "pt") as f:
            known |= set(f.keys())
    tied = set(model._tied_weights_keys or []) if model.config.tie_word_embeddings else set()
    tensors = load_file(file)
    extra = tied | {name for name in tensors if name.endswith(".bias") and name not in known}
    if any(bool(tensors[name].any()) for name in extra - tied):
        raise RuntimeError("AutoGPTQ wrote a bias that is not zero for a layer without one")
    save_file({name: tensor for name, tensor in tensors.items() if name not in extra}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    old_stack.main(quantize, ("auto-gptq", "optimum", "peft"))
