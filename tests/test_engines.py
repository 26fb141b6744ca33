"""Every engine gives what transformers gives on the same weights: logits at all positions, tokens one by one, task scores."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from model_house import write_gguf_parts

from pipeline import engines, evaluate, quantize
from pipeline.core.errors import InvalidVariant, Unsupported
from pipeline.core.params import Evaluate, Variant
from pipeline.engines import Sampling, Trace, choose, steps
from pipeline.engines._forest import Forest
from pipeline.evalset.calibration import Calibration
from pipeline.model import attestation

WHOLE = {  # each engine with a variant that keeps every bit, and how far its logits may be off (of the largest)
    "onnxruntime": (Variant(quantizer="onnx", engine="onnxruntime", options={"precision": "fp32"}), 1e-4),
    "llamacpp": (Variant(quantizer="gguf", engine="llamacpp", options={"type": "F16"}), 1e-2),
}
# In 32 bits: nats by which a choice's log-likelihood may be off, and how many of 12 replies may take another turn at a near tie.
# llama.cpp's flash attention, its default, turns keys and values of 32 bits into 16 again.
OFF = {"onnxruntime": (1e-3, 0), "llamacpp": (5e-2, 2)}


@pytest.fixture(scope="module")
def base(tiny: Path) -> Any:
    return engines.load("hf", tiny, threads=1)


@pytest.fixture(scope="module", params=WHOLE)
def other(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine, its folder, tolerance) on the tiny model's weights."""
    variant, tolerance = WHOLE[request.param]
    home = tmp_path_factory.mktemp(request.param)
    shutil.copytree(ROOT / "envs", home / "envs")
    (home / "artifacts").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("pipeline.quantizers.gguf._convert", write_gguf)
        built = quantize.build(variant, tiny, _made(home / "model"), calibration=Calibration(home / "none"), seed=1, threads=1)
        if built["status"] == "unsupported":
            pytest.skip(f"{request.param}: {built['reason']}")
        return engines.load(variant.engine, home / "model", threads=1), home / "model", tolerance


def write_gguf(model_dir: Path, out: Path, more: Mapping[str, Any] = {}, **how: Any) -> None:
    """The tiny model as GGUF: llama.cpp's converter knows tokenizers by their hash, and takes none that was made here.

    more: tensors beside its own; how: for gguf's writer. Rows of q and k stand in another order: transformers rotates halves of
    a head, llama.cpp pairs.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {k: v.float().numpy() for k, v in load_file(model_dir / "model.safetensors").items()}
    vocab = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))["model"]
    writer = gguf.GGUFWriter(out, "llama", **how)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab["vocab"], key=vocab["vocab"].__getitem__))
    writer.add_token_types([3] * 3 + [1] * (config["vocab_size"] - 3))
    writer.add_token_merges([" ".join(m) for m in vocab["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def paired(weight: np.ndarray, n: int) -> np.ndarray:
        return weight.reshape(n, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in names.items():
            weight = tensors[f"model.layers.{layer}.{theirs}.weight"]
            weight = paired(weight, heads) if ours == "attn_q" else paired(weight, kv_heads) if ours == "attn_k" else weight
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(weight))
    for name, tensor in more.items():
        writer.add_tensor(name, tensor)
    write_gguf_parts(writer)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


IDS = [5 + 11 * k % 500 for k in range(90)]


def close(logits: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return logits.shape == expected.shape and bool(np.abs(logits - expected).max() < tolerance * np.abs(expected).max())


def test_logits_and_blocks_are_those_of_transformers(base: Any, other: Any) -> None:
    engine, _, tolerance = other
    assert engine.logits(IDS).dtype == np.float32 and close(engine.logits(IDS), base.logits(IDS), tolerance)
    assert all(n > 0 for n in engine.kernels().values()) and engine.kernels(), "the kernels that ran are named"
    both = (list(e.logit_blocks([IDS[:60], IDS[30:90]], [0, 37], 16)) for e in (engine, base))
    for (i, at, block), (j, start, expected) in zip(*both, strict=True):
        assert (i, at) == (j, start) and close(block, expected, tolerance)


def test_greedy_tokens_are_those_of_transformers_and_times_go_on(base: Any, other: Any) -> None:
    engine = other[0]
    ours = list(engine.stream(IDS[:40], 12, Sampling(stop=False)))
    theirs = list(base.stream(IDS[:40], 12, Sampling(stop=False)))
    assert [t for t, _ in ours] == [t for t, _ in theirs]
    times = [at for _, at in ours]
    assert times == sorted(times) and len(set(times)) == 12
    assert list(engine.stream(IDS[:40], 12, Sampling(stop=False)))[3][0] == ours[3][0]


def test_replies_end_at_the_tokens_that_the_base_names_in_every_engine(tiny: Path, other: Any, tmp_path: Path) -> None:
    for name, folder in (("hf", tiny), (other[0].name, other[1])):
        own = Path(shutil.copytree(folder, tmp_path / name))
        (own / "generation_config.json").write_text('{"eos_token_id": [2, 14]}')
        assert engines.load(name, own, threads=1).end_ids == {2, 14}


@pytest.fixture(scope="module")
def exact(other: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine on weights, keys and values of 32 bits, as transformers has them here."""
    engine, folder, _ = other
    if engine.name != "llamacpp":
        return engine
    whole = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(folder, whole)
    write_gguf(tiny, whole / "model.gguf")
    return engines.load("llamacpp", whole, threads=1, kv="f32")


