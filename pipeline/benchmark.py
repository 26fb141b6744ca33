"""benchmark: speed and memory, one row per request, raw timestamps -> artifacts/timings/<variant>.jsonl

Machines drift, so a ratio is only fair inside one run: variant and reference each run in their own process and answer the same
prompt in turn, A B B A A B ..., and each round gives one ratio. If a gate rule is still open then, more rounds follow
(speed/rounds.py); finally the variant alone runs contexts and batches (speed/schedule.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import Unsupported
from pipeline.core.params import Params, Requests
from pipeline.core.records import Json, Looked, ModelManifest, ModelShape, TimedModel, TimingFacts, TimingRow, TimingsMeta
from pipeline.engines._speculation import drafting_variant
from pipeline.engines._worker import Worker
from pipeline.evalset import load_texts
from pipeline.gating.rules import looks_of
from pipeline.speed import hardware, rounds, schedule
from pipeline.speed.roofline import shape_of


def measure(
    variant: Worker, reference: Worker, setup: Requests, prompts: Sequence[list[int]], first: int = 0, speculates: bool = False
) -> Iterator[TimingRow]:
    """Warm-ups, then rounds; both answer the same prompt, and the order changes from round to round.
    first: number of earlier rounds; speculates: the variant also answers without its draft."""
    order = [("variant", variant, "stream"), ("reference", reference, "stream")]
    if speculates:
        order.insert(0, ("undrafted", variant, "stream_undrafted"))
    with cli.progress(len(prompts), "benchmark", "round") as bar:
        for k, prompt in enumerate(prompts, first):
            warmup = k < setup.warmups
            for who, worker, how in order if k % 2 else order[::-1]:
                row = worker.ask(prompt, setup.output_tokens, how=how)
                yield {
                    "round": None if warmup else k - setup.warmups, "scenario": "single", "who": who, "warmup": warmup,
                    "prompt_tokens": len(prompt), **row,
                }  # fmt: skip
            bar.update()


def in_rounds(
    variant: Worker, reference: Worker, setup: Requests, prompts: Sequence[list[int]], looks: rounds.Looks, confidence: float,
    speculates: bool = False,
) -> tuple[list[TimingRow], Looked]:  # fmt: skip
    """(rows of the paired rounds, how often they were looked at); a second batch follows if the first leaves a rule open."""
    some = setup.warmups + setup.rounds
    rows = list(measure(variant, reference, setup, prompts[:some], speculates=speculates))
    more = looks.planned > 1 and looks.unsettled(rows, confidence)
    if more:
        rows += measure(variant, reference, setup, prompts[some:], some, speculates)
    return rows, {"planned": looks.planned, "taken": 1 + more, "bounds": [*looks.bounds], "max_rounds": setup.max_rounds}


def timed(settings: Params, variant: str, threads: int, facts: TimingFacts) -> list[TimingRow]:
    """All rows of a variant; fills `facts`. Raises `Unsupported` if a model cannot run."""
    from tokenizers import Tokenizer

    setup, reference = settings.amount.benchmark, settings.reference
    folder, base = artifacts.model_dir(variant), artifacts.model_dir(reference)
    models = {"variant": timed_model(variant, settings), "reference": timed_model(reference, settings)}
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    prompts = schedule.Prompts(schedule.tokens_of(load_texts(Path(settings.benchmark.prompts)), tokenizer), settings.seed)
    looks = looks_of(settings, variant)
    count = setup.warmups + (setup.rounds if looks.planned == 1 else setup.max_rounds or 0)
    asked = [prompts.cut(setup.prompt_tokens) for _ in range(count)]
    chosen, other = settings.variant(variant), settings.variant(reference)
    with closing(Worker(chosen, folder, threads)) as a, closing(Worker(other, base, threads)) as b:
        longest = min(a.facts["max_length"], b.facts["max_length"])
        if setup.prompt_tokens + setup.output_tokens > longest:
            lengths = f"{setup.prompt_tokens} prompt and {setup.output_tokens} output tokens (the tier's benchmark)"
            raise Unsupported(f"{lengths} are more than the {longest} that both models hold")
        device, dtypes = a.facts["device"], [m["dtype"] for m in models.values()]
        rates = b.cpu_rates(threads, dtypes) if device == "cpu" else hardware.rates(threads, device, dtypes)
        speculates = bool(chosen.engine_options.get("speculate"))
        rows, looked = in_rounds(a, b, setup, asked, looks, rounds.confidence(settings), speculates)
        plan = schedule.plan(setup, min(a.facts["max_length"], len(prompts.source)))
        schedule.fill(plan, prompts)
        rows += schedule.run(a, plan)
        facts["loads"] = {"variant": a.facts, "reference": b.facts}
    facts["models"], facts["rates"], facts["memory_bandwidth"], facts["looks"] = models, rates, rates["read"], looked
    facts["sweep"] = {"output_tokens": schedule.OUTPUT, "repeats": schedule.REPEATS, "notes": plan.notes, "missing": plan.absent()}
    facts["machine"], facts["versions"] = hardware.describe(threads), artifacts.versions()
    return rows


def timed_model(name: str, settings: Params) -> TimedModel:
    folder, engine = artifacts.model_dir(name), settings.variant(name).engine
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    dtype, in_torch = product(manifest, engine)
    config = folder / "config.json"
    return {
        "name": name, "engine": engine, "weight_bytes": manifest["weight_bytes"],
        "parameters": 8 * manifest["weight_bytes"] / manifest["bits_per_weight"], "dtype": dtype,
        "rate_of": dtype if in_torch else f"{dtype} in torch, a yardstick: its own products are others",
        "shape": records.checked(shape_of(with_tying(artifacts.read_json(config))), ModelShape, str(config)),
    }  # fmt: skip


def product(manifest: ModelManifest, engine: str) -> tuple[str, bool]:
    """(type of a model's products, whether they are torch's). With packed weights, llama.cpp, ONNX Runtime and torchao's dynamic
    scheme round activations to 8 bits; others unpack weights to the model's type."""
    packed = manifest["quantized_share"] > 0
    eight = packed and (engine in ("llamacpp", "onnxruntime") or manifest["options"].get("scheme") == "int8-dynamic")
    return "int8" if eight else manifest["dtype"] or "float32", engine == "hf" and not packed


