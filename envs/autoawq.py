"""AutoAWQ quantizes a folder to 4 bits: `python autoawq.py request.json`, in the environment of autoawq.txt."""

from __future__ import annotations

from typing import Any

import old_stack


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    """Request: base, out, rows (token ids of equal length), kept (full names), bits, group_size."""
    import torch

    old_stack.check_config(request["base"])
    from awq import AutoAWQForCausalLM
    from awq.modules.linear import WQLinear_GEMM

    try:
        # float32: its default, float16, is slow on a CPU and can overflow; codes are made in float16 either way
        model = AutoAWQForCausalLM.from_pretrained(request["base"], torch_dtype=torch.float32, trust_remote_code=False)
    except TypeError as e:  # its list of architectures
        raise old_stack.Unsupported(f"AutoAWQ: {e}") from None
    rows = request["rows"]
    model.quantize(
        None,
        {"zero_point": True, "q_group_size": request["group_size"], "w_bit": request["bits"], "version": "GEMM"},
        calib_data=rows,
        # rows are joined and cut again at this length: the very same rows
        max_calib_seq_len=len(rows[0]),
        max_calib_samples=len(rows),
        n_parallel_calib_samples=1,  # one row's activations at a time
        quantizer_cls=quantizer(frozenset(request["kept"])),
    )
    config = model.model.config.to_dict()
    old_stack.cast(model.model, torch.bfloat16)  # as the other backends leave embeddings, norms and kept layers
    model.save_quantized(request["out"])
    old_stack.cast(model.model, torch.float32)
    packed = sum(isinstance(m, WQLinear_GEMM) for m in model.model.modules())
    return {"config": config, "modules": packed, "probe": old_stack.answer(model.model, request)}


def quantizer(kept: frozenset[str]) -> Any:
    """AutoAWQ's quantizer class, made right on a CPU, that leaves layers of these full names alone.

    Its search of scales restores the weights after each try from what it takes for a copy: `v.cpu()`. On a CPU that is the weights
    themselves, and every layer would stay multiplied by the first scales tried: a wrecked model, without a word.
    Its `modules_to_not_convert` means a kind of layer in every block, and the search then asks for inputs that it did not record.
    Here kept layers take part in the search (their scales are folded in, which changes nothing that they compute).
    """
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.module import get_op_name

    class Quantizer(AwqQuantizer):
        def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *more: Any, **named: Any) -> Any:
            hook = module2inspect.register_state_dict_post_hook(copy_tensors)
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *more, **named)
            finally:
                hook.remove()

        def _packed(self, block: Any, linears: dict[str, Any]) -> dict[str, Any]:
            name = get_op_name(self.model, block)
            return {n: layer for n, layer in linears.items() if f"{name}.{n}" not in kept}

        def _search_best_clip(self, layer: Any, named_linears: dict[str, Any], input_feat: Any) -> Any:
            return super()._search_best_clip(layer, self._packed(layer, named_linears), input_feat)

        def _apply_quant(self, module: Any, named_linears: dict[str, Any]) -> None:
            super()._apply_quant(module, self._packed(module, named_linears))

    return Quantizer


def copy_tensors(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook after `module.state_dict()`, which gives the weights themselves, under other names."""
    for name in state_dict:
        state_dict[name] = state_dict[name].clone()


if __name__ == "__main__":
    old_stack.main(quantize, ("autoawq",))
