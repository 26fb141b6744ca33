"""What is written is what params ask for, measured from the files."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from gate_house import write_manifest
from model_house import calibration, change_weights, tensors_of
from test_engines import write_gguf

from pipeline import engines, quantize, quantizers
from pipeline.core import artifacts
from pipeline.core.errors import InvalidVariant, Unsupported
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import attestation, headers
from pipeline.quantizers import _gptqmodel

QUIET = pytest.mark.filterwarnings("ignore")  # the libraries' own
IDS = list(range(5, 60))
UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny` with widths that every kernel takes, and in bfloat16, as models are that people quantize."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", hidden=128, dtype="bfloat16")


@pytest.fixture(scope="module")
def plain(wide: Path) -> Any:
    """Its logits of IDS."""
    return engines.load("hf", wide, threads=1).logits(IDS)


def run(base: Path, quantizer: str, rows: list[list[int]] | None = None, **options: Any) -> tuple[Any, Path]:
    """(facts, folder) of a model quantized in the working directory."""
    out = Path(f"out{len(list(Path().glob('out*')))}").absolute()
    out.mkdir()
    given = calibration(Path("calibration"), rows)
    return quantize.quantize(Variant(quantizer=quantizer, options=options), base, out, calibration=given, seed=1), out


def build(base: Path, quantizer: str, engine: str = "hf", **options: Any) -> tuple[Any, Path]:
    """(manifest, folder) of a model built without calibration rows."""
    (out := Path("out").absolute()).mkdir()
    variant = Variant(quantizer=quantizer, engine=engine, options=options)
    return quantize.build(variant, base, out, calibration=Calibration(Path("none")), seed=1, threads=1), out


def changed(base: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model with other weights."""
    return change_weights(Path(shutil.copytree(base, "base")), change)


def loaded(out: Path, facts: Any) -> Any:
    """What was built, in engine hf: as many matrices run packed as were, and it answers as it did in memory."""
    engine: Any = engines.load("hf", out, threads=1)
    attestation.check_kernels(engine.kernels(), facts)
    attestation.check_answer(engine, facts["probe"])
    return engine


def same_text_side(out: Path, base: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return all((out / name).read_bytes() == (base / name).read_bytes() for name in names)


@pytest.mark.parametrize("dtype, bits", [("float32", 32), ("bfloat16", 16), ("float16", 16)])
def test_cast_measures_the_bits_it_asked_for(tiny: Path, dtype: str, bits: int) -> None:
    facts, out = run(tiny, "cast", dtype=dtype)
    assert facts["bits_per_weight"] == bits and facts["quantized_share"] == 0 and facts["dtype"] == dtype
    assert same_text_side(out, tiny)


def test_a_weight_past_the_range_of_fp16_is_refused_by_name(tiny: Path) -> None:
    base = changed(tiny, lambda tensors: tensors[UP.format(1)][0].fill_(70000.0))
    with pytest.raises(InvalidVariant, match=r"model.layers.1.mlp.up_proj.weight holds 7e\+04"):
        run(base, "cast", dtype="float16")


def test_fp16_overflow_names_the_first_layer_that_passes_the_range(wide: Path) -> None:
    def enlarge(tensors: dict[str, Any]) -> None:
        up = tensors[UP.format(1)]
        up *= 3e5 / up.abs().max()
        up.clamp_(-6e4, 6e4)  # each weight fits; a sum of 64 of them does not

    with pytest.raises(InvalidVariant, match=r"first in model\.layers\.1\.mlp\.up_proj"):
        run(changed(wide, enlarge), "cast", dtype="float16")
    facts, _ = run(wide, "cast", dtype="float16")
    assert facts["range_probe_tokens"] == 64 and facts["underflowed_weights"] == 0


def test_weights_lost_to_underflow_are_counted(wide: Path) -> None:
    base = changed(wide, lambda tensors: tensors[UP.format(0)][0, :5].fill_(1e-9))
    assert [run(base, "cast", dtype=dtype)[0]["underflowed_weights"] for dtype in ("float16", "bfloat16")] == [5, 0]


def test_int8_packs_the_layers_and_keeps_the_embeddings(tiny: Path) -> None:
    facts, _ = run(tiny, "torchao", scheme="int8-weight-only")
    kept = math.prod(headers.read_headers(tiny)["model.embed_tokens.weight"].shape) / headers.count_weights(tiny)
    assert 8 < facts["bits_per_weight"] < 8 + 8 * kept + 2
    assert facts["quantized_share"] == pytest.approx(1 - kept, abs=0.01)


@QUIET
@pytest.mark.parametrize("bits, group", [(4, 32), (8, -1)])
def test_rtn_is_the_nearest_code_of_each_group(tiny: Path, bits: int, group: int) -> None:
    """No weight moves by more than half a step of its group: the definition of rounding to nearest."""
    import torch

    facts, out = run(tiny, "rtn", bits=bits, group_size=group)
    assert facts["modules"] == 14 and facts["calibration"] is None
    engine: Any = engines.load("hf", out, threads=1)
    base = tensors_of(tiny)
    for name, module in engine.model.named_modules():
        if hasattr(module, "qweight"):
            original = base[f"{name}.weight"]
            packed = module(torch.eye(original.shape[1], dtype=torch.float32)).T.float()
            if module.bias is not None:
                packed -= module.bias.float()[:, None]
            rows = original.reshape(len(original), -1, original.shape[1] if group == -1 else group)
            step = (rows.abs().amax(-1, keepdim=True) * 2 / (2**bits - 2)).expand_as(rows).reshape(original.shape)
            assert ((packed - original).abs() <= 0.51 * step + 2**-7 * original.abs()).all(), name


def test_an_invalid_variant_is_recorded_and_the_stage_goes_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "evalsets"):
        Path(name).symlink_to(ROOT / name)
    shutil.copytree(tiny, artifacts.BASE)
    write_manifest(artifacts.BASE)

    def overflow(*_: object, **__: object) -> dict[str, object]:
        raise InvalidVariant("layer 3 holds inf")

    monkeypatch.setattr(quantizers, "find", lambda name: overflow)
    quantize.main("int8")
    manifest = artifacts.read_manifest(artifacts.model_dir("int8"))
    assert manifest["status"] == "invalid" and manifest["reason"] == "layer 3 holds inf" and manifest["files"] == {}


