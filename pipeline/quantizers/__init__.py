"""Quantizers turn the base model into a variant's folder. One file per method; the file's name is its registration.

`quantize(model_dir, out_dir, *, calibration, seed, <its own options by name>)` writes weights and config.json to `out_dir` and
returns facts for the manifest (`{}` is enough: bits and sizes are read from the files). A file may also declare:
`ENGINE`, the one engine that reads its folders (default: hf);
`PACKS`, which matrices it packs (model/headers.py; default: those of the layers);
`LOADED_AS`, transformers' name of a method that packs while it loads;
`refuse(model_dir, options)`, which raises `Unsupported` for what it cannot do with a model, by its files' headers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline.core import artifacts
from pipeline.core.droppings import data_files
from pipeline.core.errors import ParamsError, Unsupported
from pipeline.core.explain import backend, check_options, with_defaults
from pipeline.core.records import BuildFacts, Options
from pipeline.evalset.calibration import Calibration
from pipeline.model.headers import in_blocks, kept_layers, linear_widths, skeleton

Facts = BuildFacts
MOST = 0.9  # of the matrices' weights: `check` reports a method that packs a smaller share
GIVEN = {"model_dir", "out_dir", "calibration", "seed"}  # from the pipeline; all other arguments are options


def find(name: str) -> Callable[..., Facts]:
    function: Callable[..., Facts] = backend("quantizers", name).quantize
    return function


def make(name: str, options: Options, base: Path, out: Path, *, calibration: Calibration, seed: int) -> Facts:
    """Quantize the base into a folder that an engine can load; return the method's facts. Tokenizer, chat template and special
    tokens are the base's, byte for byte."""
    facts = find(name)(base, out, calibration=calibration, seed=seed, **options)
    for file in data_files(base, "*"):  # all but weights and config
        weights = file.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and file.name not in ("config.json", artifacts.MANIFEST):
            shutil.copyfile(file, out / file.name)
    return facts


def check_engine(name: str, engine: str) -> None:
    """Raise `ParamsError` if an engine cannot read a method's folders."""
    reads = getattr(backend("quantizers", name), "ENGINE", "hf")
    if reads not in (engine, getattr(backend("engines", engine), "READS", None)):
        raise ParamsError(f"engine {engine!r} does not read what quantizer {name!r} writes; use engine: {reads}")


def check(name: str, options: Options) -> None:
    """Raise `ParamsError` for an unknown method or option, without loading anything heavy."""
    check_options(f"quantizer {name!r}", find(name), options, given=GIVEN)


def check_model(name: str, options: Options, model_dir: Path) -> None:
    """Raise `ParamsError` for patterns in `keep` that match or leave no layer, `Unsupported` for a model that cannot be packed."""
    module = backend("quantizers", name)
    asked = with_defaults(module.quantize, options, given=GIVEN)
    if "keep" in asked:
        kept = kept_layers(model_dir, asked["keep"])
        if getattr(module, "ENGINE", "hf") == "hf":  # GGUF and ONNX also quantize the head
            layers = linear_widths(model_dir, getattr(module, "PACKS", in_blocks))
            packed = [layer for layer in layers if layer not in kept]
            if not layers:
                raise Unsupported(f"the model has no matrix that quantizer {name!r} packs")
            if not packed:
                rest = "so that nothing is left to quantize"
                raise ParamsError(f"options.keep: {asked['keep']} keeps all {len(layers)} matrices of the layers, {rest}")
            _refuse_by_class(name, model_dir, packed)
    if hasattr(module, "refuse"):
        module.refuse(model_dir, asked)


def packs_only(name: str, model_dir: Path) -> str | None:
    """A note if a method leaves many of the model's matrices at 16 bits, such as a mixture's fused experts."""
    packs, model = getattr(backend("quantizers", name), "PACKS", None), skeleton(model_dir)
    if packs is None or model is None:
        return None
    left = [matrix for matrix in model.matrices.values() if not packs(matrix)]
    share = 1 - sum(m.weights for m in left) / max(1, sum(m.weights for m in model.matrices.values()))
    if share > MOST:
        return None
    kinds = ", ".join(sorted({matrix.kind for matrix in left}))
    return f"quantizer {name!r} packs {100 * share:.0f} % of this model's matrices; the others ({kinds}) stay at 16 bits"


def _refuse_by_class(name: str, model_dir: Path, packed: list[str]) -> None:
    """Raise if the model's class does not work with packed matrices, or transformers loads another class for the method."""
    model = skeleton(model_dir)
    if model is None:
        return
    if bare := next((layer for layer in packed if model.matrices[layer].bare), None):
        way = f"options.keep: ['*.{bare.rpartition('.')[2]}'] leaves them at 16 bits"
        packs = f"and quantizer {name!r} would pack them"
        raise Unsupported(f"the model's class multiplies with the weights of {bare} itself, {packs}; {way}")
    if (loaded_as := getattr(backend("quantizers", name), "LOADED_AS", None)) is None:
        return
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as OTHERS

    kinds = {matrix.kind for matrix in model.matrices.values()}
    if split := next((k for k in kinds & OTHERS.keys() if loaded_as in OTHERS[k]["quantization_methods"]), None):
        raise Unsupported(f"for {loaded_as}, transformers splits {split} into matrices that are not in the model's files")
