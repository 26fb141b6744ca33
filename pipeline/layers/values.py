"""The values that a format stores, in float32 by transformers' module names, and their bytes.

GGUF is dequantized by transformers. Other formats are multiplied with the identity in their own kernel, which gives W."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import engines
from pipeline.layers.groups import Group
from pipeline.model.headers import read_headers
from pipeline.quantizers import gguf
from pipeline.quantizers.gguf import EMBEDDINGS, HEAD

if TYPE_CHECKING:
    from torch import Tensor

BYTES = "bytes."  # in a values file's metadata, before a module's name


def write(folder: Path, engine: str, groups: Sequence[Group], out: Path, threads: int) -> None:
    """Write the values of a variant's folder, with the bytes of each module."""
    from safetensors.torch import save_file

    modules = [module for g in groups for module in g.modules]
    model, sizes = _gguf(folder, modules) if engine == "llamacpp" else _packed(folder, modules, threads)
    held = {module: _values(model, module) for module in modules}
    save_file(held, out, metadata={f"{BYTES}{module}": str(n) for module, n in sizes.items()})


def tensor_of(model: Any, module: str) -> Tensor:
    """The parameter of a module's matrix, or of fused experts."""
    part = _part(model, module)
    return getattr(part, "weight", part)  # type: ignore[no-any-return]


def _part(model: Any, module: str) -> Any:
    """A module with a matrix, or the parameter of fused experts."""
    if module in (EMBEDDINGS, HEAD):
        return model.get_input_embeddings() if module == EMBEDDINGS else model.get_output_embeddings()
    parent, _, last = module.rpartition(".")
    return getattr(model.get_submodule(parent), last)


def _values(model: Any, module: str) -> Tensor:
    import torch

    part = _part(model, module)
    packed = isinstance(part, torch.nn.Module) and module not in (EMBEDDINGS, HEAD)
    if not packed or (type(part) in (torch.nn.Linear, torch.nn.Embedding) and type(part.weight.data) is torch.Tensor):
        return tensor_of(model, module).detach().float().contiguous().clone()
    with torch.inference_mode():
        eye = torch.eye(part.in_features, dtype=torch.bfloat16)
        product = part(eye) - (part.bias if getattr(part, "bias", None) is not None else 0)
    return product.T.float().contiguous().clone()  # type: ignore[no-any-return]


def _gguf(folder: Path, modules: list[str]) -> tuple[Any, dict[str, int]]:
    import gguf as library
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.FILE, dtype=torch.float32)
    stored = {t.name: int(t.n_bytes) for t in library.GGUFReader(folder / gguf.FILE).tensors}
    names = gguf.names_of(folder / gguf.FILE, [m for m in modules if m not in (EMBEDDINGS, HEAD)])
    names |= gguf.OUTSIDE
    return model, {module: stored[names[module]] for module in modules}


def _packed(folder: Path, modules: list[str], threads: int) -> tuple[Any, dict[str, int]]:
    engine: Any = engines.load("hf", folder, threads=threads)
    headers = read_headers(folder)
    names = {part: name for name, part in engine.model.named_modules()}
    outside = {m: names[_part(engine.model, m)] for m in (EMBEDDINGS, HEAD)}
    sizes = {m: sum(t.bytes for n, t in headers.items() if f"{n}.".startswith(f"{outside.get(m, m)}.")) for m in modules}
    return engine.model, sizes


class Values:
    """A file of values, read one tensor at a time."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        opened: Any = safe_open
        self._file = opened(path, framework="pt")
        about: dict[str, str] = self._file.metadata() or {}
        self.bytes = {name.removeprefix(BYTES): int(n) for name, n in about.items() if name.startswith(BYTES)}

    def of(self, module: str) -> Tensor:
        return self._file.get_tensor(module)  # type: ignore[no-any-return]

    def bytes_of(self, group: Group) -> int | None:
        """None for a group that is not stored at this level."""
        return sum(self.bytes[m] for m in group.modules) if all(m in self.bytes for m in group.modules) else None
