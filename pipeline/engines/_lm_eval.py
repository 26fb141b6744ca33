"""lm-eval's model over an engine: it computes once what requests share, and logits only where they are scored.

All requests of a task form a forest of tokens (`_forest`). transformers reads blocks of it in one pass, in which each token sees
only its ancestors; any other engine reads it branch by branch. The answers are lm-eval's: its prompts, truncation, stop sequences,
and in float32 its log-likelihoods (tests/test_parity.py)."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, PreTrainedModel

from pipeline.core import cli
from pipeline.core.errors import Unsupported
from pipeline.engines import ROWS, Sampling
from pipeline.engines._forest import Forest, grown
from pipeline.model.config import appended

BLOCK_TOKENS = 256  # tokens in one pass: enough to fill the cores; attention costs its square
ALIKE = 0.05  # of the largest logit: how far a forest's logits may be off; a token that sees another branch is further off
# settings of a model's generation_config that do not affect greedy decoding
HARMLESS = {
    "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_length", "max_new_tokens",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
Request = tuple[Any, list[int], list[int]]  # (texts, context ids, choice ids), as lm-eval passes it
Answer = tuple[float, bool]  # log-likelihood, and whether greedy decoding would give the same
Passes = Iterator[tuple[list[int], Any]]  # (nodes, their logits [n, vocab]), until all wanted nodes have come


def lm_for(engine: Any, batch_size: int) -> Any:
    """lm-eval's model for an engine; batch_size: replies at a time, if the engine has batches."""
    if engine.name != "hf":
        return EngineLM(engine, AutoConfig.from_pretrained(engine.folder))
    return EngineLM(engine, engine.model.config) if engine.reads_cache else ForestLM(engine, batch_size)


def ask(lm: Any, manager: Any, task: str, *, samples: list[int] | None, limit: int | None, chat: bool, seed: int) -> Any:
    """lm-eval's result for one task, as from `simple_evaluate`. samples: indices of the items; None: the first `limit`, or all."""
    import lm_eval

    random.seed(seed)  # for tasks that shuffle their own documents, as simple_evaluate does
    np.random.seed(seed)
    torch.manual_seed(seed)
    loaded = manager.load([task])
    for one in loaded["tasks"].values():
        if one.get_config("num_fewshot") is None:
            one.set_config(key="num_fewshot", value=0)
        one.set_fewshot_seed(seed=seed)
    return lm_eval.evaluate(
        lm=lm, task_dict=loaded, samples=None if samples is None else {task: samples}, limit=limit,
        apply_chat_template=chat, fewshot_as_multiturn=True, log_samples=True, bootstrap_iters=0,
    )  # fmt: skip


class _Texts(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """HFLM that tokenizes a text once; lm-eval asks for a context again with every choice."""

    def __init__(self, engine: Any, **arguments: Any) -> None:
        self._known: dict[tuple[Any, ...], list[int]] = {}
        super().__init__(tokenizer=engine.tokenizer, max_length=engine.max_length, **arguments)
        self.engine, self._tail = engine, appended(self.tokenizer)

    def tok_batch_encode(self, *given: Any, **named: Any) -> tuple[Any, Any]:
        """Without an end token that the tokenizer appends: these texts are continued, padded on the left."""
        ids, mask = super().tok_batch_encode(*given, **named)
        return (ids[:, : -self._tail], mask[:, : -self._tail]) if self._tail else (ids, mask)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None) -> list[int]:
        key = (string, add_special_tokens, left_truncate_len)
        if key not in self._known:
            ids = super().tok_encode(string, add_special_tokens, left_truncate_len)
            bare = not self._tail or ids == super().tok_encode(string, False, left_truncate_len)
            self._known[key] = ids if bare else ids[: -self._tail]
        return list(self._known[key])

    def encoded(self, context: str, choice: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of the choice after it, as lm-eval scores them; no context is one token of its own."""
        if context:
            return self._encode_pair(context, choice)  # type: ignore[no-any-return]
        ids = self.tok_encode(choice, add_special_tokens=False)
        return (ids[:1], ids[1:]) if ids[0] == self.prefix_token_id else ([self.prefix_token_id], ids)

    def with_context(self, requests: list[Request]) -> list[Request]:
        """lm-eval moves a context of only spaces to the choice; then the token that stands for no context precedes it."""
        return [(text, context or [self.prefix_token_id], choice) for text, context, choice in requests]


class ForestLM(_Texts):
    """The transformers engine: one pass per block of the forest. Log-likelihoods are in float32: in bfloat16, lm-eval's default for
    such a model, a document's moves in steps of 8 nats."""

    def __init__(self, engine: Any, batch_size: int) -> None:
        super().__init__(engine, pretrained=engine.model, batch_size=batch_size, softmax_dtype="float32")

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        if not takes_forests(self.engine):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)  # type: ignore[no-any-return]
        requests = self.with_context(requests)
        answers = score(requests, self.max_length, lambda forest, wanted: _one_pass(self.engine, forest, wanted))
        # a value that is not finite spreads from one branch to others (0 times NaN is NaN): ask those requests alone
        broken = [i for i, (value, _) in enumerate(answers) if not math.isfinite(value)]
        if broken:
            alone = super()._loglikelihood_tokens([requests[i] for i in broken], disable_tqdm, override_bs)
            for i, answer in zip(broken, alone):
                answers[i] = answer
        return answers

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """context: [b, n], padded on the left. transformers' own `generate` wherever it does more than take the likeliest token."""
        if not (takes_forests(self.engine) and is_plain(self.engine.model.generation_config, kwargs)):
            return super()._model_generate(context, max_length, stop, **kwargs)
        most = max_length - context.shape[1]
        replies = grow(
            self.engine, context, kwargs["attention_mask"], most, lambda reply: has_stopped(self.tok_decode(reply), stop)
        )
        longest = max(map(len, replies))
        padded = [reply + [self.tokenizer.pad_token_id] * (longest - len(reply)) for reply in replies]
        return torch.cat([context, torch.tensor(padded, device=context.device)], 1)


