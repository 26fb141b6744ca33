"""What "no difference" measures: made of honest runs, marked where it drowns a metric, and never a way to pass."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model
from gate_house import alone, write_metrics
from gate_house import run as judged
from pydantic import ValidationError
from reported import result
from store_house import stored, windows_of

from pipeline import compare, engines, floor, gate
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError, Unsupported
from pipeline.core.params import Compare, Rule
from pipeline.divergence.store import Store, Window, batches
from pipeline.engines import hf
from pipeline.gating.rules import bound_of, judge_above
from pipeline.metrics import definitions
from pipeline.metrics.builder import Builder
from pipeline.reporting import charts, text

IDS = [5, 9, 200, 31, 77, 400, 12, 8, 301, 44]


def load(model: Path) -> Any:
    return engines.load("hf", model, threads=1)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny: Path, tiny_bf16: Path) -> tuple[Store, Path]:
    model = tiny if request.param == "float32" else tiny_bf16
    engine = load(model)
    return stored(engine, windows_of(engine), tmp_path_factory.mktemp("store") / "reference"), model


@pytest.fixture(scope="module")
def metrics(made: tuple[Store, Path]) -> Any:
    """The floor's metrics of the model that made the store."""
    return measured(*made)


def measured(store: Store, model: Path) -> Any:
    b = Builder(Compare(resamples=200), seed=1)
    floor.measure(load(model), store, range(len(store.windows)), b, batch_size=2, steps=60, threads=1)
    return b.metrics


# --- the engine's part -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 4, 9])
def test_decoding_through_the_cache_gives_the_logits_of_one_pass(tiny: Path, start: int) -> None:
    engine = load(tiny)
    logits = engine.logits_stepwise(IDS, start)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, engine.logits(IDS)[start:], atol=1e-4)


