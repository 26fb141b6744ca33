"""The smallest that passes: what a group costs is what a whole pass says, what is stored is what was asked, and the order holds."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from reported import judged as reported_judged
from reported import result, rule, verdicts
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from test_engines import write_gguf

from pipeline import certify, quantizers, search, sensitivity
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError, Unsupported
from pipeline.core.params import Smallest
from pipeline.evalset.calibration import Calibration
from pipeline.gating import looks
from pipeline.layers import choosing, mixes, values
from pipeline.layers.groups import groups_of, kind_of
from pipeline.layers.probe import Probe
from pipeline.reporting import recommendation, smallest

IDS = [[5 + (7 * k + 3 * r) % 400 for k in range(24)] for r in range(5)]


def closeness(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a["kld"]) - np.asarray(b["kld"])).max())


def other(probe: Probe, module: str, by: float = 1.05) -> dict[str, Any]:
    return {module: values.tensor_of(probe.model, module).data * by}


# ---- groups, values, swaps ---------------------------------------------------------------------------------------------------


def test_groups_are_what_runtimes_fuse_and_cover_every_matrix_once(tiny: Path) -> None:
    groups = groups_of(tiny)
    assert [g.name for g in groups[:5]] == ["embeddings", "0.qkv", "0.o", "0.gate+up", "0.down"]
    modules = [m for g in groups for m in g.modules]
    assert len(modules) == len(set(modules)) == 1 + 2 * 7, "tied: the head is the embeddings"
    assert {m.rpartition(".")[2] for m in groups[1].modules} == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(("module", "kind"), [
    ("h.0.attn.c_proj", "o"), ("h.0.mlp.c_proj", "down"), ("layers.3.mlp.experts.7.down_proj", "experts"),
    ("layers.0.self_attn.qkv_proj", "qkv"), ("layers.0.mixer.in_proj", "in_proj"),
])  # fmt: skip
def test_a_matrix_of_another_architecture_has_its_kind(module: str, kind: str) -> None:
    assert kind_of(module) == kind


def test_a_pass_from_the_changed_layer_on_equals_a_whole_one(tiny: Path) -> None:
    probe = Probe(tiny, IDS, threads=1)
    probe.keep()
    for start, module in ((1, "model.layers.1.mlp.down_proj"), (0, "model.layers.0.self_attn.q_proj")):
        with probe.swapped(other(probe, module)) as changed:
            whole, part = probe.measure(), probe.measure(start)
        assert changed and closeness(whole, part) < 1e-6 and min(whole["kld"]) > 1e-6


def test_a_pass_that_starts_behind_the_changed_layer_misses_it(tiny: Path) -> None:
    """So that the test above can fail."""
    probe = Probe(tiny, IDS, threads=1)
    probe.keep()
    with probe.swapped(other(probe, "model.layers.0.mlp.down_proj")):
        assert closeness(probe.measure(), probe.measure(1)) > 1e-6


def test_a_swap_that_changes_nothing_is_noticed_and_undone(tiny: Path) -> None:
    probe = Probe(tiny, IDS, threads=1)
    module = "model.layers.0.mlp.down_proj"
    with probe.swapped({module: values.tensor_of(probe.model, module).data.clone()}) as changed:
        assert not changed and max(probe.measure()["kld"]) == 0
    with probe.swapped(other(probe, module)) as changed:
        assert changed and min(probe.measure()["kld"]) > 0
    assert max(probe.measure()["kld"]) == 0, "what stood there stands there again"
    with pytest.raises(ArtifactError, match="is stored as"), probe.swapped({module: other(probe, module)[module].T}):
        pass


def test_divergence_in_memory_is_that_of_two_softmaxes(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    probe, module = Probe(tiny, IDS, threads=1), "model.layers.1.self_attn.o_proj"
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.inference_mode(), probe.swapped(other(probe, module)):
        found = probe.measure()
        p, q = (torch.log_softmax(m(input_ids=torch.tensor(IDS)).logits[:, :-1].double(), -1) for m in (plain, probe.model))
        expected = (p.exp() * (p - q)).sum(-1).mean(1)
        true = torch.tensor(IDS)[:, 1:, None]
        lost = (p - q).gather(-1, true)[..., 0].mean(1)
    np.testing.assert_allclose(found["kld"], expected, rtol=1e-3)
    np.testing.assert_allclose(found["loss"], lost, atol=1e-5)


def test_a_kernel_gives_the_values_it_multiplies_with(tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "int8"
    folder.mkdir()
    quantizers.find("torchao")(tiny, folder, calibration=Calibration(), seed=0, scheme="int8-weight-only")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    groups = groups_of(tiny)
    values.write(folder, "hf", groups, tmp_path / "v.safetensors", 1)
    held, module = values.Values(tmp_path / "v.safetensors"), "model.layers.0.mlp.up_proj"
    weight = AutoModelForCausalLM.from_pretrained(folder).get_submodule(module).weight.dequantize().float()
    torch.testing.assert_close(held.of(module), weight, rtol=2**-7, atol=1e-6)
    assert held.bytes_of(groups[4]) < 2 * 128 * 64, "packed: fewer than two bytes a weight"
    assert held.bytes_of(groups[0]) == 2 * held.of("embed_tokens").numel()


# ---- GGUF: tensor types by layer ---------------------------------------------------------------------------------------------


@pytest.fixture
def ggufs(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr("pipeline.quantizers.gguf._convert", write_gguf)
    monkeypatch.chdir(tmp_path)
    Path("envs").symlink_to(ROOT / "envs")

    def make(name: str, **options: Any) -> tuple[Path, dict[str, str]]:
        import gguf

        folder = tmp_path / name
        folder.mkdir()
        quantizers.find("gguf")(tiny, folder, calibration=Calibration(), seed=0, **options)
        return folder, {t.name: t.tensor_type.name for t in gguf.GGUFReader(folder / "model.gguf").tensors}

    return make


def test_each_layer_is_stored_as_asked_and_no_option_changes_no_byte(ggufs: Any) -> None:
    plain, stored = ggufs("plain", type="Q4_0")
    same, _ = ggufs("same", type="Q4_0", types=None)
    assert (plain / "model.gguf").read_bytes() == (same / "model.gguf").read_bytes()
    _, mixed = ggufs("mixed", type="Q4_0", types={"*.down_proj": "Q8_0", "layers.0.mlp.down_proj": "Q5_1", "embed_tokens": "Q4_1"})
    changed = {name: kind for name, kind in mixed.items() if kind != stored[name]}
    assert changed == {"blk.0.ffn_down.weight": "Q5_1", "blk.1.ffn_down.weight": "Q8_0", "token_embd.weight": "Q4_1"}


def test_a_type_that_rows_cannot_have_and_a_pattern_without_layers_are_refused(ggufs: Any) -> None:
    with pytest.raises(Unsupported, match="rows of 64.*not Q6_K"):
        ggufs("k", type="Q4_0", types={"*.q_proj": "Q6_K"})
    with pytest.raises(ParamsError, match="'\\*.dwon_proj' matches no layer"):
        ggufs("typo", type="Q4_0", types={"*.dwon_proj": "Q8_0"})


def test_an_option_that_is_not_asked_stands_in_no_manifest() -> None:
    from pipeline.core.explain import with_defaults

    function = quantizers.find("gguf")
    assert with_defaults(function, {"type": "Q4_0"}, quantizers.GIVEN) == {"type": "Q4_0", "keep": []}


def test_the_options_of_a_mix_say_every_group(tiny: Path) -> None:
    from pipeline.quantizers.gguf import layer_types

    groups, rng = groups_of(tiny), np.random.default_rng(1)
    setup = Smallest(quantizer="gguf", engine="llamacpp", options={"type": "Q4_0"}, types=["Q8_0"], texts="t")
    for _ in range(20):
        mix = {g.name: str(rng.choice(["Q4_0", "Q5_1", "Q8_0"])) for g in groups}
        types = mixes.options_of(setup, groups, mix)["types"]
        assert layer_types(tiny, types) == {m: mix[g.name] for g in groups for m in g.modules}


# ---- search ------------------------------------------------------------------------------------------------------------------


def table_of(rng: np.random.Generator, count: int = 4) -> list[Any]:
    rows = []
    for k in range(count):
        n = int(rng.integers(100, 1000))
        error = {"a": 1.0, "b": float(rng.uniform(0.1, 0.9)), "c": float(rng.uniform(0, 0.1))}
        size = {"a": 4 * n, "b": 5 * n, "c": 8 * n}
        rows.append({"name": str(k), "bytes": size, "error": error, "alone": {"value": float(rng.exponential())}})
    return rows


def of_mix(table: list[Any], levels: Any) -> tuple[int, float]:
    """(bytes, predicted divergence) of a mix."""
    both = list(zip(table, levels))
    return 10 + sum(r["bytes"][level] for r, level in both), sum(search.cost(r, level, "a") for r, level in both)


@pytest.mark.parametrize("seed", range(10))
def test_no_mix_at_all_is_smaller_at_what_it_costs(seed: int) -> None:
    """Against all 81 mixes, up to the steps that costs are rounded to."""
    table = table_of(np.random.default_rng(seed))
    every = [of_mix(table, chosen) for chosen in itertools.product("abc", repeat=len(table))]
    low, high = min(lost for _, lost in every), max(lost for _, lost in every)
    targets = np.linspace(low * 1.01 + 0.01 * high, high, 9).tolist()
    steps = search.knapsack(table, "a", 10, targets)
    for s, target in zip(steps, targets, strict=True):
        size, lost = of_mix(table, [s.mix[r["name"]] for r in table])
        assert s.bytes == size and s.predicted == pytest.approx(lost) and lost <= target * (1 + 1e-9)
        assert s.bytes <= min(size for size, lost in every if lost <= target - len(table) * max(targets) / search.BINS)


def test_a_target_that_no_mix_meets_has_no_mix() -> None:
    table = table_of(np.random.default_rng(0))
    least = sum(search.cost(r, "c", "a") for r in table)
    assert search.knapsack(table, "a", 0, [least / 2]) == []


def test_a_level_that_stores_a_group_exactly_costs_nothing() -> None:
    row: Any = {"error": {"a": 0.0, "b": 0.0}, "alone": {"value": 0.5}}
    assert search.cost(row, "a", "a") == search.cost(row, "b", "a") == 0


# ---- the stages on a small model ---------------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> Path:
    """A folder with a base, its 16-bit variant, texts and params.yaml that asks for int8 mixed with 16 bits."""
    monkeypatch.chdir(tmp_path)
    data = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["smallest"] = {
        "quantizer": "torchao", "options": {"scheme": "int8-weight-only"}, "texts": "texts.jsonl", "documents": 6, "tokens": 16,
        "proposals": 4, "candidates": 3,
    }  # fmt: skip
    with (tmp_path / "params.yaml").open("w") as f:
        YAML().dump(data, f)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    rng = np.random.default_rng(0)
    texts = [
        {"id": f"d{k}", "domain": "news", "text": " ".join("".join(rng.choice(list(alphabet), 4)) for _ in range(30))}
        for k in range(8)
    ]
    artifacts.write_jsonl(Path("texts.jsonl"), texts)
    shutil.copytree(tiny, artifacts.BASE)
    artifacts.write_json(artifacts.BASE / artifacts.MANIFEST, base_manifest())
    folder = artifacts.model_dir("bf16")
    folder.mkdir(parents=True)
    monkeypatch.setattr(sensitivity.artifacts, "versions", dict)
    quantizers.find("cast")(artifacts.BASE, folder, calibration=Calibration(), seed=0, dtype="bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    files = artifacts.files_of(folder)
    artifacts.write_json(folder / artifacts.MANIFEST, {
        "status": "ok", "files": files, "digest": "d", "versions": {}, "reason": None, "variant": "bf16", "quantizer": "cast",
        "asked": {},
        "options": {}, "engine": "hf", "engine_options": {}, "base": "b", "seed": 0, "trust_remote_code": False,
    })  # fmt: skip
    return tmp_path


def base_manifest() -> dict[str, Any]:
    return {
        "status": "ok", "files": {}, "digest": "b", "versions": {}, "source": "path", "note": None, "weights": 1,
        "trust_remote_code": False,
    }  # fmt: skip


def frozen_list() -> Any:
    shutil.rmtree(artifacts.ARTIFACTS / "partial", ignore_errors=True)
    sensitivity.main()
    search.main()
    return json.loads(artifacts.CANDIDATES.read_text("utf-8")), json.loads(artifacts.SENSITIVITY.read_text("utf-8"))


def test_the_same_seed_gives_the_same_list_with_predicted_beside_measured(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, plain = list[Path](), Probe.save_reference
    monkeypatch.setattr(Probe, "save_reference", lambda self, path: (written.append(path), plain(self, path))[1])
    (first, table), (second, _) = frozen_list(), frozen_list()
    assert first["digest"] == second["digest"] and first["order"] == second["order"]
    assert len(written) == 2 and not any(path.exists() for path in written), "the 16-bit model's logits, once a search"
    mixed = [p for p in first["proposals"] if p["predicted"] is not None]
    assert mixed and all(p["measured"]["value"] is not None for p in mixed)
    assert all(p["measured"]["low"] <= p["measured"]["value"] <= p["measured"]["high"] for p in mixed)
    assert (artifacts.SMALLEST / "sensitivity.svg").exists()
    kinds = {row["name"]: row for row in table["groups"]}
    assert kinds["embeddings"]["unchanged"], "torchao leaves embeddings at 16 bits"
    assert kinds["embeddings"]["alone"]["value"] == 0 < kinds["0.down"]["alone"]["value"]
    sizes = [p["bytes"] for name in first["order"] for p in first["proposals"] if p["name"] == name]
    assert sizes == sorted(sizes, reverse=True), "safest first: the largest"


def test_a_built_model_is_compared_with_the_logits_that_the_search_holds(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a model on disk, in its engine, are those of the same weights in the search's memory."""
    probe, module = Probe(tiny, IDS, threads=1), "model.layers.1.mlp.down_proj"

    def make(_: str, __: Any, base: Path, out: Path, **___: Any) -> None:
        shutil.copytree(tiny, out, dirs_exist_ok=True)
        tensors = load_file(tiny / "model.safetensors")
        save_file(tensors | {f"{module}.weight": tensors[f"{module}.weight"] * 1.05}, out / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(quantizers, "make", make)
    probe.save_reference(tmp_path / search.REFERENCE)
    setup: Any = SimpleNamespace(quantizer="q", engine="hf")
    found = search.run_built(setup, {}, IDS, tmp_path, SimpleNamespace(thread_count=1, seed=0))  # type: ignore[arg-type]
    with probe.swapped(other(probe, module)):
        expected = probe.measure()
    assert min(expected["kld"]) > 0 and found["tokens"] == expected["tokens"]
    for name in ("kld", "agreement", "loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-6)


def test_a_killed_run_goes_on_from_what_was_measured(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    plain = Probe.measure

    def counted(self: Probe, start: int = 0) -> Any:
        measured.append(start)
        if len(measured) == 12:
            raise KeyboardInterrupt
        return plain(self, start)

    monkeypatch.setattr(Probe, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        sensitivity.sensitivity(params.load())
    done = len(measured) - 1
    sensitivity.sensitivity(params.load())
    checks = 4  # two whole passes and two from the middle, each time that outputs are kept
    assert len(measured) - done - 1 < 2 * len(groups_of(artifacts.BASE)) + 2 + checks


def test_a_gate_that_nothing_can_pass_and_a_lowest_type_that_groups_cannot_have_are_said(house: Path) -> None:
    settings = params.load()
    sensitivity.main()
    rules = [params.Rule(metric="kld_mean", margin="0 nats")]
    found = search.search(settings.model_copy(update={"gate": settings.gate.model_copy(update={"rules": rules})}))
    assert not found["order"] and found["words"][0].startswith("no candidate")
    k_quants = Smallest(
        quantizer="gguf", engine="llamacpp", options={"type": "Q6_K"}, types=["Q8_0"], texts="texts.jsonl", tokens=16
    )
    with pytest.raises(ParamsError, match="Q6_K cannot store every group"):
        sensitivity.sensitivity(settings.model_copy(update={"smallest": k_quants}))


# ---- certify -----------------------------------------------------------------------------------------------------------------


def freeze(names: list[str]) -> None:
    options = {n: {"scheme": "int8-weight-only", "keep": [n]} for n in names}
    nothing: dict[str, Any] = dict.fromkeys(("low", "high", "clusters", "weight", "between"))
    nothing |= {"value": 0.01, "n": 1, "method": "", "warnings": []}
    artifacts.write_json(artifacts.SENSITIVITY, {})
    proposals = [
        {"name": n, "mix": {}, "options": options[n], "bytes": 1, "predicted": 0.01, "measured": nothing, "agreement": 1.0,
         "loss": 0.0,
         "engine": None, "against": None, "gain": None, "candidate": True, "kept": "candidate"} for n in names
    ]  # fmt: skip
    artifacts.write_json(artifacts.CANDIDATES, {
        "quantizer": "torchao", "engine": "hf", "seed": 0, "sensitivity": artifacts.sha256_file(artifacts.SENSITIVITY),
        "proposals": proposals, "order": names, "digest": artifacts.digest([names, [options[n] for n in names]]), "words": [],
        "wall_s": 0.0, "load": 0.0,
    })  # fmt: skip


def floor_of(store: str) -> None:
    rest: dict[str, Any] = {"runs": {}, "windows": [], "threads": 1, "metrics": {}, "versions": {}}
    artifacts.write_json(artifacts.FLOOR, {"reference": "bf16", "model": "m", "store": store, **rest})


@pytest.mark.parametrize(("verdicts", "tested", "answer"), [
    (["PASS", "PASS", "FAIL", "PASS"], 3, "c1"), (["INCONCLUSIVE", "PASS", "PASS", "PASS"], 1, None), (["PASS"] * 4, 4, "c3"),
])  # fmt: skip
def test_certification_stops_at_the_first_that_does_not_pass(
    house: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[str], tested: int, answer: str | None
) -> None:
    names = [f"c{k}" for k in range(4)]
    freeze(names)
    floor_of("s")
    done: list[str] = []
    judged = {"reason": "", "required": False, "rules": [], "family": {"rules": 0, "correction": "", "level": 0.0, "sided": "one"}}

    def judge(name: str, proposal: Any, settings: params.Params) -> Any:
        assert name in settings.variants and settings.variants[name].options == proposal["options"]
        assert name in YAML(typ="safe").load(certify.COPY.read_text(encoding="utf-8"))["variants"]
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return {"name": name, "options": {}, "model": "m", "weight_bytes": 10, "bits_per_weight": 4.0, "predicted": 0.01,
                "measured": 0.01, "kld": None, "judged": {**judged, "verdict": verdicts[int(name[1])]}, "wall_s": 1.0}  # fmt: skip

    monkeypatch.setattr(certify, "judge", judge)
    monkeypatch.setattr(certify, "words", lambda *_: [])
    if tested > 1:
        with pytest.raises(KeyboardInterrupt):
            certify.certify(params.load())
    found = certify.certify(params.load())
    assert len(found["tested"]) == tested and found["answer"] == answer and found["store"] == "s"
    assert done == ["c0", *["c1"] * 2 * (tested > 1), *names[2:tested]], "what was judged before a kill is not judged again"


def test_a_list_that_was_edited_after_it_was_frozen_is_refused(house: Path) -> None:
    freeze(["a", "b"])
    data = json.loads(artifacts.CANDIDATES.read_text("utf-8"))
    artifacts.write_json(artifacts.CANDIDATES, data | {"order": ["b", "a"]})
    with pytest.raises(ArtifactError, match="changed after it was frozen"):
        certify.frozen(params.load())
    artifacts.write_json(artifacts.CANDIDATES, data | {"order": ["a", "unheard-of"]})
    with pytest.raises(ArtifactError, match="changed after it was frozen"):
        certify.frozen(params.load())


# ---- bad input, looks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    ({"quantizer": "cast", "options": {"dtype": "bfloat16"}}, "stores all layers alike"),
    ({"types": ["Q8_0"]}, "has no tensor types"),
    ({"quantizer": "gguf", "engine": "llamacpp", "options": {"type": "Q4_0"}, "types": ["Q7_0"]}, "not a tensor type of llama.cpp"),
    ({"options": {"scheme": "int8-weight-only", "keep": ["*"]}}, "what is kept is what is looked for"),
    ({"budget_mb": 0.001}, "below the smallest there is"), ({"texts": "overlap.jsonl"}, "overlaps what is measured"),
    ({"texts": "gone.jsonl"}, "gone.jsonl cannot be read"),
])  # fmt: skip
def test_check_names_what_cannot_find_anything(house: Path, change: dict[str, Any], said: str) -> None:
    Path("evalsets").symlink_to(ROOT / "evalsets")
    copied = (ROOT / "evalsets/corpus/news.jsonl").read_text(encoding="utf-8").splitlines()[0]
    Path("overlap.jsonl").write_text(copied + "\n", encoding="utf-8")
    settings = params.load()
    assert list(choosing.faults(settings)) == []
    section = Smallest.model_validate({**settings.smallest.model_dump(), **change})  # type: ignore[union-attr]
    (fault,) = choosing.faults(settings.model_copy(update={"smallest": section}))
    assert said in fault


def test_check_names_a_gate_that_nothing_can_pass(house: Path) -> None:
    Path("evalsets").symlink_to(ROOT / "evalsets")
    settings = params.load()
    rules = [params.Rule(metric="size_ratio", gain="90 %")]
    asked = settings.model_copy(update={"gate": settings.gate.model_copy(update={"rules": rules})})
    assert ["nothing can pass size_ratio" in fault for fault in choosing.faults(asked)] == [True]


def test_looks_are_commits_with_other_results_since_the_sets_or_the_seed_changed(house: Path) -> None:
    def commit(**files: str) -> None:
        for name, text in files.items():
            path = Path(name.replace("__", "/").replace("_dot_", "."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        subprocess.run(["git", "add", "-f", *(n.replace("__", "/").replace("_dot_", ".") for n in files)], check=True)
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "m"], check=True)

    subprocess.run(["git", "init", "-q"], check=True)
    settings = params.load()
    sets = {f"evalsets__{name}__a": "1" for name in ("corpus", "tasks", "prompts")}
    commit(params_dot_yaml=f"seed: {settings.seed}\n", reports__metrics__a="0", **sets)
    commit(reports__metrics__a="1")
    commit(README="no result")
    commit(reports__metrics__a="2")
    assert looks.count(settings) == 3
    other, full = (settings.model_copy(update=u) for u in ({"seed": 1}, {"seed": 1, "tier": "full"}))
    assert looks.count(other) == 0 and looks.count(full) == 3, "another seed draws the same of all"
    assert "seed" not in looks.note(looks.WORN, full) and "add others" in looks.note(looks.WORN, full)
    commit(evalsets__corpus__a="2", reports__metrics__a="3")
    assert looks.count(settings) == 1, "other documents"
    assert "worn" not in looks.note(1, settings)
    assert "worn" in looks.note(looks.WORN, settings) and str(settings.seed + 1) in looks.note(looks.WORN, settings)
    assert smallest.family_note(1, 0.025) is None and "12.5 %" in (smallest.family_note(5, 0.025) or "")


def test_a_mix_is_a_candidate_only_where_it_beats_the_uniform_model_of_its_size(house: Path) -> None:
    """What changes nothing is no candidate at all."""
    found, _ = frozen_list()
    for p in found["proposals"]:
        if p["candidate"] and p["gain"] is not None:
            assert p["gain"]["low"] > 0
        if p["name"].endswith("all-kept"):
            assert not p["candidate"] and "changes nothing" in p["kept"]
    assert found["proposals"][0]["name"] == "torchao-all-kept", "the largest"


@pytest.mark.parametrize(("built", "said"), [
    ({"kld": [0.01], "agreement": [0.95], "loss": [0.01]}, ""), ({"kld": [0.03], "agreement": [0.95], "loss": [0.01]}, "kld_mean"),
    ({"kld": [0.01], "agreement": [0.92], "loss": [0.01]}, "top1_agreement"),
    ({"kld": [0.01], "agreement": [0.95], "loss": [0.03]}, "ppl_ratio"),
])  # fmt: skip
def test_a_built_model_past_any_bound_that_texts_tell_is_no_candidate(built: Any, said: str) -> None:
    bounds = search.bounds_of(params.load(ROOT / "params.yaml"))
    assert (said in search.over(built, bounds)) and bool(said) == bool(search.over(built, bounds))


# ---- in the pages ------------------------------------------------------------------------------------------------------------


def found_for(results: Any, verdict: Any) -> None:
    """Write reports/smallest/ as if it had been found with these results."""
    freeze(["c0", "c1"])
    artifacts.write_json(artifacts.SENSITIVITY, {
        "quantizer": "torchao", "levels": ["low"], "model": results["bf16"]["model"], "groups": [], "other_bytes": 0, "words": [],
        "options": {}, "uniform": {}, "texts": {"files": {}, "documents": [], "tokens": 48}, "versions": {}, "predicted": 0.0,
        "measured": 0.0, "wall_s": 0.0, "load": 0.0,
    })  # fmt: skip
    data = artifacts.read_json(artifacts.CANDIDATES) | {"sensitivity": artifacts.sha256_file(artifacts.SENSITIVITY)}
    artifacts.write_json(artifacts.CANDIDATES, data)
    unsure = {"verdict": "INCONCLUSIVE", "settle": 2184, "n": 696, "metric": "acc_delta/all", "unit": "pp", "threshold": -2.0}
    passed = verdict["variants"]["int8"]
    verdicts = passed, passed | {"verdict": "INCONCLUSIVE", "rules": [passed["rules"][0], passed["rules"][1] | unsure]}
    tested = [
        {"name": f"c{k}", "options": {"keep": ["*.o"]}, "model": "m", "weight_bytes": 5 * 10**7, "bits_per_weight": 4.0,
         "predicted": 0.01, "measured": 0.01, "kld": None, "judged": judged, "wall_s": 1.0} for k, judged in enumerate(verdicts)
    ]  # fmt: skip
    rest = {"answer": "c0", "looks": 1, "words": [], "wall_s": 1.0, "load": 0.0}
    artifacts.write_json(artifacts.ANSWER, {"candidates": data["digest"], "store": "s", "tested": tested, **rest})
    floor_of("s")


def test_the_advice_ends_with_what_was_certified_for_this_reference_and_these_rules_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = {"bf16": result("bf16", 1.0, 0.0, 269), "int8": result("int8", 2.0, 0.006, 100)}
    kinds = {"neutral": 0.0, "p_fail": None, "p_fail_holm": None, "clusters": None, "between": None}
    rules = [rule("kld_mean", "PASS", **kinds), rule("acc_delta/all", "PASS", **kinds)]
    verdict = {**verdicts(int8=reported_judged("PASS", *rules)), "reference": "bf16"}
    family = {"rules": 2, "correction": "Holm", "level": 0.025, "sided": "one"}
    verdict["variants"]["int8"]["family"] = family
    assert smallest.load(results, verdict) is None, "nothing was looked for"
    found_for(results, verdict)
    advised = recommendation.advice(results, verdict, "bf16", smallest.load(results, verdict))
    assert "c0, 50.0 MB (50 % smaller than int8)" in advised.smallest[0]
    assert "Not settled: c1: acc_delta/all" in advised.smallest[3] and "about 2184 items in place of 696" in advised.smallest[3]
    assert YAML(typ="safe").load(advised.setting) == {"c0": {"quantizer": "torchao", "engine": "hf", "options": {"keep": ["*.o"]}}}
    other = {**results, "bf16": results["bf16"] | {"model": "z" * 64}}
    assert smallest.load(other, verdict) is None, "another base"
    floor_of("t")
    assert smallest.load(results, verdict) is None, "other texts: another seed, tier or corpus"
    floor_of("s")
    left = artifacts.CANDIDATES.rename("elsewhere")
    assert smallest.load(results, verdict) is None, "DVC removed it before `search`, which was killed"
    left.rename(artifacts.CANDIDATES)
    stricter = reported_judged("PASS", *(r | {"bound": "margin 0.01 nats"} for r in rules)) | {"family": family}
    assert smallest.load(results, {**verdict, "variants": {"int8": stricter}}) is None, "other rules"


def test_the_stages_that_show_it_depend_on_a_file_that_no_stage_writes_as_its_output() -> None:
    """Else `dvc repro` would look for the smallest, too."""
    files = ("dvc.yaml", "tools/smallest/dvc.yaml")
    line, looking = (YAML(typ="safe").load((ROOT / file).read_text("utf-8"))["stages"] for file in files)
    page = str(smallest.PAGE)
    assert all(page in line[name]["deps"] for name in ("report", "track")) and (ROOT / page).exists()
    written = {out for stage in looking.values() for o in stage["outs"] for out in o}
    assert str(artifacts.ANSWER) in written and page not in written
    assert not written & {dep for stage in line.values() for dep in stage.get("deps", [])}
