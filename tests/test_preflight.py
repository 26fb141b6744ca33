"""What the base model does not take of params.yaml is said by check where its files are here, and else before any work."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from gate_house import write_manifest
from model_house import change_json

from pipeline import check, engines, evaluate, quantize, quantizers, reference
from pipeline.core import artifacts, explain, params, quota
from pipeline.core.errors import DataError, ParamsError
from pipeline.core.params import Evaluate, PathModel, Serving, Trajectories, Variant
from pipeline.core.records import Options
from pipeline.evalset.calibration import Calibration
from pipeline.preflight import model, room

CHAT = {"id": "c", "domain": "chat", "messages": [{"role": "user", "content": "hello"}]}
WINDOW = 1024  # of the tiny model
BF16 = Variant(quantizer="cast", options={"dtype": "bfloat16"})


@pytest.fixture
def house(tiny: Path) -> params.Params:
    """The project's sets and params in a folder of its own, for a copy of the tiny model in ./model."""
    shutil.copytree(ROOT / "evalsets", "evalsets")
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    shutil.copytree(tiny, "model")
    variants = {"bf16": BF16, "int8": BF16}
    made = settings(params.load(), model=PathModel(source="path", path="model"), variants=variants, serving=Serving())
    return asked(made, facts=2)


def settings(of: params.Params, **changed: object) -> params.Params:
    return of.model_copy(update=changed)


def asked(of: params.Params, **tasks: int | str) -> params.Params:
    """The same params with a tier of these tasks alone."""
    return settings(of, tiers={of.tier: of.amount.model_copy(update={"tasks": tasks})})


def rows(*given: dict[str, Any]) -> None:
    Path("evalsets/tasks/mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")


def tokens_of(text: str) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained("model")(text, add_special_tokens=False).input_ids)


def number_in(message: str) -> int:
    return int(message.split(" has ")[1].split()[0])


def without_template(folder: Path) -> None:
    for file in folder.glob("chat_template.*"):
        file.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


# --- windows -----------------------------------------------------------------------------------------------------


def test_trajectories_past_the_window_are_named(house: params.Params) -> None:
    longer = house.diverge.model_copy(update={"trajectories": house.diverge.trajectories.model_copy(update={"tokens": 1000})})
    (fault,) = model.faults(settings(house, diverge=longer))
    assert "diverge.trajectories: prompt" in fault and "the model's window is 1024" in fault
    assert not model.faults(house)


def test_windows_longer_than_an_engine_reads_are_named(house: params.Params) -> None:
    change_json(Path("model/config.json"), max_position_embeddings=8192)
    longer = settings(house, diverge=house.diverge.model_copy(update={"window": 8192}))
    assert not model.faults(longer)
    gguf = Variant(quantizer="gguf", engine="llamacpp", options={"type": "Q8_0"})
    (fault,) = model.faults(settings(longer, variants={"bf16": BF16, "gguf-q8_0": gguf}))
    assert "8192 tokens are more than engine 'llamacpp' reads here (4096), for gguf-q8_0" in fault


@pytest.mark.parametrize("window, faults", [
    (300, []),
    (280, ["params.yaml: tiers.default.benchmark: 256 prompt and 32 output tokens are more than the model's 280; ask for fewer"]),
])  # fmt: skip
def test_requests_longer_than_the_window_are_named_before_any_is_sent(house: params.Params, window: int, faults: list[str]) -> None:
    change_json(Path("model/config.json"), max_position_embeddings=window)
    assert [fault for fault in model.faults(house) if ".benchmark" in fault] == faults


# --- items longer than the window --------------------------------------------------------------------------------


@pytest.mark.parametrize("row, fits", [
    ({"context": "a " * 1100, "choices": ["b", "c"], "answer": 0}, False), ({"context": "a " * 1000, "target": "b"}, False),
    ({"context": "q", "choices": ["b", "c" + " a" * 1100], "answer": 0}, False),
    ({"context": "a " * 400, "target": "b"}, True), ({"text": "a " * 2000}, True),
    ({"context": "q", "choices": ["b", "c"], "answer": 0}, True),
])  # fmt: skip
def test_an_item_past_the_window_is_named_with_its_tokens(house: params.Params, row: dict[str, Any], fits: bool) -> None:
    rows({"id": "first"} | row)
    faults = model.faults(asked(house, mine="all"))
    assert len(faults) == (not fits)
    if fits:
        return
    assert faults[0].startswith("params.yaml: tiers.default.tasks: task 'mine' item 'first' has ")
    longest = max((row["context"] + " " + c for c in row.get("choices", [""])), key=len).rstrip()
    said = number_in(faults[0])
    assert abs(said - tokens_of(longest) - 32 * ("target" in row)) <= 1 and said > WINDOW and f"window is {WINDOW}" in faults[0]


