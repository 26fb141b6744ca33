"""What is written is what params ask for, measured from the files."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

import pytest
from conftest import make_model

from pipeline import quantize, quantizers
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, InvalidVariant, Unsupported
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import headers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny` with widths that every kernel takes, and in bfloat16, as models are that people quantize."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", hidden=128, dtype="bfloat16")


def calibration(folder: Path, rows: int = 4, tokens: int = 64) -> Calibration:
    """Rows as `calibrate` writes them."""
    if not folder.exists():
        artifacts.write_jsonl(
            folder / "rows.jsonl", ({"token_ids": [5 + (7 * k + r) % 500 for k in range(tokens)]} for r in range(rows))
        )
        files = artifacts.files_of(folder)
        artifacts.write_json(folder / artifacts.MANIFEST, {"status": "ok", "rows_used": rows, "files": files, "digest": "d"})
    return Calibration(folder)


def run(tiny: Path, out: Path, quantizer: str, **options: object) -> dict[str, object]:
    out.mkdir()
    variant = Variant(quantizer=quantizer, options=dict(options))
    return quantize.quantize(variant, tiny, out, calibration=calibration(out.parent / "calibration"), seed=1)


@pytest.mark.parametrize("dtype, bits", [("float32", 32), ("bfloat16", 16), ("float16", 16)])
def test_cast_measures_the_bits_it_asked_for(tiny: Path, tmp_path: Path, dtype: str, bits: int) -> None:
    facts = run(tiny, tmp_path / "out", "cast", dtype=dtype)
    assert facts["bits_per_weight"] == bits and facts["quantized_share"] == 0 and facts["dtype"] == dtype


def test_a_weight_past_the_range_of_fp16_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    base.mkdir()
    for file in tiny.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(InvalidVariant, match=r"model.layers.1.mlp.up_proj.weight holds 7e\+04"):
        run(base, tmp_path / "out", "cast", dtype="float16")


def test_int8_packs_the_layers_and_keeps_the_embeddings(tiny: Path, tmp_path: Path) -> None:
    facts = run(tiny, tmp_path / "out", "torchao", scheme="int8-weight-only")
    total = headers.count_weights(tiny)
    embeddings = math.prod(headers.read_headers(tiny)["model.embed_tokens.weight"].shape)
    assert 8 < facts["bits_per_weight"] < 8 + 8 * embeddings / total + 2  # type: ignore[operator]
    assert facts["quantized_share"] == pytest.approx(1 - embeddings / total, abs=0.01)


@pytest.mark.parametrize("quantizer, options", [("torchao", {"scheme": "int8-weight-only"}), ("cast", {"dtype": "float16"})])
def test_tokenizer_and_template_are_the_bases_byte_for_byte(
    tiny: Path, tmp_path: Path, quantizer: str, options: dict[str, str]
) -> None:
    run(tiny, tmp_path / "out", quantizer, **options)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny / name).read_bytes(), name


def test_gptq_writes_four_bits_and_equal_inputs_give_equal_files(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = run(tiny, tmp_path / "out", "gptq", bits=4, group_size=32)
    packed = headers.read_headers(tmp_path / "out")
    codes = sum(t.bytes for n, t in packed.items() if n.endswith("qweight"))
    linear = sum(math.prod(t.shape) for n, t in headers.read_headers(tiny).items() if "proj" in n)
    assert 8 * codes / linear == 4
    assert facts["modules"] == 14 and facts["damping"] == 0.05 and facts["damped_more"] == {}
    assert facts["calibration"]["rows_used"] == 4  # type: ignore[index]
    assert "/tmp/" not in (tmp_path / "out/config.json").read_text()
    assert not (tmp_path / "logs").exists()


@pytest.mark.filterwarnings("ignore")  # gptqmodel's own, at load
def test_a_gptq_folder_loads_with_a_packed_kernel_and_close_logits(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from pipeline import engines

    monkeypatch.chdir(tmp_path)
    run(tiny, tmp_path / "out", "gptq", bits=8, group_size=32)
    engine, base = engines.load("hf", tmp_path / "out", threads=1), engines.load("hf", tiny, threads=1)
    packed = {k: n for k, n in engine.kernels().items() if not k.startswith("Linear[")}  # type: ignore[attr-defined]
    assert sum(packed.values()) == 14 and len(packed) == 1
    ids = list(range(5, 60))
    error = np.abs(engine.logits(ids) - base.logits(ids))
    assert 0 < error.max() < 0.1 * np.abs(base.logits(ids)).max()


@pytest.mark.filterwarnings("ignore")  # gptqmodel's own, at load
@pytest.mark.parametrize("bits, group", [(8, 32), (4, 32), (8, -1)])
def test_rtn_is_the_nearest_code_of_each_group(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, group: int
) -> None:
    """No weight moves by more than half a step of its group: the definition of rounding to nearest."""
    import torch
    from safetensors.torch import load_file

    from pipeline import engines

    monkeypatch.chdir(tmp_path)
    facts = run(tiny, tmp_path / "out", "rtn", bits=bits, group_size=group)
    assert facts["modules"] == 14 and facts["calibration"] is None
    engine = engines.load("hf", tmp_path / "out", threads=1)
    base = load_file(tiny / "model.safetensors")
    for name, module in engine.model.named_modules():  # type: ignore[attr-defined]
        if hasattr(module, "qweight"):
            original = base[f"{name}.weight"]
            packed = module(torch.eye(original.shape[1], dtype=torch.float32)).T.float()
            if module.bias is not None:
                packed -= module.bias.float()[:, None]
            rows = original.reshape(len(original), -1, original.shape[1] if group == -1 else group)
            step = (rows.abs().amax(-1, keepdim=True) * 2 / (2**bits - 2)).expand_as(rows).reshape(original.shape)
            assert ((packed - original).abs() <= 0.51 * step + 2**-7 * original.abs()).all(), name


def test_an_invalid_variant_is_recorded_and_the_stage_goes_on(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("params.yaml", "evalsets"):
        (tmp_path / name).symlink_to(ROOT / name)
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


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ArtifactError, match="cut short"):
        headers.read_headers(tmp_path)


def test_an_unknown_quantizer_suggests_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'gptq'"):
        quantizers.find("gptqq")


def test_a_failing_quantizer_leaves_no_model(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError), artifacts.atomic_dir(tmp_path / "model") as out:
        quantize.quantize(
            Variant(quantizer="gptq", options={"group_size": 32}), tiny, out,
            calibration=Calibration(tmp_path / "none"), seed=1,
        )  # fmt: skip
    assert not (tmp_path / "model").exists()


# --- every method, on the tiny model -----------------------------------------------------------------------------

METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "w8a8": ("torchao", {"scheme": "int8-dynamic"}),
    "bnb int8": ("bnb", {"type": "int8"}),
    "nf4": ("bnb", {"type": "nf4"}),
    "nf4, scales quantized": ("bnb", {"type": "nf4", "double_quant": True}),
    "gptq 8": ("gptq", {"bits": 8, "group_size": 32}),
    "gptq 3": ("gptq", {"bits": 3, "group_size": 32}),
    "gptq 4, by activation": ("gptq", {"bits": 4, "group_size": 32, "act_order": True}),
    "awq": ("awq", {"bits": 4, "group_size": 32}),
    "rtn": ("rtn", {"bits": 4, "group_size": 32}),
}
KEEPS = {"w8a8", "nf4", "gptq 8", "awq", "rtn"}
QUIET = pytest.mark.filterwarnings("ignore")  # the libraries' own


@QUIET
@pytest.mark.parametrize("name", METHODS)
def test_a_method_packs_every_matrix_and_answers_alike_when_loaded_anew(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import numpy as np

    from pipeline import engines
    from pipeline.model import attestation

    monkeypatch.chdir(tmp_path)
    quantizer, options = METHODS[name]
    facts = run(wide, tmp_path / "out", quantizer, **options)
    assert facts["modules"] == 14 and facts["kept"] == []
    assert facts["packed_bits"] == pytest.approx(facts["expected_bits"], rel=attestation.TOLERANCE)
    engine, base = engines.load("hf", tmp_path / "out", threads=1), engines.load("hf", wide, threads=1)
    attestation.check_kernels(engine.kernels(), facts)
    attestation.check_answer(engine, facts["probe"])
    ids = list(range(5, 60))
    ours, theirs = engine.logits(ids), base.logits(ids)
    assert np.isfinite(ours).all() and 0.5 < np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] < 1


@QUIET
@pytest.mark.parametrize("name", sorted(KEEPS))
def test_kept_layers_stay_as_they_are(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from pipeline import engines
    from pipeline.model import attestation

    monkeypatch.chdir(tmp_path)
    quantizer, options = METHODS[name]
    facts = run(wide, tmp_path / "out", quantizer, **options, keep=["*.down_proj"])
    assert facts["modules"] == 12 and len(facts["kept"]) == 2  # type: ignore[arg-type]
    attestation.check_kernels(engines.load("hf", tmp_path / "out", threads=1).kernels(), facts)


@QUIET
@pytest.mark.parametrize("name", ["rtn", "gptq 8", "nf4", "w8a8"])
@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_groups_of_nothing_give_finite_scales_and_nothing(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: float
) -> None:
    import numpy as np
    from safetensors.torch import load_file, save_file

    from pipeline import engines

    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    shutil.copytree(wide, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][:] = size
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    quantizer, options = METHODS[name]
    run(base, tmp_path / "out", quantizer, **options)
    engine, plain = engines.load("hf", tmp_path / "out", threads=1), engines.load("hf", base, threads=1)
    ours, theirs = engine.logits(list(range(5, 40))), plain.logits(list(range(5, 40)))
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
    out = tmp_path / "out"
    out.mkdir()
    built = quantize.build(
        Variant(quantizer="torchao", options={"scheme": scheme}),
        wide,
        out,
        calibration=Calibration(tmp_path / "none"),
        seed=1,
        threads=1,
    )
    assert built["status"] == "unsupported" and word in built["reason"]


def test_fp16_overflow_names_the_first_layer_that_passes_the_range(wide: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(wide, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 3e5 / tensors["model.layers.1.mlp.up_proj.weight"].abs().max()
    tensors["model.layers.1.mlp.up_proj.weight"].clamp_(-6e4, 6e4)  # each weight fits; a sum of 64 of them does not
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidVariant, match=r"first in model\.layers\.1\.mlp\.up_proj"):
        run(base, tmp_path / "out", "cast", dtype="float16")
    facts = run(wide, tmp_path / "fine", "cast", dtype="float16")
    assert facts["range_probe_tokens"] == 64 and facts["underflowed_weights"] == 0


def test_weights_lost_to_underflow_are_counted(wide: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(wide, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, :5] = 1e-9
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert run(base, tmp_path / "out", "cast", dtype="float16")["underflowed_weights"] == 5
    assert run(base, tmp_path / "out2", "cast", dtype="bfloat16")["underflowed_weights"] == 0


@QUIET
def test_a_hessian_that_cannot_be_factored_is_damped_more_and_said(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration rows of one token: the Hessian has rank one, and a damping of nearly nothing does not help."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "calibration"
    artifacts.write_jsonl(folder / "rows.jsonl", ({"token_ids": [7] * 64} for _ in range(8)))
    artifacts.write_json(folder / artifacts.MANIFEST, {"status": "ok", "rows_used": 8, "files": artifacts.files_of(folder)})
    facts = run(wide, tmp_path / "out", "gptq", bits=4, group_size=32, damping=1e-9)
    assert facts["damping"] == 1e-9 and all(d > 1e-9 for d in facts["damped_more"].values())  # type: ignore[attr-defined]
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
