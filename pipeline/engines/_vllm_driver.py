"""Answer requests by vLLM, one at a time: `python _vllm_driver.py` in vLLM's environment, started by engine `vllm`.

In: lines of JSON, first the arguments of `LLM`, then questions. Out: lines of JSON, first {"facts"}, then answers.
It can import nothing of pipeline/ but `divergence.in_vllm`."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from pipeline.divergence.in_vllm import CardFacts

CLOSE = 1e-3  # nats: between a token's log-probability from the logits that were read and vLLM's own


class Facts(CardFacts):
    """cache_tokens: that the cache has room for."""

    cache_tokens: int
    version: str


class Question(TypedDict, total=False):
    """ids: a prompt whose rows are wanted from `start` on (see `LogitsReader.rows`). prompts: to continue by at most `most` tokens
    each, until one of `ends`; whole: at once, not token by token. Neither: no more tokens are wanted."""

    ids: list[int]
    start: int
    vocab: int
    file: str
    threads: int
    prompts: list[list[int]]
    most: int
    temperature: float
    seed: int
    ends: list[int]
    number: int
    whole: bool


class Answer(TypedDict, total=False):
    """tokens, at: one of each prompt, and when they were known; done: no more follow. unsupported, fault: what went wrong."""

    facts: Facts
    rows: dict[str, list[float]]
    tokens: list[int]
    at: float
    replies: list[list[int]]
    done: bool
    unsupported: str
    fault: str


def score(llm: Any, params: Any, asked: Question) -> Answer:
    """The columns of a prompt's rows (`in_vllm`), if they agree with vLLM's own log-probability of every true token."""
    ids, start = asked["ids"], asked["start"]
    llm.collective_rpc("watch")
    try:
        given = llm.generate([{"prompt_token_ids": ids}], params(max_tokens=1, prompt_logprobs=1, detokenize=False), use_tqdm=False)
        arguments = (ids, start, asked["vocab"], asked["file"], asked["threads"])
        found = [rows for rows in llm.collective_rpc("rows", args=arguments) if rows is not None]
    finally:
        llm.collective_rpc("unwatch")
    rows = found[0] if found else "vLLM computed no logits in the model's compute_logits"
    if isinstance(rows, str):
        return {"fault": rows}
    says = [given[0].prompt_logprobs[at][ids[at]].logprob for at in range(start + 1, len(ids))]
    wrong = [k for k, (a, b) in enumerate(zip(rows["logp"], says)) if not abs(a - b) <= CLOSE]  # NaN is wrong, too
    if wrong:
        counts, k = f"{len(wrong)} of {len(says)} tokens by more than {CLOSE:g} nats", wrong[0]
        first = f"first: position {start + 1 + k}, {rows['logp'][k]:.5g} by the logits that were read, {says[k]:.5g} by vLLM"
        return {"fault": f"self-check: its log-probabilities differ from vLLM's own at {counts} ({first})"}
    return {"rows": rows}


def stream(llm: Any, params: Any, asked: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
    """Tokens of a batch of prompts, one of each at a time, with the time when all were known; or whole replies."""
    engine, prompts = llm.llm_engine, asked["prompts"]
    how = params(
        max_tokens=asked["most"], temperature=asked["temperature"], seed=asked["seed"], stop_token_ids=asked["ends"],
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    if asked["whole"]:
        given = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        yield {"replies": [list(one.outputs[0].token_ids) for one in given]}
        return
    names = [f"{asked['number']}-{k}" for k in range(len(prompts))]
    for name, ids in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": ids}, how)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    shown = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            tokens[out.request_id] = list(out.outputs[0].token_ids)
        at = time.monotonic()
        while all(len(t) > shown for t in tokens.values()):
            yield {"tokens": [t[shown] for t in tokens.values()], "at": at}
            shown += 1
        if stopped():
            engine.abort_request(names)


def serve(
    llm: Any, params: Any, lines: Iterable[str], send: Callable[[Answer], object], stopped: Callable[[], bool]
) -> None:  # fmt: skip
    """Answer all questions. stopped: whether another one waits, which ends a stream."""
    for line in lines:
        asked: Question = json.loads(line)
        if "prompts" in asked:
            for step in stream(llm, params, asked, stopped):
                send(step)
            send({"done": True})
        elif "ids" in asked:  # else a stop after the end
            send(score(llm, params, asked))


def facts(llm: Any) -> Facts:
    import vllm

    each: list[CardFacts] = llm.collective_rpc("facts")
    cache = llm.llm_engine.vllm_config.cache_config
    held, room = sum(e["cache_bytes"] for e in each), cache.num_gpu_blocks * cache.block_size
    return {**each[0], "cache_bytes": held, "cache_tokens": room, "version": str(vllm.__version__)}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log

    def send(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    lines = iter(sys.stdin.readline, "")
    arguments = json.loads(next(lines))
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        eager = arguments.pop("eager") or current_platform.is_cpu()  # without graphs compiling only takes minutes
        llm = LLM(**arguments, enforce_eager=eager)
        found = facts(llm)
    except Exception as e:
        import traceback

        traceback.print_exc()
        send({"unsupported": " ".join(f"{type(e).__name__}: {e}".split())[:300]})
        return
    send({"facts": found})
    serve(llm, SamplingParams, lines, send, lambda: bool(select.select([sys.stdin], [], [], 0)[0]))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this file's folder, which has a vllm.py
    main()
