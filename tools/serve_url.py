"""`quantgate serve URL`: measure a server, or start one with --launch and measure it.

Writes artifacts/serving/<name>.jsonl (one row per request), its .meta.json, and <name>.figures.json. For --score see score_url.py.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline.core import artifacts, cli
from pipeline.core.errors import ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.records import Json, Probe, RequestRow
from pipeline.evalset import sets_digest
from pipeline.metrics.definitions import SERVED
from pipeline.metrics.serving import Objective
from pipeline.serving import logprobs, measure
from pipeline.serving.client import KEY, Endpoint, ServerError, connected
from pipeline.serving.measure import Plan, endpoint_of
from pipeline.speed import hardware
from tools import score_url

PROMPTS = Path("evalsets/corpus")
HOME = artifacts.ARTIFACTS / "serving"
COLUMNS = {
    "failed": "failure_rate", "TTFT p50": "ttft_p50_ms", "p99 (ms)": "ttft_p99_ms", "TPOT p50": "tpot_p50_ms",
    "p99 (ms) ": "tpot_p99_ms", "req/s": "throughput_req_s", "tok/s": "throughput_tok_s", "goodput": "goodput_req_s",
}  # fmt: skip


def positive(text: str, option: str) -> float:
    """Parse a positive, finite number. Raises `ParamsError` with the option's name."""
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ParamsError(f"{option}: {text!r} is not a positive number")


def numbers(text: str, option: str) -> list[float]:
    """Parse `1,2,4` as positive numbers."""
    return [positive(part, option) for part in text.split(",") if part.strip()]


def objective_of(text: str) -> Objective:
    """Parse `ttft_ms=500,tpot_ms=50`. Raises `ParamsError` for an unknown name or a limit that is not positive."""
    limits, names = dict[str, float](), list(Objective.__dataclass_fields__)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in names:
            raise ParamsError(f"--objective {part!r}: unknown limit {name.strip()!r}{did_you_mean(name, names)}")
        limits[name.strip()] = positive(value, f"--objective {part!r}")
    return Objective(**limits)


def write(path: Path, rows: list[RequestRow], plan: Plan, about: Json) -> None:
    """Write rows and metrics, and print them. Raises `ServerError`, after writing, if no request was complete."""
    levels, knee = measure.metrics_of(rows, plan)
    written, definitions = path.with_suffix(".figures.json"), {name: d.about for name, d in SERVED.items()}
    client = {"client": {**hardware.describe(0), "threads": None}, "versions": artifacts.versions()}
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), about | client)
    artifacts.write_json(written, {"levels": levels, "knee": knee, "objective": asdict(plan.objective), "about": definitions})
    measure.unfinished(path).unlink(missing_ok=True)
    if why := measure.failure(rows):
        raise ServerError(f"{why} (all: {path})")
    table = []
    for level, metrics in levels.items():
        values = {column: metrics[name]["value"] for column, name in COLUMNS.items()}
        table.append({"load": level, **{column: "–" if v is None else f"{v:.3g}" for column, v in values.items()}})
    cli.table(("load", *COLUMNS), table, left=("load",))
    cli.say("serving", f"{measure.summary(rows, knee)}; {written}")


def lacking(abilities: Probe) -> list[str]:
    """One line for each ability that the endpoint lacks, may lack, or has in one of several ways."""
    word = {None: "unknown", False: "no", True: "yes"}
    return [f"{k}: {word[v['value']]}: {v['reason']}" for k, v in abilities.items() if isinstance(v, dict) and v["reason"]]


async def probed(endpoint: Endpoint, words: logprobs.Words | None) -> Probe:
    async with connected(endpoint) as client:
        endpoint, abilities = await measure.probe(client, endpoint)
        return {**abilities, "prompt_logprobs": await logprobs.ability(client, endpoint, words)}


