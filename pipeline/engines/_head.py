"""The output head by itself: hidden states -> the whole model's logits. It is the model's own class with a body that returns given
hidden states, so that whatever scales, caps or biases logits is included."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from pipeline.core import artifacts
from pipeline.divergence.distributions import F32
from pipeline.engines import ROWS


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """A body's output with final hidden states only: all else that a model's class may read, such as router logits or a state, is
    None, as where it was not requested."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(torch.nn.Module):
    """A model body whose output is given."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)

    @property
    def decoder(self) -> _Given:
        """OPT's class calls its body's decoder, not its body."""
        return self


class Head:
    """Callable: hidden states [n, d] -> float32 logits [n, vocab]."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._given = _Given()
        model._modules[body_of(model)] = self._given

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a loaded model; shares its weights and leaves it as it is."""
        shell = copy.copy(model)
        shell._modules = dict(model._modules)
        shell.__dict__.pop("forward", None)  # accelerate's, for a model on several cards, calls the whole model
        return cls(shell)

    @classmethod
    def load(cls, folder: Path) -> Head:
        """Load a head that `save` wrote, without the model's body."""
        trusted = artifacts.trusts_code(folder.parent)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted).eval()
        head = cls(model)
        model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
        return head

    def save(self, folder: Path) -> int:
        """Write the head; return its size in bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._state()
        save_file({k: v.clone().contiguous() for k, v in state.items()}, folder / "model.safetensors")
        config = copy.deepcopy(self._model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.save_pretrained(folder)
        return sum(t.numel() * t.element_size() for t in state.values())

    def _state(self) -> dict[str, torch.Tensor]:
        """Tensors by name, also those that accelerate keeps off the cards."""
        with ExitStack() as there:
            for module in self._model.modules():
                there.enter_context(align_module_device(module))
            return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    def equals(self, other: Head) -> bool:
        """Whether two heads certainly give the same logits: same class, scaling and device, equal plain tensors."""
        state, expected = self._state(), other._state()
        return (
            type(self._model) is type(other._model)
            and _scaling(self._model.config) == _scaling(other._model.config)
            and state.keys() == expected.keys()
            and all(_same(state[k], expected[k]) for k in state)
        )

    def tensor(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] in the model's own type, ROWS at a time, the last block padded with zeros: a processor may sum products
        of another shape in another order."""
        blocks, ids = [], torch.zeros(1, ROWS, dtype=torch.long, device=hidden.device)
        with torch.inference_mode():
            for block in torch.split(hidden, ROWS):
                self._given.hidden = torch.nn.functional.pad(block, (0, 0, 0, ROWS - len(block)))[None]
                blocks.append(self._model(input_ids=ids, use_cache=False).logits[0, : len(block)])
        return torch.cat(blocks)

    def __call__(self, hidden: torch.Tensor) -> F32:
        return self.tensor(hidden).float().cpu().numpy()  # type: ignore[no-any-return]


def body_of(model: Any) -> str:
    """Name of the part of a model that computes hidden states: the one with its embeddings."""
    embeddings = model.get_input_embeddings()
    parts: dict[str, Any] = dict(model.named_children())
    return next(name for name, part in parts.items() if any(m is embeddings for m in part.modules()))


def _scaling(config: Any) -> dict[str, Any]:
    about = ("num_hidden_layers", "layer_types", "quantization_config", "_name_or_path", "transformers_version", "architectures")
    return {k: v for k, v in config.to_dict().items() if k not in about}


def _same(a: Any, b: Any) -> bool:
    plain = all(type(getattr(t, "data", t)) is torch.Tensor for t in (a, b))  # a quantized weight is a subclass
    return plain and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
