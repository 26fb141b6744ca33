"""Measure a model whose weights are changed in memory, against its own unchanged logits, in float32.

Why float32: rounding in 16-bit products moves the default model by 0.0016 nats, and single groups move it by less. Only the layers
from the changed one on run again: the output of those before it is kept for every token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.core.records import ByDocument
from pipeline.divergence.distributions import F32, compare_parts
from pipeline.layers.values import tensor_of

if TYPE_CHECKING:
    from torch import Tensor

BATCH_TOKENS = 2048  # of a forward pass
SAME = 1e-4  # nats: how far a pass from the middle may differ from a whole one


class Probe:
    """A reference model and texts of equal length; results are by document."""

    def __init__(self, folder: Path, windows: Sequence[Sequence[int]], threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        trusted = artifacts.trusts_code(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusted).eval()
        self.torch, self.threads = torch, threads
        size = max(1, BATCH_TOKENS // len(windows[0]))
        self.batches = [torch.tensor(windows[at : at + size]) for at in range(0, len(windows), size)]
        lists: list[Any] = [m for m in self.model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList)]
        self.layers = max((list(m) for m in lists), key=len)
        self._plain = {layer: layer.forward for layer in self.layers}
        self._kept: list[list[Any]] = []  # [batch][layer] outputs
        self._at = 0  # the batch that is being read
        self._reference = [self._logits(ids) for ids in self.batches]

    def keep(self) -> None:
        """Keep every layer's output with the current weights, for passes that start at a later layer."""
        self._kept = []
        for ids in self.batches:
            self._kept.append([])
            hooks = [layer.register_forward_hook(lambda _, __, out: self._kept[-1].append(out)) for layer in self.layers]
            try:
                self._logits(ids)
            finally:
                for hook in hooks:
                    hook.remove()
        if len(self._kept[0]) != len(self.layers):
            raise ArtifactError("the model does not run its layers one after the other: no prefix can be reused")
        whole, part = self.measure(), self.measure(len(self.layers) // 2)
        if abs(np.mean(whole["kld"]) - np.mean(part["kld"])) > SAME:
            raise ArtifactError("a pass that starts in the middle differs from a whole one: no prefix can be reused")

    def measure(self, start: int = 0) -> ByDocument:
        """Compare with the reference's logits; layers before `start` are as they were when `keep` was called."""

        def parts() -> Iterator[tuple[F32, F32, NDArray[np.int64]]]:
            for k, (ids, expected) in enumerate(zip(self.batches, self._reference)):
                self._at = k
                yield flat(expected), flat(self._logits(ids)), ids.numpy()

        with self._from(start):
            return by_document(self.threads, parts())

    def save_reference(self, path: Path) -> None:
        """Write the unchanged model's logits: float32 [documents, positions but the last, vocab]."""
        with path.open("wb") as file:
            for logits in self._reference:
                flat(logits).tofile(file)

    @contextmanager
    def swapped(self, values: Mapping[str, Tensor]) -> Iterator[bool]:
        """Replace modules' weights; yields whether any value differs from the one before."""
        before = {module: tensor_of(self.model, module).data for module in values}
        changed = any(not self.torch.equal(before[m], v) for m, v in values.items())
        for module, value in values.items():
            if value.shape != before[module].shape:
                raise ArtifactError(f"{module} is stored as {tuple(value.shape)} and is {tuple(before[module].shape)} in the model")
            tensor_of(self.model, module).data = value
        try:
            yield changed
        finally:
            for module, value in before.items():
                tensor_of(self.model, module).data = value

    @contextmanager
    def _from(self, start: int) -> Iterator[None]:
        """Let layers before `start` return the kept output of the last of them."""
        for layer in self.layers[:start]:
            layer.forward = lambda *_, **__: self._kept[self._at][start - 1]
        try:
            yield
        finally:
            for layer in self.layers[:start]:
                layer.forward = self._plain[layer]

    def _logits(self, ids: Tensor) -> Tensor:
        with self.torch.inference_mode():
            return self.model(input_ids=ids, use_cache=False).logits[:, :-1]  # type: ignore[no-any-return]


def flat(logits: Tensor) -> F32:
    return logits.reshape(-1, logits.shape[-1]).numpy()  # type: ignore[no-any-return]


def by_document(threads: int, parts: Iterable[tuple[F32, F32, NDArray[np.int64]]]) -> ByDocument:
    """Means by document. parts: (the reference's logits, a model's, token ids [documents, n]) of equally long documents; logits
    [documents * (n - 1), vocab]."""
    found: ByDocument = {"kld": [], "agreement": [], "loss": [], "tokens": 0}
    with ThreadPoolExecutor(threads) as pool:
        for expected, logits, ids in parts:
            rows = compare_parts(pool, expected, logits, ids[:, 1:].reshape(-1))
            kld, same, loss = (
                np.asarray(column, float).reshape(len(ids), -1).mean(1).tolist()
                for column in (rows.kld, rows.top1 == rows.top1_ref, rows.logp_ref - rows.logp)
            )
            found["kld"] += kld
            found["agreement"] += same
            found["loss"] += loss
            found["tokens"] = ids.shape[1] - 1
    return found
