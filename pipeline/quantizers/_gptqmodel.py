"""Shared by all methods of gptqmodel: quiet loading, progress, its logs, equal files for equal inputs."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from pipeline.core import artifacts, cli, quota
from pipeline.core.droppings import data_files
from pipeline.core.errors import Unsupported, needs
from pipeline.core.quiet import before_gptqmodel, output_to
from pipeline.core.records import Json, Options
from pipeline.model.headers import kept_layers, linear_widths, packed_bits, read_headers, skeleton
from pipeline.quantizers import Facts
from pipeline.quantizers._probe import OTHER_KERNEL, probe
from pipeline.quantizers._reproducible import ANY_MACHINE, SAME_MACHINE

SPLIT = "split"  # a key in quantization_config.meta that engine 'hf' reads
GroupSize = Literal[-1, 16, 32, 64, 128, 256, 512, 1024]  # of its kernels; -1: one group per row
CPU_INT4_GROUPS = (32, 64, 128, 256)  # torch's _weight_int4pack_mm
SMALL = 8  # a model of at most 1/8 of the memory stays in it, and takes at most 1.6 times its size


def build(
    method: str,
    model_dir: Path,
    out_dir: Path,
    *,
    config: tuple[str, Options],
    rows: list[list[int]] | None,
    batch_size: int,
    group_size: int,
    keep: list[str],
    cpu_backend: str | None = None,
) -> Facts:
    """Quantize layer by layer with a config class of gptqmodel and its arguments; rows: calibration rows, or None. Packed layers
    stay in memory (862 MB instead of 632 for a base of 538) if the model is small for this machine, since only then can it be
    probed."""
    kept = kept_layers(model_dir, keep)
    bits = config[1]["bits"]
    with output_to(artifacts.LOGS / f"{method}.log") as terminal:
        model = _load(method, model_dir, config, kept)
        _quantize(model, method, rows, batch_size, cpu_backend, terminal)
        model.save(str(out_dir))
        answered: Facts = {} if _on_disk(model_dir) or _routes(model_dir) else {"probe": _answer(model)}
        for log in Path("logs").glob("gptq_log_*.log"):  # its fixed place
            shutil.move(log, artifacts.LOGS / log.name)
        with contextlib.suppress(OSError):  # somebody else's folder, or not empty
            Path("logs").rmdir()
    _rewrite_configs(out_dir, kept if method == "awq" else [], split=_is_split(model_dir, out_dir))
    losses = _losses(out_dir, artifacts.LOGS / f"{method}.csv", config[1].get("damp_percent"))
    index = 0 if method == "awq" else 32  # an int32 per column with its group
    return {
        "library": "gptqmodel", "reproducible": ANY_MACHINE if rows is None else SAME_MACHINE, "head": "bfloat16", "kept": kept,
        "expected_bits": packed_bits(model_dir, kept, weight=bits, group=16 + bits, group_size=group_size, column=index),
        **answered, **losses,
    }  # fmt: skip


def has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _on_disk(model_dir: Path) -> bool:
    size = sum(file.stat().st_size for file in data_files(model_dir, "*.safetensors"))
    return has_cuda() or size > quota.memory_bytes() / SMALL


def _routes(model_dir: Path) -> bool:
    model = skeleton(model_dir)
    return model is not None and any(matrix.count > 1 for matrix in model.matrices.values())


def _load(method: str, model_dir: Path, config: tuple[str, Options], kept: list[str]) -> Any:
    before_gptqmodel()
    with needs(f"quantizer {method!r}", "pip install gptqmodel -c constraints.txt"):
        import gptqmodel
        from gptqmodel.quantization import config as configs
    name, arguments = config
    skipped: dict[str, Options] = {f"-:^{re.escape(layer)}$": {} for layer in kept}
    asked = getattr(configs, name)(**arguments, offload_to_disk=_on_disk(model_dir), dynamic=skipped or None)
    return gptqmodel.GPTQModel.load(str(model_dir), asked, trust_remote_code=artifacts.trusts_code(model_dir))


def _quantize(
    model: Any, method: str, rows: list[list[int]] | None, batch_size: int, cpu_backend: str | None, terminal: TextIO
) -> None:
    """Layer by layer, with a progress bar on `terminal`; cpu_backend: name of a kernel to use without CUDA."""
    from gptqmodel import BACKEND

    named = model.simple_layer_modules  # lists a shared expert once per other expert, and RTN packs whatever is listed
    model.simple_layer_modules = lambda *args, **options: [list(dict.fromkeys(part)) for part in named(*args, **options)]
    given = None if rows is None else [{"input_ids": r, "attention_mask": [1] * len(r)} for r in rows]
    chosen = {} if cpu_backend is None or has_cuda() else {"backend": BACKEND[cpu_backend]}
    with cli.progress(model.model.config.get_text_config().num_hidden_layers, method, "layer", terminal) as bar:
        model.layer_callback = _Progress(bar)
        model.quantize(given, batch_size=batch_size, **chosen)


def _answer(model: Any) -> Json:
    # The zero points of GPTQ's format are one less than the kernel takes, in memory as in the file: corrected here as at any load.
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format

    asked = model.quantize_config
    corrected = convert_gptq_v1_to_v2_format(model.model, cfg=asked, qlinear_kernel=model.qlinear_kernel)
    return {**probe(corrected), "close": OTHER_KERNEL}


class _Progress:
    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        self.bar.update(max(0, layer_idx + 1 - self.bar.n))  # called twice a layer, in threads


def refuse(model_dir: Path, options: Options) -> None:
    """See `pipeline.quantizers`: parts of layers that gptqmodel would leave; groups that do not divide a layer's width, or that
    this CPU's packed 4-bit product does not take, which fails only when the model runs."""
    _refuse_parts_unknown(model_dir)
    size, kept = options["group_size"], kept_layers(model_dir, options["keep"])
    widths = {layer: width for layer, width in linear_widths(model_dir).items() if layer not in kept}
    taken = CPU_INT4_GROUPS if options["bits"] == 4 and not has_cuda() else ()
    works = [g for g in get_args(GroupSize) if g > 0 and math.gcd(*widths.values()) % g == 0]
    for layer, width in widths.items():
        if width % size:  # never of -1, one group a row
            way = f"sizes that work for every layer: {', '.join(map(str, works)) or 'none'}, or -1 (one group a row)"
            raise Unsupported(f"group_size {size} does not divide the {width} inputs of {layer}; {way}")
        if taken and (group := width if size == -1 else size) not in taken:
            way = f"the CPU's 4-bit kernel takes {', '.join(map(str, taken))}"
            raise Unsupported(f"group_size {size} makes groups of {group} in {layer}; {way}")


