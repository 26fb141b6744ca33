"""transformers, in process: what every other engine is compared with.

What bounds it: prefill is matrix products over all prompt tokens at once (compute-bound); each decode step reads every
weight once for one token (bandwidth-bound), plus the cost of some thousand Python-driven kernel launches (overhead),
which on a small model is most of it."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts, quota
from pipeline.core.errors import InvalidVariant, Unsupported, needs
from pipeline.divergence.distributions import F32
from pipeline.engines import Blocks, Sampling, Timed, Trace, _gptq
from pipeline.engines._forest import common_prefix
from pipeline.engines._speculation import ALONE, Speculate, drafted, give_draft
from pipeline.model.config import end_ids, window

UNBOUNDED = 2048  # tokens: the window taken for a model without one, such as a recurrent one or one with ALiBi
CACHES = ("cache", "past_key_values", "cache_params")  # the argument's names in models
GROUPS = (64, 32, 16, 8)  # numbers of a head that share a scale and a zero point in an int8 or int4 cache: the first that fits
RESIDUAL = 128  # tokens that such a cache holds unpacked before it packs them: transformers' default
PROMPT = 32  # tokens read as the prompt of a text without one: fp8 takes its one scale from them, and one token is too few
CROPPED = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # kinds of cache layers that tokens can be removed from
CACHE_BITS = {"fp8": 8, "int8": 8, "int4": 4}


def load(
    model_dir: Path,
    *,
    threads: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    attention: Literal["auto", "sdpa", "eager"] = "auto",
    device_map: Literal["one", "auto"] = "one",
    kv: Literal["auto", "fp8", "int8", "int4"] = "auto",
    speculate: Speculate | None = None,
) -> HfEngine:
    """Load a Hugging Face folder with its own dtype, quantization config and kernel. attention: auto is sdpa where the model has
    it, else eager. device_map: auto spreads a model that is larger than one card over all of them and then the machine's memory, by
    accelerate (untried on cards). kv: type of keys and values; auto is the model's own, int8 and int4 are HQQ's. speculate: see
    llamacpp.py."""
    with needs("engine 'hf'", "pip install torch transformers -c constraints.txt"):
        import torch
        from transformers import AutoTokenizer, DynamicCache
        from transformers.utils import logging
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("no CUDA device on this machine")
    trusted = artifacts.trusts_code(model_dir)
    model = _model(model_dir, trusted, device, attention, device_map).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trusted)
    engine = HfEngine(model, tokenizer, device, end_ids(model_dir, tokenizer), kv)
    try:
        engine.new_cache()
    except ImportError:
        raise Unsupported(f"engine 'hf' packs keys and values to {kv} with hqq; pip install hqq -c constraints-dev.txt") from None
    except ValueError as e:
        raise Unsupported(f"transformers has no {kv} cache for this model ({' '.join(str(e).split())[:200]})") from None
    if speculate:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
        if kv != "auto" or model._is_stateful or kinds - CROPPED:
            raise Unsupported("a packed cache or a recurrent model cannot take tokens back: no speculation")
        how = partial(load, threads=threads, device=device, attention=attention, device_map=device_map)
        give_draft(engine, speculate, model_dir, how)
    return engine


def _model(folder: Path, trusted: bool, device: str, attention: str, device_map: str) -> Any:
    """The folder's model. Raises `InvalidVariant` where weights and model do not match."""
    from transformers import AutoModelForCausalLM

    if _gptq.is_its_own(folder):
        if attention != "auto":
            raise Unsupported("a model that gptqmodel loads runs with attention: auto only")
        return _gptq.load(folder, device, trusted)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=None if attention == "auto" else attention,
            device_map="auto" if device_map == "auto" else None if device == "cpu" else {"": device},
            trust_remote_code=trusted,
            use_safetensors=True,
            output_loading_info=True,
        )
    except ValueError as e:
        if "offload" in str(e):
            raise Unsupported("the model fits neither on the cards nor in the machine's memory") from None
        if "attention" not in str(e):
            raise
        raise Unsupported(f"this model has no attention: {attention}; take auto ({' '.join(str(e).split())[:200]})") from None
    if wrong := {k: sorted(map(str, v)) for k, v in info.items() if k.endswith("_keys") and v}:
        raise InvalidVariant(f"the weights do not fit the model: {wrong}")
    return model


