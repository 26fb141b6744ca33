"""vLLM, asked one request at a time over a pipe: `python _vllm_driver.py` in vLLM's environment, started by engine `vllm`.

In: a line of JSON each: first the arguments of `LLM`, then requests. Out: lines of JSON: {"facts"}, then a request's answer.
Nothing of pipeline/ but `divergence.in_vllm` can be imported there."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLOSE = 1e-3  # nats: between the log-probability of a token by the logits that were read and by vLLM's own count

Answer = dict[str, Any]


def score(llm: Any, params: Any, asked: Answer) -> Answer:
    """The columns of a prompt's rows (`in_vllm`), if they are what vLLM itself says of every true token."""
    ids, start = asked["ids"], asked["start"]
    llm.collective_rpc("watch")
    try:
        given = llm.generate([{"prompt_token_ids": ids}], params(max_tokens=1, prompt_logprobs=1, detokenize=False), use_tqdm=False)
        arguments = (ids, start, asked["vocab"], asked["file"], asked["threads"])
        found = [rows for rows in llm.collective_rpc("rows", args=arguments) if rows is not None]
    finally:
        llm.collective_rpc("unwatch")
    if not found:
        return {"fault": "vLLM computed no logits in the model's compute_logits"}
    if "fault" in found[0]:
        return found[0]
    says = [given[0].prompt_logprobs[at][ids[at]].logprob for at in range(start + 1, len(ids))]
    off = [abs(a - b) for a, b in zip(found[0]["logp"], says)]
    if wrong := [k for k, d in enumerate(off) if not d <= CLOSE]:  # NaN is wrong, too
        k = wrong[0]
        counts = f"{len(wrong)} of {len(off)} tokens by more than {CLOSE:g} nats"
        first = f"first: position {start + 1 + k}, {found[0]['logp'][k]:.5g} by the logits that were read, {says[k]:.5g} by vLLM"
        return {"fault": f"self-check: its log-probabilities differ from vLLM's own at {counts} ({first})"}
    return {"rows": found[0], "off": max(off)}


def stream(llm: Any, params: Any, asked: Answer, stopped: Any) -> Iterator[Answer]:
    """Tokens of prompts side by side, one of each at a time, with the time at which all were known."""
    engine, prompts = llm.llm_engine, asked["prompts"]
    how = params(
        max_tokens=asked["most"], temperature=asked["temperature"], seed=asked["seed"], stop_token_ids=asked["ends"],
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    names = [f"{asked['number']}-{k}" for k in range(len(prompts))]
    for name, ids in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": ids}, how)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    given = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            tokens[out.request_id] = list(out.outputs[0].token_ids)
        at = time.monotonic()
        while all(len(t) > given for t in tokens.values()):
            yield {"tokens": [t[given] for t in tokens.values()], "at": at}
            given += 1
        if stopped():
            engine.abort_request(names)


def serve(llm: Any, params: Any, lines: Any, send: Any, stopped: Any) -> None:
    """Answer requests until there is none. lines: requests; stopped: whether a stream is to end."""
    for line in lines:
        asked = json.loads(line)
        if "prompts" in asked:
            for step in stream(llm, params, asked, stopped):
                send(step)
            send({"done": True})
        elif "ids" in asked:  # else a stop that came after the end
            send(score(llm, params, asked))


def facts(llm: Any) -> Answer:
    import vllm

    each: list[Answer] = llm.collective_rpc("facts")
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    return each[0] | {"cache_bytes": sum(e["cache_bytes"] for e in each), "cache_tokens": tokens, "version": vllm.__version__}


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

        eager = arguments.pop("eager") or current_platform.is_cpu()  # there are no graphs, and compiling takes minutes
        llm = LLM(**arguments, enforce_eager=eager, worker_extension_cls="pipeline.divergence.in_vllm.LogitsReader")
        found = facts(llm)
    except Exception as e:
        import traceback

        traceback.print_exc()
        send({"unsupported": " ".join(f"{type(e).__name__}: {e}".split())[:300]})
        return
    send({"facts": found})
    serve(llm, SamplingParams, lines, send, lambda: bool(select.select([sys.stdin], [], [], 0)[0]))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # of this file's folder, where a file is called vllm.py, too
    main()
