"""torchao: scaled integer or float8 weights; no calibration. Products run in torch's own kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts
from pipeline.core.errors import Unsupported, needs
from pipeline.evalset.calibration import Calibration
from pipeline.model.headers import any_linear, kept_layers, linear_widths, packed_bits, skeleton
from pipeline.model.streaming import Shapes, write
from pipeline.quantizers import Facts
from pipeline.quantizers._probe import probe
from pipeline.quantizers._reproducible import ANY_MACHINE, save

# torchao's config, and bits of a weight and of a row's or a group's scale and zero point in its files; the last three are untested.
SCHEMES: dict[str, tuple[str, dict[str, int]]] = {
    "int8-weight-only": ("Int8WeightOnlyConfig", {"weight": 8, "row": 32 + 8}),
    "int8-dynamic": ("Int8DynamicActivationInt8WeightConfig", {"weight": 8, "row": 32 + 8}),
    "int4-weight-only": ("Int4WeightOnlyConfig", {"weight": 4, "group": 32, "group_size": 128}),
    "float8-weight-only": ("Float8WeightOnlyConfig", {"weight": 8, "row": 32}),
    "float8-dynamic": ("Float8DynamicActivationFloat8WeightConfig", {"weight": 8, "row": 32}),
}
PACKS = any_linear
LOADED_AS = "torchao"
FLOAT8_SINCE = (8, 9)  # CUDA compute capability of the first cards with float8 products


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    scheme: Literal["int8-weight-only", "int8-dynamic", "int4-weight-only", "float8-weight-only", "float8-dynamic"],
    keep: list[str] = [],  # noqa: B006  # read only; the default is shown by name in errors and manifests
) -> Facts:
    """Quantize every Linear but the output head; embeddings stay in bfloat16. int8-dynamic: activations too are rounded to int8,
    row by row, when they are computed (W8A8). Without a kernel for this machine: `Unsupported`."""
    with needs("quantizer 'torchao'", "pip install torchao -c constraints.txt"):
        import torch
        from torchao import quantization as methods
        from transformers import AutoModelForCausalLM, TorchAoConfig
        from transformers.utils import logging
    _refuse_without_kernel(torch, scheme)
    config, bits = SCHEMES[scheme]
    kept, own = kept_layers(model_dir, keep), skeleton(model_dir)
    left = [own.head, *(n for n, m in own.matrices.items() if not PACKS(m))] if own else ["lm_head"]
    asked = TorchAoConfig(getattr(methods, config)(), modules_to_not_convert=[*kept, *left])
    logging.disable_progress_bar()
    loading = {
        "dtype": torch.bfloat16, "device_map": "cuda" if torch.cuda.is_available() else None, "use_safetensors": True,
        "trust_remote_code": artifacts.trusts_code(model_dir),
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_dir, **loading)  # its weights stay mapped where the files hold this type
    packed = _Packed(model, asked, "meta" if scheme.startswith("int8") else model.device)
    if packed.saves_as_loaded():
        answered = packed.probe()
        packed.save(out_dir)
    else:  # transformers loads other tensors than it saves, such as fused experts, and needs all of them at once
        model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=asked, **loading)
        answered = probe(model)
        save(model, out_dir)
    return {
        "library": "torchao", "head": "bfloat16", "kept": kept, "modules": len(linear_widths(model_dir, PACKS).keys() - kept),
        "expected_bits": packed_bits(model_dir, kept, packs=PACKS, **bits), "probe": answered,
        "reproducible": ANY_MACHINE,
    }  # fmt: skip


def _refuse_without_kernel(torch: Any, scheme: str) -> None:
    cuda = torch.cuda.is_available()
    if scheme == "int4-weight-only" and not cuda:
        raise Unsupported("torchao's int4 needs a CUDA device: it has no packed kernel for this CPU")
    if scheme.startswith("float8") and not (cuda and torch.cuda.get_device_capability() >= FLOAT8_SINCE):
        raise Unsupported("float8 products need a CUDA device of compute capability 8.9 or later")


class _Packed:
    """A 16-bit model whose matrices are packed one at a time, both for the probe and for saving, so that memory stays near one
    model. The files equal those of transformers' `save_pretrained` for a model that was loaded with the same config."""

    def __init__(self, model: Any, asked: Any, shapes_on: Any) -> None:
        import torch
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
        from transformers.quantizers.quantizers_utils import should_convert_module

        self.model, self.asked, self.shapes_on = model, asked, shapes_on
        self.linears = {
            name: part
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear) and should_convert_module(name, asked.modules_to_not_convert)
        }
        self.state = model.state_dict()
        self.saved = remove_tied_weights_from_state_dict(dict(self.state), model).keys() - set(model._keys_to_ignore_on_save or ())

    def saves_as_loaded(self) -> bool:
        from transformers.core_model_loading import revert_weight_conversion

        names = {name: self.state[name].to("meta") for name in self.saved}
        return bool(revert_weight_conversion(self.model, names).keys() == self.saved)

    def probe(self) -> dict[str, Any]:
        plain: dict[Any, Any] = {}

        def pack(part: Any, _: Any) -> None:
            plain[part], part.weight = part.weight, self._pack(part.weight)

        def unpack(part: Any, *_: Any) -> None:
            part.weight = plain.pop(part)

        for part in self.linears.values():
            part.register_forward_pre_hook(pack)
            part.register_forward_hook(unpack)
        return probe(self.model)

    def save(self, out_dir: Path) -> None:
        metadata: dict[str, str] = {}
        shapes: Shapes = {}
        for tensors, about in self._flat(self.shapes_on):
            metadata |= about
            shapes |= {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
        metadata |= {"tensor_names": json.dumps(list(self.state)), "format": "pt"}
        write(out_dir, shapes, (item for tensors, _ in self._flat() for item in tensors.items()), metadata)
        config = self.model.config
        config.dtype, config.architectures, config.quantization_config = "bfloat16", [type(self.model).__name__], self.asked
        config.save_pretrained(out_dir)
        self.model.generation_config.save_pretrained(out_dir)

    def _flat(self, device: Any = None) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """({name in the file: tensor}, its header entries), one of the model's tensors at a time; none for tied copies."""
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        for name, tensor in self.state.items():
            value = tensor.to(device) if device is not None else tensor
            packed = self._pack(value).data if name.removesuffix(".weight") in self.linears else value
            tensors, about = flatten_tensor_state_dict({name: packed})
            about.pop("tensor_names")
            yield tensors if name in self.saved else {}, about

    def _pack(self, weight: Any) -> Any:
        import torch
        from torchao.quantization import quantize_

        one = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        one.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(one, self.asked.get_apply_tensor_subclass(), lambda *_: True)
        return one.weight
