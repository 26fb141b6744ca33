"""The original libraries, in environments of their own: what they pack, today's transformers reads as they read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from model_house import calibration, change_json, change_weights

from pipeline import engines, quantize
from pipeline.core import artifacts, venvs
from pipeline.core.errors import ArtifactError, InvalidVariant, Unsupported
from pipeline.core.params import Variant
from pipeline.engines import Sampling
from pipeline.model import attestation
from pipeline.quantizers import _original

THETA = 500000.0
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
IDS = [5 + 11 * k % 500 for k in range(40)]

read: Any = artifacts.read_json


def answers_as_saved(folder: Path, built: Any) -> None:
    engine = engines.load("hf", folder, threads=1)
    attestation.check_kernels(engine.kernels(), built)
    attestation.check_answer(engine, built["probe"])


# --- configs ------------------------------------------------------------------------------------------------------


PLAIN = {"rope_theta": THETA, "rope_type": "default"}


def config(**rope: Any) -> dict[str, Any]:
    return {"model_type": "llama", "dtype": "bfloat16", "vocab_size": 512, "max_position_embeddings": 1024,
            "rope_parameters": rope or PLAIN}  # fmt: skip


@pytest.mark.parametrize("rope", [PLAIN, PLAIN | {"rope_type": "linear", "factor": 2.0}, PLAIN | {"rope_type": "llama3"} | LLAMA3])
def test_today_s_transformers_reads_a_translated_config_as_the_one_it_came_from(rope: dict[str, Any]) -> None:
    """It reads both forms: an independent word on what the older one means."""
    from transformers import LlamaConfig

    read = LlamaConfig(**_original.to_old(config(**rope)))
    assert dict(read.rope_parameters) == rope and str(read.dtype).removeprefix("torch.") == "bfloat16"


def test_rope_keeps_every_number_under_its_older_names_and_a_config_that_is_old_already_comes_out_as_it_was() -> None:
    old = _original.to_old(config(**PLAIN | {"rope_type": "llama3"} | LLAMA3))
    assert old["rope_theta"] == THETA and old["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}
    assert old["torch_dtype"] == "bfloat16" and not {"rope_parameters", "dtype"} & old.keys()
    assert _original.to_old(old) == old


@pytest.mark.parametrize("change, named", [
    ({"rope_parameters": {"rope_theta": THETA, "rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_parameters": {"rope_theta": THETA, "rope_type": "proportional"}}, "rope_type 'proportional'"),
    ({"rope_parameters": {"rope_theta": THETA, "rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_parameters.beta"),
    ({"rope_parameters": {"rope_theta": THETA, "factor": 2.0}}, "rope_parameters.factor of type 'default'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": THETA}}}, "full_attention"),
    ({"rope_theta": 10000.0}, "rope_theta is 10000.0"),
    ({"torch_dtype": "float16"}, "torch_dtype is 'float16'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"auto_map": {"AutoModel": "m.py"}}, "auto_map"),
])  # fmt: skip
def test_what_cannot_be_translated_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported) as caught:
        _original.to_old(config() | change)
    assert named in str(caught.value)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, None])
def test_layers_that_are_all_of_the_only_kind_it_knows_are_no_obstacle(kinds: list[str] | None) -> None:
    assert _original.to_old(config() | {"layer_types": kinds}) == _original.to_old(config())


@pytest.mark.parametrize("now, then", [("TokenizersBackend", "PreTrainedTokenizerFast"), ("GPT2Tokenizer", "GPT2Tokenizer")])
def test_the_tokenizer_s_class_gets_its_older_name_and_all_else_stays(tmp_path: Path, now: str, then: str) -> None:
    artifacts.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": now, "eos_token": "<e>"})
    linked = _original.link_base(tmp_path, tmp_path / "old", {}) / "tokenizer_config.json"
    assert artifacts.read_json(linked) == {"tokenizer_class": then, "eos_token": "<e>"}


def test_a_key_that_the_old_transformers_read_otherwise_is_an_error_with_both_values() -> None:
    old = _original.to_old(config())
    _original.refuse_misread(old, old | {"more": 1})
    with pytest.raises(ArtifactError, match=r"read rope_theta = 10000.0 where the base has 500000.0"):
        _original.refuse_misread(old, old | {"rope_theta": 10000.0})
    with pytest.raises(ArtifactError, match="read vocab_size = None"):
        _original.refuse_misread(old, {k: v for k, v in old.items() if k != "vocab_size"})


def test_a_checkpoint_gets_the_base_s_config_back() -> None:
    given = config(**PLAIN | {"rope_type": "llama3"} | LLAMA3)
    written = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None, "model_name_or_path": "/tmp/x"}
    new = _original.to_new(given | {"dtype": "float32"}, written, [])
    assert new == given | {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert _original.to_new(given, written, ["model.layers.0.mlp.up_proj"])["quantization_config"]["modules_to_not_convert"]


def test_the_base_is_linked_and_not_copied(tiny: Path, tmp_path: Path) -> None:
    folder = _original.link_base(tiny, tmp_path / "base", {"model_type": "llama"})
    assert (folder / "model.safetensors").is_symlink() and (folder / "model.safetensors").samefile(tiny / "model.safetensors")
    assert read(folder / "config.json") == {"model_type": "llama"}
    classes = [read(f / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast" for f in (folder, tiny)]
    assert classes == [True, False]


# --- refusals before any environment is built ---------------------------------------------------------------------


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object, **__: object) -> None:
        raise AssertionError("an environment was asked for")

    monkeypatch.setattr(venvs, "python", built)
    monkeypatch.setattr(venvs, "run", built)
    monkeypatch.setattr(_original, "has_cuda", lambda: False)


def build(base: Path, home: Path, quantizer: str, **options: Any) -> Any:
    out = home / "model"
    out.mkdir(parents=True)
    rows = calibration(home / "calibration", [[5 + (7 * k + 31 * r) % 500 for k in range(64)] for r in range(4)])
    return quantize.build(Variant(quantizer=quantizer, options=options), base, out, calibration=rows, seed=1, threads=1)


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize("quantizer, options, named", [
    ("gptq", {"backend": "auto-gptq", "group_size": 32}, "AutoGPTQ quantizes on CUDA only"),
    ("awq", {"backend": "autoawq", "group_size": -1}, "option group_size = -1"),
    ("awq", {"backend": "autoawq", "group_size": 128}, "does not divide the 64 inputs"),
    ("awq", {"backend": "autoawq", "group_size": 16}, "the CPU's 4-bit kernel takes 32"),
    ("awq", {"backend": "autoawq", "group_size": 32}, "v_proj has 32 outputs, and AutoAWQ takes multiples of 64"),
])  # fmt: skip
def test_what_it_cannot_do_is_said_before_an_environment_is_built(
    tiny: Path, tmp_path: Path, quantizer: str, options: dict[str, Any], named: str
) -> None:
    built = build(tiny, tmp_path, quantizer, **options)
    assert built["status"] == "unsupported" and named in built["reason"]


@pytest.mark.usefixtures("no_environment")
def test_autogptq_refuses_kept_layers_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"option keep = \['\*\.down_proj'\]: AutoGPTQ packs every layer"):
        _original.autogptq(tiny, tmp_path, rows=[[1]], bits=4, group_size=32, keep=["*.down_proj"])


def test_a_build_s_variables_are_read_from_its_file() -> None:
    assert dict(venvs.WITH.findall((ROOT / "envs/autogptq.txt").read_text("utf-8"))) == {"BUILD_CUDA_EXT": "0"}
    assert venvs.WITH.findall((ROOT / "envs/autoawq.txt").read_text("utf-8")) == []


def test_files_of_environments_hold_pins_and_no_addresses() -> None:
    for file in (ROOT / "envs").glob("*.txt"):
        wanted = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith(("#", "--no-binary "))]
        assert wanted and all(line.count("==") == 1 and "/" not in line for line in wanted), file


# --- AutoAWQ, really ----------------------------------------------------------------------------------------------

ANSWER = '''
"""AutoAWQ's own loader and modules: greedy tokens and logits of a checkpoint of its own; versions; what a config is refused for."""
import json, sys, torch, transformers
import awq.models.base as base
from awq import AutoAWQForCausalLM

