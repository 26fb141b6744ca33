"""Read and compare a model's logits inside vLLM's own process and environment: mixed into its worker (`worker_extension_cls`).

vLLM does not return logits. For a prompt with `prompt_logprobs` it calls the model's `compute_logits` twice: for the row that it
samples from, then for all rows but the last. The second gives the logits of a forward pass: after the last norm, by the model's
head, without the vocabulary's padding, and joined from the parts of several cards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import numpy as np

from pipeline.divergence.distributions import compare_parts


class CardFacts(TypedDict):
    """kernels: {kind of product: number of the model's matrices}; cache_*: of keys and values on this card."""

    kernels: dict[str, int]
    attention: str
    device: str
    cache_bytes: int
    cache_type: str
    element_bytes: int


class LogitsReader:
    """Answers are plain values: only they cross vLLM's processes."""

    model_runner: Any  # vLLM's

    def watch(self) -> None:
        """Keep the logits of the next prompt."""
        model = self.model_runner.model
        plain = model.compute_logits
        self._calls: list[Any] = []

        def compute_logits(*given: Any, **named: Any) -> Any:
            logits = plain(*given, **named)
            if logits is not None:  # None on all cards but the first
                self._calls.append(logits.detach().clone())
            return logits

        model.compute_logits = compute_logits

    def unwatch(self) -> None:
        del self.model_runner.model.compute_logits  # restores the class's own
        self._calls = []

    def rows(self, ids: list[int], start: int, vocab: int, file: str, threads: int) -> dict[str, list[float]] | str | None:
        """{name: one value per position} at positions start .. n - 2, or what is wrong; None on a card without logits.
        threads: 0 writes the logits to `file`, float32; else they are compared with the reference's in `file`."""
        calls, n = self._calls, len(ids) - 1
        if not calls:
            return None
        shapes = [tuple(c.shape) for c in calls]
        if shapes[0] != (1, vocab) or sum(rows for rows, _ in shapes[1:]) != n or {width for _, width in shapes} != {vocab}:
            # a prompt in chunks gives a sampled row of each; part of a vocabulary, or one with padding, is no distribution
            expected = f"{n + 1} tokens of a vocabulary of {vocab} give [(1, {vocab}), ({n}, {vocab})]"
            return f"vLLM computed logits of shapes {shapes}, and {expected}"
        var = np.concatenate([c.float().cpu().numpy() for c in calls[1:]])[start:]
        true = np.asarray(ids[start + 1 :])
        if threads == 0:
            var.tofile(file)
            top = var.max(1, keepdims=True)
            log_z = top[:, 0] + np.log(np.exp(var - top).sum(1, dtype=np.float64))
            return {"logp": (var[np.arange(len(var)), true] - log_z).tolist()}
        ref = np.fromfile(file, np.float32).reshape(-1, vocab)
        if len(ref) != len(var):
            return f"vLLM gave {len(var)} positions, the reference's store has {len(ref)}"
        with ThreadPoolExecutor(threads) as pool:
            return {name: values.tolist() for name, values in vars(compare_parts(pool, ref, var, true)).items()}

    def facts(self) -> CardFacts:
        runner = self.model_runner
        kinds: Counter[str] = Counter()
        for module in runner.model.modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method.endswith("LinearMethod"):
                plain = method == "UnquantizedLinearMethod"
                kind = str(module.weight.dtype).removeprefix("torch.") if plain else method
                kinds[f"vllm[{kind}]"] += len(getattr(module, "output_sizes", [0]))  # queries, keys and values are one module
        caches = [part for held in runner.kv_caches for part in (held if isinstance(held, (list, tuple)) else [held])]
        attention = next(m.attn_backend.get_name() for m in runner.model.modules() if hasattr(m, "attn_backend"))
        return {
            "kernels": dict(kinds), "attention": attention, "device": runner.device.type,
            "cache_bytes": sum(c.nbytes for c in caches), "cache_type": str(caches[0].dtype),
            "element_bytes": caches[0].element_size(),
        }  # fmt: skip
