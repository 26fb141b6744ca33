"""`make models`: small random models of every architecture of tests/zoo.py through every method and engine.

    python tests/bench/models.py [NAME ...]      after `make repro`: their tokenizer is the base's (llama.cpp knows no other)

Writes docs/models.md. A cell is the mean KLD to the model's own bfloat16 in nats with the bits a weight, or the reason that `check`
gives for none. Exit 1 if a cell is wrong: a reference that differs from itself, an int8 farther off than an int4, GGUF or ONNX
without rounding FAITHFUL times as far off as float32 is, a method that fails after `check` let it pass.
`ZOO_TOKENIZER=FOLDER`: another tokenizer; `ZOO_KEEP=FILE.json`: what is found, kept and not made again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing as mp
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: quantizer, engine, options
    "bf16": ("cast", "hf", {"dtype": "bfloat16"}),
    "fp32": ("cast", "hf", {"dtype": "float32"}),
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
EXACT, FAITHFUL = ("gguf-bf16", "onnx-fp32"), 3  # times what float32 differs by; a lost scale, cap or norm costs whole nats
LONGEST_S = 900.0
PAGE = Path("docs", "models.md")
HEAD = """# Models that were tried

Small random models of every architecture of `tests/zoo.py`, through every method and engine; `make models` writes this page.
A cell is the mean KLD to the model's own bfloat16 in nats, with the bits a weight in brackets (the embeddings, most of so small a
model, stay at 16 bits). A number in square brackets is a note: why there is no figure, as `check` says it from the model's files,
or which part is not packed. Random weights have no quality to lose: figures compare cells of a row, and say nothing of a trained
model.
"""
Cell = dict[str, Any]


def work(todo: list[tuple[str, str]], base: Path, pipe: Any) -> None:
    """In a process of its own: send (name, method, None) before each cell, and the cell when it is found."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import numpy as np
    from gguf import gguf_reader

    from pipeline.core import isolate
    from pipeline.quantizers import gguf

    plain = {"memmap": lambda *args, **named: np.asarray(np.memmap(*args, **named))}  # it slices it two million times a file
    gguf_reader.np = SimpleNamespace(**vars(np) | plain)  # type: ignore[assignment]
    isolate.isolated = lambda function, *args, what: function(*args)  # this process is one already
    gguf._convert = functools.partial(_converted, gguf._convert)
    for name, method in todo:
        pipe.send((name, method, None))
        pipe.send((name, method, cell(name, method, base)))
    pipe.send(("", "", None))


def _converted(plain: Any, model_dir: Path, out: Path, *options: str) -> None:
    """Convert a model once, for check (which would take holes for values) and all GGUF methods."""
    whole = model_dir.parent / "whole.gguf"
    if not whole.exists():
        plain(model_dir, whole)
    out.hardlink_to(whole)


def cell(name: str, method: str, base: Path) -> Cell:
    """A figure, or who gave the reason for none: `check` before any work, or something later, which is a fault."""
    import zoo  # type: ignore[import-not-found]

    from pipeline import quantizers
    from pipeline.core.errors import QuantgateError

    quantizer, _, options = METHODS[method]
    folder = Path("zoo", name, "base")
    if not folder.exists():
        zoo.make(name, folder, tokenizer=base)
    started = time.monotonic()
    try:
        quantizers.check_model(quantizer, options, folder)
    except QuantgateError as e:
        return {"check": str(e)}
    try:
        return {**score(method, folder), "seconds": time.monotonic() - started}
    except Exception as e:  # what a run would end with: the cell that this is here to find
        return {"late": f"{type(e).__name__}: {e}"}


def score(method: str, folder: Path) -> Cell:
    """Build a variant, and measure it against the store of the model's own bfloat16."""
    from test_models import WINDOWS, stored  # type: ignore[import-not-found]

    from pipeline import engines, quantize, quantizers
    from pipeline.core import artifacts
    from pipeline.core.params import Variant
    from pipeline.diverge import diverge
    from pipeline.divergence.store import Store
    from pipeline.evalset.calibration import Calibration

    quantizer, engine, options = METHODS[method]
    home = folder.parent
    variant, out, rows = Variant(quantizer=quantizer, engine=engine, options=options), home / method, home / "calibration"
    out.mkdir(exist_ok=True)
    if not rows.exists():
        artifacts.write_jsonl(rows / "rows.jsonl", ({"token_ids": [5 + (7 * k + r) % 500 for k in range(64)]} for r in range(4)))
        artifacts.write_json(rows / artifacts.MANIFEST, {"rows_used": 4, "files": artifacts.files_of(rows), "digest": "d"})
    facts = quantize.quantize(variant, folder, out, calibration=Calibration(rows), seed=1)
    quantize.answer(variant, out, facts, 1)
    if not (home / "store").exists():
        stored(engines.load("hf", folder, threads=1), home / "store")
    blocks = diverge(engines.load(engine, out, threads=1), Store(home / "store"), batch_size=4, threads=1)
    kld = [value for block in blocks for value in block["kld"]]
    assert len(kld) == sum(w.scored for w in WINDOWS)
    told = quantizers.packs_only(quantizer, folder)
    return {"kld": sum(kld) / len(kld), "bits": facts["bits_per_weight"], "share": facts["quantized_share"], "told": told}


