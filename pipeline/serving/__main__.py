"""`python -m pipeline.serving URL`: measure a server, or with --launch one that is started for it.

Writes artifacts/serving/<name>.jsonl (one row a request), its .meta.json, and <name>.figures.json; with --score, see score.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.core import artifacts, cli
from pipeline.core.errors import ParamsError
from pipeline.evalset import sets_digest
from pipeline.serving import measure, probe, score
from pipeline.serving.client import KEY, Row, ServerError
from pipeline.serving.measure import Plan, endpoint_of, load_tokenizer, measured, unfinished
from pipeline.speed import hardware

PROMPTS = Path("evalsets/corpus")
HOME = artifacts.ARTIFACTS / "serving"
COLUMNS = ("load", "failed", "TTFT p50", "p99 (ms)", "TPOT p50", "p99 (ms) ", "req/s", "tok/s", "goodput")
IN_COLUMNS = (
    "failure_rate", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "throughput_req_s", "throughput_tok_s",
    "goodput_req_s",
)  # fmt: skip


def numbers(text: str, option: str) -> list[float]:
    """`1,2,4` as positive numbers."""
    return [measure.positive(part, option) for part in text.split(",") if part.strip()]


def line(level: str, metrics: dict[str, Row]) -> dict[str, str]:
    """A level's row of the table; a dash for unknown values."""
    values = [metrics[name]["value"] for name in IN_COLUMNS]
    return dict(zip(COLUMNS, [level, *("–" if v is None else f"{v:.3g}" for v in values)]))


def check_server(url: str, kind: str, model_dir: Path | None) -> None:
    """Raise `ParamsError` unless one server is named: by its URL, or by its kind and its model's folder."""
    if url and kind:
        raise ParamsError(f"{url} is a server's URL and --launch starts another; give one of them")
    if bool(url) == bool(kind) or bool(kind) != (model_dir is not None):
        raise ParamsError("name a server by its URL, or start one with --launch llamacpp --model-dir FOLDER")


def write(name: str, rows: list[Row], plan: Plan, about: Row) -> None:
    """Write rows and metrics, and print them. Raises `ServerError`, after writing, if no request was complete."""
    report = measure.figures(rows, plan)
    path = HOME / f"{name}.jsonl"
    artifacts.write_jsonl(path, rows)
    client = {"client": hardware.describe(0) | {"threads": None}, "versions": artifacts.versions()}
    artifacts.write_json(artifacts.meta_of(path), about | client)
    artifacts.write_json(path.with_suffix(".figures.json"), report)
    unfinished(path).unlink(missing_ok=True)
    if why := measure.failure(rows):
        raise ServerError(f"{why} (all: {path})")
    cli.table(COLUMNS, [line(level, metrics) for level, metrics in report["levels"].items()], left=("load",))
    complete = f"{len(rows)} requests, {sum(r['ok'] for r in rows)} complete"
    cli.say("serving", f"{complete}; {measure.saturation(report['knee'])}; {path.with_suffix('.figures.json')}")


def main(
    url: Annotated[str, typer.Argument(help="the server, http://127.0.0.1:8000; the API key comes from QUANTGATE_API_KEY")] = "",
    launch_: Annotated[str, typer.Option("--launch", help="start this kind of server: llamacpp, vllm")] = "",
    model_dir: Annotated[Path | None, typer.Option("--model-dir", help="with --launch: the model's folder")] = None,
    model: Annotated[str, typer.Option(help="its name at the server, if there are several")] = "",
    chat: Annotated[bool, typer.Option(help="use chat completions instead of completions")] = False,
    concurrency: Annotated[str, typer.Option(help="closed loop: concurrent requests (--score: the first)")] = "1,2,4,8,16",
    rates: Annotated[str, typer.Option(help="open loop: requests a second, Poisson arrivals")] = "",
    requests: Annotated[int, typer.Option(min=1, help="in a level and round (at least 4 for each concurrent one)")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    warmups: Annotated[int, typer.Option(min=0, help="in a level, at least one for each concurrent one; 0: none")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 32,
    prompts: Annotated[Path, typer.Option(help="JSONL of texts, or a folder of them")] = PROMPTS,
    tokenizer: Annotated[Path | None, typer.Option(help="its tokenizer.json: exact prompt lengths, counted replies")] = None,
    objective: Annotated[str, typer.Option(help="for goodput: ttft_ms=500,tpot_ms=50,e2e_ms=3000")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for a whole reply")] = 120.0,
    key_env: Annotated[str, typer.Option(help="the variable that holds the API key")] = KEY,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(min=1, help="with --launch: of the server")] = 1,
    name: Annotated[str, typer.Option(help="of the files under artifacts/serving/")] = "server",
    only_probe: Annotated[bool, typer.Option("--probe", help="only print what the server can do")] = False,
    is_scored: Annotated[bool, typer.Option("--score", help="score the corpus instead: ppl, ppl_ratio, delta_p")] = False,
) -> None:
    """Measure an OpenAI-compatible server: what it can do, latency, throughput, goodput and the saturation point.

    Exits 1 if no request was complete.
    """
    check_server(url, launch_, model_dir)
    concurrent = numbers(concurrency, "--concurrency")
    if any(x != int(x) for x in concurrent):
        raise ParamsError(f"--concurrency {concurrency!r}: concurrency is a whole number, as in 1,2,4,8")
    plan = Plan(
        list(map(int, concurrent)), numbers(rates, "--rates"), requests, rounds, warmups, prompt_tokens, output_tokens,
        objective=measure.objective_of(objective), seed=seed,
    )  # fmt: skip
    if not plan.levels():
        raise ParamsError("nothing to measure: give --concurrency 1,2,4 or --rates 0.5,1")
    if is_scored:
        if prompts != PROMPTS:
            raise ParamsError(f"--score uses the tier's documents; leave --prompts {prompts} out")
        score.run(
            url, launch_, model_dir, score.check_asked(tokenizer or model_dir, chat, only_probe), model=model, timeout=timeout,
            at_once=max(1, *plan.concurrency[:1]), key_env=key_env, threads=threads, name=name,
        )  # fmt: skip
        return
    words = load_tokenizer(tokenizer)
    with endpoint_of(
        url, launch_, model_dir, plan, tokenizer=words, model=model, chat=chat, timeout_s=timeout, key_env=key_env, threads=threads
    ) as (endpoint, launch):
        abilities, plan, rows = asyncio.run(measured(endpoint, plan, prompts, words, only_probe, HOME / f"{name}.jsonl"))
    for text in probe.lacking(abilities):
        cli.say("serving", text)
    if not only_probe:
        write(name, rows, plan, {"probe": abilities, "plan": asdict(plan), "launch": launch, "prompts": sets_digest(prompts)})


if __name__ == "__main__":
    cli.run(main)
