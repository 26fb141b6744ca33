"""The answer of a model in memory to a fixed probe, for comparison with a fresh process."""

from __future__ import annotations

from typing import Any

from pipeline.core.records import Json

TOKENS = 24
KEPT = 8  # the largest logits of the last position
OTHER_KERNEL = 5e-2  # of the largest logit: the model in memory ran in another kernel and type than the loaded one


def token_ids(vocab_size: int) -> list[int]:
    """The probe: ids spread over the vocabulary."""
    return [7 + 13 * k % (vocab_size - 7) for k in range(TOKENS)]


def probe(model: Any) -> Json:
    """{token_ids, at: ids of the largest logits after them, logits: their values}."""
    import torch

    ids = token_ids(model.config.get_text_config().vocab_size)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float().cpu()
    values, at = logits.topk(KEPT)
    return {"token_ids": ids, "at": at.tolist(), "logits": values.tolist()}


def first_overflow(model: Any, token_ids: list[int]) -> str | None:
    """The first module, in the order of running, whose output is not finite, or None."""
    import torch

    overflowed: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            tensor = out[0] if isinstance(out, tuple) else out
            if not overflowed and isinstance(tensor, torch.Tensor) and not bool(torch.isfinite(tensor).all()):
                overflowed.append(name)

        return hook

    hooks = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if not list(m.children())]
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return overflowed[0] if overflowed else None if bool(torch.isfinite(logits).all()) else "the output head"
