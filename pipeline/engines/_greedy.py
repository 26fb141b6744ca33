"""Greedy replies side by side in the transformers engine: a reply that has ended leaves the batch at once.

transformers' own `generate` computes every row until the last has ended, and lm-eval lets it go on until all rows hold a stop
sequence: most replies here have five tokens and the longest twenty-four.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

# settings of a model's generation_config that greedy decoding does not heed
HARMLESS = {
    "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_length", "max_new_tokens",
    "output_attentions", "output_hidden_states",
}  # fmt: skip


def grow(engine: Any, ids: Any, mask: Any, most: int, stopped: Callable[[list[int]], bool]) -> list[list[int]]:
    """At most `most` tokens for each row of ids [b, n], padded on the left where mask [b, n] is 0.

    A reply ends with the model's end token, or when `stopped` says so of its tokens.
    """
    torch, ends = engine.torch, engine.end_ids
    replies: list[list[int]] = [[] for _ in ids]
    going, cache = list(range(len(replies))), None
    with torch.inference_mode():
        for _ in range(most):
            logits, cache = _step(engine, ids, mask, cache)
            tokens = logits.argmax(-1)
            for row, token in zip(going, tokens.tolist()):
                replies[row].append(token)
            on = [k for k, row in enumerate(going) if replies[row][-1] not in ends and not stopped(replies[row])]
            if not on:
                break
            if len(on) < len(going):
                cache.batch_select_indices(torch.tensor(on, device=tokens.device))
            going = [going[k] for k in on]
            ids = tokens[on, None]
            mask = torch.cat([mask[on], mask.new_ones(len(on), 1)], 1)
    return replies


def _step(engine: Any, ids: Any, mask: Any, cache: Any) -> tuple[Any, Any]:
    """Logits [b, vocab] of the last position of ids [b, n], which follow what `cache` holds; and the cache."""
    keep = {"logits_to_keep": 1} if keeps_some(engine) else {}
    places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    own = {engine._cache: cache}
    out = engine.model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, **own, **keep)
    return out.logits[:, -1], getattr(out, engine._cache)


def keeps_some(engine: Any) -> bool:
    """Whether the model can give logits of some positions only."""
    return "logits_to_keep" in inspect.signature(engine.model.forward).parameters


def is_plain(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether generating means to take the likeliest token: no sampling, no beams, no penalty that the model's folder asks for."""
    if kwargs.get("do_sample") or kwargs.keys() - {"do_sample", "temperature", "attention_mask"}:
        return False
    return not {k for k, v in config.to_diff_dict().items() if v is not None} - HARMLESS


def has_stopped(text: str, stop: Sequence[str]) -> bool:
    """Whether a reply can be cut at a stop sequence: it holds one, and no other that began earlier may yet come to its end."""
    found = [text.find(s) for s in stop if s and s in text]
    return bool(found) and not any(s.startswith(text[at:]) for s in stop for at in range(max(0, len(text) - len(s)), min(found)))
