"""`python -m pipeline.serving URL`: measure a server, or with --launch one that is started for it.

Writes artifacts/serving/<name>.jsonl (one row a request), its .meta.json, and <name>.figures.json; with --score, what
score.py says.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline import hardware
from pipeline.core import artifacts, cli
from pipeline.core.errors import ParamsError
from pipeline.evalset import sets_digest
from pipeline.serving import measure, probe, score
from pipeline.serving.client import KEY, Endpoint, Row, ServerError, address, key_from
from pipeline.serving.measure import Plan
from pipeline.serving.session import counter, load_tokenizer, measured, started, unfinished

PROMPTS = Path("evalsets/corpus")
HOME = artifacts.ARTIFACTS / "serving"
COLUMNS = ("load", "failed", "TTFT p50", "p99 (ms)", "TPOT p50", "p99 (ms) ", "req/s", "tok/s", "goodput")


def check_complete(rows: list[Row], path: Path) -> None:
    """Raise `ServerError` if no request that counts was complete: the figures are of nothing then."""
    counted = [r for r in rows if not r["warmup"]]
    if not any(r["ok"] for r in counted):
        raise ServerError(f"none of {len(counted)} requests was complete; the first said: {counted[0]['error']} (all: {path})")


def numbers(text: str, option: str) -> list[float]:
    """`1,2,4` as numbers, each positive."""
    return [measure.positive(part, option) for part in text.split(",") if part.strip()]


def whole(text: str, option: str) -> list[int]:
    found = numbers(text, option)
    if any(x != int(x) for x in found):
        raise ParamsError(f"{option} {text!r}: requests at once are whole numbers, as in 1,2,4,8")
    return [int(x) for x in found]


def write(name: str, rows: list[Row], meta: Row, figures: Row) -> Path:
    """Rows, their side file and the figures; returns the figures' path."""
    path = HOME / f"{name}.jsonl"
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta)
    artifacts.write_json(path.with_suffix(".figures.json"), figures)
    unfinished(path).unlink(missing_ok=True)
    return path.with_suffix(".figures.json")


def shown(metric: Row) -> str:
    """A value with three digits; what is not known is a dash."""
    return "–" if metric["value"] is None else f"{metric['value']:.3g}"


def line(name: str, m: dict[str, Row]) -> dict[str, str]:
    keys = ("failure_rate", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "throughput_req_s", "throughput_tok_s")
    values = [name, *(shown(m[k]) for k in keys), shown(m["goodput_req_s"])]
    return dict(zip(COLUMNS, values))


def check_server(url: str, kind: str, model_dir: Path | None) -> None:
    """Raise `ParamsError` unless one server is named: by its address, or by its kind and the folder of its model."""
    if url and kind:
        raise ParamsError(f"{url} is a server's address and --launch starts another; give one of them")
    if bool(url) == bool(kind) or bool(kind) != (model_dir is not None):
        raise ParamsError("name a server by its address, or start one with --launch llamacpp --model-dir FOLDER")


def keep(name: str, rows: list[Row], plan: Plan, about: Row) -> None:
    """Write rows and figures, and show them. Raises `ServerError`, once they are written, if no request was complete."""
    report = measure.figures(rows, plan)
    client = {"client": hardware.describe(0) | {"threads": None}, "versions": artifacts.versions()}
    path = write(name, rows, about | client, report)
    check_complete(rows, HOME / f"{name}.jsonl")
    cli.table(COLUMNS, [line(k, m) for k, m in report["levels"].items()], left=("load",))
    best = report["knee"]
    knee = f"knee at {best['value']} at once" if best["value"] is not None else f"no knee: {best['warnings'][0]}"
    cli.say("serving", f"{len(rows)} requests, {sum(r['ok'] for r in rows)} complete; {knee}; {path}")


def main(
    url: Annotated[str, typer.Argument(help="the server, http://127.0.0.1:8000; the API key comes from QUANTGATE_API_KEY")] = "",
    launch_: Annotated[str, typer.Option("--launch", help="start this kind of server on MODEL: llamacpp, vllm")] = "",
    model_dir: Annotated[Path | None, typer.Option("--model-dir", help="with --launch: the folder of the model")] = None,
    model: Annotated[str, typer.Option(help="its name at the server, where there are several")] = "",
    chat: Annotated[bool, typer.Option(help="chat completions in place of completions")] = False,
    concurrency: Annotated[str, typer.Option(help="closed loop: so many requests at once (--score: the first)")] = "1,2,4,8,16",
    rates: Annotated[str, typer.Option(help="open loop: so many a second, Poisson arrivals")] = "",
    requests: Annotated[int, typer.Option(min=1, help="requests a level and round (at least 4 for each at once)")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    warmups: Annotated[int, typer.Option(min=0, help="a level, at least one for each at once; left out; 0: none")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 32,
    prompts: Annotated[Path, typer.Option(help="JSONL of texts, or a folder of them")] = PROMPTS,
    tokenizer: Annotated[Path | None, typer.Option(help="its tokenizer.json: prompts of exact length, replies counted")] = None,
    objective: Annotated[str, typer.Option(help="for goodput: ttft_ms=500,tpot_ms=50,e2e_ms=3000")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for a whole reply")] = 120.0,
    key_env: Annotated[str, typer.Option(help="the variable that holds the API key")] = KEY,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(min=1, help="with --launch: of the server")] = 1,
    name: Annotated[str, typer.Option(help="of the files under artifacts/serving/")] = "server",
    only_probe: Annotated[bool, typer.Option("--probe", help="say what the server can do, and stop")] = False,
    is_scored: Annotated[bool, typer.Option("--score", help="score the corpus in place of speed: ppl, ppl_ratio, delta_p")] = False,
) -> None:
    """Measure an OpenAI-compatible server: what it can do, latency, throughput, goodput and the knee.

    Exits 1 if no request was complete.
    """
    check_server(url, launch_, model_dir)
    plan = Plan(
        whole(concurrency, "--concurrency"), numbers(rates, "--rates"), requests, rounds, warmups, prompt_tokens, output_tokens,
        objective=measure.objective_of(objective), seed=seed,
    )  # fmt: skip
    if not plan.levels():
        raise ParamsError("nothing to measure: give --concurrency 1,2,4 or --rates 0.5,1")
    if is_scored:
        if prompts != PROMPTS:
            raise ParamsError(f"--score takes the tier's documents of diverge.corpus; leave --prompts {prompts} out")
        score.run(
            url, launch_, model_dir, score.check_asked(tokenizer or model_dir, chat, only_probe), model=model, timeout=timeout,
            at_once=max(1, *plan.concurrency[:1]), key_env=key_env, threads=threads, name=name,
        )  # fmt: skip
        return
    words = load_tokenizer(tokenizer)
    with started(launch_, model_dir, plan, threads=threads, is_counted=words is not None, is_chat=chat) as own:
        key = own.key if own else key_from(key_env)
        endpoint = Endpoint(own.url if own else address(url, key_env), model, chat, timeout, key, counter(words), key_env)
        found, plan, rows = asyncio.run(measured(endpoint, plan, prompts, words, only_probe, HOME / f"{name}.jsonl"))
    for text in probe.lacking(found):
        cli.say("serving", text)
    if not only_probe:
        about = {"probe": found, "plan": asdict(plan), "launch": own.facts if own else None, "prompts": sets_digest(prompts)}
        keep(name, rows, plan, about)


if __name__ == "__main__":
    cli.run(main)