class EngineLM(_Texts):
    """Any engine that gives logits and tokens, behind HFLM's own handling of text: prompts, templates, stop sequences."""

    def __init__(self, engine: Any, config: Any) -> None:
        super().__init__(engine, pretrained=_Absent(config), batch_size=1)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        return score(self.with_context(requests), self.max_length, lambda forest, wanted: _by_engine(self.engine, forest, wanted))

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """context: [1, n], as HFLM cut it. Greedy; ends at the model's end token or a stop sequence."""
        if kwargs.get("do_sample") and kwargs.get("temperature", 1.0) > 0:
            raise Unsupported(f"engine {self.engine.name!r} answers tasks greedily only")
        prompt = context[0].tolist()
        reply: list[int] = []
        for token, _ in self.engine.stream(prompt, max_length - len(prompt), Sampling()):
            reply.append(token)
            if has_stopped(self.tok_decode(reply), stop):
                break
        return torch.tensor([prompt + reply])


class _Absent(PreTrainedModel):  # type: ignore[misc,unused-ignore]
    """What HFLM requires of a model when it is made; the engine does the rest."""

    _supports_sdpa = True  # the config of a loaded model requires it

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(1), requires_grad=False)


def score(requests: Sequence[Request], max_length: int, logits_of: Callable[[Forest, list[int]], Passes]) -> list[Answer]:
    """Answers in the order of the requests, from an engine's logits for nodes of a forest."""
    if not all(0 < len(choice) <= max_length for _, _, choice in requests):
        raise ValueError(f"a choice needs one token of its own at least, and {max_length} at most")
    # all but the last token, cut on the left as lm-eval cuts it
    inputs = [[*context, *choice][-(max_length + 1) : -1] for _, context, choice in requests]
    answers: dict[int, Answer] = {}
    with cli.progress(len(requests), "choices", "request") as bar:
        for forest, held in grown(inputs, BLOCK_TOKENS):
            asked = [(path[-len(requests[i][2]) :], requests[i][2]) for i, path in zip(held, forest.paths)]
            answers |= zip(held, _answers(forest, asked, logits_of))
            bar.update(len(held))
    return [answers[i] for i in range(len(requests))]


def _answers(
    forest: Forest, asked: list[tuple[list[int], list[int]]], logits_of: Callable[[Forest, list[int]], Passes]
) -> list[Answer]:
    """For each (nodes, tokens that follow them): the tokens' joint log-likelihood, and whether all are the likeliest."""
    follow: dict[int, set[int]] = defaultdict(set)
    for nodes, choice in asked:
        for node, token in zip(nodes, choice):
            follow[node].add(token)
    by_pair: dict[tuple[int, int], Answer] = {}
    for nodes, logits in logits_of(forest, sorted(follow)):
        for at in range(0, len(nodes), ROWS):
            by_pair |= _read_off(nodes[at : at + ROWS], logits[at : at + ROWS], follow)
    parts = [[by_pair[pair] for pair in zip(nodes, choice)] for nodes, choice in asked]
    return [(sum(value for value, _ in part), all(best for _, best in part)) for part in parts]


def _read_off(nodes: list[int], logits: Any, follow: dict[int, set[int]]) -> dict[tuple[int, int], Answer]:
    pairs = [(row, token) for row, node in enumerate(nodes) for token in sorted(follow[node])]
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    logp = torch.log_softmax(logits.float(), -1)
    best = logp.argmax(-1)[rows] == tokens
    return {(nodes[r], t): (v, b) for (r, t), v, b in zip(pairs, logp[rows, tokens].tolist(), best.tolist())}