base.get_best_device = lambda: "plain torch"  # on "cpu" its loader wants Intel's extension, which ended with torch 2.8
folder, ids, tokens, out, odd, envs = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
sys.path.insert(0, envs)
import old_stack
model = AutoAWQForCausalLM.from_quantized(folder, fuse_layers=False, device_map={"": "cpu"}, trust_remote_code=False).model
with torch.inference_mode():
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    said = list(ids)
    for _ in range(tokens):
        said.append(int(model(input_ids=torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
versions = [transformers.__version__, torch.__version__, sys.prefix]
try:
    refused = old_stack.check_config(odd)
except old_stack.Unsupported as e:
    refused = str(e)
found = {"logits": logits.tolist(), "said": said[len(ids):], "versions": versions, "refused": refused}
json.dump(found, open(out, "w"))
'''


@pytest.fixture(scope="module")
def autoawq() -> Iterator[None]:
    """The environment of AutoAWQ, in the repository's own artifacts, where later runs and sessions find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(venvs, "FILES", ROOT / "envs")
        patch.setattr(venvs, "HOME", ROOT / "artifacts/envs")
        patch.setattr(artifacts, "LOGS", ROOT / "artifacts/logs")
        try:
            venvs.python("autoawq")
        except Unsupported as e:
            pytest.skip(str(e))
        yield


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of widths that AutoAWQ takes, with a rope base that is not the one an ignorant transformers would take, and with
    input channels of unequal size, as in trained models: what scales are for."""
    import torch

    def spread(tensors: dict[str, Any]) -> None:
        rng = torch.Generator().manual_seed(3)
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            tensors[name] *= torch.randn(tensors[name].shape[1], generator=rng).mul(1.2).exp().clamp(max=6).to(torch.bfloat16)

    folder = change_weights(make_model(tmp_path_factory.mktemp("original") / "base", hidden=128, dtype="bfloat16"), spread)
    change_json(folder / "config.json", rope_parameters=PLAIN)
    return folder


@pytest.fixture(scope="module")
def packed(autoawq: None, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("awq")
    built = build(wide, home, "awq", backend="autoawq", group_size=32, rows=3)
    assert built["status"] == "ok", built["reason"]
    return home / "model", built


@pytest.fixture(scope="module")
def original(packed: tuple[Path, dict[str, Any]], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ANSWER finds, of the packed model in float16, and of a base with a key of next year."""
    home = tmp_path_factory.mktemp("original")
    halved = _original.to_old(read(packed[0] / "config.json") | {"dtype": "float16"})
    old = _original.link_base(packed[0], home / "old", halved)
    of_next_year = _original.to_old(read(wide / "config.json")) | {"residual_scale_of_next_year": 0.5}
    odd = _original.link_base(wide, home / "odd", of_next_year)
    script, out = home / "answer.py", home / "answer.json"
    script.write_text(ANSWER, "utf-8")
    words = [str(script), str(old), json.dumps(IDS), "32", str(out), str(odd), str(ROOT / "envs")]
    venvs.run("autoawq", *words, log=home / "log")
    return read(out)


def test_the_old_transformers_wins_inside_and_ours_outside_and_refuses_a_key_that_it_does_not_know(original: Any) -> None:
    import torch
    import transformers

    inside, torch_inside, prefix = original["versions"]
    assert inside == "4.51.3" and transformers.__version__.startswith("5.")
    assert torch_inside == torch.__version__ and Path(prefix).parent == ROOT / "artifacts/envs"
    assert "does not know residual_scale_of_next_year" in original["refused"]


@pytest.mark.filterwarnings("ignore")  # gptqmodel's own, at load
def test_autoawq_packs_every_matrix_to_four_bits(packed: tuple[Path, dict[str, Any]]) -> None:
    folder, built = packed
    assert built["modules"] == 14 and built["kept"] == [] and built["calibration_rows"] == 3
    assert built["packed_bits"] == pytest.approx(built["expected_bits"], rel=attestation.TOLERANCE)
    assert built["environment"]["autoawq"] == "0.2.9" and built["environment"]["transformers"] == "4.51.3"
    answers_as_saved(folder, built)
    written = read(folder / "config.json")
    assert written["rope_parameters"] == PLAIN and written["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore")
def test_today_s_stack_says_what_autoawq_s_own_load_says(
    packed: tuple[Path, dict[str, Any]], original: dict[str, Any], tmp_path: Path
) -> None:
    """Both in float16, which AutoAWQ's loader asks for, and with plain products of unpacked weights: the packed product that this
    CPU would serve with rounds to bfloat16, which moves a random model's logits by some percent (the probe's tolerance)."""
    new = Path(shutil.copytree(packed[0], tmp_path / "new"))
    settings = read(new / "config.json")["quantization_config"] | {"backend": "torch_awq"}
    change_json(new / "config.json", dtype="float16", quantization_config=settings)
    engine = engines.load("hf", new, threads=1)
    assert 14 in engine.kernels().values()
    logits = np.array(original["logits"])
    assert np.abs(engine.logits(IDS) - logits).max() < 1e-3 * np.abs(logits).max()
    assert [token for token, _ in engine.stream(IDS, 32, Sampling(stop=False))] == original["said"]
    assert len(set(original["said"])) > 3


@pytest.mark.filterwarnings("ignore")
def test_its_search_of_scales_is_worth_it(packed: tuple[Path, dict[str, Any]], wide: Path, tmp_path: Path) -> None:
    """Nearer to the base than plain rounding to groups as large. AutoAWQ alone, on a CPU, wrecks every layer (envs/autoawq.py)."""
    plain = build(wide, tmp_path, "rtn", group_size=32)
    assert plain["status"] == "ok", plain["reason"]
    ids = [5 + 11 * k % 500 for k in range(200)]
    base, searched, rounded = (engines.load("hf", f, threads=1).logits(ids) for f in (wide, packed[0], tmp_path / "model"))
    assert ((searched - base) ** 2).mean() < ((rounded - base) ** 2).mean()


@pytest.mark.filterwarnings("ignore")
def test_the_answers_depend_on_the_rope_base(packed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """So that the two tests above would have seen the trap: the base of 10000 that a misread config gives."""
    wrong = Path(shutil.copytree(packed[0], tmp_path / "wrong"))
    change_json(wrong / "config.json", rope_parameters=PLAIN | {"rope_theta": 10000.0})
    with pytest.raises(InvalidVariant, match="saving or loading lost something"):
        answers_as_saved(wrong, packed[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("autoawq")
def test_kept_layers_stay_unpacked_block_by_block(wide: Path, tmp_path: Path) -> None:
    built = build(wide, tmp_path, "awq", backend="autoawq", group_size=64, rows=1, keep=["layers.1.mlp.down_proj", "*.q_proj"])
    assert built["status"] == "ok", built["reason"]
    assert built["modules"] == 11 and len(built["kept"]) == 3
    answers_as_saved(tmp_path / "model", built)
