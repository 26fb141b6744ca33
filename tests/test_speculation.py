"""A draft changes how fast a reply comes and never the reply; what it gives is counted, and what it may tip is bounded."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gate_house import write_manifest
from test_benchmark import SETUP
from test_engines import IDS, write_gguf
from test_generation import MOST, REFERENCE, builder, reply
from test_speed_metrics import request, timings
from test_token_metrics import measured, tokens

from pipeline import benchmark, compare, engines
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, Unsupported
from pipeline.engines import Sampling, Trace, _generation
from pipeline.engines._speculation import by_model, lookup, speculated, without_draft
from pipeline.engines.hf import HfEngine
from pipeline.gating import freshness
from pipeline.metrics import generation
from pipeline.metrics.definitions import timed

FORCED = Sampling(stop=False)


class Counter:
    """Says the next number after the last token, up to 20 and then from 0; `wrong` by one at every multiple of it."""

    end_ids = frozenset({17})

    def __init__(self, wrong: int = 1000) -> None:
        self.wrong, self.trace, self.read = wrong, Trace(), list[int]()

    def rows_after(self, ids: list[int], tokens: list[int]) -> Any:
        self.read.append(len(tokens))
        return np.eye(21, dtype=np.float32)[[(t + 1 + (t % self.wrong == 0)) % 21 for t in tokens]]

    def forget(self) -> None: ...


def streamed(draft: Any, most: int, sampling: Sampling = FORCED, prompt: list[int] | None = None) -> tuple[list[int], Counter]:
    engine = Counter()
    out = speculated(engine, prompt or [3, 4], draft, 4, most, sampling)
    return [token for token, _ in out], engine


def test_every_token_is_the_model_s_own_and_passes_are_counted_by_hand() -> None:
    perfect, engine = streamed(partial(by_model, Counter()), 11)
    assert perfect == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert engine.trace.guesses == {"proposed": [4, 4], "accepted": [4, 4]} and engine.read == [1, 5, 5]
    faulty, engine = streamed(partial(by_model, Counter(wrong=4)), 11)
    assert faulty == perfect and engine.trace.guesses == {"proposed": [4, 4, 1], "accepted": [3, 3, 1]}
    useless, engine = streamed(partial(by_model, Counter(wrong=1)), 11)
    assert useless == perfect and engine.trace.guesses["accepted"] == [0] * 10 and engine.trace.decode is None
    assert streamed(partial(by_model, Counter()), 30, Sampling())[0][-1] == 17, "an end token among the guesses ends the reply"
    assert [len(streamed(partial(by_model, Counter()), n)[0]) for n in range(1, 9)] == list(range(1, 9))


def test_a_lookup_guesses_what_followed_the_same_tokens_last() -> None:
    propose = lookup([1, 2, 3, 9, 1, 2, 4, 7])
    assert propose([1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 2) == [4, 7], "the later of two"
    assert propose([1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 3], 8) == [9, 1, 2, 4, 7, 1, 2, 3], "three tokens go before two"
    assert propose([1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 3, 8], 4) == []
    around = [*range(21), *range(21), 0, 1]  # the numbers have come by twice
    assert streamed(lookup, 10, prompt=around)[1].trace.guesses["accepted"] == [4, 3]


def test_rounds_hold_the_variant_without_its_draft_and_start_with_the_one_that_has_it() -> None:
    asked: list[str] = []

    class Fake:
        def ask(self, prompt: list[int], n: int, how: str) -> Any:
            asked.append(how)
            return {"ok": True}

    rows = list(benchmark.measure(Fake(), Fake(), SETUP, [[1]] * 3, speculates=True))  # type: ignore[arg-type]
    assert [r["who"] for r in rows[:6]] == ["reference", "variant", "undrafted", "undrafted", "variant", "reference"]
    assert asked[:3] == ["stream", "stream", "stream_undrafted"]


def test_what_a_draft_gave_is_a_ratio_of_counts_and_its_speed_is_against_the_same_engine_without_it() -> None:
    guesses = {"proposed": [4, 4, 0, 2], "accepted": [4, 1, 0, 2]}
    rows = [r for k in range(5) for r in (
        request(k, "variant", 0.2, 0.05, **guesses), request(k, "undrafted", 0.2, 0.1), request(k, "reference", 0.4, 0.4),
    )]  # fmt: skip
    found = timings(rows)
    value = {name: m["value"] for name, m in found.items()}
    assert value["spec_step"] == pytest.approx(11 / 4) and value["spec_accepted"] == pytest.approx(7 / 10)
    by_position = [value[f"spec_accepted/{k}"] for k in (1, 2, 3, 4)]
    assert by_position == pytest.approx([1, 2 / 3, 1 / 2, 1 / 2])
    assert value["spec_speed_ratio"] == pytest.approx(2) and value["spec_e2e_ratio"] == pytest.approx(0.6 / 0.4)
    assert value["speed_ratio"] == pytest.approx(8) and timed("spec_speed_ratio") and not timed("spec_step")
    assert value["mbu"] is None and "several tokens" in found["mbu"]["warnings"][0] and value["mfu"] is not None
    silent = timings([r | {"proposed": [0], "accepted": [0]} if r["who"] == "variant" else r for r in rows])
    assert silent["spec_accepted"]["value"] is None and silent["spec_step"]["value"] == 1
    assert not any(name.startswith("spec_") for name in timings([request(k, "variant", 0.2, 0.05) for k in range(5)]))


def told(gap: float, moved: float = 0.05) -> tuple[Any, str | None]:
    """16 replies, of which the first departs at its third token, where the two likeliest lie `gap` nats apart."""
    own = {"gaps": [9.0, 9.0, gap, *[9.0] * (MOST - 3)], "moved": moved}
    rows = [reply(k, list(r["token_ids"]), undrafted=own | {"token_ids": r["token_ids"]}) for k, r in enumerate(REFERENCE)]
    rows[0]["token_ids"] = [0, 1, 77, *rows[0]["token_ids"][3:]]
    b = builder()
    return b.metrics, generation.free_metrics(b, generation.pair(rows, REFERENCE), MOST, False)


def test_a_departure_near_a_tie_is_rounding_and_far_from_one_a_fault() -> None:
    metrics, fault = told(0.09)
    assert fault is None and metrics["spec_same"]["value"] == pytest.approx(15 / 16) and metrics["spec_same"]["n"] == 16
    assert metrics["spec_gap"]["value"] == 0.09 and metrics["spec_gap_floor"]["value"] == 0.05
    fault = told(2.5)[1]
    assert fault and "1 of 16 are not the model's own" in fault and "2.5 nats apart" in fault


def test_expected_tokens_of_a_draft_are_the_geometric_sum_and_the_overlap_is_the_summed_minima() -> None:
    found = measured(tokens([0.02] * 80, tv=[0.1, 0.3] * 40, top1=[1, 1, 1, 2] * 20))
    assert found["draft_step/1"]["value"] == pytest.approx(1.75) and found["draft_step/3"]["value"] == pytest.approx(
        (1 - 0.75**4) / 0.25
    )
    assert found["draft_step/8"]["low"] < found["draft_step/8"]["value"] < found["draft_step/8"]["high"]
    assert found["draft_overlap"]["value"] == pytest.approx(0.8) and "independent" in found["draft_step/2"]["method"]
    assert found["draft_step_sampled/2"]["value"] == pytest.approx(1 + 0.8 + 0.64)


def test_timings_with_another_build_of_the_draft_are_refused_with_the_command_that_repeats_them() -> None:
    write_manifest(artifacts.model_dir("small"), digest="new")
    manifest: Any = {"digest": "m", "engine_options": {"speculate": {"draft": "small", "tokens": 4}}}
    meta: Any = {"model": "m", "reference": "r"}
    for built, fits in (("new", True), ("old", False)):
        made = compare.Measured("v", manifest, meta, meta, meta | {"draft": built}, meta)
        with nullcontext() if fits else pytest.raises(ArtifactError, match="dvc repro -sf diverge@v benchmark@v"):
            made.refuse_others("r", "r")


def test_results_with_another_build_of_the_draft_are_stale_though_dvc_sees_nothing() -> None:
    settings = params.load(ROOT / "params.yaml")
    drafted = settings.variants["gguf-bf16"].model_copy(update={"engine_options": {"speculate": {"draft": "int8", "tokens": 4}}})
    settings = settings.model_copy(update={"variants": settings.variants | {"gguf-bf16": drafted}})
    assert freshness.changed_drafts(settings) == [], "nothing was timed"
    write_manifest(artifacts.model_dir("int8"), digest="new")
    meta = {"variant": "gguf-bf16", "model": "m", "reference": "r", "status": "ok", "reason": None}
    for built, changed in (("new", []), ("old", ["gguf-bf16"])):
        artifacts.write_json(artifacts.meta_of(artifacts.timings("gguf-bf16")), meta | {"draft": built})
        assert freshness.changed_drafts(settings) == changed


# --- in engines ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants: the tiny model, and its draft with a few weights moved."""
    home = tmp_path_factory.mktemp("models")
    for name in ("whole", "draft"):
        shutil.copytree(tiny, home / name)
        write_gguf(tiny, home / name / "model.gguf")
    return home


