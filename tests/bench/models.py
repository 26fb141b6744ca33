"""`make models`: small random models of every architecture of tests/zoo.py through every method and engine.

    python tests/bench/models.py [NAME ...]      after `make repro`: their tokenizer is the base's (llama.cpp knows no other)

Writes docs/models.md. A cell is the mean KLD to the model's own bfloat16 in nats with the bits a weight, or the reason that `check`
gives for none. Exit 1 if a cell is wrong: a reference that differs from itself, an int8 farther off than an int4, GGUF or ONNX
without rounding FAITHFUL times as far off as float32 is, a method that fails after `check` let it pass.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, TimeoutError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import harness
import psutil

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
PAGE = harness.ROOT / "docs/models.md"
HEAD = """# Models that were tried

Small random models of every architecture of `tests/zoo.py`, through every method and engine; `make models` writes this page.
A cell is the mean KLD to the model's own bfloat16 in nats, with the bits a weight in brackets (the embeddings, most of so small a
model, stay at 16 bits). A number in square brackets is a note: why there is no figure, as `check` says it from the model's files,
or which part is not packed. Random weights have no quality to lose: figures compare cells of a row, and say nothing of a trained
model.
"""


class Cell(NamedTuple):
    """kld: in nats, None where there is no figure; why: the reason, or what is not packed; late: it failed after `check`."""

    kld: float | None
    bits: float = 0.0
    share: float = 0.0
    why: str | None = None
    late: bool = False


Rows = dict[str, dict[str, Cell]]  # {architecture: {method: cell}}


# --- cells -------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """What saves time in the process of the cells."""
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


def _converted(plain: Any, model_dir: Path, out: Path, *options: str) -> None:
    """Convert a model once, for check (which would take holes for values) and all GGUF methods."""
    whole = model_dir.parent / "whole.gguf"
    if not whole.exists():
        plain(model_dir, whole)
    out.hardlink_to(whole)


def cell(name: str, method: str, tokenizer: Path) -> Cell:
    """A figure, or who gave the reason for none: `check` before any work, or something later, which is a fault."""
    import zoo  # type: ignore[import-not-found]

    from pipeline import quantizers
    from pipeline.core.errors import QuantgateError

    quantizer, _, options = METHODS[method]
    folder = Path("zoo", name, "base")
    if not folder.exists():
        zoo.make(name, folder, tokenizer=tokenizer)
    try:
        quantizers.check_model(quantizer, options, folder)
    except QuantgateError as e:
        return Cell(None, why=str(e))
    try:
        return score(method, folder)
    except Exception as e:  # what a run would end with: the cell that this is here to find
        return Cell(None, why=f"{type(e).__name__}: {e}", late=True)


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
    unpacked = quantizers.packs_only(quantizer, folder)
    return Cell(sum(kld) / len(kld), facts["bits_per_weight"], facts["quantized_share"], unpacked or None)


def measure(names: list[str], tokenizer: Path) -> Rows:
    """Every cell, one after the other in one process; where that dies or hangs is a cell too, and a new one goes on behind it."""
    rows: Rows = {name: {} for name in names}
    todo = [(name, method) for name in names for method in METHODS]
    while todo:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare)
        for future in [pool.submit(cell, *each, tokenizer) for each in todo]:
            name, method = todo.pop(0)
            try:
                rows[name][method] = future.result(LONGEST_S)
            except (BrokenExecutor, TimeoutError) as e:
                rows[name][method] = Cell(None, why=f"the process died or hung ({type(e).__name__})", late=True)
                for worker in multiprocessing.active_children():  # and what it started
                    for process in psutil.Process(worker.pid).children(recursive=True):
                        process.kill()
                    worker.kill()
                break
            if len(rows[name]) == len(METHODS):
                print(f"{name}: {'; '.join(faults(rows[name])) or 'right'}", file=sys.stderr, flush=True)
        pool.shutdown(cancel_futures=True)
    return rows


# --- the page ----------------------------------------------------------------------------------------------------


def faults(cells: dict[str, Cell]) -> list[str]:
    """What of an architecture's row is wrong, in words."""
    kld = {method: cell.kld for method, cell in cells.items() if cell.kld is not None}
    wrong = [f"{method}: {cell.why}" for method, cell in cells.items() if cell.late]
    wrong += ["bf16 differs from its own store"] if kld.get("bf16") != 0 else []
    floor = kld.get("fp32", 0)
    wrong += [f"{m}: {kld[m]:.3g} nats, and float32 {floor:.3g}" for m in EXACT if kld.get(m, 0) > FAITHFUL * floor]
    for near, far in NEARER:
        if near in kld and far in kld and cells[near].share >= cells[far].share and kld[near] >= kld[far]:
            wrong.append(f"{near} ({kld[near]:.3g}) is not nearer than {far} ({kld[far]:.3g})")
    return wrong


def table(rows: Rows) -> str:
    """Markdown: a row an architecture, a column a method, reasons as numbered notes."""
    notes: list[str] = []

    def shown(cell: Cell) -> str:
        note = ""
        if cell.why:
            why = " ".join(cell.why.split())[:300]
            if why not in notes:
                notes.append(why)
            note = f"[{notes.index(why) + 1}]"
        if cell.kld is None:
            return f"**late** {note}" if cell.late else note
        return f"{'0' if cell.kld == 0 else f'{cell.kld:.2g}'} ({cell.bits:.1f}) {note}".rstrip()

    lines = [harness.head("model", *METHODS)]
    lines += [harness.row(name, *(shown(cells[m]) for m in METHODS)) for name, cells in rows.items()]
    return "\n".join([*lines, "", *(f"{k}. {note}" for k, note in enumerate(notes, 1))])


def main() -> None:
    import zoo
    from transformers import __version__

    from pipeline.core import venvs
    from pipeline.speed import hardware

    (harness.ROOT / "artifacts/envs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        for shared in ("envs", "constraints.txt", "artifacts/envs"):
            Path(tmp, shared).parent.mkdir(exist_ok=True)
            Path(tmp, shared).symlink_to(harness.ROOT / shared)
        os.chdir(tmp)
        venvs.python("gguf")
        rows = measure(sys.argv[1:] or list(zoo.ZOO), harness.ROOT / "artifacts/base")
        os.chdir(harness.ROOT)
    bad = sum(len(faults(cells)) for cells in rows.values())
    facts = hardware.describe(1)
    amx = "with AMX" if "amx_bf16" in Path("/proc/cpuinfo").read_text() else "no AMX"
    machine = f"{facts['cpu']}, {facts['cpu_capability']}, {amx}, {facts['cores']} cores; transformers {__version__}"
    made = f"{time.strftime('%Y-%m-%d')}, {machine}; {bad} cells that should be otherwise"
    PAGE.write_text(f"{HEAD}\n{made}\n\n{table(rows)}\n", encoding="utf-8")
    print(f"{PAGE}: {bad} cells that should be otherwise")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