def test_items_that_are_not_asked_or_may_be_cut_are_no_fault(house: params.Params) -> None:
    rows(*({"id": f"{k}", "context": "a " * (1100 if k else 3) + str(k), "target": "b"} for k in range(2)))
    long = [n for n in (1, 2) if model.faults(asked(house, mine=n))]
    assert 2 in long and (1 in long) is (evaluate.subset(2, 1, house.seed) == [1])
    assert not model.faults(settings(asked(house, mine=2), evaluate=Evaluate(allow_truncated=True)))


def test_a_long_item_is_named_before_a_model_is_loaded(house: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    rows({"id": "first", "context": "a " * 1100, "target": "b"})
    asking = asked(house, mine="all")
    folder = artifacts.model_dir("int8")
    shutil.copytree("model", folder)
    write_manifest(folder)
    monkeypatch.setattr(params, "load", lambda: asking)
    monkeypatch.setattr(engines, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match=r"item 'first' has \d+ tokens, the 32 of its reply among them, and the model's window is"):
        evaluate.main("int8")
    assert not artifacts.answers("int8").exists()


# --- targets longer than a reply ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words, fits", [(3, True), (31, True), (80, False)])
@pytest.mark.parametrize("several", [False, True])
def test_a_target_that_no_reply_can_hold_is_named_with_its_tokens(
    house: params.Params, words: int, fits: bool, several: bool
) -> None:
    target = " ".join("abc"[k % 3] for k in range(words))
    rows({"id": "short", "context": "q", "target": ["b"] if several else "b"},
         {"id": "first", "context": "q", "target": [target, f"{target} more"] if several else target})  # fmt: skip
    faults = model.faults(asked(house, mine="all"))
    assert len(faults) == (not fits)
    for fault in faults:
        assert fault.startswith("params.yaml: tiers.default.tasks: task 'mine' item 'first': its target has ")
        assert abs(number_in(fault) - tokens_of(target)) <= 1
        assert "a reply at most 32; shorten it, or raise generation_kwargs.max_gen_toks in evalsets/tasks/mine.yaml" in fault


def test_one_target_of_several_within_reach_is_enough_and_the_task_s_own_limit_counts(house: params.Params) -> None:
    long = " ".join("a" * 60)
    rows({"id": "first", "context": "q", "target": [long, "b"]}, {"id": "second", "context": "q", "target": [long]})
    assert ["item 'second'" in f for f in model.faults(asked(house, mine="all"))] == [True]
    config = {
        "task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "evalsets/tasks/mine.jsonl"}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "context", "doc_to_target": "target",
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    for most, faults in ((200, 0), (16, 1), (None, 0)):  # None: lm-eval's own, which nobody has said
        config["generation_kwargs"] = {"until": ["\n"]} | ({"max_gen_toks": most} if most else {})
        Path("evalsets/tasks/mine.yaml").write_text(json.dumps(config), encoding="utf-8")
        assert len(model.faults(asked(house, mine="all"))) == faults, most


# --- chats -------------------------------------------------------------------------------------------------------


def test_chats_are_named_where_the_model_has_no_template(house: params.Params) -> None:
    Path("evalsets/prompts/trajectories.jsonl").write_text(json.dumps(CHAT) + "\n", encoding="utf-8")
    chatty = asked(house, instruct=2, facts=2)
    assert model.faults(chatty) == []
    without_template(Path("model"))
    task, prompt = model.faults(chatty)
    assert "tiers.default.tasks: task 'instruct' is a chat and the model has no chat template" in task
    assert "diverge.trajectories.prompts: prompt 'c' is a chat and the model has no chat template" in prompt
    assert check.faults(chatty)[-2:] == [task, prompt]
    assert model.unanswerable({"facts": 2}, Path("model"), False, 0) == []


def test_a_template_that_refuses_a_chat_or_is_not_the_default_is_said(
    house: params.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = CHAT | {"messages": [{"role": "system", "content": "be brief"}, *CHAT["messages"]]}
    monkeypatch.setattr(model, "choose", lambda *_: [system])
    assert model.faults(house) == []
    without_template(Path("model"))
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
    artifacts.write_text(Path("model/chat_template.jinja"), refusing)
    (fault,) = model.faults(house)
    assert "prompt 'c' is a chat that the model's template refuses (no system role); choose plain prompts" in fault
    Path("model/chat_template.jinja").unlink()
    artifacts.write_json(Path("model/chat_template.json"), {"chat_template": [{"name": "rag", "template": "x"}]})
    (fault,) = model.faults(house)
    assert "prompt 'c' is a chat, and the model's chat templates are named (rag) and none is the default" in fault


def test_a_chat_among_prompts_is_named_before_the_first_is_continued(tiny: Path) -> None:
    engine: Any = engines.load("hf", tiny, threads=1)
    engine.tokenizer.chat_template = None
    engine.sample = lambda *a: pytest.fail("a prompt was continued")
    plain = [{"id": f"p{k}", "domain": "d", "prompt": "one two"} for k in range(9)]
    with pytest.raises(DataError, match="prompt c is a chat"):
        reference.trajectories(engine, [*plain, CHAT], Trajectories(prompts="", tokens=2), seed=0, skipped=Counter())


# --- layers and groups -------------------------------------------------------------------------------------------

KEEPING: dict[str, dict[str, Any]] = {
    "gptq": {"group_size": 64}, "rtn": {"group_size": 64}, "awq": {"group_size": 64}, "bnb": {"type": "nf4"},
    "torchao": {"scheme": "int8-weight-only"}, "gguf": {"type": "Q8_0"}, "onnx": {"precision": "int4"},
}  # fmt: skip
HEAD_TOO = ("gguf", "onnx")  # they quantize the head besides the layers


def build(variant: Variant) -> Any:
    """What a build ends with where check had no model to look at: there are no calibration rows, and perhaps no library."""
    Path("out").mkdir(exist_ok=True)
    return quantize.build(variant, Path("model"), Path("out"), calibration=Calibration(Path("none")), seed=1, threads=1)


@pytest.mark.parametrize("quantizer", KEEPING)
def test_a_pattern_that_matches_no_layer_or_all_is_a_fault_before_any_work(house: params.Params, quantizer: str) -> None:
    def keeping(*keep: str) -> params.Params:
        variant = Variant(quantizer=quantizer, options=KEEPING[quantizer] | {"keep": list(keep)})
        return settings(house, variants={"bf16": BF16, "mine": variant})

    assert model.faults(keeping("*.down_proj")) == [] == model.notes(keeping("*.down_proj"))
    for keep, fault in (
        (["*.dwon_proj"], "'*.dwon_proj' matches no layer"),
        (["*"], "keeps all 14 matrices of the layers, so that nothing is left to quantize"),
        (["*.self_attn.*", "*.mlp.*"], "keeps all 14 matrices of the layers, so that nothing is left to quantize"),
    ):
        faults = model.faults(keeping(*keep))
        if quantizer in HEAD_TOO and "all 14" in fault:
            assert faults == []
            continue
        assert len(faults) == 1 and faults[0].startswith("params.yaml: variants.mine: options.keep: ") and fault in faults[0]
        with pytest.raises(ParamsError, match=fault.split(" ", 1)[1]):
            build(keeping(*keep).variants["mine"])


@pytest.mark.parametrize("quantizer, options, words", [
    ("gptq", {"group_size": 128}, "group_size 128 does not divide the 64 inputs of"),
    ("rtn", {"group_size": 128}, "group_size 128 does not divide"), ("awq", {}, "group_size 128 does not divide"),  # its default
    ("onnx", {"precision": "int4", "keep": ["*.q_proj"]}, "keep all three or none"),
])  # fmt: skip
def test_what_a_quantizer_cannot_do_with_the_model_is_said_and_no_fault(
    house: params.Params, quantizer: str, options: dict[str, Any], words: str
) -> None:
    variant = Variant(quantizer=quantizer, options=options)
    with_it = settings(house, variants={"bf16": BF16, "int8": variant, "other": variant})
    assert model.faults(with_it) == []
    required, advisory = model.notes(with_it)
    assert required.startswith("variants.int8 will be unsupported: ") and words in required and required.endswith("will FAIL")
    assert words in advisory and "required" not in advisory
    built = build(variant)
    assert built["status"] == "unsupported" and words in built["reason"]


def test_every_quantizer_that_keeps_layers_is_held_to_leave_some_and_one_with_groups_says_which_it_cannot_pack() -> None:
    options = {name: quantizers.find(name).__annotations__ for name in explain.backends("quantizers")}
    assert {name for name in options if "keep" in options[name]} == set(KEEPING)
    grouped = [name for name in options if "group_size" in options[name]]
    assert all(hasattr(sys.modules[f"pipeline.quantizers.{name}"], "refuse") for name in grouped)


# --- where the model is ------------------------------------------------------------------------------------------


def test_a_base_is_looked_at_only_if_it_is_of_the_model_that_params_name(house: params.Params) -> None:
    named = params.load().model
    packaged = settings(house, model=named, variants={"mine": Variant(quantizer="rtn", options={"keep": ["x"]})})
    assert model.base_folder(packaged) is None and model.faults(packaged) == [] == model.notes(packaged)
    shutil.copytree("model", artifacts.BASE)
    for package, here in (("other==1", False), (named.model_dump()["package"], True)):
        write_manifest(artifacts.BASE, **named.model_dump() | {"package": package})
        assert bool(model.faults(packaged)) is here


# --- memory and disk ---------------------------------------------------------------------------------------------


def test_a_damaged_file_of_the_model_is_a_line(house: params.Params) -> None:
    Path("model/config.json").write_text("{", encoding="utf-8")
    (fault,) = model.faults(house)
    assert "params.yaml: model: model/config.json is not valid JSON" in fault


def test_check_says_what_does_not_fit_here_before_any_work(house: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = room.capacity(house)
    assert "GB more on disk" in whole
    most = max(need.memory for need in room.needs(house, Path("model")).values())
    monkeypatch.setattr(quota, "memory_bytes", lambda: most - 1)
    (small,) = room.capacity(house)[1:]
    assert small.startswith("floor: about 1.5 GB of memory and 1.5 GB are here") and "a larger machine" in small
    monkeypatch.setattr(quota, "memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 999, 1))  # type: ignore[attr-defined]
    assert "the disk is too small" in room.capacity(house)[1]


@pytest.mark.parametrize("engine, options, cards, says", [
    ("hf", {}, [80e9], None), ("hf", {"device": "cpu"}, [1e9], None), ("llamacpp", {}, [1e9], None), ("hf", {}, [], None),
    ("hf", {}, [40e9, 40e9], "on a card of 40.0 GB; engine_options: {device_map: auto} spreads it over 2 cards"),
    ("hf", {}, [10e9, 10e9], "on a card of 10.0 GB; engine_options: {device_map: auto} spreads it over all 2 cards and"),
    ("hf", {"device_map": "auto"}, [40e9, 40e9], None),
    ("hf", {"device_map": "auto"}, [10e9, 10e9], "on 2 cards of 10.0 GB; the machine's memory takes the rest"),
    ("vllm", {}, [40e9] * 4, "engine_options: {tensor_parallel: 2} shares it"), ("vllm", {"tensor_parallel": 2}, [40e9] * 4, None),
    ("vllm", {}, [20e9], "a machine with more cards"),
])  # fmt: skip
def test_a_model_too_large_for_a_card_is_named_with_what_would_make_it_fit(
    house: params.Params, monkeypatch: pytest.MonkeyPatch, engine: str, options: Options, cards: list[float], says: str | None
) -> None:
    monkeypatch.setattr(room, "variant_bytes", lambda variant, folder: 60e9)
    large = settings(house, variants={"bf16": Variant(quantizer="cast", engine=engine, options={}, engine_options=options)})
    lines = room.too_large(large, Path("model"), room.Room(1e12, cards))
    if says is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("diverge@bf16, evaluate@bf16, benchmark@bf16, reference, floor: about 6") and says in line


def test_a_quantizer_takes_memory_or_a_card_by_how_it_works(house: params.Params) -> None:
    variants = {q: Variant(quantizer=q, options={}) for q in ("cast", "gptq", "torchao", "gguf")} | {"bf16": BF16}
    found = room.needs(settings(house, variants=variants), Path("model"))
    assert found["quantize@gptq"].memory > found["quantize@torchao"].memory == found["quantize@cast"].memory
    assert found["quantize@torchao"].card > found["quantize@gptq"].card > 0 == found["quantize@gguf"].card
    assert found["floor"].memory > found["reference"].memory
    small = room.too_large(settings(house, variants=variants), Path("model"), room.Room(found["quantize@gptq"].memory - 1, []))
    assert any("quantize@gptq: " in line and "quantizers cast, gguf and torchao take less" in line for line in small)
    cards = room.too_large(settings(house, variants=variants), Path("model"), room.Room(1e12, [1e8]))
    assert {"device_map" in line for line in cards if "quantize@torchao" in line} == {False}  # engine_options are not a quantizer's


@pytest.mark.parametrize("quantizer, options", [
    ("cast", {"dtype": "bfloat16"}), ("torchao", {"scheme": "int8-weight-only"}), ("bnb", {"type": "nf4"}),
])  # fmt: skip
def test_what_check_expects_of_a_variant_is_what_it_takes(
    tiny: Path, tmp_path: Path, quantizer: str, options: dict[str, Any]
) -> None:
    variant = Variant(quantizer=quantizer, options=options)
    quantize.quantize(variant, tiny, tmp_path, calibration=Calibration(), seed=1)
    held = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert room.variant_bytes(variant, tiny) == pytest.approx(held, rel=0.15)