class HfEngine:
    """See `pipeline.engines.Engine`; `hidden` and `head` split a forward pass before the output head."""

    name = "hf"
    speculate: Speculate | None = None
    draft: HfEngine | None = None
    kept: list[int]  # the tokens in `kept_cache`, the cache of `rows_after`
    kept_cache: Any

    def __init__(self, model: Any, tokenizer: Any, device: str, ends: set[int], kv: str = "auto") -> None:
        import torch

        from pipeline.engines._head import Head, body_of

        self.torch = torch
        self.model, self.tokenizer, self.device, self.end_ids, self.kv = model, tokenizer, device, ends, kv
        self.reads_cache = kv != "auto"  # logits are made through the cache, as decoding makes them
        self.body = getattr(model, body_of(model))
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        config = model.config.get_text_config()
        self.max_length = window(config.to_dict()) or UNBOUNDED
        self.attention = str(config._attn_implementation)
        self.head = Head.of(model)
        self.trace = Trace()
        arguments = inspect.signature(model.forward).parameters
        self.keeps_some = "logits_to_keep" in arguments  # it can give the logits of some positions only
        self._cache = next(name for name in CACHES if name in arguments)
        self.forget()

    def close(self) -> None:
        if self.draft:
            self.draft.close()
        del self.model, self.body, self.head

    # --- teacher-forced ------------------------------------------------------------------------------------------

    def hidden(self, batch: Sequence[Sequence[int]]) -> Any:
        """Final hidden states (after the last norm) of windows of equal length: tensor [b, n, d]."""
        with self.torch.inference_mode():
            return self.body(input_ids=self._ids(batch), use_cache=False).last_hidden_state

    def logits(self, token_ids: Sequence[int]) -> F32:
        return self.own_logits([token_ids])[1][0].float().cpu().numpy()  # type: ignore[no-any-return]

    def own_logits(self, batch: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """One whole forward pass: hidden states [b, n, d] given to the head, and logits [b, n, vocab] in the model's own type."""
        caught: list[Any] = []
        # where a body wraps a decoder, the model may call either; the outer one ends last
        parts = {self.body, self.body.get_decoder()}
        hooks = [part.register_forward_hook(lambda _, __, out: caught.append(out[0])) for part in parts]
        try:
            with self.torch.inference_mode():
                logits = self.model(input_ids=self._ids(batch), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return caught[-1], logits

    def logit_blocks(self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False) -> Blocks:
        if self.reads_cache:
            for i, (ids, start) in enumerate(zip(batch, starts)):
                yield from ((i, at, block.float().cpu().numpy()) for at, block in self._through_cache(ids[:-1], start, rows))
            return
        given = self.own_logits(batch)[1] if whole else self.hidden(batch)
        for i, start in enumerate(starts):
            last = len(batch[i]) - 1
            for at in range(start, last, rows):
                block = given[i, at : min(at + rows, last)]
                yield i, at, block.float().cpu().numpy() if whole else self.head(block)

    def _through_cache(self, ids: Sequence[int], start: int, rows: int) -> Iterator[tuple[int, Any]]:
        """(first position, logits [at most `rows`, vocab]) from `start` on, as decoding one token at a time gives them. The first
        pass sees its keys and values unpacked; only later passes read the packed cache. So the tokens up to `start` (from 0: PROMPT
        tokens) are read in one pass, like a prompt, and the others RESIDUAL at a time: that many are packed together, and are read
        unpacked until then."""
        held, cache, prompt = list[Any](), None, start + 1 if start else min(PROMPT, len(ids))
        ends = [prompt, *range(prompt + RESIDUAL, len(ids), RESIDUAL), len(ids)]
        for begin, end in pairwise([0, *dict.fromkeys(ends)]):
            logits, cache = self.forward([ids[begin:end]], cache, last=begin == 0 < start)
            held += list(logits[0, -1:] if begin == 0 < start else logits[0])
            while len(held) >= rows or (held and end == len(ids)):
                yield end - len(held), self.torch.stack(held[:rows])
                del held[:rows]

    def plain(self) -> HfEngine:
        """The same model with keys and values of its own type, read through the cache in the same passes."""
        engine = HfEngine(self.model, self.tokenizer, self.device, self.end_ids)
        engine.reads_cache = True
        return engine

    def new_cache(self) -> Any:
        """An empty cache that packs keys and values; None: the model makes one of its own type."""
        if self.kv == "auto":
            return None
        from transformers import QuantizedCache

        if self.kv == "fp8":
            return QuantizedCache("fp8", self.model.config)
        along = {"axis_key": 1, "axis_value": 1, "q_group_size": self._group()}  # numbers of one token and head share a scale
        return QuantizedCache("hqq", self.model.config, nbits=CACHE_BITS[self.kv], residual_length=RESIDUAL, **along)

    def _group(self) -> int:
        """A size that divides every head and gives a token an even number of groups: HQQ packs 4-bit groups in pairs."""
        config = self.model.config.get_text_config()
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        numbers = width * int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        return next(size for size in GROUPS if width % size == 0 and numbers // size % 2 == 0)

    def _element_bytes(self) -> float:
        """Bytes of one number in the cache, with its part of a scale and a zero point of the model's type."""
        if self.kv == "auto":
            return float(self.model.dtype.itemsize)
        return CACHE_BITS[self.kv] / 8 + (2 * self.model.dtype.itemsize / self._group() if self.kv != "fp8" else 0)

    def _ids(self, batch: Sequence[Sequence[int]]) -> Any:
        return self.torch.tensor([list(ids) for ids in batch], dtype=self.torch.long, device=self.device)

    def forward(self, batch: Sequence[Sequence[int]], cache: Any, last: int = 0) -> tuple[Any, Any]:
        """One pass after the tokens in `cache` (None: empty): logits [b, n, vocab], or the `last` ones, and the cache."""
        keep = {"logits_to_keep": int(last)} if last and self.keeps_some else {}
        cache = self.new_cache() if cache is None else cache
        with self.torch.inference_mode():
            out = self.model(input_ids=self._ids(batch), use_cache=True, **{self._cache: cache}, **keep)
        return out.logits, getattr(out, self._cache)

    def logits_stepwise(self, token_ids: Sequence[int], start: int) -> F32:
        """Logits at positions start .. n - 1, [n - start, vocab], as in decoding: one pass up to `start`, then token by token."""
        logits, cache = self.forward([token_ids[: start + 1]], None, last=True)
        rows = [logits[0, -1]]
        for token in token_ids[start + 1 :]:
            logits, cache = self.forward([[token]], cache, last=True)
            rows.append(logits[0, -1])
        return self.torch.stack(rows).float().cpu().numpy()  # type: ignore[no-any-return]

    def use_threads(self, threads: int) -> None:
        self.torch.set_num_threads(threads)

    def to_float32(self) -> None:
        """Compute with the same weights in float32 from now on; a layer's are widened while it runs. Raises `Unsupported`, and
        changes nothing, where that is no other arithmetic or does not fit."""
        if getattr(self.model.config, "quantization_config", None):
            raise Unsupported("its weights are packed: float32 would not be the same weights through the same products")
        if any(w.is_meta for w in self.model.parameters()):
            raise Unsupported("part of it is kept in the machine's memory by accelerate, in its own type")
        if all(w.element_size() >= 4 for w in self.model.parameters()):
            raise Unsupported("it computes in float32 already")
        lists = [part for part in self.body.get_decoder().modules() if isinstance(part, self.torch.nn.ModuleList)]
        inner = {part for own in lists for layer in own for part in layer.modules()}
        layers = [layer for own in lists if own not in inner for layer in own]
        within = {id(tensor) for layer in layers for tensor in _values(layer)}
        rest = [tensor for tensor in _values(self.model) if id(tensor) not in within]
        more = 4 * (_count(rest) + max((_count(_values(layer)) for layer in layers), default=0))
        free = _free_bytes(self.torch, self.device)
        if more > 0.9 * free:
            raise Unsupported(f"its weights in float32 need {more / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free")
        for tensor in rest:
            tensor.data = tensor.data.float()
        for layer in layers:
            layer.register_forward_pre_hook(_widen)
            layer.register_forward_hook(_narrow)

    # --- generation ----------------------------------------------------------------------------------------------

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        replies = drafted(self, token_ids, max_new_tokens, sampling)
        if replies is None:
            yield from self.stream_undrafted(token_ids, max_new_tokens, sampling)
            return
        self.forget()
        trace = self.trace = Trace(element_bytes=self._element_bytes())
        yield from replies
        trace.cache_bytes, trace.cache_tokens = _cache_bytes(self.kept_cache), len(self.kept)

    def rows_after(self, ids: list[int], tokens: list[int]) -> F32:
        text, same = [*ids, *tokens], common_prefix(self.kept, ids)
        self.kept_cache.crop(same - len(self.kept))  # a negative number removes that many tokens
        logits, self.kept_cache = self.forward([text[same:]], self.kept_cache, last=len(tokens))
        self.kept = text
        return logits[0, -len(tokens) :].float().cpu().numpy()  # type: ignore[no-any-return]

    def forget(self) -> None:
        from transformers import DynamicCache

        self.kept, self.kept_cache = list[int](), DynamicCache()  # without a config it keeps all tokens, not just a sliding window

    def stream_undrafted(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        generator = self.torch.Generator().manual_seed(sampling.seed)
        ends = self.end_ids if sampling.stop else set()
        trace = self.trace = Trace(element_bytes=self._element_bytes())
        ids, cache, seen = list(token_ids), None, 0
        for _ in range(max_new_tokens):
            start = self._now()
            logits, cache = self.forward([ids], cache, last=True)
            computed = self._now()
            token = _choose(self.torch, logits[0, -1], sampling, generator)
            chosen = self._now()
            trace.add(computed - start, chosen - computed)
            seen += len(ids)
            ids = [token]
            yield token, chosen
            if token in ends:
                break
        # at the end, where it delays no token that is timed
        trace.cache_bytes, trace.cache_tokens = _cache_bytes(cache), seen

    def _now(self) -> float:
        """The monotonic clock, read when the device has finished."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        return time.monotonic()

    def stream_on(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        raise Unsupported("engine 'hf' keeps no prefix from one request to the next: each reads its whole prompt")

    def stream_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[tuple[list[int], float]]:
        if self.speculate:
            raise Unsupported(ALONE)
        ids, cache = [list(p) for p in prompts], None
        for _ in range(max_new_tokens):
            logits, cache = self.forward(ids, cache, last=True)
            tokens = logits[:, -1].argmax(-1).tolist()
            yield tokens, self._now()
            ids = [[token] for token in tokens]

    def sample(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling) -> list[list[int]]:
        """Continue prompts as one left-padded batch; each reply ends at (and includes) its end token."""
        from transformers import GenerationConfig

        torch, ends, width = self.torch, self.end_ids, max(map(len, prompts))
        pad = min(ends, default=0)
        ids = self._ids([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = self._ids([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        # not the model's own config, whose penalties and filters would give another distribution
        plain = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampling.temperature > 0,
            **({"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature > 0 else {}),
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
        )
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(sampling.seed)
            packed = {} if self.kv == "auto" else {self._cache: self.new_cache()}
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=plain, **packed)
        rows = out[:, width:].tolist()
        return [row[: next((k + 1 for k, token in enumerate(row) if token in ends), len(row))] for row in rows]

    # --- what ran ------------------------------------------------------------------------------------------------

    def kernels(self) -> dict[str, int]:
        """Modules that hold matrices, counted by kernel class and packed type of the weight."""
        found: Counter[str] = Counter()
        for module in self.model.modules():
            kind = type(module).__name__
            weight = getattr(module, "weight", None)
            if hasattr(module, "qweight"):
                found[kind] += 1
            elif weight is not None and ("Linear" in kind or isinstance(module, self.torch.nn.Linear)):
                inner = getattr(weight, "data", weight)
                packed = type(inner).__name__
                found[f"{kind}[{str(inner.dtype).removeprefix('torch.') if packed == 'Tensor' else packed}]"] += 1
        return dict(found)


def _values(module: Any) -> list[Any]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


def _count(tensors: list[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _widen(layer: Any, _: Any) -> None:
    layer.narrow = [(tensor, tensor.data) for tensor in _values(layer)]
    for tensor, data in layer.narrow:
        tensor.data = data.float()


def _narrow(layer: Any, *_: Any) -> None:
    for tensor, data in layer.__dict__.pop("narrow"):
        tensor.data = data


def _choose(torch: Any, logits: Any, sampling: Sampling, generator: Any) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax().item())
    p = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    return int(torch.multinomial(p, 1, generator=generator).item())


def _free_bytes(torch: Any, device: str) -> int:
    return quota.free_bytes() if device == "cpu" else int(torch.cuda.mem_get_info()[0])


def _cache_bytes(cache: Any) -> int | None:
    """Bytes of a cache's keys and values; None for one that holds anything else, as with linear attention."""
    layers = getattr(cache, "layers", [None])
    if any(getattr(layer, kind, None) is None for layer in layers for kind in ("keys", "values")):
        return None
    packed = ("keys", "values", "_quantized_keys", "_quantized_values")  # packed ones, beside those not packed yet
    return sum(_bytes(getattr(layer, kind, None)) for layer in layers for kind in packed)


def _bytes(held: Any) -> int:
    """Bytes of a tensor, or of the tensors in a tuple or dict."""
    if isinstance(held, (tuple, dict)):
        return sum(map(_bytes, held.values() if isinstance(held, dict) else held))
    return int(getattr(held, "nbytes", 0))