def with_tying(config: Json) -> Json:
    """A config.json with `tie_word_embeddings`: if absent, transformers' default for the model type, or null."""
    text = {**config, **(config.get("text_config") or {})}
    if "tie_word_embeddings" in text:
        return config
    from transformers import CONFIG_MAPPING

    kind = text.get("model_type")
    tied = getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", None) if kind in CONFIG_MAPPING else None
    return config | {"tie_word_embeddings": tied}


def main(variant: str) -> None:
    """Time VARIANT, in turns with the reference."""
    watch = artifacts.Stopwatch("benchmark", variant)
    settings = params.load()
    settings.variant(variant)
    hardware.note()
    folders = [artifacts.model_dir(name) for name in (variant, settings.reference)]
    manifests = [records.read(folder / artifacts.MANIFEST, ModelManifest) for folder in folders]
    meta: TimingsMeta = {
        "variant": variant, "model": manifests[0]["digest"], "reference": manifests[1]["digest"], "status": "ok", "reason": None,
    }  # fmt: skip
    rows: list[TimingRow]
    with artifacts.recording(meta, artifacts.timings(variant)) as rows:
        for folder, manifest in zip(folders, manifests):
            artifacts.check_model(folder, manifest)
        if draft := drafting_variant(settings.variant(variant).engine_options):
            meta["draft"] = records.read(artifacts.model_dir(draft) / artifacts.MANIFEST, ModelManifest)["digest"]
        rows += timed(settings, variant, settings.thread_count, meta)
    if meta["status"] != "ok":
        cli.say("benchmark", f"{variant}: {meta['status']}: {meta['reason']}")
        return
    answered = [r for r, _ in rounds.pairs(rows)]
    spans = [r["t_tokens"][-1] - r["t_tokens"][0] for r in answered]
    rate = len(spans) * (settings.amount.benchmark.output_tokens - 1) / sum(spans) if spans else 0
    what = f"{rate:.1f} tok/s decoding over {len(spans)} rounds" if spans else "every request failed"
    cli.say("benchmark", f"{variant}: {what}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
