"""Sizes are read off the files, in every format; and what was asked really happened."""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_house import write_gguf_parts

from pipeline.core.errors import ArtifactError, InvalidVariant
from pipeline.model import attestation, headers


def test_a_gguf_file_is_counted_by_block_type(tiny: Path, tmp_path: Path) -> None:
    """Q8_0: 32 weights take 34 bytes; F32: 4 a weight."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    packed = gguf.quants.quantize(np.zeros((64, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    write_gguf_parts(writer)
    size = attestation.measure(tiny, tmp_path)
    assert size["tensor_types"] == {"Q8_0": 64 * 64 * 34 // 32, "F32": 256}
    assert size["weight_bytes"] == 64 * 64 * 34 // 32 + 256
    assert size["quantized_share"] == pytest.approx(64 * 64 / headers.count_weights(tiny))


@pytest.mark.parametrize("rows", [32, 10**9])
def test_an_onnx_graph_is_counted_by_its_initializers(tiny: Path, tmp_path: Path, rows: int) -> None:
    """A head that is tied in the base is quantized beside the embeddings: no more than all weights are."""
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.zeros((32, 2, 16), np.uint8), "w")
    scales = numpy_helper.from_array(np.ones(64, np.float32), "s")
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", N=rows, K=64, bits=4, block_size=32)
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 64])
    out = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 32])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [value], [out], [weight, scales])), tmp_path / "model.onnx")
    size = attestation.measure(tiny, tmp_path)
    assert size["tensor_types"] == {"UINT8": 1024, "FLOAT": 256} and size["weight_bytes"] == 1280
    assert size["quantized_share"] == pytest.approx(min(rows * 64 / headers.count_weights(tiny), 1))


def test_the_base_itself_is_not_quantized_and_a_folder_without_weights_is_an_error(tiny: Path, tmp_path: Path) -> None:
    size = attestation.measure(tiny, tiny)
    assert size["quantized_share"] == 0 and size["bits_per_weight"] == 32 and size["packed_bits"] is None
    assert size["weight_bytes"] == 4 * sum(math.prod(t.shape) for t in headers.read_headers(tiny).values())
    with pytest.raises(ArtifactError, match="holds no weights"):
        attestation.measure(tiny, tmp_path)


@pytest.mark.parametrize(
    "patterns, count", [(["*.down_proj"], 2), (["layers.0.*"], 7), (["layers.0.*", "*.down_proj"], 8), ([], 0)]
)
def test_layers_to_keep_are_matched_as_in_a_shell(tiny: Path, patterns: list[str], count: int) -> None:
    assert len(headers.kept_layers(tiny, patterns)) == count


def refused(why: str | None) -> AbstractContextManager[Any]:
    return pytest.raises(InvalidVariant, match=why) if why else nullcontext()


@pytest.mark.parametrize("bits, ok", [(4.3, True), (4.2, True), (4.1, False), (16.0, False), (3.2, False), (None, True)])
def test_packed_bits_must_be_the_method_s(bits: float | None, ok: bool) -> None:
    with refused(None if ok else "was not quantized as requested"):
        attestation.check_bits({"expected_bits": 4.25}, bits)
    attestation.check_bits({}, bits)


@pytest.mark.parametrize("kernels, ok", [
    ({"TorchLinear": 14, "Linear[bfloat16]": 1}, True), ({"TorchLinear": 13, "Linear[bfloat16]": 2}, False),
    ({"Linear[bfloat16]": 15}, False), ({}, True),
])  # fmt: skip
def test_as_many_matrices_run_packed_as_were_quantized(kernels: dict[str, int], ok: bool) -> None:
    with refused(None if ok else "14 matrices were quantized"):
        attestation.check_kernels(kernels, {"modules": 14})


@pytest.mark.parametrize("logits, why", [
    ([1.0, 5.0, 3.0], None), ([1.0, 5.01, 3.0], None), ([1.0, 4.0, 3.0], "saving or loading lost something"),
    ([1.0, np.nan, 3.0], "1 of its 3 logits .* not finite"),
])  # fmt: skip
def test_a_fresh_process_answers_as_the_saved_model_did(logits: list[float], why: str | None) -> None:
    class Fixed:
        def logits(self, token_ids: list[int]) -> np.ndarray:
            return np.asarray([logits], np.float32)

        def stream(self, *_: object) -> list[tuple[int, float]]:
            return []

    with refused(why):
        attestation.check_answer(Fixed(), {"token_ids": [1, 2], "at": [1, 2], "logits": [5.0, 3.0]})
