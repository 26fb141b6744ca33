"""The output head by itself: hidden states -> the very logits the whole model gives.

It is the model's own class with its body replaced by one that returns given hidden states, so that models which scale
or cap their logits, or add a bias, do so here too: nothing about the head is written a second time.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from pipeline.core import artifacts


class _Given(torch.nn.Module):
    """A model body that has already been computed."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)  # type: ignore[arg-type]


class Head:
    """Callable: hidden states [n, d] -> float32 logits [n, vocab]."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._given = _Given()
        model._modules[model.base_model_prefix] = self._given

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a loaded model; shares its weights and leaves it as it is."""
        shell = copy.copy(model)
        shell._modules = dict(model._modules)
        return cls(shell)

    @classmethod
    def load(cls, folder: Path) -> Head:
        """A head that `save` wrote; the model's body is never loaded."""
        trusted = artifacts.trusts_code(folder.parent)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted).eval()
        model._modules[model.base_model_prefix] = _Given()
        model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
        return cls(model)

    def save(self, folder: Path) -> int:
        """Write what the head needs, once; returns its size in bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().clone().contiguous() for k, v in self._model.state_dict().items()}
        save_file(state, folder / "model.safetensors")
        config = copy.deepcopy(self._model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.num_hidden_layers = 1  # the body is never built from it; one layer keeps `load` quick
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        config.save_pretrained(folder)
        return sum(t.numel() * t.element_size() for t in state.values())

    def equals(self, other: Head) -> bool:
        """Whether two heads give the same logits for certain: one class, one scaling, equal plain tensors in one place."""
        ours, theirs = self._model.state_dict(), other._model.state_dict()
        return (
            type(self._model) is type(other._model)
            and _scaling(self._model.config) == _scaling(other._model.config)
            and ours.keys() == theirs.keys()
            and all(_same(ours[k], theirs[k]) for k in ours)
        )

    def tensor(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] in the model's own type."""
        with torch.inference_mode():
            self._given.hidden = hidden[None]
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def __call__(self, hidden: torch.Tensor) -> NDArray[np.float32]:
        return self.tensor(hidden).float().cpu().numpy()  # type: ignore[no-any-return]


def _scaling(config: Any) -> dict[str, Any]:
    """Settings that may touch logits: all but those of the body's size, and those that say where a model came from."""
    about = ("num_hidden_layers", "layer_types", "quantization_config", "_name_or_path", "transformers_version", "architectures")
    return {k: v for k, v in config.to_dict().items() if k not in about}


def _same(a: Any, b: Any) -> bool:
    plain = all(type(getattr(t, "data", t)) is torch.Tensor for t in (a, b))  # a quantized weight is a subclass
    return plain and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
