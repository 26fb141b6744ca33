"""Models larger than memory: files are written a tensor at a time and not twice, and check says what a run takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from test_fit import house  # noqa: F401  # a fixture

from pipeline import engines, quantize
from pipeline.core import artifacts, params, quota
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import streaming
from pipeline.preflight import capacity

FILES = ("model.safetensors", "config.json", "generation_config.json")


def cast(base: Path, out: Path, dtype: str) -> Path:
    out.mkdir()
    quantize.quantize(Variant(quantizer="cast", options={"dtype": dtype}), base, out, calibration=Calibration(), seed=1)
    return out


def test_a_streamed_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {f"{k}.é.{kind}": torch.arange(9 + k).to(getattr(torch, kind)) for kind in streaming.TYPES for k in range(2)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0), "turned": torch.arange(6).view(2, 3).T.contiguous()}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    shapes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    parts = ((name, part) for name, t in tensors.items() for part in streaming.chunks(t))
    streaming.write(tmp_path, shapes, parts, {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_shards_hold_so_much_at_most_and_are_the_model_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(streaming, "SHARD_BYTES", 70_000)
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    out = cast(tiny, tmp_path / "out", "bfloat16")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 75_000 for file in files)
    state = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    for name, tensor in load_file(tiny / "model.safetensors").items():
        assert (state[name] == tensor.bfloat16()).all(), name


def test_a_base_that_has_the_type_is_linked_and_not_written_again(tiny_bf16: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_bf16, tmp_path / "base")
    (base / "model.safetensors").chmod(0o444)  # as DVC leaves what it links
    with artifacts.atomic_dir(tmp_path / "out") as out:
        shutil.rmtree(out)
        cast(base, out, "bfloat16")
    one, other = (folder / "model.safetensors" for folder in (base, tmp_path / "out"))
    assert one.samefile(other) and one.stat().st_nlink == 2
    assert not (base / "config.json").samefile(tmp_path / "out/config.json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["int8-weight-only", "int8-dynamic"])
def test_torchao_packs_matrix_by_matrix_what_transformers_packs_at_once(tmp_path: Path, dtype: str, scheme: str) -> None:
    import torch
    import torchao.quantization as methods
    from transformers import AutoModelForCausalLM, TorchAoConfig

    from pipeline.quantizers import torchao
    from pipeline.quantizers._probe import probe
    from pipeline.quantizers._reproducible import save

    base = make_model(tmp_path / "base", hidden=128, dtype=dtype)
    (tmp_path / "ours").mkdir()
    asked: Any = {"int8-weight-only": methods.Int8WeightOnlyConfig, "int8-dynamic": methods.Int8DynamicActivationInt8WeightConfig}
    facts = torchao.quantize(base, tmp_path / "ours", calibration=Calibration(), seed=1, scheme=scheme)  # type: ignore[arg-type]
    how = TorchAoConfig(asked[scheme](), modules_to_not_convert=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=how)
    save(model, tmp_path / "theirs")
    for name in FILES:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    assert facts["probe"] == probe(model)


def test_a_model_spread_by_its_device_map_is_the_same_model(tiny_bf16: Path) -> None:
    one, spread = (engines.load("hf", tiny_bf16, threads=1, device_map=how) for how in ("one", "auto"))
    assert (one.logits(range(5, 40)) == spread.logits(range(5, 40))).all()


def test_check_tells_what_does_not_fit_here_before_any_work(house: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    whole = capacity.notes(house)
    assert len(whole) == 1 and "GB more on disk" in whole[0]
    needed = capacity.memory_by_stage(house, house.model.folder)  # type: ignore[union-attr]
    monkeypatch.setattr(quota, "memory_bytes", lambda: max(needed.values()) - 1)
    assert [line.split()[0] for line in capacity.notes(house)[1:]] == [max(needed, key=needed.__getitem__)]
    monkeypatch.setattr(quota, "memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 999, 1))  # type: ignore[attr-defined]
    assert "the disk is too small" in capacity.notes(house)[1]


def test_what_check_expects_of_a_variant_is_what_it_takes(tiny: Path, tmp_path: Path) -> None:
    for quantizer, given in (
        ("cast", {"dtype": "bfloat16"}),
        ("torchao", {"scheme": "int8-weight-only"}),
        ("bnb", {"type": "nf4"}),
    ):
        variant, out = Variant(quantizer=quantizer, options=given), tmp_path / quantizer
        out.mkdir()
        quantize.quantize(variant, tiny, out, calibration=Calibration(), seed=1)
        held = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        assert capacity.variant_bytes(variant, tiny) == pytest.approx(held, rel=0.15), quantizer