def _refuse_parts_unknown(model_dir: Path) -> None:
    """Raise if the model's layers have a part that gptqmodel's source for the model's type does not name."""
    package, model = find_spec("gptqmodel"), skeleton(model_dir)
    if package is None or model is None:
        return
    folder, kind = Path(package.origin or "").parent / "models", artifacts.read_json(model_dir / "config.json")["model_type"]
    definition = re.search(rf'^    "{kind}": (\w+),', (folder / "auto.py").read_text(encoding="utf-8"), re.MULTILINE)
    sources = [file.read_text(encoding="utf-8") for file in (folder / "definitions").glob("*.py")]
    tree = _tree(sources, definition[1]) if definition else ""
    known = {part for name in re.findall(r'"([\w.]+)', tree) for part in name.split(".")}
    for name, matrix in model.matrices.items():
        part = re.split(r"\.\d+\.", name, maxsplit=1)[-1].partition(".")[0]
        if known and matrix.block and part not in known:
            raise Unsupported(f"gptqmodel knows no part {part} in the layers of model_type {kind}, and would leave {name} as it is")


def _tree(sources: list[str], name: str) -> str:
    for source in sources:
        if body := re.search(rf"^class {name}\((\w+).*?(?=^class |\Z)", source, re.MULTILINE | re.DOTALL):
            return body[0] if "module_tree =" in body[0] else _tree(sources, body[1])
    return ""


def _is_split(model_dir: Path, out_dir: Path) -> bool:
    """Whether only gptqmodel can load it: a packed matrix is no Linear of transformers' class (gptqmodel also packs single experts,
    fused parts and Conv1D), or optimum, by which transformers loads, does not know the layers' name."""
    from optimum.gptq.constants import BLOCK_PATTERNS

    model = skeleton(model_dir)
    if model is None:
        return False
    packed = {name.rpartition(".")[0] for name in read_headers(out_dir) if name.endswith(".qweight")}
    known = any(name.startswith(tuple(BLOCK_PATTERNS)) for name in model.matrices)
    return not known or not packed <= {name for name, matrix in model.matrices.items() if matrix.linear}


def _rewrite_configs(out_dir: Path, unconverted: list[str], *, split: bool) -> None:
    """Remove a temporary folder's name from the written configs, since equal inputs must give equal files; list unconverted layers
    transformers' way; mark what only gptqmodel's loader reads."""
    for name in ("config.json", "quantize_config.json"):
        file = out_dir / name
        config = json.loads(file.read_text(encoding="utf-8"))
        settings = config.get("quantization_config", config)
        meta = settings.get("meta", {})
        for key in ("offload_to_disk", "offload_to_disk_path"):
            meta.pop(key, None)
        if split:
            settings["meta"] = meta | {SPLIT: True}
        if unconverted:
            settings["modules_to_not_convert"] = unconverted
            settings.pop("dynamic", None)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _losses(out_dir: Path, log: Path, damping: float | None) -> Facts:
    """Mean and worst layer loss, and damping, from the library's own log, which is moved to `log`."""
    shutil.move(out_dir / "quant_log.csv", log)
    with log.open(newline="") as f:
        rows = {f"layers.{row['layer']}.{row['module']}": row for row in csv.DictReader(f)}
    rows = dict(sorted(rows.items()))  # threads write them in any order, and the manifest must not depend on it
    facts: Facts = {"modules": len(rows)}
    losses = {name: float(row["loss"].removeprefix("rtn: ")) for name, row in rows.items() if row["loss"] != "not applicable"}
    if losses:  # awq has none for some layers
        worst = max(losses, key=losses.__getitem__)
        facts["loss_mean"] = sum(losses.values()) / len(losses)
        facts["loss_worst"] = {"module": worst, "loss": losses[worst]}
    if damping is not None:
        used = {name: float(row["damp"]) for name, row in rows.items()}
        facts["damping"] = damping
        facts["damped_more"] = {name: d for name, d in used.items() if abs(d - damping) > 1e-9}
    return facts
