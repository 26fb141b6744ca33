"""Engine and precision apart: rates multiply, divergences are subtracted in pairs, and what is unknown says what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from reported import result

from pipeline.core.params import Compare, Variant
from pipeline.reporting import effects, text

SETUP = Compare(confidence=0.95, resamples=200)


def llamacpp(name: str, speed: float, kld: float, type_: str, **more: Any) -> Any:
    return result(name, speed, kld, 143, engine="llamacpp", options={"type": type_}, **more)


def house() -> Any:
    return {
        "bf16": result("bf16", 1.0, 0.0, 269), "int8": result("int8", 2.0, 0.1, 143),
        "kv8": llamacpp("kv8", 3.0, 0.02, "BF16", engine_options={"kv": "q8_0"}),
        "own": llamacpp("own", 3.0, 0.01, "BF16", engine_options={"kv": "f16"}), "q8": llamacpp("q8", 6.0, 0.04, "Q8_0"),
        "alone": result("alone", 6.0, 0.01, 143, engine="onnxruntime", options={"precision": "int4"}),
    }  # fmt: skip


def test_only_variants_that_change_both_are_split_and_a_packed_cache_is_no_engine_s_16_bits() -> None:
    assert effects.both(house(), "bf16") == ["kv8", "q8", "alone"]
    assert [text.own_16(house(), name) for name in ("int8", "q8", "kv8", "alone")] == ["bf16", "own", "own", None]


def test_the_effects_of_engine_and_precision_multiply_to_the_whole() -> None:
    row = next(r for r in effects.rows(house(), "bf16", SETUP, 1) if r["variant"] == "q8")
    engine, precision = (row[f"decode: {of}, ×"]["value"] for of in ("engine", "precision"))  # type: ignore[index]
    assert (engine, precision) == (3.0, pytest.approx(2.0)) and engine * precision == pytest.approx(6.0)
    said = effects.words(house(), "q8") or ""
    assert "llamacpp alone gives × 3 " in said and "precision × 2 " in said and effects.words(house(), "own") is None


def test_what_kld_is_beyond_the_engine_s_is_the_difference_of_means_in_pairs_by_document() -> None:
    results = house()
    for name, more in (("own", 0.0), ("q8", 0.03)):
        documents = {f"d{k}": {"tokens": 10 * k, "kld": 0.3 * k * k + more * 10 * k} for k in range(1, 9)}
        results[name]["curves"] = {"kld_by_document": documents}
    found = effects.beyond(results, "q8", "own", SETUP, 1)
    assert found["value"] == pytest.approx(0.03) and found["n"] == 360 and found["clusters"] == 8
    assert found["high"] - found["low"] < 1e-9, "documents differ by thirty times that: paired, nothing of it is left"  # type: ignore[operator]
    del results["own"]["curves"]["kld_by_document"]["d1"]
    assert effects.beyond(results, "q8", "own", SETUP, 1)["value"] is None, "other tokens"


@pytest.mark.parametrize("engine", ["hf", "llamacpp", "onnxruntime"])
def test_what_is_missing_is_a_line_for_params_that_gives_it(engine: str) -> None:
    line = effects.lacking(engine).partition("params.yaml: ")[2]
    ((_, fields),) = yaml.safe_load(line).items()
    variant = Variant.model_validate(fields)
    packed = result("x", 1.0, 0.1, 9, engine=engine, options={"bits": 4}, reference="-")
    results = {"x": packed, "new": {**packed, "options": variant.options}}
    assert variant.engine == engine and text.own_16(results, "x") == "new"
    (row,) = (r for r in effects.rows(house(), "bf16", SETUP, 1) if r["variant"] == "alone")
    cells = [text.about(m) for k, m in row.items() if ":" in k and "total" not in k]  # type: ignore[arg-type]
    assert all("no variant of onnxruntime at 16 bits; add" in cell for cell in cells) and effects.notes(house(), "bf16")
