"""lm-eval's model around the engine's, which computes what several choices share only once.

lm-eval sends context and choice through the model for every choice, and keeps the logits of all positions. Here a long
context is read once, its keys and values are kept, and the choices follow it as one small batch; a context that begins
as the one before it (several questions about one passage) starts from there. Measured on 2 cores, 150 questions about
passages of 100 to 1 000 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, PreTrainedModel

from pipeline import cli
from pipeline.engines import Sampling
from pipeline.errors import Unsupported

WORTH_SHARING = 64  # tokens of context; below, one padded batch is faster than two passes

Request = tuple[Any, list[int], list[int]]  # (texts, context ids, choice ids), as lm-eval passes it
Answer = tuple[float, bool]  # log-likelihood, and whether greedy decoding would say the same


def lm_for(engine: Any, batch_size: int) -> Any:
    """lm-eval's model for an engine."""
    if engine.name == "hf":
        return SharedContextLM(engine, batch_size)
    return EngineLM(engine, AutoConfig.from_pretrained(engine.folder))


class SharedContextLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """HFLM whose long shared contexts are read once; log-likelihoods in float32.

    In bfloat16, lm-eval's default for such a model, a document's log-likelihood moves in steps of 8 nats.
    """

    def __init__(self, engine: Any, batch_size: int) -> None:
        super().__init__(
            pretrained=engine.model,
            tokenizer=engine.tokenizer,
            batch_size=batch_size,
            max_length=engine.max_length,
            softmax_dtype="float32",
        )
        self.engine = engine

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, choice) in enumerate(requests):
            if len(context) >= WORTH_SHARING and len(context) + len(choice) <= self.max_length:
                groups.setdefault(tuple(context), []).append(i)
        shared = {context: own for context, own in groups.items() if len(own) > 1}
        found: dict[int, Answer] = {}
        reader = _Reader(self.engine)
        if shared and reader.can_go_back():
            with cli.progress(len(shared), "choices", "item") as bar:
                for ids, own in sorted(shared.items()):  # so that contexts with one beginning follow each other
                    answers = reader.answers(list(ids), [requests[i][2] for i in own])
                    found.update(zip(own, answers))
                    bar.update()
        rest = [i for i in range(len(requests)) if i not in found]
        if rest:
            found.update(zip(rest, super()._loglikelihood_tokens([requests[i] for i in rest], disable_tqdm, override_bs)))
        return [found[i] for i in range(len(requests))]


class EngineLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """Any engine that gives logits and tokens, behind HFLM's own handling of text: prompts, templates, stop sequences.

    Requests go one by one, those that begin alike after each other: an engine may keep what they share.
    """

    def __init__(self, engine: Any, config: Any) -> None:
        super().__init__(pretrained=_Absent(config), tokenizer=engine.tokenizer, batch_size=1, max_length=engine.max_length)
        self.engine = engine

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        found: dict[int, Answer] = {}
        with cli.progress(len(requests), "choices", "request") as bar:
            for i in sorted(range(len(requests)), key=lambda i: (requests[i][1], requests[i][2])):
                _, context, choice = requests[i]
                ids = [*context, *choice][-(self.max_length + 1) :]
                start = len(ids) - len(choice) - 1
                blocks = [torch.from_numpy(block) for _, _, block in self.engine.logit_blocks([ids], [start], len(choice))]
                found[i] = _answer(torch.log_softmax(torch.cat(blocks), -1), choice)
                bar.update()
        return [found[i] for i in range(len(requests))]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """context: [1, n], as HFLM cut it. Greedy; ends at the model's end token or a stop sequence."""
        if kwargs.get("do_sample") and kwargs.get("temperature", 1.0) > 0:
            raise Unsupported(f"engine {self.engine.name!r} answers tasks greedily only")
        prompt = context[0].tolist()
        reply: list[int] = []
        for token, _ in self.engine.stream(prompt, max_length - len(prompt), Sampling()):
            reply.append(token)
            text = self.tok_decode(reply)
            if any(s in text for s in stop):
                break
        return torch.tensor([prompt + reply])


class _Absent(PreTrainedModel):  # type: ignore[misc,unused-ignore]
    """What HFLM asks of a model when it is made; the engine does the rest."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(1), requires_grad=False)


class _Reader:
    """Reads contexts one after the other, and keeps what the next one begins with."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.ids: list[int] = []
        self.cache: Any = None

    def can_go_back(self) -> bool:
        """Whether this model's cache can be cut back to a shorter context: a sliding window or a recurrent state cannot."""
        with torch.inference_mode():
            cache = self.engine.forward([[0, 0]], None, last=True)[1]
        return all(type(layer).__name__ == "DynamicLayer" for layer in getattr(cache, "layers", [None]))

    def answers(self, context: list[int], choices: list[list[int]]) -> list[Answer]:
        with torch.inference_mode():
            first = self._read(context)
            longest = max(map(len, choices)) - 1
            if longest == 0:
                return [_answer(first[None], choice) for choice in choices]
            # right-padded: a causal model's answers at real positions do not depend on what follows them
            follow = [choice[:-1] + [choice[0]] * (longest - len(choice) + 1) for choice in choices]
            self.cache.batch_repeat_interleave(len(choices))
            logits = self.engine.forward(follow, self.cache)[0]
            self.cache.batch_select_indices(torch.tensor([0], device=logits.device))
            self._crop(len(context))
            rest = torch.log_softmax(logits.float(), -1)
            return [_answer(torch.cat([first[None], row[: len(c) - 1]]), c) for row, c in zip(rest, choices)]

    def _read(self, context: list[int]) -> Any:
        """Log-probabilities [vocab] of what follows the context, whose keys and values are then in the cache."""
        same = next((k for k, (a, b) in enumerate(zip(self.ids, context[:-1])) if a != b), min(len(self.ids), len(context) - 1))
        if same < WORTH_SHARING or self.cache is None:
            same, self.cache = 0, None
        else:
            self._crop(same)
        logits, self.cache = self.engine.forward([context[same:]], self.cache, last=True)
        self.ids = context
        return torch.log_softmax(logits[0, -1].float(), -1)

    def _crop(self, length: int) -> None:
        surplus = self.cache.get_seq_length() - length
        if surplus > 0:
            self.cache.crop(-surplus)


def _answer(logp: Any, choice: list[int]) -> Answer:
    """logp: [len(choice), vocab]."""
    ids = torch.tensor(choice, device=logp.device)
    greedy = bool((logp.argmax(-1) == ids).all())
    return float(logp.gather(1, ids[:, None]).sum()), greedy