@pytest.mark.parametrize("bits, group, why", [
    (8, 64, r"does not divide the 96 inputs of model\.layers\.0\..* 16, 32, or -1"), (8, 32, ""), (8, 16, ""), (8, -1, ""),
    (4, 32, ""), (4, 16, "the CPU's 4-bit kernel takes 32, 64, 128, 256"), (4, -1, "groups of 96 .* kernel takes 32"),
])  # fmt: skip
def test_check_refuses_groups_that_do_not_divide_a_width_or_have_no_kernel(tmp_path: Path, bits: int, group: int, why: str) -> None:
    base = make_model(tmp_path / "odd", hidden=96)
    with pytest.raises(Unsupported, match=why) if why else contextlib.nullcontext():
        quantizers.check_model("gptq", {"bits": bits, "group_size": group}, base)


METHODS: dict[str, tuple[str, dict[str, Any], float]] = {  # with how near its logits must be to the base's: their correlation
    "w8a8": ("torchao", {"scheme": "int8-dynamic"}, 0.95),
    "bnb int8": ("bnb", {"type": "int8"}, 0.95),
    "nf4": ("bnb", {"type": "nf4"}, 0.5),
    "nf4, scales quantized": ("bnb", {"type": "nf4", "double_quant": True}, 0.5),
    "gptq 8": ("gptq", {"bits": 8, "group_size": 32}, 0.99),
    "gptq 3": ("gptq", {"bits": 3, "group_size": 32}, 0.5),
    "gptq 4, by activation": ("gptq", {"bits": 4, "group_size": 32, "act_order": True}, 0.5),
    "awq": ("awq", {"bits": 4, "group_size": 32}, 0.5),
    "rtn": ("rtn", {"bits": 4, "group_size": 32}, 0.5),
}


@QUIET
@pytest.mark.parametrize("name", METHODS)
def test_a_method_packs_every_matrix_and_answers_alike_when_loaded_anew(wide: Path, plain: Any, name: str) -> None:
    """And leaves no path of this machine, and the base's tokenizer and template byte for byte."""
    quantizer, options, near = METHODS[name]
    facts, out = run(wide, quantizer, **options)
    assert facts["modules"] == 14 and facts["kept"] == []
    assert facts["packed_bits"] == pytest.approx(facts["expected_bits"], rel=attestation.TOLERANCE)
    if quantizer == "gptq":
        assert facts["damping"] == 0.05 and facts["damped_more"] == {} and facts["calibration"]["rows_used"] == 4
        assert not Path("logs").exists()
    logits = loaded(out, facts).logits(IDS)
    assert np.isfinite(logits).all() and near < np.corrcoef(logits.ravel(), plain.ravel())[0, 1] < 1
    assert same_text_side(out, wide) and "/tmp/" not in (out / "config.json").read_text()


