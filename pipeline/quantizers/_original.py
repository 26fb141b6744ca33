"""The original AutoAWQ and AutoGPTQ, each in its own environment with the last transformers that it supports (4.51).

That transformers ignores unknown keys of today's configs, and would run a model with another rope base. So it gets a translated
config; what cannot be translated is refused. The checkpoint gets the base's own config back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts, cli, venvs
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError, Unsupported
from pipeline.core.records import Json
from pipeline.model.headers import kept_layers, linear_shapes, packed_bits
from pipeline.quantizers import Facts
from pipeline.quantizers._gptqmodel import has_cuda
from pipeline.quantizers._probe import KEPT, OTHER_KERNEL, token_ids
from pipeline.quantizers._reproducible import SAME_MACHINE

# The keys that both read, of each rope type with the same meaning in both.
ROPES = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
UNREAD = {"torch_dtype", "transformers_version", "use_cache", "architectures", "_name_or_path", "_model_name_or_path"}
CLIP_ROWS, CODE_ROWS = 64, 8  # outputs that AutoAWQ clips at a time; codes in an int32
UNCLIPPED = ("q_", "k_", "query", "key", "Wqkv")  # in names of layers that AutoAWQ does not clip


def autoawq(model_dir: Path, out_dir: Path, *, rows: list[list[int]], bits: int, group_size: int, keep: list[str]) -> Facts:
    """Quantize with AutoAWQ 0.2.9, on CPU or CUDA. rows: token ids of equal length."""
    kept = kept_layers(model_dir, keep)
    if group_size == -1:
        raise Unsupported("option group_size = -1: AutoAWQ cannot use whole rows as groups; give a size that divides every width")
    refuse_shapes_of_autoawq(model_dir)
    options: Json = {"bits": bits, "group_size": group_size, "kept": kept}
    facts = _run("autoawq", model_dir, out_dir, rows, options)
    expected = packed_bits(model_dir, kept, weight=bits, group=16 + bits, group_size=group_size)
    return {**facts, "kept": kept, "expected_bits": expected}


def autogptq(
    model_dir: Path, out_dir: Path, *, rows: list[list[int]], bits: int, group_size: int, keep: list[str], **options: Any
) -> Facts:
    """Quantize with AutoGPTQ 0.7.1, untested for lack of a CUDA device. options: act_order, damping, batch_size."""
    kept = kept_layers(model_dir, keep)
    if kept:
        raise Unsupported(f"option keep = {keep}: AutoGPTQ packs every layer; backend: gptqmodel can keep some")
    facts = _run("autogptq", model_dir, out_dir, rows, {"bits": bits, "group_size": group_size, **options})
    expected = packed_bits(model_dir, [], weight=bits, group=16 + bits, group_size=group_size, column=32)
    return {**facts, "kept": [], "expected_bits": expected}


def refuse_without_cuda() -> None:
    if not has_cuda():
        raise Unsupported("AutoGPTQ quantizes on CUDA only and there is no CUDA device here; backend: gptqmodel works on a CPU")


def refuse_shapes_of_autoawq(model_dir: Path) -> None:
    """Raise, with the layer's name, if an assertion of AutoAWQ would fail after loading."""
    for layer, (outputs, _) in linear_shapes(model_dir).items():
        kind = layer.rpartition(".")[2]
        step = CODE_ROWS if any(part in kind for part in UNCLIPPED) else CLIP_ROWS
        if outputs % step:
            raise Unsupported(f"{layer} has {outputs} outputs, and AutoAWQ takes multiples of {step}; backend: gptqmodel takes it")