def _by_engine(engine: Any, forest: Forest, wanted: list[int]) -> Passes:
    """By the engine's own `forest_logits`, or branch by branch, each from where it leaves the one before, which the engine
    keeps."""
    passes = engine.forest_logits(forest, wanted) if hasattr(engine, "forest_logits") else None
    if passes is not None:
        yield from ((nodes, torch.from_numpy(logits)) for nodes, logits in passes)
        return
    scored, through_cache = set(wanted), getattr(engine, "reads_cache", False)
    for k, old in forest.runs():
        path = forest.paths[k]
        since = 0 if through_cache else old  # the prompt, read in one pass, ends where the first choice begins
        first = next(p for p in range(since, len(path)) if path[p] in scored)  # there is one: a request ends at the last
        ids = [forest.tokens[node] for node in path]
        blocks = [torch.from_numpy(block) for _, _, block in engine.logit_blocks([[*ids, 0]], [first], len(path) - first)]
        keep = [p for p in range(first, len(path)) if path[p] in scored]
        yield [path[p] for p in keep], torch.cat(blocks)[[p - first for p in keep]]


def _one_pass(engine: Any, forest: Forest, wanted: list[int]) -> Passes:
    """All nodes in one pass of the model; its head only at the wanted ones."""
    arguments: dict[str, Any] = {}
    if not forest.is_chain():
        # numbers to add, in the model's own type: the one form that every attention takes
        seen = torch.from_numpy(forest.attends()).to(engine.device)
        hidden = torch.finfo(engine.model.dtype).min
        mask = torch.zeros(seen.shape, dtype=engine.model.dtype, device=engine.device)
        arguments["attention_mask"] = mask.masked_fill_(~seen, hidden)[None, None]
        arguments["position_ids"] = torch.tensor([forest.depths], device=engine.device)
    positions = torch.tensor(wanted, device=engine.device)
    if engine.keeps_some:
        arguments["logits_to_keep"] = positions
    with torch.inference_mode():
        ids = torch.tensor([forest.tokens], device=engine.device)
        logits = engine.model(input_ids=ids, use_cache=False, **arguments).logits[0]
    yield wanted, logits if engine.keeps_some else logits[positions]


@lru_cache(maxsize=1)  # of the last engine
def takes_forests(engine: Any) -> bool:
    """Whether a model reads a forest like its sequences one by one: not with a sliding window or a recurrent state; a model that
    numbers positions or makes masks itself shows it in its logits."""
    with torch.inference_mode():
        cache = engine.forward([[0, 0]], None, last=True)[1]
    if not all(type(layer).__name__ == "DynamicLayer" for layer in getattr(cache, "layers", [None])):
        return False
    forest = Forest()
    top = engine.vocab_size
    sequences = sorted([k % top for k in (1, 2, 3, 4, *more)] for more in ((5, 6, 7), (5, 8, 9, 10), (11, 12)))
    for ids in sequences:
        forest.add(ids)
    last = [path[-1] for path in forest.paths]
    try:
        together = torch.cat([logits for _, logits in _one_pass(engine, forest, last)]).float()
    except (RuntimeError, TypeError, ValueError):  # its code takes no such mask or positions
        return False
    alone = torch.stack([torch.from_numpy(engine.logits(ids)[-1]) for ids in sequences]).to(together.device)
    return bool((together - alone).abs().max() <= ALIKE * alone.abs().max())


def grow(engine: Any, ids: Any, mask: Any, most: int, stopped: Callable[[list[int]], bool]) -> list[list[int]]:
    """At most `most` greedy tokens for each row of ids [b, n], padded on the left where mask [b, n] is 0. A reply ends with the
    model's end token, or when `stopped` is true of its tokens."""
    replies: list[list[int]] = [[] for _ in ids]
    going, cache = list(range(len(replies))), None
    keep = {"logits_to_keep": 1} if engine.keeps_some else {}
    with torch.inference_mode():
        for _ in range(most):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            held = {engine._cache: cache}
            out = engine.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **held, **keep)
            cache = getattr(out, engine._cache)
            tokens = out.logits[:, -1].argmax(-1)
            for row, token in zip(going, tokens.tolist()):
                replies[row].append(token)
            on = [k for k, row in enumerate(going) if replies[row][-1] not in engine.end_ids and not stopped(replies[row])]
            if not on:
                break
            if len(on) < len(going):
                cache.batch_select_indices(torch.tensor(on, device=tokens.device))
            going = [going[k] for k in on]
            ids = tokens[on, None]
            mask = torch.cat([mask[on], mask.new_ones(len(on), 1)], 1)
    return replies


def is_plain(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether generation only takes the likeliest token: no sampling, beams or penalties of the model's folder."""
    if kwargs.get("do_sample") or kwargs.keys() - {"do_sample", "temperature", "attention_mask"}:
        return False
    return not {k for k, v in config.to_diff_dict().items() if v is not None} - HARMLESS


def has_stopped(text: str, stop: Sequence[str]) -> bool:
    """Whether a reply can be cut at a stop sequence: it holds one, and none that began earlier can still be completed."""
    starts = [text.find(s) for s in stop if s and s in text]
    return bool(starts) and not any(s.startswith(text[at:]) for s in stop for at in range(max(0, len(text) - len(s)), min(starts)))