def main(
    url: Annotated[str, typer.Argument(help="the server, http://127.0.0.1:8000; the API key comes from QUANTGATE_API_KEY")] = "",
    launch_: Annotated[str, typer.Option("--launch", help="start this kind of server: llamacpp, vllm")] = "",
    model_dir: Annotated[Path | None, typer.Option("--model-dir", help="with --launch: the model's folder")] = None,
    model: Annotated[str, typer.Option(help="the model's name at the server, if it serves several")] = "",
    chat: Annotated[bool, typer.Option(help="use chat completions instead of completions")] = False,
    concurrency: Annotated[str, typer.Option(help="closed loop: concurrent requests (--score: the first)")] = "1,2,4,8,16",
    rates: Annotated[str, typer.Option(help="open loop: requests per second, Poisson arrivals")] = "",
    requests: Annotated[int, typer.Option(min=1, help="per level and round (at least 4 for each concurrent one)")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    warmups: Annotated[int, typer.Option(min=0, help="per level, at least one for each concurrent one; 0: none")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 32,
    prompts: Annotated[Path, typer.Option(help="JSONL of texts, or a folder of them")] = PROMPTS,
    tokenizer: Annotated[Path | None, typer.Option(help="the model's tokenizer.json, for exact token counts")] = None,
    objective: Annotated[str, typer.Option(help="for goodput: ttft_ms=500,tpot_ms=50,e2e_ms=3000")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for a whole reply")] = 120.0,
    key_env: Annotated[str, typer.Option(help="the variable that holds the API key")] = KEY,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(min=1, help="with --launch: the server's threads")] = 1,
    name: Annotated[str, typer.Option(help="name of the files in artifacts/serving/")] = "server",
    only_probe: Annotated[bool, typer.Option("--probe", help="only print what the server can do")] = False,
    is_scored: Annotated[bool, typer.Option("--score", help="score the corpus instead: ppl, delta_p, least KLD")] = False,
) -> None:
    """Measure an OpenAI-compatible server: what it can do, latency, throughput, goodput and the saturation point.

    Exits 1 if no request was complete.
    """
    if url and launch_:
        raise ParamsError(f"{url} is a server's URL and --launch starts another; give one of them")
    if not (url or launch_) or bool(launch_) != (model_dir is not None):
        raise ParamsError("name a server by its URL, or start one with --launch llamacpp --model-dir FOLDER")
    concurrent = numbers(concurrency, "--concurrency")
    if any(x != int(x) for x in concurrent):
        raise ParamsError(f"--concurrency {concurrency!r}: concurrency is a whole number, as in 1,2,4,8")
    plan = Plan(
        list(map(int, concurrent)), numbers(rates, "--rates"), requests, rounds, warmups, prompt_tokens, output_tokens,
        objective=objective_of(objective), seed=seed,
    )  # fmt: skip
    if not plan.levels():
        raise ParamsError("nothing to measure: give --concurrency 1,2,4 or --rates 0.5,1")
    connect = partial(endpoint_of, url, launch_, model_dir, model=model, timeout_s=timeout, key_env=key_env, threads=threads)
    if is_scored:
        if prompts != PROMPTS:
            raise ParamsError(f"--score uses the tier's documents; leave --prompts {prompts} out")
        if chat or only_probe:
            raise ParamsError(f"--score uses completions and does nothing else; leave {'--chat' if chat else '--probe'} out")
        if (folder := tokenizer or model_dir) is None:
            raise ParamsError("--score sends token ids: name the model's tokenizer.json, or its folder, with --tokenizer")
        score_url.run(connect, folder, max(1, *plan.concurrency[:1]), HOME / f"{name}.scores.jsonl")
        return
    words, path = logprobs.load_tokenizer(tokenizer) if tokenizer else None, HOME / f"{name}.jsonl"
    rows: list[RequestRow] = []
    with connect(plan, tokenizer=words, chat=chat) as (endpoint, launch):
        if only_probe:
            abilities = asyncio.run(probed(endpoint, logprobs.Words(tokenizer) if tokenizer else None))
        else:
            abilities, plan, rows = asyncio.run(measure.measured(endpoint, plan, prompts, words, path))
    for text in lacking(abilities):
        cli.say("serving", text)
    if not only_probe:
        write(path, rows, plan, {"probe": abilities, "plan": asdict(plan), "launch": launch, "prompts": sets_digest(prompts)})


if __name__ == "__main__":
    cli.run(main)