def _run(tool: Literal["autoawq", "autogptq"], model_dir: Path, out_dir: Path, rows: list[list[int]], options: Json) -> Facts:
    """envs/<tool>.py in its environment: files in, files out (see envs/old_stack.py)."""
    config = artifacts.read_json(model_dir / "config.json")
    if "vocab_size" not in config:
        raise Unsupported(f"{tool} takes plain language models only: config.json has no vocab_size of its own")
    old = to_old(config)
    log = artifacts.LOGS / f"{tool}.log"
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as tmp:
        request = Path(tmp).absolute() / "request.json"
        asked = {"base": str(link_base(model_dir, request.parent / "base", old)), "out": str(out_dir.absolute()), "rows": rows}
        probe = {"probe_ids": token_ids(config["vocab_size"]), "probe_kept": KEPT}
        artifacts.write_json(request, {**asked, **probe, **options})
        venvs.python(tool)  # built first, so that the next line shows what takes time
        cli.say("quantize", f"{tool} in its own environment (log: {log})")
        try:
            venvs.run(tool, str((venvs.FILES / f"{tool}.py").absolute()), str(request), log=log)
        except RuntimeError as e:
            raise Unsupported(f"the original library could not quantize this model: {e}") from None
        result = artifacts.read_json(request.with_name("result.json"))
    if "unsupported" in result:
        raise Unsupported(result["unsupported"])
    refuse_misread(old, result["config"])
    written = artifacts.read_json(out_dir / "config.json")["quantization_config"]
    artifacts.write_json(out_dir / "config.json", to_new(config, written, options.get("kept", [])))
    return {
        "library": tool, "reproducible": SAME_MACHINE, "head": "bfloat16", "environment": result["versions"],
        "modules": result["modules"], "probe": result["probe"] | {"close": OTHER_KERNEL},
    }  # fmt: skip


def link_base(model_dir: Path, folder: Path, config: Json) -> Path:
    """The base for the old transformers: weights and text files linked; config and tokenizer class translated."""
    folder.mkdir()
    for file in data_files(model_dir, "*"):
        if file.name not in ("config.json", "tokenizer_config.json", artifacts.MANIFEST):
            (folder / file.name).symlink_to(file.absolute())
    artifacts.write_json(folder / "config.json", config)
    tokenizer = model_dir / "tokenizer_config.json"
    if tokenizer.exists():
        text = tokenizer.read_text(encoding="utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')  # its older name
        (folder / tokenizer.name).write_text(text, encoding="utf-8")
    return folder


def to_old(config: Json) -> Json:
    """Today's config.json for transformers 4.51; one written by it is unchanged. Raises `Unsupported` with the name of a key that
    has no equal there."""
    old = dict(config)
    if "auto_map" in old:
        raise Unsupported("config.json has auto_map: the old transformers does not run a model's own code")
    _move(old, "dtype", old.pop("dtype", None), to="torch_dtype")
    if kinds := set(old.pop("layer_types", None) or []) - {"full_attention"}:
        raise Unsupported(f"config.json: layer_types {sorted(kinds)} have no equal in transformers 4.51")
    for name, value in rope_to_old(old.pop("rope_parameters", None) or {}).items():
        _move(old, f"rope_parameters.{name}", value, to=name)
    return old


def _move(config: Json, name: str, value: Any, *, to: str) -> None:
    if value is None:
        return
    if config.get(to) not in (None, value):
        raise Unsupported(f"config.json: {name} is {value!r} and {to} is {config[to]!r}: which one is meant?")
    config[to] = value


def rope_to_old(rope: Json) -> Json:
    """{rope_theta, partial_rotary_factor, rope_scaling} of `rope_parameters`; the scaling only if not the default."""
    if nested := sorted(name for name, value in rope.items() if isinstance(value, dict)):
        raise Unsupported(f"config.json: rope_parameters by kind of layer ({', '.join(nested)}) have no equal in transformers 4.51")
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
    kind = rope.get("rope_type") or "default"
    if kind not in ROPES:
        raise Unsupported(f"config.json: rope_type {kind!r} does not mean the same in transformers 4.51; {', '.join(ROPES)} do")
    if unknown := sorted(scaling.keys() - ROPES[kind]):
        raise Unsupported(f"config.json: rope_parameters.{unknown[0]} of type {kind!r} has no equal in transformers 4.51")
    moved: Json = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}
    return moved if kind == "default" else {**moved, "rope_scaling": {"rope_type": kind, **scaling}}


def refuse_misread(old: Json, read: Json) -> None:
    """Raise if the old transformers read a key differently. read: its loaded config, with all defaults."""
    for name, value in old.items():
        if name not in UNREAD and value is not None and read.get(name) != value:
            raise ArtifactError(f"the old transformers read {name} = {read.get(name)!r} where the base has {value!r}")


def to_new(base: Json, quantization: Json, kept: list[str]) -> Json:
    """The checkpoint's config.json: the base's, with the old library's quantization. kept: full names of unpacked layers."""
    settings = {k: v for k, v in quantization.items() if v is not None and not k.startswith("model_")}
    if kept:
        settings["modules_to_not_convert"] = kept
    return {k: v for k, v in base.items() if k != "torch_dtype"} | {"dtype": "bfloat16", "quantization_config": settings}