@QUIET
@pytest.mark.parametrize("name", ["rtn", "gptq 8", "nf4", "w8a8", "awq"])
def test_kept_layers_stay_as_they_are_and_groups_of_nothing_give_finite_scales_and_nothing(wide: Path, name: str) -> None:
    base = changed(wide, lambda tensors: [tensors[UP.format(k)].fill_(size) for k, size in enumerate((0.0, 1e-9))])
    quantizer, options, _ = METHODS[name]
    facts, out = run(base, quantizer, **options, keep=["*.down_proj"])
    assert facts["modules"] == 12 and len(facts["kept"]) == 2
    logits, whole = loaded(out, facts).logits(IDS), engines.load("hf", base, threads=1).logits(IDS)
    assert np.isfinite(logits).all() and np.corrcoef(logits.ravel(), whole.ravel())[0, 1] > 0.7


@pytest.mark.parametrize("scheme, word", [
    ("int4-weight-only", "int4 needs a CUDA device"), ("float8-weight-only", "compute capability 8.9"), ("float8-dynamic", "8.9"),
])  # fmt: skip
def test_what_this_machine_has_no_kernel_for_is_unsupported_with_the_reason(wide: Path, scheme: str, word: str) -> None:
    if _gptqmodel.has_cuda():
        pytest.skip("a CUDA device is here: the scheme may be supported")
    built, _ = build(wide, "torchao", scheme=scheme)
    assert built["status"] == "unsupported" and word in built["reason"]


@QUIET
def test_a_hessian_that_cannot_be_factored_is_damped_more_and_said(wide: Path) -> None:
    """Calibration rows of one token: the Hessian has rank one, and a damping of nearly nothing does not help."""
    facts, _ = run(wide, "gptq", rows=[[7] * 64] * 8, bits=4, group_size=32, damping=1e-9)
    assert facts["damping"] == 1e-9 and all(d > 1e-9 for d in facts["damped_more"].values())
    assert facts["damped_more"]


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    monkeypatch.setattr("pipeline.quantizers.gguf._convert", write_gguf)


@QUIET
@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize("quantizer, engine, options, kept", [
    ("gguf", "llamacpp", {"type": "Q8_0"}, 6), ("onnx", "onnxruntime", {"precision": "int4"}, 4),  # one product of q, k and v
])  # fmt: skip
def test_kept_layers_are_the_only_plain_products(
    tiny: Path, quantizer: str, engine: str, options: dict[str, str], kept: int
) -> None:
    facts, out = build(tiny, quantizer, engine, **options, keep=["*.down_proj", "layers.0.self_attn.*"])
    assert facts["status"] == "ok", facts["reason"]
    kernels = engines.load(engine, out, threads=1).kernels()
    plain = sum(n for kind, n in kernels.items() if any(f"[{p}]" in kind for p in attestation.PLAIN))
    assert len(facts["kept"]) == 6 and plain == kept and 0 < facts["quantized_share"] < 1


@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize("type, fell_back", [("Q4_K_M", True), ("Q6_K", True), ("Q4_0", False)])
def test_k_quants_that_fall_back_are_said_with_their_share(tiny: Path, type: str, fell_back: bool) -> None:
    """The tiny model's rows are 64 and 128 wide: no block of 256 fits."""
    facts, _ = build(tiny, "gguf", "llamacpp", type=type)
    assert facts["status"] == "ok", facts["reason"]
    assert bool(facts["warnings"]) is fell_back
    if fell_back:
        assert "(100 % of their weights) have rows of 64, 128, no multiple of 256" in facts["warnings"][0]
        assert not any(name.endswith("_K") for name in facts["tensor_types"])


def test_what_a_manifest_says_of_losses_does_not_depend_on_the_order_in_which_threads_log_them(tmp_path: Path) -> None:
    lines = [f"{n},{name},{loss},0.05" for n, (name, loss) in enumerate([("q", 0.1), ("k", 0.2), ("v", 0.3), ("o", 0.7)])]
    said = set()
    for order in (lines, lines[::-1], lines[2:] + lines[:2]):
        (tmp_path / "quant_log.csv").write_text("\n".join(["layer,module,loss,damp", *order]) + "\n")
        said.add(json.dumps(_gptqmodel._losses(tmp_path, tmp_path / "log.csv", 0.01)))
    assert len(said) == 1