def measure(names: list[str], base: Path, kept: Path | None) -> dict[str, dict[str, Cell]]:
    """{name: {method: cell}}; a method at which the process dies is a cell too, and the next process goes on behind it."""
    found: dict[str, dict[str, Cell]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    context = mp.get_context("spawn")
    while todo := [(name, method) for name in names for method in METHODS if method not in found.setdefault(name, {})]:
        near, far = context.Pipe()
        process = context.Process(target=work, args=(todo, base, far), daemon=True)
        process.start()
        far.close()
        now = todo[0]
        with contextlib.suppress(EOFError):
            while near.poll(LONGEST_S):
                name, method, got = near.recv()
                if not name:
                    break
                now = name, method
                if got is not None:
                    found[name][method] = got
                    if kept:
                        kept.write_text(json.dumps(found, indent=1))
                    if len(found[name]) == len(METHODS):
                        print(f"{name}: {'; '.join(faults(found[name])) or 'right'}", file=sys.stderr, flush=True)
        process.join(20)
        process.kill()
        if now[1] not in found[now[0]]:
            found[now[0]][now[1]] = {"late": f"the process died or hung (exit {process.exitcode})"}
    return {name: found[name] for name in names}


def faults(found: dict[str, Cell]) -> list[str]:
    """What of an architecture's row is wrong, in words."""
    kld = {method: cell["kld"] for method, cell in found.items() if "kld" in cell}
    wrong = [f"{method}: {cell['late']}" for method, cell in found.items() if "late" in cell]
    wrong += ["bf16 differs from its own store"] if kld.get("bf16") != 0 else []
    floor = kld.get("fp32", 0)
    wrong += [f"{m}: {kld[m]:.3g} nats, and float32 {floor:.3g}" for m in EXACT if kld.get(m, 0) > FAITHFUL * floor]
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
            return f"{value} ({cell['bits']:.1f})" + (f" [{_note(notes, cell['told'])}]" if cell.get("told") else "")
        return f"[{_note(notes, cell['check'])}]" if "check" in cell else f"**late** [{_note(notes, cell['late'])}]"

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
    from transformers import __version__

    root = Path.cwd()
    base = Path(os.environ.get("ZOO_TOKENIZER", root / "artifacts" / "base")).absolute()
    kept = Path(os.environ["ZOO_KEEP"]).absolute() if "ZOO_KEEP" in os.environ else None
    with tempfile.TemporaryDirectory() as tmp:
        for shared in ("envs", "constraints.txt"):
            Path(tmp, shared).symlink_to(root / shared)
        Path(tmp, "artifacts").mkdir()
        (root / "artifacts" / "envs").mkdir(parents=True, exist_ok=True)
        Path(tmp, "artifacts", "envs").symlink_to(root / "artifacts" / "envs")
        os.chdir(tmp)
        from pipeline.core import venvs
        from pipeline.speed import hardware

        venvs.python("gguf")
        results = measure(sys.argv[1:] or list(zoo.ZOO), base, kept)
        os.chdir(root)
    bad = sum(len(faults(found)) for found in results.values())
    facts = hardware.describe(1)
    amx = "with AMX" if "amx_bf16" in Path("/proc/cpuinfo").read_text() else "no AMX"
    machine = f"{facts['cpu']}, {facts['cpu_capability']}, {amx}, {facts['cores']} cores; transformers {__version__}"
    PAGE.parent.mkdir(exist_ok=True)
    made = f"{time.strftime('%Y-%m-%d')}, {machine}; {bad} cells that should be otherwise"
    PAGE.write_text(f"{HEAD}\n{made}\n\n{table(results)}\n", encoding="utf-8")
    print(f"{PAGE}: {bad} cells that should be otherwise")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
