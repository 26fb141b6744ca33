"""benchmark: speed and memory, one row per request, raw timestamps -> artifacts/timings/<variant>.jsonl

Decoding a token reads every weight once, so its floor is weight bytes over memory bandwidth; prefill is matrix products, so its
floor is arithmetic; a small model on a fast machine is bound by the cost of launching operations from Python. Both rates are
measured in the same run (speed/hardware.py).

Machines drift, so a ratio is only fair inside one run: variant and reference each live in their own process and answer the same
prompt in turn, A B B A A B ..., and each round gives one ratio. Where they leave a gate rule open, there are more
(speed/rounds.py); then the variant alone goes through contexts and batches (speed/schedule.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import Unsupported
from pipeline.core.params import Params, Requests
from pipeline.engines._worker import Worker, working
from pipeline.evalset import load_texts
from pipeline.gating.rules import looks_of
from pipeline.speed import hardware, rounds, schedule
from pipeline.speed.roofline import Shape

Row = dict[str, Any]


def measure(ours: Worker, theirs: Worker, setup: Requests, asked: Sequence[list[int]], first: int = 0) -> Iterator[Row]:
    """Warm-ups, then rounds; both answer the same prompt, and who goes first changes from round to round.
    first: how many rounds there have been already."""
    order = [("variant", ours), ("reference", theirs)]
    with cli.progress(len(asked), "benchmark", "round") as bar:
        for k, prompt in enumerate(asked, first):
            warmup = k < setup.warmups
            for who, worker in order if k % 2 else order[::-1]:
                row = worker.ask(prompt, setup.output_tokens)
                yield {
                    "round": None if warmup else k - setup.warmups, "scenario": "single", "who": who, "warmup": warmup,
                    "prompt_tokens": len(prompt), **row,
                }  # fmt: skip
            bar.update()


def in_rounds(
    ours: Worker, theirs: Worker, setup: Requests, prompts: Sequence[list[int]], looks: rounds.Looks, confidence: float
) -> tuple[list[Row], Row]:
    """(rows of the paired rounds, how often they were looked at); a second batch where the first leaves a rule open."""
    some = setup.warmups + setup.rounds
    rows = list(measure(ours, theirs, setup, prompts[:some]))
    more = looks.planned > 1 and looks.unsettled(rows, confidence)
    if more:
        rows += measure(ours, theirs, setup, prompts[some:], first=some)
    return rows, {"planned": looks.planned, "taken": 1 + more, "bounds": looks.bounds, "max_rounds": setup.max_rounds}


def timed(settings: Params, variant: str, threads: int) -> tuple[list[Row], Row]:
    """(all rows of a variant, what its metrics need besides). Raises `Unsupported` where a model cannot run."""
    from tokenizers import Tokenizer

    setup, reference = settings.amount.benchmark, settings.reference
    folder, base = artifacts.model_dir(variant), artifacts.model_dir(reference)
    models = {"variant": facts(variant, folder, settings), "reference": facts(reference, base, settings)}
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    prompts = schedule.Prompts(schedule.tokens_of(load_texts(Path(settings.benchmark.prompts)), tokenizer), settings.seed)
    looks = looks_of(settings, variant)
    count = setup.warmups + (setup.rounds if looks.planned == 1 else setup.max_rounds or 0)
    asked = [prompts.cut(setup.prompt_tokens) for _ in range(count)]
    with working(settings.variant(variant), folder, threads) as a, working(settings.variant(reference), base, threads) as b:
        longest = min(a.facts["max_length"], b.facts["max_length"])
        if setup.prompt_tokens + setup.output_tokens > longest:
            raise Unsupported(
                f"{setup.prompt_tokens} prompt and {setup.output_tokens} output tokens (the tier's benchmark) are more than "
                f"the {longest} that both models hold"
            )
        device, dtypes = a.facts["device"], [m["dtype"] for m in models.values()]
        rates = b.cpu_rates(threads, dtypes) if device == "cpu" else hardware.rates(threads, device, dtypes)
        rows, looked = in_rounds(a, b, setup, asked, looks, rounds.confidence(settings))
        plan = schedule.plan(setup, min(a.facts["max_length"], len(prompts.source)))
        schedule.fill(plan, prompts)
        rows += schedule.run(a, plan)
        loads = {"variant": a.facts, "reference": b.facts}
    return rows, {
        "loads": loads, "models": models, "rates": rates, "memory_bandwidth": rates["read"], "looks": looked,
        "sweep": {"output_tokens": schedule.OUTPUT, "repeats": schedule.REPEATS, "notes": plan.notes, "missing": plan.absent()},
        "machine": hardware.describe(threads),
    }  # fmt: skip


def facts(name: str, folder: Path, settings: Params) -> Row:
    """What metrics need of a model: size, shape, and the type whose products are its yardstick."""
    manifest, config = artifacts.read_manifest(folder), artifacts.read_json(folder / "config.json")
    engine = settings.variant(name).engine
    dtype, own = product(manifest, engine)
    return {
        "name": name, "engine": engine, "weight_bytes": manifest["weight_bytes"],
        "parameters": 8 * manifest["weight_bytes"] / manifest["bits_per_weight"], "dtype": dtype,
        "rate_of": dtype if own else f"{dtype} in torch, a yardstick: its own products are others",
        "shape": asdict(Shape.of(with_tying(config))),
    }  # fmt: skip


def product(manifest: Row, engine: str) -> tuple[str, bool]:
    """(type of a model's products, whether they are torch's): llama.cpp, ONNX Runtime and torchao's dynamic scheme round
    activations to 8 bits for packed weights; elsewhere packed weights are unpacked to the model's type."""
    packed, kind = bool(manifest.get("quantized_share")), str(manifest.get("dtype") or "float32")
    eight = packed and (engine in ("llamacpp", "onnxruntime") or manifest["options"].get("scheme") == "int8-dynamic")
    return "int8" if eight else kind, engine == "hf" and not packed


