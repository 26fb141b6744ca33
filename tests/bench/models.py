"""`make models`: small random models of every architecture of tests/zoo.py through every method and engine.

    python tests/bench/models.py [NAME ...]      after `make repro`: their tokenizer is the base's (llama.cpp knows no other)

A cell is the mean KLD to the model's own bfloat16 in nats with the bits a weight, or why there is none: said by `check`, from the
model's files (c), when it was to be built, as by another project's converter (b), or too late (l). Exit 1 if a cell is wrong: a
reference that differs from itself, an int8 farther off than an int4, GGUF or ONNX without rounding farther off than FAITHFUL, or a
reason that came too late. `ZOO_TOKENIZER=FOLDER`: another tokenizer; `ZOO_KEEP=1`: what is found so far, in zoo.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing as mp
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: quantizer, engine, options
    "bf16": ("cast", "hf", {"dtype": "bfloat16"}),
    "int8": ("torchao", "hf", {"scheme": "int8-weight-only"}),
    "int8-bnb": ("bnb", "hf", {"type": "int8"}),
    "nf4": ("bnb", "hf", {"type": "nf4"}),
    "int8-rtn": ("rtn", "hf", {"bits": 8, "group_size": 32}),
    "int4-rtn": ("rtn", "hf", {"bits": 4, "group_size": 32}),
    "int4-gptq": ("gptq", "hf", {"bits": 4, "group_size": 32}),
    "gguf-bf16": ("gguf", "llamacpp", {"type": "BF16"}),
    "gguf-q8_0": ("gguf", "llamacpp", {"type": "Q8_0"}),
    "gguf-q4_0": ("gguf", "llamacpp", {"type": "Q4_0"}),
    "onnx-fp32": ("onnx", "onnxruntime", {"precision": "fp32"}),
    "onnx-int4": ("onnx", "onnxruntime", {"precision": "int4"}),
}
NEARER = (("int8", "nf4"), ("int8-bnb", "nf4"), ("int8-rtn", "int4-rtn"), ("gguf-q8_0", "gguf-q4_0"), ("onnx-fp32", "onnx-int4"))
FAITHFUL = {"gguf-bf16": 0.05, "onnx-fp32": 0.05}  # nats; a lost scale, cap or norm costs whole ones
LONGEST_S = 600.0
Cell = dict[str, Any]


def cells(name: str, base: Path, done: list[str], pipe: Any) -> None:
    """In a process of its own: every method that is not done yet, each sent as it is found."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import zoo  # type: ignore[import-not-found]
    from test_models import WINDOWS  # type: ignore[import-not-found]

    from pipeline import engines, quantize, quantizers, reference
    from pipeline.calibration import Calibration
    from pipeline.core import artifacts
    from pipeline.core.errors import QuantgateError, Unsupported
    from pipeline.core.params import Variant
    from pipeline.diverge import diverge
    from pipeline.store import Store

    home = Path("zoo", name)
    folder = home / "base" if (home / "base").exists() else zoo.make(name, home / "base", tokenizer=base)
    rows = home / "calibration"
    if not rows.exists():
        artifacts.write_jsonl(rows / "rows.jsonl", ({"token_ids": [5 + (7 * k + r) % 500 for k in range(64)]} for r in range(4)))
        artifacts.write_json(rows / artifacts.MANIFEST, {"rows_used": 4, "files": artifacts.files_of(rows), "digest": "d"})

    def build(method: str) -> tuple[Path, Cell]:
        quantizer, engine, options = METHODS[method]
        variant, out = Variant(quantizer=quantizer, engine=engine, options=options), home / method
        out.mkdir(exist_ok=True)
        facts = quantize.quantize(variant, folder, out, calibration=Calibration(rows), seed=1)
        quantize.answer(variant, out, facts, 2)
        return out, facts

    def score(method: str) -> Cell:
        out, facts = build(method)
        engine: Any = engines.load(METHODS[method][1], out, threads=2)
        if method == "bf16":
            files = reference.write_store(engine, WINDOWS, _fresh(home / "store"), 4)
            own = artifacts.files_of(home / "store")
            rest = {"vocab": engine.vocab_size, "files": own, "digest": artifacts.digest(own)}
            artifacts.write_json(home / "store" / artifacts.MANIFEST, files | rest)
        blocks = list(diverge(engine, Store(home / "store"), batch_size=4, threads=2))
        kld = [value for block in blocks for value in block["kld"]]
        told = quantizers.packs_only(METHODS[method][0], folder)
        return {"kld": sum(kld) / len(kld), "bits": facts["bits_per_weight"], "share": facts["quantized_share"], "told": told}

    for method, (quantizer, _engine, options) in METHODS.items():
        if method in done:
            continue
        pipe.send((method, None))
        started = time.monotonic()
        try:
            quantizers.check_model(quantizer, options, folder)
        except QuantgateError as e:
            pipe.send((method, {"check": str(e)}))
            continue
        try:
            cell = score(method)
        except Unsupported as e:
            cell = {"built": str(e).replace(str(home), name)}
        except QuantgateError as e:
            cell = {"late": f"{type(e).__name__}: {e}"}
        except Exception as e:  # what a run would end with: the cell that this is here to find
            cell = {"late": f"traceback: {type(e).__name__}: {e}"}
        pipe.send((method, cell | {"seconds": time.monotonic() - started}))
    pipe.send(("", None))


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def architecture(name: str, base: Path) -> dict[str, Cell]:
    """{method: cell}; a method at which the process dies is a cell too, and the next process goes on behind it."""
    found: dict[str, Cell] = {}
    while len(found) < len(METHODS):
        near, far = mp.get_context("spawn").Pipe()
        log = Path("zoo", f"{name}.log")
        log.parent.mkdir(exist_ok=True)
        process = mp.get_context("spawn").Process(target=_logged, args=(name, base, list(found), far, log), daemon=True)
        process.start()
        far.close()
        now = ""
        with contextlib.suppress(EOFError):
            while near.poll(LONGEST_S):
                method, cell = near.recv()
                if cell is not None:
                    found[method] = cell
                elif not method:
                    break
                now = method
        process.join(20)
        if process.is_alive():
            process.kill()
        if len(found) < len(METHODS):
            found.setdefault(now, {"late": f"the process died or hung (exit {process.exitcode}); see {log}"})
    return found


