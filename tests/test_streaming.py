"""Models larger than memory: files are written a tensor at a time, and not twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from model_house import tensors_of

from pipeline import engines, quantize
from pipeline.core import artifacts
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import streaming
from pipeline.quantizers import torchao
from pipeline.quantizers._probe import probe
from pipeline.quantizers._reproducible import save


def cast(base: Path, out: Path, dtype: str) -> Path:
    out.mkdir()
    quantize.quantize(Variant(quantizer="cast", options={"dtype": dtype}), base, out, calibration=Calibration(), seed=1)
    return out


def test_a_streamed_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {f"{k}.é.{kind}": torch.arange(9 + k).to(getattr(torch, kind)) for kind in streaming.TYPES for k in range(2)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0), "turned": torch.arange(6).view(2, 3).T.contiguous()}
    save_file(tensors, tmp_path / "right.safetensors", metadata={"format": "pt"})
    shapes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    parts = ((name, part) for name, t in tensors.items() for part in streaming.chunks(t))
    streaming.write(tmp_path, shapes, parts, {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "right.safetensors").read_bytes()


def test_shards_hold_so_much_at_most_and_are_the_model_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(streaming, "SHARD_BYTES", 70_000)
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    out = cast(tiny, tmp_path / "out", "bfloat16")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 75_000 for file in files)
    state = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    for name, tensor in tensors_of(tiny).items():
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

    base = make_model(tmp_path / "base", hidden=128, dtype=dtype)
    (tmp_path / "out").mkdir()
    configs: Any = {"int8-weight-only": methods.Int8WeightOnlyConfig, "int8-dynamic": methods.Int8DynamicActivationInt8WeightConfig}
    facts = torchao.quantize(base, tmp_path / "out", calibration=Calibration(), seed=1, scheme=scheme)  # type: ignore[arg-type]
    how = TorchAoConfig(configs[scheme](), modules_to_not_convert=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=how)
    save(model, right := tmp_path / "right")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (right / name).read_bytes(), name
    assert facts["probe"] == probe(model)


def test_a_model_spread_by_its_device_map_is_the_same_model(tiny_bf16: Path) -> None:
    one, spread = (engines.load("hf", tiny_bf16, threads=1, device_map=how) for how in ("one", "auto"))
    assert (one.logits(range(5, 40)) == spread.logits(range(5, 40))).all()