def with_tying(config: Row) -> Row:
    """A config.json with `tie_word_embeddings`: where it is left out, transformers' default for the model type, or null."""
    own = {**config, **(config.get("text_config") or {})}
    if "tie_word_embeddings" in own:
        return config
    from transformers import CONFIG_MAPPING

    kind = own.get("model_type")
    tied = getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", None) if kind in CONFIG_MAPPING else None
    return config | {"tie_word_embeddings": tied}


def main(variant: str) -> None:
    """Time VARIANT, in turns with the reference."""
    watch = artifacts.Stopwatch("benchmark", variant)
    settings = params.load()
    settings.variant(variant)
    path = artifacts.timings(variant)
    manifest, theirs = (artifacts.read_manifest(artifacts.model_dir(name)) for name in (variant, settings.reference))
    meta: Row = {
        "variant": variant, "model": manifest["digest"], "reference": theirs["digest"], "status": manifest["status"],
        "reason": manifest["reason"],
    }  # fmt: skip
    rows: list[Row] = []
    hardware.note()
    if meta["status"] == "ok":
        for name, written in {variant: manifest, settings.reference: theirs}.items():
            artifacts.verify_files(artifacts.model_dir(name), written)
        with artifacts.recording(meta):
            rows, details = timed(settings, variant, settings.thread_count)
            meta |= details | {"versions": artifacts.versions()}
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta)
    if meta["status"] != "ok":
        cli.say("benchmark", f"{variant}: {meta['status']}: {meta['reason']}")
        return
    ratios = rounds.decode_ratios(rows)
    spans = [r["t_tokens"][-1] - r["t_first"] for r, _ in rounds.pairs(rows)]
    rate = len(spans) * (settings.amount.benchmark.output_tokens - 1) / sum(spans) if spans else 0
    what = f"{rate:.1f} tok/s decoding over {len(ratios)} rounds" if spans else "every request failed"
    cli.say("benchmark", f"{variant}: {what}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
