"""What is written is what params ask for, measured from the files."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_model

from pipeline import engines, quantize, quantizers
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, InvalidVariant, Unsupported
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import attestation, headers

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def calibration(folder: Path, rows: list[list[int]]) -> Calibration:
    """Rows as `calibrate` writes them."""
    artifacts.write_jsonl(folder / "rows.jsonl", ({"token_ids": row} for row in rows))
    files = artifacts.files_of(folder)
    artifacts.write_json(folder / artifacts.MANIFEST, {"status": "ok", "rows_used": len(rows), "files": files, "digest": "d"})
    return Calibration(folder)


def run(base: Path, quantizer: str, rows: list[list[int]] | None = None, **options: Any) -> tuple[dict[str, Any], Path]:
    """(facts, folder) of a model quantized in the working directory."""
    out = Path(f"out{len(list(Path().glob('out*')))}").absolute()
    out.mkdir()
    rows = rows or [[5 + (7 * k + r) % 500 for k in range(64)] for r in range(4)]
    given = calibration(Path("calibration"), rows)
    return quantize.quantize(Variant(quantizer=quantizer, options=options), base, out, calibration=given, seed=1), out


def changed(base: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model with other weights."""
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(base, "base"))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


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
    total = headers.count_weights(tiny)
    embeddings = math.prod(headers.read_headers(tiny)["model.embed_tokens.weight"].shape)
    assert 8 < facts["bits_per_weight"] < 8 + 8 * embeddings / total + 2
    assert facts["quantized_share"] == pytest.approx(1 - embeddings / total, abs=0.01)


@QUIET
@pytest.mark.parametrize("bits, group", [(4, 32), (8, -1)])
def test_rtn_is_the_nearest_code_of_each_group(tiny: Path, bits: int, group: int) -> None:
    """No weight moves by more than half a step of its group: the definition of rounding to nearest."""
    import torch
    from safetensors.torch import load_file

    facts, out = run(tiny, "rtn", bits=bits, group_size=group)
    assert facts["modules"] == 14 and facts["calibration"] is None
    engine: Any = engines.load("hf", out, threads=1)
    base = load_file(tiny / "model.safetensors")
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
    files = artifacts.files_of(artifacts.BASE)
    artifacts.write_json(artifacts.BASE / artifacts.MANIFEST, {"files": files, "digest": "d", "trust_remote_code": False})

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


def test_a_failing_quantizer_leaves_no_model(tiny: Path, tmp_path: Path) -> None:
    variant = Variant(quantizer="gptq", options={"group_size": 32})
    with pytest.raises(ArtifactError), artifacts.atomic_dir(tmp_path / "model") as out:
        quantize.quantize(variant, tiny, out, calibration=Calibration(tmp_path / "none"), seed=1)
    assert not (tmp_path / "model").exists()


# --- every method, on the tiny model -----------------------------------------------------------------------------

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
    engine: Any = engines.load("hf", out, threads=1)
    attestation.check_kernels(engine.kernels(), facts)
    attestation.check_answer(engine, facts["probe"])
    ours = engine.logits(IDS)
    assert np.isfinite(ours).all() and near < np.corrcoef(ours.ravel(), plain.ravel())[0, 1] < 1
    assert same_text_side(out, wide) and "/tmp/" not in (out / "config.json").read_text()


@QUIET
@pytest.mark.parametrize("name", ["rtn", "gptq 8", "nf4", "w8a8", "awq"])
def test_kept_layers_stay_as_they_are_and_groups_of_nothing_give_finite_scales_and_nothing(wide: Path, name: str) -> None:
    base = changed(wide, lambda tensors: [tensors[UP.format(k)].fill_(size) for k, size in enumerate((0.0, 1e-9))])
    quantizer, options, _ = METHODS[name]
    facts, out = run(base, quantizer, **options, keep=["*.down_proj"])
    assert facts["modules"] == 12 and len(facts["kept"]) == 2
    engine, whole = engines.load("hf", out, threads=1), engines.load("hf", base, threads=1)
    attestation.check_kernels(engine.kernels(), facts)
    ours, theirs = engine.logits(IDS), whole.logits(IDS)
    assert np.isfinite(ours).all() and np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.7


@pytest.mark.parametrize("scheme, word", [
    ("int4-weight-only", "int4 needs a CUDA device"), ("float8-weight-only", "compute capability 8.9"), ("float8-dynamic", "8.9"),
])  # fmt: skip
def test_what_this_machine_has_no_kernel_for_is_unsupported_with_the_reason(
    wide: Path, tmp_path: Path, scheme: str, word: str
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: the scheme may be supported")
    variant, out = Variant(quantizer="torchao", options={"scheme": scheme}), tmp_path / "out"
    out.mkdir()
    built = quantize.build(variant, wide, out, calibration=Calibration(tmp_path / "none"), seed=1, threads=1)
    assert built["status"] == "unsupported" and word in built["reason"]


@QUIET
def test_a_hessian_that_cannot_be_factored_is_damped_more_and_said(wide: Path) -> None:
    """Calibration rows of one token: the Hessian has rank one, and a damping of nearly nothing does not help."""
    facts, _ = run(wide, "gptq", rows=[[7] * 64] * 8, bits=4, group_size=32, damping=1e-9)
    assert facts["damping"] == 1e-9 and all(d > 1e-9 for d in facts["damped_more"].values())
    assert facts["damped_more"]


def test_a_model_that_is_large_for_the_machine_goes_layer_by_layer_to_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from pipeline.quantizers import _gptqmodel

    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(_gptqmodel, "has_cuda", lambda: False)
    for memory, on_disk in ((8000, False), (7999, True)):
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: SimpleNamespace(total=memory))
        assert _gptqmodel._on_disk(tmp_path) is on_disk
