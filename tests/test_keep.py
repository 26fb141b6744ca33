"""`options.keep` and fallbacks of the formats that are not transformers' own: GGUF and ONNX."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_engines import write_gguf

from pipeline import engines, quantize
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.model import attestation

PACKED = {"gguf": {"type": "Q8_0"}, "onnx": {"precision": "int4"}}
ENGINES = {"gguf": "llamacpp", "onnx": "onnxruntime"}


@pytest.fixture
def build(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Quantize the tiny model in a folder of its own; returns (manifest, folder)."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.quantizers.gguf._convert", write_gguf)

    def make(quantizer: str, **options: object) -> tuple[dict[str, Any], Path]:
        out = tmp_path / "out"
        out.mkdir()
        variant = Variant(quantizer=quantizer, engine=ENGINES[quantizer], options=dict(options))
        return quantize.build(variant, tiny, out, calibration=Calibration(tmp_path / "none"), seed=1, threads=1), out

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantizer", PACKED)
def test_kept_layers_are_the_only_plain_products(build: Any, quantizer: str) -> None:
    facts, out = build(quantizer, **PACKED[quantizer], keep=["*.down_proj", "layers.0.self_attn.*"])
    assert facts["status"] == "ok", facts["reason"]
    engine = engines.load(ENGINES[quantizer], out, threads=1)
    plain = sum(n for kind, n in engine.kernels().items() if any(f"[{p}]" in kind for p in attestation.PLAIN))
    # q, k and v of a layer are one product in ONNX Runtime
    assert len(facts["kept"]) == 6 and plain == {"gguf": 6, "onnx": 4}[quantizer]
    assert 0 < facts["quantized_share"] < 1


@pytest.mark.parametrize("type, fell_back", [("Q4_K_M", True), ("Q6_K", True), ("Q4_0", False)])
def test_k_quants_that_fall_back_are_said_with_their_share(build: Any, type: str, fell_back: bool) -> None:
    """The tiny model's rows are 64 and 128 wide: no block of 256 fits."""
    facts, _ = build("gguf", type=type)
    assert facts["status"] == "ok", facts["reason"]
    assert bool(facts["warnings"]) is fell_back
    if fell_back:
        assert "(100 % of their weights) have rows of 64, 128, no multiple of 256" in facts["warnings"][0]
        assert not any(name.endswith("_K") for name in facts["tensor_types"])
