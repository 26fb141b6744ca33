"""Quantizers turn the base model into a variant's folder. One file per method; the file's name is its registration.

A quantizer file has one function, `quantize(model_dir, out_dir, *, calibration, seed, <its own options by name>)`,
which writes weights and config.json into `out_dir` and returns facts for the manifest. Beside it may stand
`refuse(model_dir, options)`, which raises `Unsupported` for what the method cannot do with that model, from its files' headers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.core.errors import ParamsError, Unsupported
from pipeline.core.explain import did_you_mean
from pipeline.core.options import check_options, names_in, with_defaults
from pipeline.model.headers import in_blocks, kept_layers, linear_widths, packed_share, skeleton

Facts = dict[str, Any]
MOST = 0.9  # a smaller share of the matrices packed is told
GIVEN = {"model_dir", "out_dir", "calibration", "seed"}  # what the pipeline passes; all else is an option


def find(name: str) -> Callable[..., Facts]:
    """The `quantize` function of a method, or an error that names the nearest one."""
    function: Callable[..., Facts] = _module(name).quantize
    return function


def check_engine(name: str, engine: str) -> None:
    """Raise `ParamsError` if an engine cannot read what a method writes: transformers' folders, unless it says otherwise."""
    reads = getattr(_module(name), "ENGINE", "hf")
    if engine != reads:
        raise ParamsError(f"engine {engine!r} does not read what quantizer {name!r} writes; use engine: {reads}")


def names() -> list[str]:
    """Methods that params may name."""
    return names_in(Path(__file__).parent)


def _module(name: str) -> Any:
    known = names()
    if name not in known:
        raise ParamsError(f"quantizer {name!r} is not in pipeline/quantizers/{did_you_mean(name, known)}")
    return import_module(f"pipeline.quantizers.{name}")


def check(name: str, options: dict[str, Any]) -> None:
    """Raise `ParamsError` for an unknown method or option, without loading anything heavy."""
    check_options(f"quantizer {name!r}", find(name), options, given=GIVEN)


def check_model(name: str, options: dict[str, Any], model_dir: Path) -> None:
    """Raise for what a method's options ask and this model does not have: nothing is loaded, its files' headers are enough.

    `ParamsError`: a pattern in `keep` that matches no layer, or patterns that leave none; `Unsupported`: what the method's own
    `refuse` says.
    """
    module = _module(name)
    asked = with_defaults(module.quantize, options, given=GIVEN)
    if "keep" in asked:
        kept = kept_layers(model_dir, asked["keep"])
        if getattr(module, "ENGINE", "hf") == "hf":  # GGUF and ONNX quantize the head besides
            packed = linear_widths(model_dir, getattr(module, "PACKS", in_blocks))
            _refuse_nothing_left(name, asked["keep"], len(packed.keys() & kept), len(packed))
            _refuse_by_class(name, model_dir, [layer for layer in packed if layer not in kept])
    if hasattr(module, "refuse"):
        module.refuse(model_dir, asked)


def packs_only(name: str, model_dir: Path) -> str | None:
    """In words, that a method leaves a good part of the model's matrices as they are, such as the fused experts of a mixture."""
    packs, model = getattr(_module(name), "PACKS", None), skeleton(model_dir)
    if packs is None or model is None or (share := packed_share(model_dir, packs)) > MOST:
        return None
    kinds = sorted({m.kind for m in model.matrices.values() if not packs(m)})
    return f"quantizer {name!r} packs {100 * share:.0f} % of this model's matrices; the others ({', '.join(kinds)}) stay at 16 bits"


def _refuse_by_class(name: str, model_dir: Path, packed: list[str]) -> None:
    """Raise where the model's class does not work with packed matrices, or transformers loads another class for the method."""
    model = skeleton(model_dir)
    if model is None:
        return
    if bare := next((layer for layer in packed if model.matrices[layer].bare), None):
        raise Unsupported(
            f"the model's class multiplies with the weights of {bare} itself, and quantizer {name!r} would pack them; "
            f"options.keep: ['*.{bare.rpartition('.')[2]}'] leaves them at 16 bits"
        )
    loaded_as = getattr(_module(name), "LOADED_AS", None)  # transformers' name of a method that packs while it loads
    if loaded_as is None:
        return
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as OTHERS

    kinds = {matrix.kind for matrix in model.matrices.values()}
    if split := next((k for k in kinds & OTHERS.keys() if loaded_as in OTHERS[k]["quantization_methods"]), None):
        raise Unsupported(f"for {loaded_as}, transformers splits {split} into matrices that are not in the model's files")


def _refuse_nothing_left(name: str, keep: list[str], kept: int, layers: int) -> None:
    """Raise where a method that packs matrices of the layers, and nothing else, has none to pack."""
    if layers == 0:
        raise Unsupported(f"the model has no matrix that quantizer {name!r} packs")
    if kept == layers:
        raise ParamsError(f"options.keep: {keep} keeps all {layers} matrices of the layers, so that nothing is left to quantize")