def _logged(name: str, base: Path, done: list[str], pipe: Any, log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    cells(name, base, done, pipe)


def faults(found: dict[str, Cell]) -> list[str]:
    """What of an architecture's row is wrong, in words."""
    kld = {method: cell["kld"] for method, cell in found.items() if "kld" in cell}
    wrong = [f"{method}: {cell['late']}" for method, cell in found.items() if "late" in cell]
    wrong += ["bf16 differs from its own store"] if kld.get("bf16") != 0 else []
    wrong += [f"{m}: {kld[m]:.3g} nats where nothing is rounded" for m, most in FAITHFUL.items() if kld.get(m, 0) > most]
    packed = {m: found[m].get("share", 0) for m in found}
    for near, far in NEARER:
        if near in kld and far in kld and packed[near] >= packed[far] and kld[near] >= kld[far]:
            wrong.append(f"{near} ({kld[near]:.3g}) is not nearer than {far} ({kld[far]:.3g})")
    return wrong


def table(results: dict[str, dict[str, Cell]]) -> str:
    """Markdown: a row an architecture, a column a method, reasons as numbered notes."""
    notes: list[str] = []

    def shown(cell: Cell) -> str:
        if "kld" in cell:
            value = "0" if cell["kld"] == 0 else f"{cell['kld']:.2g}"
            return f"{value} ({cell['bits']:.1f})" + (f" c{_note(notes, cell['told'])}" if cell.get("told") else "")
        kind = next(kind for kind in ("check", "built", "late") if kind in cell)
        return f"{kind[0]}{_note(notes, cell[kind])}"

    lines = [f"| model | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(shown(found[m]) for m in METHODS)} |" for name, found in results.items()]
    return "\n".join([*lines, "", *(f"{k}. {note}" for k, note in enumerate(notes, 1))])


def _note(notes: list[str], why: str) -> int:
    why = " ".join(why.split())[:300]
    if why not in notes:
        notes.append(why)
    return notes.index(why) + 1


def main() -> None:
    import zoo

    root = Path.cwd()
    base = Path(os.environ.get("ZOO_TOKENIZER", root / "artifacts" / "base")).absolute()
    names = sys.argv[1:] or list(zoo.ZOO)
    results: dict[str, dict[str, Cell]] = {}
    bad = 0
    with tempfile.TemporaryDirectory() as tmp:
        for shared in ("envs", "constraints.txt"):
            Path(tmp, shared).symlink_to(root / shared)
        Path(tmp, "artifacts").mkdir()
        (root / "artifacts" / "envs").mkdir(parents=True, exist_ok=True)
        Path(tmp, "artifacts", "envs").symlink_to(root / "artifacts" / "envs")
        os.chdir(tmp)
        for name in names:
            started = time.monotonic()
            results[name] = architecture(name, base)
            wrong = faults(results[name])
            bad += len(wrong)
            print(f"{name}: {time.monotonic() - started:.0f} s; " + ("; ".join(wrong) or "right"), file=sys.stderr, flush=True)
            if os.environ.get("ZOO_KEEP"):
                (root / "zoo.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        os.chdir(root)
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} processors; {bad} cells that should be otherwise\n")
    print(table(results))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