@pytest.mark.filterwarnings("ignore")
def test_task_scores_are_those_of_transformers(base: Any, exact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item by item, every kind of task: the same answers; log-likelihoods within OFF (seen: 1e-5 and 0.03 nats)."""
    monkeypatch.chdir(ROOT)
    tasks = {"facts": 12, "grammar": 8, "commonsense": 6, "retrieval": 2, "arithmetic_copy": 6, "instruct": 6, "prose_ppl": 1}
    ours = evaluate.evaluate(exact, Evaluate(batch_size=1), tasks, 1, tmp_path)
    theirs = evaluate.evaluate(base, Evaluate(batch_size=4), tasks, 1, tmp_path)
    assert len(ours) == len(theirs) == sum(tasks.values())
    other_replies = 0
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        differ = {k for k in a if a[k] != b[k]} - {"loglikelihoods"}
        if a["kind"] == "generate_until" and differ:  # a random model has near ties; the reply goes on from the other token
            other_replies += 1
            assert a["prediction"][:1] == b["prediction"][:1] and differ <= {"prediction"}
        else:
            assert not differ
    most, replies = OFF[exact.name]
    assert other_replies <= replies
    for a, b in zip(ours, theirs):
        limit = most * (max(row["n_tokens"] for row in theirs) ** 0.5 if a["kind"] == "loglikelihood_rolling" else 1)
        assert a["loglikelihoods"] is None or a["loglikelihoods"] == pytest.approx(b["loglikelihoods"], rel=0, abs=limit)


@pytest.mark.filterwarnings("ignore")
def test_what_was_read_before_changes_no_logits(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may keep what requests begin alike; longer, shorter, other and the same again must give what they give alone."""
    engine, _, tolerance = other
    monkeypatch.setattr("pipeline.engines.onnxruntime.ROOM", 64)
    monkeypatch.setattr("pipeline.engines.onnxruntime.PIECE", 16)
    monkeypatch.setattr(engine, "room", 0, raising=False)
    asked = [IDS, IDS[:50], [*IDS[:49], 7], [*IDS[:49], 7], IDS[20:], IDS[:50], IDS * 11, IDS[:3]]
    alone = [engine.logits(ids) for ids in asked]
    for ids, expected in zip(asked, alone):
        for start in (len(ids) - 1, len(ids) // 2, 0):
            blocks = [block for _, _, block in engine.logit_blocks([[*ids, 0]], [start], len(ids))]
            assert np.abs(np.concatenate(blocks) - expected[start:]).max() < tolerance * np.abs(expected).max()
    list(engine.stream(IDS[:10], 3, Sampling()))
    again = [block for _, _, block in engine.logit_blocks([[*IDS, 0]], [0], len(IDS))]
    assert close(np.concatenate(again), alone[0], tolerance)


def test_windows_side_by_side_give_the_digits_that_each_gives_alone(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any lengths, in their order, on two threads; a reader that stops early leaves the engine as it was."""
    name, folder = other[0].name, other[1]
    if name != "llamacpp":
        pytest.skip(f"{name} scores windows one after the other")
    engine: Any = engines.load(name, folder, threads=2)
    lanes = list[Any]()
    plain = type(engine)._lane
    monkeypatch.setattr(type(engine), "_lane", lambda self, length: (lanes.append(plain(self, length)), lanes[-1])[1])
    windows, starts = [IDS[:60], IDS[:37], IDS[30:90], IDS[5:9], IDS[:60], IDS[::-1]], [0, 20, 37, 1, 58, 3]
    together = list(engine.logit_blocks(windows, starts, 16))
    assert [lane.threads for lane in lanes] == [1, 1] and len({engine.context, *(lane.context for lane in lanes)}) == 3
    next(engine.logit_blocks(windows, starts, 16))
    monkeypatch.setattr("pipeline.engines.llamacpp.BATCH", 50)  # too long for one pass: one after the other
    engine._forget_from(0)
    assert [at[:2] for at in engine.logit_blocks(windows, starts, 16)] == [at[:2] for at in together] and len(lanes) == 4
    monkeypatch.undo()
    alone = list[Any]()
    for k, (ids, start) in enumerate(zip(windows, starts)):
        engine._forget_from(0)
        alone += [(k, at, block) for _, at, block in engine.logit_blocks([ids], [start], 16)]
    for (k, at, block), (j, start, expected) in zip(together, alone, strict=True):
        assert (k, at) == (j, start) and np.array_equal(block, expected)
    engine.close()


def test_requests_side_by_side_give_what_each_gives_alone(base: Any, other: Any) -> None:
    prompts = [IDS[k : k + 30] for k in (0, 20, 40, 55)]
    for engine in (base, other[0]):
        steps = list(engine.stream_batch(prompts, 6))
        assert [t for _, t in steps] == sorted(t for _, t in steps) and all(len(tokens) == 4 for tokens, _ in steps)
        alone = [[t for t, _ in engine.stream(p, 6, Sampling(stop=False))] for p in prompts]
        assert [list(reply) for reply in zip(*(tokens for tokens, _ in steps))] == alone


def test_a_kept_prefix_is_not_read_again_and_changes_nothing(base: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = other[0]
    first, second = IDS[:80], [*IDS[:60], *IDS[10:30]]
    alone = [[t for t, _ in engine.stream(ids, 5, Sampling(stop=False))] for ids in (first, second)]
    read = list[int]()
    name = "_decode" if engine.name == "llamacpp" else "_read"
    plain = getattr(engine, name)
    at = 0 if engine.name == "llamacpp" else 1
    monkeypatch.setattr(engine, name, lambda *args: (read.append(len(args[at])), plain(*args))[1])
    ours = [[t for t, _ in engine.stream_on(ids, 5, Sampling(stop=False))] for ids in (IDS[5:], first, second)]
    assert ours[1:] == alone
    assert sum(read[-5:]) == 20 + 4, "the second prompt's own tokens, and its reply"
    with pytest.raises(Unsupported, match="keeps no prefix"):
        base.stream_on(first, 5, Sampling(stop=False))


def test_a_request_s_phases_and_cache_are_traced(base: Any, other: Any) -> None:
    for engine in (base, other[0]):
        times = [t for _, t in engine.stream(IDS[:40], 6, Sampling(stop=False))]
        trace = engine.trace
        assert trace.prefill > 0 and len(trace.decode) == 5 and len(trace.sampling) == 6 and trace.unknown == {}
        assert sum(trace.decode) + sum(trace.sampling[1:]) <= times[-1] - times[0]
        assert trace.cache_tokens in (45, 46), "what is kept, or what there is room for"
        numbers = trace.cache_tokens * 2 * 2 * 2 * 16  # layers, keys and values, heads, width
        assert trace.cache_bytes == pytest.approx(numbers * trace.element_bytes, rel=0.1)  # llama.cpp adds a few words


def test_a_cache_that_llama_cpp_does_not_pack_is_unsupported_or_found(other: Any) -> None:
    engine, folder, _ = other
    if engine.name != "llamacpp":
        pytest.skip("its cache has one type")
    with pytest.raises(Unsupported, match="cannot keep keys and values as q8_0 for this model"):  # heads of 16, blocks of 32
        engines.load("llamacpp", folder, threads=1, kv="q8_0")
    with pytest.raises(InvalidVariant, match="not quantized: without kv"):
        attestation.check_cache(engine, IDS)


def test_a_forest_read_at_once_gives_what_its_sequences_give(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, tolerance = other
    if not hasattr(engine, "forest_logits"):
        pytest.skip(f"{engine.name} reads forests branch by branch")
    monkeypatch.setattr("pipeline.engines.llamacpp.BATCH", 20)  # several passes
    monkeypatch.setattr("pipeline.engines.llamacpp.SEQUENCES", 8)  # no more than tokens in a pass
    monkeypatch.setattr(engine, "forests", None)
    given = sorted([IDS[:40], [*IDS[:30], 7, 9, 11], [*IDS[:31], 8], IDS[:12], IDS[50:70], [3]])
    forest = Forest()
    for ids in given:
        forest.add(ids)
    for _ in range(2):  # nothing of the first is left in the second
        found = {n: row for nodes, rows in engine.forest_logits(forest, range(len(forest.tokens))) for n, row in zip(nodes, rows)}
        for path, ids in zip(forest.paths, given):
            assert close(np.stack([found[n] for n in path]), engine.logits(ids), tolerance)
    many = Forest()
    for k in range(300):
        many.add([k])
    assert engine.forest_logits(many, [0]) is None


def test_sampling_follows_the_softmax() -> None:
    logits, rng = np.log(np.array([0.1, 0.6, 0.3], np.float32)), np.random.default_rng(0)
    drawn = np.bincount([choose(logits, Sampling(temperature=1.0), rng) for _ in range(4000)], minlength=3) / 4000
    assert drawn == pytest.approx([0.1, 0.6, 0.3], abs=0.03)
    assert choose(logits, Sampling(), rng) == 1


@pytest.mark.parametrize("stop, expected", [(True, [3, 2, 1]), (False, [3, 2, 1, 0, 3])])
def test_a_reply_ends_with_an_end_token_or_its_length_and_every_pass_is_in_the_trace(stop: bool, expected: list[int]) -> None:
    """An engine that counts down from 3; 1 ends a reply."""
    engine: Any = SimpleNamespace(trace=Trace(), end_ids={1})
    read, decoded = np.eye(4, dtype=np.float32)[3], list[int]()

    def decode(state: str, token: int) -> Any:
        decoded.append(token)
        return np.eye(4, dtype=np.float32)[(token - 1) % 4]

    def whole() -> Any:
        kept.append((yield from steps(engine, lambda: ("held", read), decode, 5, Sampling(stop=stop))))

    kept: list[str] = []
    found = list(whole())
    assert [t for t, _ in found] == expected and kept == ["held"]
    assert decoded == expected[:-1], "nothing is computed behind the last token"
    assert len(engine.trace.decode) == len(expected) - 1 and len(engine.trace.sampling) == len(expected)
    assert engine.trace.prefill is not None and [t for _, t in found] == sorted(t for _, t in found)