@pytest.mark.parametrize("draft", ["ngram", "draft"])
@pytest.mark.parametrize("name, how", [("llamacpp", {"kv": "f32"}), ("hf", {})])
def test_replies_are_the_same_with_a_draft_as_without(models: Path, name: str, how: dict[str, str], draft: str) -> None:
    if name == "llamacpp":
        pytest.importorskip("llama_cpp")
    if draft != "ngram":
        (models / draft / "manifest.json").unlink(missing_ok=True)
        with pytest.raises(ArtifactError, match="manifest.json"):
            engines.load(name, models / "whole", threads=1, speculate={"draft": draft, "tokens": 3})
        write_manifest(models / draft)
    engine: Any = engines.load(name, models / "whole", threads=1, **how, speculate={"draft": draft, "tokens": 3})
    for ids in (IDS[:40], IDS[:7] * 5):
        alone = [t for t, _ in engine.stream_undrafted(ids, 24, FORCED)]
        assert engine.trace.guesses == {} and len(engine.trace.decode) == 23
        with_draft = [t for t, _ in engine.stream(ids, 24, FORCED)]
        guesses = engine.trace.guesses
        assert with_draft == alone and sum(guesses["accepted"]) + len(guesses["accepted"]) == 23
        assert engine.trace.cache_tokens <= len(ids) + 24
        undrafted = without_draft(engine, ids, 3, 24)
        n = len(undrafted["token_ids"])
        assert undrafted["token_ids"] == alone[:n] and len(undrafted["gaps"]) == n and 0 <= undrafted["moved"] < 0.1
    assert draft == "ngram" or max(guesses["accepted"]) == 3, "a draft with the same weights is right"
    with pytest.raises(Unsupported, match="one request at a time"):
        list(engine.stream_batch([IDS[:8]] * 2, 4))
    engine.trace = Trace()
    rows = _generation.generate(engine, [_generation.Prompt("a", "d", "x", IDS[:20])], 8, is_reference=False)
    assert json.loads(json.dumps(rows))[0]["undrafted"]["token_ids"] == rows[0]["token_ids"]
    assert engine.trace.guesses, "its own replies are drafted"
    engine.close()