def test_float32_from_here_on_is_the_same_weights_cast(tiny_bf16: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = load(tiny_bf16)
    before = engine.logits(IDS)
    engine.to_float32()
    model = AutoModelForCausalLM.from_pretrained(tiny_bf16, dtype="auto").eval().float()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_array_equal(engine.logits(IDS), expected)
    blocks = np.concatenate([x for _, _, x in engine.logit_blocks([IDS], [0], 4)])
    np.testing.assert_allclose(blocks, expected[:-1], atol=1e-4)
    assert (before != expected).any(), "the head and the body are both float32 now"


def test_weights_that_are_packed_or_too_large_are_not_called_float32(tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_bf16)
    monkeypatch.setattr(hf, "_free_bytes", lambda torch, device: 1000)
    with pytest.raises(Unsupported, match="GB are free"):
        engine.to_float32()
    assert engine.kernels() == {"Linear[bfloat16]": 15}
    engine.model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(Unsupported, match="packed"):
        engine.to_float32()


# --- the runs ----------------------------------------------------------------------------------------------------


def test_every_run_scores_the_rows_that_the_store_holds(made: tuple[Store, Path], metrics: Any) -> None:
    """One position off, and even a float32 model would seem to differ from itself by more than a nat."""
    store, model = made
    scored = sum(w.scored for w in store.windows)
    most = 1e-7 if "tiny16" not in str(model) else 0.02
    for run in floor.RUNS:
        assert 0 <= metrics[f"kld_floor/{run}"]["value"] < most, run
    assert metrics["kld_floor/rerun"]["n"] == metrics["kld_floor/batch"]["n"] == scored
    assert metrics["kld_floor/length"]["n"] < scored
    assert metrics["kld_floor/stepwise"]["n"] == (60 // len(store.windows)) * len(store.windows)
    assert metrics["kld_floor/rerun"]["value"] == metrics["flip_floor/rerun"]["value"] == 0, "a second run is exactly the first"


def test_rounding_is_above_zero_in_16_bits_and_null_with_its_reason_in_32(made: tuple[Store, Path], metrics: Any) -> None:
    store, model = made
    rounding = metrics["kld_rounding"]
    if "tiny16" in str(model):
        assert 0 < rounding["low"] <= rounding["value"] <= rounding["high"]
        assert rounding["n"] == sum(w.scored for w in store.windows)
    else:
        assert rounding["value"] is None and "float32 already" in rounding["warnings"][0]


def test_equal_inputs_give_equal_values_and_another_model_is_no_floor(
    made: tuple[Store, Path], metrics: Any, tmp_path: Path
) -> None:
    assert measured(*made) == metrics
    other = measured(made[0], make_model(tmp_path / "other", seed=5))
    assert min(other[f"kld_floor/{run}"]["value"] for run in floor.RUNS) > 0.1


def test_every_other_shape_is_another_shape(made: tuple[Store, Path]) -> None:
    """The batches that the runs ask for: never the store's own, except in the second run."""
    store, everything = made[0], range(len(made[0].windows))
    parts = list(batches(store.windows, 2))

    def shapes(run: Any, given: Any) -> list[tuple[int, int]]:
        asked = list[tuple[int, int]]()
        engine = SimpleNamespace(logit_blocks=lambda batch, *_: asked.append((len(batch), len(batch[0]))) or ())
        list(run(engine, given, everything, False))
        return asked

    assert shapes(floor.rerun, parts) == [(len(part), len(part[0][1].token_ids)) for part in parts]
    sizes = [len(part) for part in parts for _ in part]
    assert set(sizes) == {1, 2}, "the store has windows that share a batch, and windows alone"
    assert [b for b, _ in shapes(floor.rebatched, parts)] == [1 if size > 1 else 2 for size in sizes]
    assert all(n < len(w.token_ids) for (_, n), w in zip(shapes(floor.shortened, store.windows), store.windows))


def windows(lengths: list[int], kind: str) -> list[Window]:
    return [Window(kind, f"{kind}{k}", f"{kind}{k}", tuple(range(n + 1)), 1) for k, n in enumerate(lengths)]


def test_the_sample_is_bounded_and_holds_texts_and_trajectories() -> None:
    everything = windows([300] * 20, "news") + windows([48] * 20, "trajectory")
    taken = [everything[i] for i in floor.choose(everything, 2000, seed=3)]
    assert 1900 < sum(w.scored for w in taken) <= 2000 and {w.set for w in taken} == {"news", "trajectory"}
    assert len({w.document for w in taken}) == len(taken) >= 10
    assert floor.choose(everything, 2000, seed=3) != floor.choose(everything, 2000, seed=4)
    assert floor.choose(everything, 10**6, seed=3) == list(range(40))
    assert len(floor.choose(windows([3000] * 5, "news"), 2000, seed=1)) == 1, "of windows that are all too long, one"


# --- the floor ---------------------------------------------------------------------------------------------------


def runs(**kld: list[float]) -> Builder:
    b = Builder(Compare(resamples=200), seed=1)
    for run in floor.RUNS:
        values = kld.get(run, [0.0])
        documents = [f"d{k}" for k in range(40) for _ in values]
        floor.add(b, f"floor/{run}", floor.Rows(values * 40, [False] * len(documents), documents))
    return b


def test_the_floor_is_the_largest_of_the_runs_and_says_which_could_not_be_made() -> None:
    b = runs(length=[0.0, 0.002], stepwise=[0.0, 0.006])
    floor.add(b, "floor/threads", "the reference runs on cuda")
    floor.add_largest(b, "kld_floor")
    largest = b.metrics["kld_floor"]
    assert largest["value"] == pytest.approx(0.003) and "largest of 4 runs, stepwise" in largest["method"]
    assert "threads: the reference runs on cuda" in largest["warnings"] and "stepwise" not in b.metrics["kld_floor/rerun"]["method"]


def test_a_run_that_broke_leaves_no_floor_however_small_the_others_are() -> None:
    b = runs(length=[0.001], stepwise=[0.0, float("nan")])
    floor.add_largest(b, "kld_floor")
    assert b.metrics["kld_floor"]["value"] is None and "stepwise: 40 of 80 tokens" in b.metrics["kld_floor"]["warnings"][0]


# --- what it marks -----------------------------------------------------------------------------------------------


def metric(value: float | None, low: float | None, high: float | None, n: int = 2000, **more: Any) -> Any:
    return {"value": value, "low": low, "high": high, "n": n, **alone(), "clusters": 14, **more}


NOTHING = metric(None, None, None, n=0, warnings=["it computes in float32 already"])
FLOORS: Any = {
    "kld_floor": metric(0.002, 0.001, 0.003, unit="nats"), "flip_floor": metric(0.01, 0.008, 0.012, unit="fraction"),
    "kld_rounding": metric(0.001, 0.0005, 0.0015, unit="nats"), "flip_rounding": metric(0.02, 0.01, 0.03, unit="fraction"),
    **{f"kld_floor/{run}": metric(0.001, 0.001, 0.001, unit="nats") for run in floor.RUNS},
}  # fmt: skip


@pytest.mark.parametrize("kld, agreement, expected", [
    (0.0039, 0.961, {"kld_mean", "top1_agreement"}), (0.0041, 0.961, {"top1_agreement"}), (0.0039, 0.959, {"kld_mean"}),
    (0.3, 0.7, set()), (0.0, 1.0, {"kld_mean", "top1_agreement"}),
])  # fmt: skip
def test_below_twice_the_larger_of_floor_and_rounding_is_floor_limited(kld: float, agreement: float, expected: set[str]) -> None:
    variant = {"kld_mean": metric(kld, kld, kld), "top1_agreement": metric(agreement, 0, 1), "ppl_ratio": metric(1.0, 1, 1)}
    definitions.mark_floor_limited(variant, FLOORS)
    assert {name for name, m in variant.items() if text.floor_mark(m)} == expected


def test_an_unknown_floor_is_a_warning_and_an_unknown_rounding_leaves_the_floor() -> None:
    variant = {"kld_mean": metric(0.001, 0.001, 0.001)}
    definitions.mark_floor_limited(variant, {"kld_floor": NOTHING, "kld_rounding": NOTHING})
    assert variant["kld_mean"]["warnings"] == ["the noise floor is unknown"]
    assert definitions.floor_limit("kld_mean", FLOORS | {"kld_rounding": NOTHING}) == pytest.approx(0.004)


def test_the_sentence_has_every_value_or_its_reason() -> None:
    floors = FLOORS | {"kld_rounding": NOTHING}
    said = text.noise_line(floors, "bf16") + text.noise_details(floors)
    assert all(part in said for part in ("0.002 [0.001, 0.003]", "float32 already", "1 [0.8, 1.2] %", "2 [1, 3] %", "stepwise"))
    assert text.noise_line({}, "bf16") == text.noise_details({}) == ""


def test_the_band_reaches_from_zero_to_the_limit() -> None:
    results = {"bf16": result("bf16", 1.0, 0.0, 269)}
    plain = charts.tradeoff(results, {"variants": {}}, "bf16", 0.95)
    assert "rect" not in [layer["mark"]["type"] for layer in plain["layer"]]
    results["bf16"]["metrics"] |= FLOORS
    band, words, *_ = charts.tradeoff(results, {"variants": {}}, "bf16", 0.95)["layer"]
    assert band["mark"]["type"] == "rect" and band["encoding"] == {"y": {"datum": 0}, "y2": {"datum": pytest.approx(0.004)}}
    assert "floor-limited" in words["mark"]["text"] and "0.004 nats" in words["mark"]["text"]


# --- rules -------------------------------------------------------------------------------------------------------

KLD, AGREEMENT = ("kld_mean", "0.02 nats", "floor"), ("top1_agreement", "3 pp", "floor")
ROUNDING = ("kld_mean", "0.02 nats", "rounding")


def verdict(value: Any, floors: Any, rule: tuple[str, str, str] = KLD) -> Any:
    return judge_above(Rule(metric=rule[0], margin=rule[1], above=rule[2]), value, floors)[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("rule, low, high, expected", [
    (KLD, 0.005, 0.0209, "PASS"), (KLD, 0.005, 0.0211, "INCONCLUSIVE"), (KLD, 0.0211, 0.0212, "INCONCLUSIVE"),
    (KLD, 0.0229, 0.03, "INCONCLUSIVE"), (KLD, 0.0231, 0.03, "FAIL"), (AGREEMENT, 0.963, 0.99, "PASS"),
    (AGREEMENT, 0.961, 0.99, "INCONCLUSIVE"), (AGREEMENT, 0.9, 0.959, "INCONCLUSIVE"), (AGREEMENT, 0.9, 0.957, "FAIL"),
    (ROUNDING, 0.01, 0.0204, "PASS"), (ROUNDING, 0.01, 0.0206, "INCONCLUSIVE"),
])  # fmt: skip
def test_a_pass_holds_above_the_floor_s_lower_bound_and_a_fail_above_its_upper_and_agreement_counts_down_from_it(
    rule: tuple[str, str, str], low: float, high: float, expected: str
) -> None:
    assert verdict(metric((low + high) / 2, low, high), FLOORS, rule).verdict == expected


def test_a_floor_measured_too_high_lets_nothing_through() -> None:
    assert verdict(metric(0.3, 0.2, 0.4), FLOORS | {"kld_floor": metric(0.5, 0.0, 1.0)}).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("broken, word", [
    (None, "missing"), (NOTHING, "float32 already"), (metric(0.1, None, None), "no interval"),
    (metric(0.1, 0.1, 0.1, n=0), "no items"),
    (metric(float("inf"), 0.1, float("inf")), "no value"), (metric(0.1, 0.1, 0.1) | {"clusters": 3}, "3 documents"),
])  # fmt: skip
def test_a_floor_that_is_no_value_is_never_a_pass(broken: Any, word: str) -> None:
    judged = verdict(metric(0.0, 0.0, 0.0), {"kld_floor": broken})
    assert judged.verdict != "PASS" and word in judged.reason and "nothing to count from" in judged.reason


def test_a_missing_metric_or_rounding_is_never_a_pass_above_a_floor_that_is_there() -> None:
    assert verdict(None, FLOORS).verdict == "FAIL"
    assert verdict(metric(0.0, None, None), FLOORS).verdict == "INCONCLUSIVE"
    rule = Rule(metric="kld_mean", margin="0.02 nats", above="rounding")
    bound, judged = judge_above(rule, metric(0.01, 0.01, 0.02), FLOORS | {"kld_rounding": NOTHING})
    assert judged.verdict == "FAIL" and "float32 already" in judged.reason and "above kld_rounding" in bound.text


@pytest.mark.parametrize("rule, reason", [
    ({"metric": "ppl_ratio", "margin": "2 %", "above": "floor"}, "only kld_mean and top1_agreement"),
    ({"metric": "kld_mean/news", "margin": "1 nats", "above": "floor"}, "only kld_mean and top1_agreement"),
    ({"metric": "kld_floor", "limit": "1 nats"}, "metric of the reference"),
    ({"metric": "flip_rounding/x", "limit": "1 pp"}, "metric of the reference"),
    ({"metric": "kld_mean", "limit": "1 nats", "above": "floor"}, "goes with a margin"),
    ({"metric": "kld_mean", "gain": "1 nats", "above": "floor"}, "goes with a margin"),
    ({"metric": "kld_mean", "margin": "1 nats", "above": "flor"}, "'floor' or 'rounding'"),
])  # fmt: skip
def test_a_rule_that_no_floor_can_answer_is_refused(rule: Any, reason: str) -> None:
    with pytest.raises((ParamsError, ValidationError), match=reason):
        bound_of(Rule(**rule))


# --- the gate ----------------------------------------------------------------------------------------------------


def made_beside() -> dict[str, str]:
    return {str(artifacts.FLOOR): artifacts.sha256_file(artifacts.FLOOR)}


@pytest.fixture
def house() -> params.Params:
    """One variant beside the reference, and one rule above the floor."""
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    settings = params.load()
    rules = [Rule(metric="kld_mean", margin="0.02 nats", above="floor")]
    settings = settings.model_copy(update={
        "variants": {n: settings.variants[n] for n in ("bf16", "int8")},
        "gate": settings.gate.model_copy(update={"rules": rules}),
    })  # fmt: skip
    measured = {"reference": "bf16", "runs": {}, "windows": [], "threads": 1, "versions": {}}
    artifacts.write_json(artifacts.FLOOR, measured | {"model": "m", "store": "s", "metrics": FLOORS})
    for name, values in (("bf16", FLOORS), ("int8", {"kld_mean": metric(0.006, 0.005, 0.007)})):
        write_metrics(settings, name, values, inputs=made_beside())
    return settings


def test_the_gate_counts_from_the_floor_and_records_it(house: params.Params) -> None:
    result = judged(house)
    rule = result["variants"]["int8"]["rules"][0]
    assert result["verdict"] == "PASS" and gate.enforce(house) == 0
    assert result["floor"]["kld_floor"]["value"] == 0.002 and rule["threshold"] == pytest.approx(0.021)
    assert "above kld_floor 0.002 [0.001, 0.003]" in rule["bound"]


@pytest.mark.parametrize("made", [{}, {"reports/floor.json": "another"}])
def test_results_made_beside_another_floor_never_pass(house: params.Params, made: dict[str, str]) -> None:
    path = artifacts.metrics("int8")
    artifacts.write_json(path, artifacts.read_json(path) | {"inputs": made})
    result = judged(house)
    assert result["verdict"] == "FAIL" and "not made with the reports/floor.json" in result["variants"]["int8"]["reason"]


def test_without_results_of_the_reference_there_is_no_floor(house: params.Params) -> None:
    artifacts.metrics("bf16").unlink()
    assert judged(house)["verdict"] == "FAIL"


def test_compare_refuses_a_missing_floor_and_that_of_another_reference(house: params.Params) -> None:
    for model, store in (("m", "s"), ("other", "s"), ("m", "other")):
        if (model, store) == ("m", "s"):
            assert compare.floors_of(model, store)["kld_floor"]["value"] == 0.002
            continue
        with pytest.raises(ArtifactError, match="measured with another reference"):
            compare.floors_of(model, store)
    artifacts.FLOOR.unlink()
    with pytest.raises(ArtifactError, match=r"floor.json is missing"):
        compare.floors_of("m", "s")


def test_a_fail_above_the_floor_is_corrected_by_the_p_value_of_the_bound_it_claims(house: params.Params) -> None:
    """Past the upper end of the floor by little: alone a FAIL, as one of four rules not."""
    near = {"ppl_ratio": metric(0.99, 0.98, 1.0), "byte_ppl_ratio": metric(0.99, 0.98, 1.0), "recovery": metric(0.99, 0.98, 1.0)}
    write_metrics(house, "bf16", FLOORS | {"kld_floor": metric(0.01, 0.005, 0.015)}, inputs=made_beside())
    write_metrics(house, "int8", near | {"kld_mean": metric(0.045, 0.0351, 0.055, clusters=40)}, inputs=made_beside())
    more = [Rule(metric=name, margin="5 %") for name in near]
    four = house.model_copy(update={"gate": house.gate.model_copy(update={"rules": house.gate.rules + more})})
    alone, one_of_four = (judged(settings)["variants"]["int8"]["rules"][0] for settings in (house, four))
    assert alone["verdict"] == "FAIL" and 0.02 < alone["p_fail"] < 0.025
    assert one_of_four["verdict"] == "INCONCLUSIVE" and one_of_four["p_fail_holm"] == pytest.approx(4 * one_of_four["p_fail"])
    between = verdict(metric(0.03, 0.0251, 0.036, 900), {"kld_floor": metric(0.01, 0.005, 0.015, 900)})
    assert between.verdict == "INCONCLUSIVE" and between.p_fail is not None, "between the floor's ends it stays in the family"