@pytest.mark.parametrize("window", [None, 8])
def test_tokens_taken_back_leave_no_trace_in_transformers(tiny: Path, window: int | None) -> None:
    """Rows after other tokens were read and taken back are those of one pass, a sliding window long passed or not."""
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=600, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.3, sliding_window=window,
    )  # fmt: skip
    engine = HfEngine(MistralForCausalLM(config).eval(), AutoTokenizer.from_pretrained(tiny), "cpu", set())
    whole = engine.logits(IDS[:60])
    for at, wrong in ((50, 3), (54, 20), (30, 9), (59, 1)):
        engine.rows_after(IDS[:at], [7] * wrong)
        np.testing.assert_allclose(engine.rows_after(IDS[: at - 2], IDS[at - 2 : at + 1]), whole[at - 2 : at + 1], atol=1e-4)


def test_a_model_or_cache_of_transformers_that_takes_no_tokens_back_does_not_speculate(tiny: Path, tmp_path: Path) -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(vocab_size=600, hidden_size=32, num_heads=8, head_dim=8, state_size=8, num_hidden_layers=1, n_groups=1)
    shutil.copytree(tiny, tmp_path / "state", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Mamba2ForCausalLM(config).save_pretrained(tmp_path / "state")
    for folder, kv in ((tiny, "fp8"), (tmp_path / "state", "auto")):
        with pytest.raises(Unsupported, match="cannot take tokens back"):
            engines.load("hf", folder, threads=1, kv=kv, speculate={"draft": "ngram", "tokens": 3})
