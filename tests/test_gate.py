"""The gate passes only what is shown to pass; everything missing, broken or undecided has its own reason."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gate_house import OTHERS, lock, result, write_metrics
from gate_house import run as judged
from pydantic import ValidationError

from pipeline import gate, report
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.params import Rule
from pipeline.gating import dvc_lock, freshness, verdicts
from pipeline.gating.rules import UNITS, bound_of, judge, worst
from pipeline.metrics.definitions import DEFINITIONS
from pipeline.stats.intervals import paired_difference

ROOT = Path(__file__).resolve().parent.parent
KLD = {"metric": "kld_mean", "margin": "0.02 nats"}


def metric(value: float | None, low: float | None, high: float | None, n: int = 100, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "warnings": [], "confidence": 0.95, **more}


def verdict(rule: dict[str, Any], found: dict[str, Any] | None) -> str:
    return judge(bound_of(Rule(**rule)), found).verdict


DAMAGED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "FAIL", "kld_mean rests on no items"),
    ({"n": -5}, "FAIL", "kld_mean rests on no items (n = -5)"),
    ({"n": 1.5}, "FAIL", "kld_mean rests on no items (n = 1.5)"),
    ({"n": "100"}, "FAIL", "kld_mean rests on no items (n = '100')"),
    ({"n": True}, "FAIL", "kld_mean rests on no items (n = True)"),
    ({"low": 0.007, "high": 0.005}, "INCONCLUSIVE", "does not contain its value: 0.006 is not in [0.007, 0.005]"),
    ({"value": 0.5}, "INCONCLUSIVE", "does not contain its value: 0.5 is not in [0.005, 0.007]"),
    ({"value": 0.001}, "INCONCLUSIVE", "does not contain its value: 0.001 is not in [0.005, 0.007]"),
    ({"value": "0.006"}, "FAIL", "kld_mean has no value"),
    ({"value": [0.006]}, "FAIL", "kld_mean has no value"),
    ({"value": False, "low": False, "high": False}, "FAIL", "kld_mean has no value"),
    ({"low": "0.005"}, "INCONCLUSIVE", "kld_mean has no interval"),
    ({"high": 1e999}, "INCONCLUSIVE", "kld_mean has no interval"),
    ({"confidence": 0.5}, "INCONCLUSIVE", "it is of 0.5 confidence, not 0.95"),
    ({"confidence": "0.95"}, "INCONCLUSIVE", "it is of '0.95' confidence, not 0.95"),
    ({"confidence": None}, "INCONCLUSIVE", "it is of None confidence, not 0.95"),
    ({"unit": "pp"}, "INCONCLUSIVE", "its unit is pp, not nats"),
    ({"value": None, "low": None, "high": None, "reason": "no kernel"}, "FAIL", "no kernel"),
    ({"value": math.nan}, "FAIL", "kld_mean has no value"),
    ({"value": math.inf, "high": math.inf}, "FAIL", "kld_mean has no value"),
    ({"low": None, "high": None}, "INCONCLUSIVE", "kld_mean has no interval"),
    ({"low": math.nan}, "INCONCLUSIVE", "kld_mean has no interval"),
]


@pytest.mark.parametrize("change, expected, said", DAMAGED, ids=[str(case[0]) for case in DAMAGED])
def test_a_damaged_figure_never_passes_and_is_told(change: dict[str, Any], expected: str, said: str) -> None:
    settings = params.load(ROOT / "params.yaml")
    rules = [Rule.model_validate({"metric": "kld_mean", "margin": "0.02 nats"})]
    settings = settings.model_copy(update={"gate": settings.gate.model_copy(update={"rules": rules})})

    def judged(found: dict[str, Any]) -> dict[str, Any]:
        return dict(verdicts.of({"int8": result(settings, "int8", {"kld_mean": found})}, settings)["variants"]["int8"])

    whole = metric(0.006, 0.005, 0.007)
    assert judged(whole)["verdict"] == "PASS"
    found = judged(whole | change)
    assert found["verdict"] == expected and said in found["reason"]


def test_a_name_that_is_given_twice_in_results_is_no_results(tmp_path: Path) -> None:
    path = tmp_path / "int8.json"
    path.write_text('{"metrics": {"kld_mean": {"value": 0.9}, "kld_mean": {"value": 0.006}}}', encoding="utf-8")
    with pytest.raises(ArtifactError, match="int8.json is not valid JSON \\('kld_mean' is given twice\\)"):
        artifacts.read_json(path)


@pytest.mark.parametrize("rule, found, expected", [
    ({"metric": "kld_mean", "margin": "0.02 nats"}, metric(0.006, 0.005, 0.007), "PASS"),
    ({"metric": "kld_mean", "margin": "0.02 nats"}, metric(0.2, 0.1, 0.3), "FAIL"),
    ({"metric": "kld_mean", "margin": "0.02 nats"}, metric(0.02, 0.01, 0.03), "INCONCLUSIVE"),
    ({"metric": "acc_delta/all", "margin": "2 pp"}, metric(-1.0, -1.9, -0.1), "PASS"),
    ({"metric": "acc_delta/all", "margin": "2 pp"}, metric(-1.0, -2.4, 0.4), "INCONCLUSIVE"),
    ({"metric": "acc_delta/all", "margin": "2 pp"}, metric(-5.0, -7.0, -3.0), "FAIL"),
    ({"metric": "speed_ratio", "margin": "10 %"}, metric(0.95, 0.91, 0.99), "PASS"),
    ({"metric": "speed_ratio", "gain": "20 %"}, metric(1.5, 1.3, 1.7), "PASS"),
    ({"metric": "speed_ratio", "gain": "20 %"}, metric(1.1, 1.05, 1.15), "FAIL"),
    ({"metric": "ttft_ms", "limit": "0.5 s"}, metric(400, 380, 420), "PASS"),
    ({"metric": "ttft_ms", "limit": "500 ms"}, metric(600, 580, 620), "FAIL"),
    ({"metric": "peak_memory_bytes", "limit": "1 GB"}, metric(9e8, 9e8, 9e8), "PASS"),
])  # fmt: skip
def test_an_interval_is_judged_as_a_whole(rule: dict[str, Any], found: dict[str, Any], expected: str) -> None:
    assert verdict(rule, found) == expected


def test_direction_belongs_to_the_metric_and_not_to_whoever_writes_the_rule() -> None:
    """Every metric that can have a margin, against the reference and against the baseline: worse fails, better passes."""
    for name, what in DEFINITIONS.items():
        unit, factor = next(iter(UNITS[what.unit].items()))
        for against in ("reference", "baseline"):
            try:
                bound = bound_of(Rule.model_validate({"metric": name, "margin": f"{0.01 / factor!r} {unit}", "against": against}))
            except ParamsError:
                continue
            worse = 0.02 if what.better == "lower" else -0.02
            neutral = 1.0 if against == "baseline" and what.unit == "ratio" else 0.0 if against == "baseline" else what.neutral
            assert neutral is not None
            found = {way: neutral + way * worse for way in (-1, 1)}
            assert judge(bound, metric(found[1], found[1], found[1])).verdict == "FAIL", (name, against)
            assert judge(bound, metric(found[-1], found[-1], found[-1])).verdict == "PASS", (name, against)


@pytest.mark.parametrize("rule, reason", [
    ({"metric": "kld_mean", "margin": "nan nats"}, "number and a unit"),
    ({"metric": "kld_mean", "margin": "1e999 nats"}, "finite"), ({"metric": "kld_mean", "margin": "-1 nats"}, "not negative"),
    ({"metric": "kld_mean", "margin": "1 pp"}, "nats"), ({"metric": "kld_maen", "margin": "1 nats"}, "did you mean 'kld_mean'"),
    ({"metric": "ppl", "margin": "1 ppl"}, "use limit"), ({"metric": "top1_agreement", "margin": "5 %"}, "pp"),
    ({"metric": "acc_delta/all", "margin": "1000 pp"}, "can never fail"),
    ({"metric": "acc_delta/all", "margin": "100 pp"}, "can never fail"),
    ({"metric": "top1_agreement", "margin": "100 pp"}, "can never fail"),
    ({"metric": "acc/all", "limit": "0 pp"}, "can never fail"),
    ({"metric": "failure_rate", "limit": "100 pp"}, "can never fail"),
    ({"metric": "speed_ratio", "margin": "100 %"}, "can never fail"),
    ({"metric": "p_mcnemar", "limit": "0 p"}, "can never fail"),
    ({"metric": "kld_mean", "margin": "50 nats"}, "protects nothing; the widest margin is 2 nats"),
    ({"metric": "ppl_ratio", "margin": "900 %"}, "protects nothing; the widest margin is 100 %"),
    ({"metric": "top1_agreement", "gain": "1 pp"}, "can never be met"),
    ({"metric": "kld_mean", "gain": "1 nats"}, "can never be met"),
    ({"metric": "acc_delta/all", "gain": "101 pp"}, "can never be met"),
    ({"metric": "top1_agreement", "margin": "100 pp", "against": "baseline"}, "can never fail"),
    ({"metric": "p_mcnemar", "margin": "0.1 p", "against": "baseline"}, "no value that means"),
])  # fmt: skip
def test_a_rule_that_could_be_read_wrongly_is_refused(rule: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParamsError, match=reason):
        bound_of(Rule(**rule))


@pytest.mark.parametrize("bound", [math.nan, math.inf, 1, 0.02, True, None, "", ".nan", "0.02"])
def test_a_bound_that_is_no_quantity_is_refused(bound: Any) -> None:
    with pytest.raises((ValidationError, ParamsError)):
        bound_of(Rule.model_validate({"metric": "kld_mean", "margin": bound}))


@pytest.mark.parametrize("more", [{"limit": "1 nats"}, {"margin": "1 nats", "above": "floor"}])
def test_against_the_baseline_there_is_no_limit_and_no_floor(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="against: baseline goes with a margin or a gain"):
        Rule.model_validate({"metric": "kld_mean", "against": "baseline"} | more)


def test_no_metric_has_a_bound_that_everything_it_can_be_would_meet() -> None:
    """The kind, over all definitions: the widest bound that is let through can still be failed, the strictest met."""
    for name, what in DEFINITIONS.items():
        low, high = {"pp": (-100.0, 100.0), "fraction": (0.0, 1.0), "p": (0.0, 1.0)}.get(what.unit, (0.0, math.inf))
        low = -1.0 if name == "delta_p_mean" else low
        unit, factor = next(iter(UNITS[what.unit].items()))
        for kind in ("margin", "gain", "limit"):
            for amount in (0, 1e-9, 0.5, 1, 50, 99, 100, 1000, 1e12):
                try:
                    bound = bound_of(Rule.model_validate({"metric": name, kind: f"{amount / factor!r} {unit}"}))
                except ParamsError:
                    continue
                if what.better == "lower":
                    past, met = bound.threshold < high, bound.threshold >= low
                else:
                    past, met = bound.threshold > low, bound.threshold <= high
                assert past and met, (name, kind, amount, bound)


def test_of_no_verdicts_nothing_passes() -> None:
    assert worst([]) == "FAIL" and worst(["PASS", "INCONCLUSIVE"]) == "INCONCLUSIVE"


def test_inconclusive_says_how_many_items_would_settle_it() -> None:
    judged = judge(bound_of(Rule(metric="acc_delta/all", margin="2 pp")), metric(-1.0, -2.4, 0.4, n=1000))
    assert judged.settle == 4005 and "about 4005 in place of 1000 would settle it in 80 % of runs" in judged.reason


# --- the stage ---------------------------------------------------------------------------------------------------

GOOD = {
    "kld_mean": metric(0.006, 0.005, 0.007), "top1_agreement": metric(0.97, 0.96, 0.98), "ppl_ratio": metric(1.0, 0.99, 1.01),
    "acc_delta/all": metric(0.1, -0.5, 0.7), "size_ratio": metric(0.6, 0.6, 0.6), "speed_ratio": metric(1, 0.95, 1.05),
}  # fmt: skip


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> params.Params:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    settings = params.load()
    for name in settings.variants:
        write_metrics(settings, name, GOOD)
    return settings


def change(variant: str, **fields: Any) -> None:
    artifacts.write_json(artifacts.metrics(variant), artifacts.read_json(artifacts.metrics(variant)) | fields)


@pytest.mark.parametrize("kld, expected, code", [
    (GOOD["kld_mean"], "PASS", 0), (metric(0.3, 0.2, 0.4), "FAIL", 1), (metric(0.02, 0.01, 0.03), "INCONCLUSIVE", 3),
])  # fmt: skip
def test_enforce_exits_by_the_verdict(house: params.Params, kld: dict[str, Any], expected: str, code: int) -> None:
    change("int8", metrics=GOOD | {"kld_mean": kld})
    assert judged(house)["verdict"] == expected and gate.enforce(house) == code


def test_an_advisory_variant_does_not_decide(house: params.Params) -> None:
    change("int4-gptq", metrics=GOOD | {"kld_mean": metric(0.3, 0.2, 0.4)})
    found = judged(house)
    assert found["variants"]["int4-gptq"]["verdict"] == "FAIL" and found["verdict"] == "PASS"


def test_a_listed_variant_without_any_results_passes_nothing_though_it_is_advisory(house: params.Params) -> None:
    assert "int4-gptq" not in house.gate.required and judged(house)["verdict"] == "PASS"
    artifacts.metrics("int4-gptq").unlink()
    assert judged(house)["verdict"] == "FAIL"


def test_an_advisory_rule_does_not_decide(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"speed_ratio": metric(0.5, 0.4, 0.6)})
    assert judged(house)["verdict"] == "PASS"


def test_inconclusive_passes_where_params_say_so(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"kld_mean": metric(0.02, 0.01, 0.03)})
    relaxed = house.model_copy(update={"gate": house.gate.model_copy(update={"inconclusive": "passes"})})
    judged(relaxed)
    assert gate.enforce(relaxed) == 0


def test_a_baseline_without_a_merge_is_refused(house: params.Params) -> None:
    with pytest.raises(ParamsError, match="--baseline goes with --enforce or --comment"):
        gate.main(rev="main")
    assert not artifacts.GATE.exists()


def damage_params(**changes: Any) -> None:
    data = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")) | changes
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


ROWS, MODEL = artifacts.answers("int8"), artifacts.model_dir("int8") / "model.safetensors"
PROTOCOL, ENGINE = map(Path, OTHERS)
STALE: dict[str, tuple[Any, str]] = {
    "no verdict": (artifacts.GATE.unlink, "reports/gate.json (missing)"),
    "an edited verdict": (lambda: artifacts.write_text(artifacts.GATE, '{"verdict": "PASS", "variants": {}}'), "reports/gate.json"),
    "an edited figure": (lambda: change("int8", reason="edited"), "reports/metrics/int8.json"),
    "a figure merged wrongly": (
        lambda: artifacts.write_text(artifacts.metrics("int8"), "<<<<<<< HEAD"),
        "reports/metrics/int8.json",
    ),
    "a figure that was lost": (artifacts.metrics("int8").unlink, "reports/metrics/int8.json (missing)"),
    "a folder in its place": (lambda: (artifacts.metrics("int8").unlink(), artifacts.metrics("int8").mkdir()), "int8.json"),
    "an edited floor": (lambda: artifacts.write_json(artifacts.FLOOR, {"metrics": {"kld_floor": 9}}), "reports/floor.json"),
    "other rows": (lambda: artifacts.write_jsonl(ROWS, [{"a": 2}]), "artifacts/answers/int8.jsonl"),
    "another model": (lambda: artifacts.write_text(MODEL, "other weights"), "artifacts/models/int8/model.safetensors"),
    "another protocol": (lambda: artifacts.write_text(PROTOCOL, "evaluate: 2"), "pipeline/protocol.yaml"),
    "another engine": (lambda: artifacts.write_text(ENGINE, "other code"), "pipeline/engines/hf.py"),
    "an engine that was lost": (ENGINE.unlink, "pipeline/engines/hf.py (missing)"),
    "other rules": (lambda: damage_params(gate={"required": ["int8"], "rules": [KLD]}), "params.yaml (gate)"),
    "another seed": (lambda: damage_params(seed=1), "params.yaml (seed)"),
    "no dvc.lock": (dvc_lock.LOCK.unlink, "reports/gate.json"),
    "a damaged dvc.lock": (lambda: artifacts.write_text(dvc_lock.LOCK, "stages: ["), "unable to read: 'dvc.lock'"),
    "no stages": (Path("dvc.yaml").unlink, "dvc.yaml"),
}


@pytest.mark.parametrize("damage, said", STALE.values(), ids=STALE.keys())
def test_whatever_differs_from_what_was_measured_is_exit_2_and_named_once_with_one_remedy(
    house: params.Params, damage: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (*map(Path, OTHERS), MODEL):
        artifacts.write_text(path, "as it was")
    artifacts.write_jsonl(ROWS, [{"a": 1}])
    artifacts.write_json(artifacts.FLOOR, {"metrics": {}})
    judged(house)
    damage()
    assert enforced() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gate: ") and line.count(said) == 1 and line.count("run `dvc repro`") <= 1


def test_faulty_params_are_exit_2_and_the_summary_says_what_the_gate_says(
    house: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(house)
    assert report.stale_line(house) is None
    change("int8", reason="edited")
    assert enforced() == 2 and report.stale_line(house) == f"STALE: {capsys.readouterr().err.strip().removeprefix('gate: ')}"
    damage_params(seed="abc")
    assert enforced() == 2 and "params.yaml:1: seed = 'abc': must be a whole number" in capsys.readouterr().err


def enforced() -> int:
    """What `python -m pipeline.gate --enforce` exits with."""
    with pytest.raises(SystemExit) as exit:
        gate.main(enforcing=True)
    return int(str(exit.value.code))


@pytest.mark.parametrize("status, word", [("unsupported", "no kernel here"), ("invalid", "NaN in layer 3")])
def test_a_required_variant_that_did_not_run_fails_the_gate(house: params.Params, status: str, word: str) -> None:
    change("int8", status=status, reason=word, metrics={})
    found = judged(house)
    assert found["verdict"] == "FAIL" and word in found["variants"]["int8"]["reason"]


def test_empty_results_fail_by_each_rule_s_own_reason(house: params.Params) -> None:
    change("int8", metrics={})
    found = judged(house)["variants"]["int8"]
    assert found["verdict"] == "FAIL" and {r["verdict"] for r in found["rules"]} == {"FAIL"}
    assert all(f"{r['metric']} is missing from the results" == r["reason"] for r in found["rules"])


def test_without_any_results_nothing_passes(house: params.Params) -> None:
    for name in house.variants:
        artifacts.metrics(name).unlink()
    found = judged(house)
    assert found["verdict"] == "FAIL" and {v["verdict"] for v in found["variants"].values()} == {"FAIL"}


def test_results_made_for_other_options_fail(house: params.Params) -> None:
    change("int8", asked={"scheme": "int8-dynamic"})
    assert "made for other params" in judged(house)["variants"]["int8"]["reason"]


def make_base(files: dict[str, str]) -> None:
    """artifacts/base with these files and the manifest that `download` would write; the results are of it."""
    for name, text in files.items():
        artifacts.write_text(artifacts.BASE / name, text)
    found = artifacts.files_of(artifacts.BASE)
    artifacts.write_json(artifacts.BASE / artifacts.MANIFEST, {"files": found, "digest": artifacts.digest(found)})
    for name in ("bf16", "int8"):
        change(name, base=artifacts.digest(found))


def test_a_local_model_that_changed_since_its_download_is_stale(
    house: params.Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("1")
    make_base({"config.json": "1"})
    house = house.model_copy(update={"model": params.PathModel(source="path", path=str(folder))})
    judged(house)
    assert gate.enforce(house) == 0
    (folder / "config.json").write_text("2")
    capsys.readouterr()
    assert gate.enforce(house) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"not what was downloaded: {folder / 'config.json'}; run `dvc repro -f download`, then `dvc repro`")


def test_a_file_that_was_repaired_at_download_is_no_change_and_one_that_was_added_is(house: params.Params, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "generation_config.json").write_text("as given")
    make_base({"generation_config.json": "repaired"})
    manifest = artifacts.read_manifest(artifacts.BASE)
    given = artifacts.sha256_file(folder / "generation_config.json")
    told = {"given": ["generation_config.json"], "repaired": {"generation_config.json": given}}
    artifacts.write_json(artifacts.BASE / artifacts.MANIFEST, manifest | told)
    house = house.model_copy(update={"model": params.PathModel(source="path", path=str(folder))})
    assert freshness.changed_source(house) == []
    (folder / "added_tokens.json").write_text("{}")
    assert freshness.changed_source(house) == [str(folder / "added_tokens.json")]


def test_metrics_edited_by_hand_and_judged_anew_are_exit_2(house: params.Params, capsys: pytest.CaptureFixture[str]) -> None:
    """gate.json agrees with them; only DVC knows that no stage wrote them."""
    change("int8", metrics=GOOD | {"kld_mean": metric(0.3, 0.2, 0.4)})
    assert judged(house)["verdict"] == "FAIL"
    change("int8", metrics=GOOD)
    gate.main()
    assert gate.enforce(house) == 2 and "reports/metrics/int8.json" in capsys.readouterr().err
    lock(house)
    assert gate.enforce(house) == 0


def test_too_few_documents_never_decide() -> None:
    few = metric(0.001, 0.001, 0.001, clusters=3)
    judged = judge(bound_of(Rule(metric="kld_mean", margin="1 nats")), few)
    assert judged.verdict == "INCONCLUSIVE" and "3 documents" in judged.reason


def test_warnings_travel_with_the_verdict() -> None:
    found = metric(0.001, 0.001, 0.001, clusters=22) | {"warnings": ["22 clusters are few for an interval"]}
    assert "22 clusters are few" in judge(bound_of(Rule(metric="kld_mean", margin="1 nats")), found).reason


def test_what_params_no_longer_name_appears_nowhere(house: params.Params) -> None:
    artifacts.write_json(artifacts.metrics("retired-variant"), {"status": "ok", "metrics": {}})
    assert "retired-variant" not in str(judged(house))


# --- several rules at once ---------------------------------------------------------------------------------------

BARELY = metric(0.0245, 0.0201, 0.029, n=5000, clusters=40)  # wholly past 0.02, by a hair: one-sided p 0.024
NEARLY = metric(0.03, 0.0218, 0.0382, n=5000, clusters=40)  # p 0.009: of four rules it would have to be 0.00625


@pytest.mark.parametrize("kld", [BARELY, NEARLY])
def test_a_fail_that_holms_correction_does_not_bear_out_is_inconclusive(house: params.Params, kld: dict[str, Any]) -> None:
    change("int8", metrics=GOOD | {"kld_mean": kld})
    found = judged(house)["variants"]["int8"]
    rule = found["rules"][0]
    assert found["verdict"] == rule["verdict"] == "INCONCLUSIVE"
    assert found["family"] == {"rules": 4, "correction": "Holm 1979", "level": pytest.approx(0.025), "sided": "one"}
    assert rule["p_fail"] < 0.025 < rule["p_fail_holm"] == pytest.approx(4 * rule["p_fail"])
    assert "one of 4 rules" in found["reason"] and rule["settle"] > 5000 and str(rule["settle"]) in found["reason"]


def test_the_same_figure_fails_where_it_is_the_only_rule(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"kld_mean": BARELY})
    alone = house.model_copy(update={"gate": house.gate.model_copy(update={"rules": house.gate.rules[:1]})})
    assert judged(alone)["variants"]["int8"]["verdict"] == "FAIL"


def test_one_clear_fail_carries_the_next_by_a_step_less(house: params.Params) -> None:
    """Holm, not Bonferroni: once the clearest of four stands, the next needs to hold against three."""
    next_one = metric(1.04, 1.0239, 1.056, n=5000, clusters=200)  # past 1.02; p 0.0077: times 3 it stands, times 4 it would not
    change("int8", metrics=GOOD | {"kld_mean": metric(0.3, 0.2, 0.4), "ppl_ratio": next_one})
    rules = {r["metric"]: r for r in judged(house)["variants"]["int8"]["rules"]}
    assert rules["ppl_ratio"]["verdict"] == "FAIL" and 4 * rules["ppl_ratio"]["p_fail"] > 0.025
    assert rules["ppl_ratio"]["p_fail_holm"] == pytest.approx(3 * rules["ppl_ratio"]["p_fail"])


def test_exact_and_missing_figures_fail_without_correction_and_do_not_count(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"size_ratio": metric(0.9, 0.9, 0.9, n=1)})
    found = judged(house)["variants"]["int8"]
    size = next(r for r in found["rules"] if r["metric"] == "size_ratio")
    assert found["verdict"] == "FAIL" and size["p_fail"] == size["p_fail_holm"] == 0 and found["family"]["rules"] == 4
    change("int8", metrics={k: v for k, v in GOOD.items() if k != "kld_mean"})
    found = judged(house)["variants"]["int8"]
    assert found["verdict"] == "FAIL" and found["rules"][0]["p_fail"] is None and found["family"]["rules"] == 3


def test_an_advisory_rule_is_no_part_of_the_family(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"speed_ratio": metric(0.8, 0.7, 0.89, n=5)})
    found = judged(house)["variants"]["int8"]
    speed = next(r for r in found["rules"] if r["metric"] == "speed_ratio")
    assert speed["verdict"] == "FAIL" and speed["p_fail_holm"] == speed["p_fail"] and found["verdict"] == "PASS"


def test_another_variant_does_not_change_a_variants_verdict(house: params.Params) -> None:
    change("int8", metrics=GOOD | {"kld_mean": metric(0.03, 0.024, 0.036, n=5000, clusters=40)})
    before = judged(house)["variants"]["int8"]
    change("int4-gptq", metrics=GOOD | {"kld_mean": BARELY})
    assert judged(house)["variants"]["int8"] == before


def test_four_good_figures_at_their_bounds_fail_a_variant_in_5_of_100_runs_at_most(house: params.Params) -> None:
    """Uncorrected, four rules would fail it in about 10: the second figure here says so of the same draws."""
    names, rng = ("kld_mean", "top1_agreement", "ppl_ratio", "acc_delta/all"), np.random.default_rng(3)
    bounds = {b.metric: b for b in (bound_of(r) for r in house.gate.rules)}
    one = house.model_copy(update={"variants": {k: house.variants[k] for k in ("bf16", "int8")}})
    held = plain = 0
    for errors in rng.normal(size=(400, 4)):
        figures = {n: bounds[n].threshold + 0.01 * e for n, e in zip(names, errors)}
        found = {n: metric(v, v - 0.0196, v + 0.0196, n=10**6) for n, v in figures.items()}
        rules = verdicts.of({"int8": result(one, "int8", GOOD | found)}, one)["variants"]["int8"]["rules"]
        held += any(r["verdict"] == "FAIL" for r in rules)
        plain += any(judge(bounds[n], found[n]).verdict == "FAIL" for n in names)
    assert held / 400 <= 0.05 < plain / 400 <= 0.14, (held, plain)


def test_30_lost_and_20_won_is_judged_by_its_interval_and_never_called_significant(house: params.Params) -> None:
    found = paired_difference(600, 30, 20, 350, confidence=0.95)
    assert found.value is not None and found.low is not None and found.high is not None
    change("int8", metrics=GOOD | {"acc_delta/all": metric(100 * found.value, 100 * found.low, 100 * found.high, n=1000)})
    written = judged(house)["variants"]["int8"]
    assert written["verdict"] == "INCONCLUSIVE" and "margin 2 pp" in written["reason"]
    assert "significant" not in str(written).lower()


def test_what_is_not_here_is_named_and_keeps_nothing_from_passing(house: params.Params, capsys: pytest.CaptureFixture[str]) -> None:
    """A clone has neither rows nor models."""
    for path in (ROWS, MODEL):
        artifacts.write_text(path, "as it was")
    judged(house)
    shutil.rmtree(artifacts.ARTIFACTS)
    assert gate.enforce(house) == 0
    assert f"not here, and so not compared with dvc.lock: {ROWS}, {MODEL}\n" in capsys.readouterr().out


@pytest.mark.parametrize("asked, value, said", [
    ({"metric": "top1_agreement", "margin": "7 pp"}, 0.5, "at least 93 (margin 7 pp)"),
    ({"metric": "top1_agreement", "margin": "2 pp", "against": "baseline"}, -0.5, "at least -2 (margin 2 pp against"),
    ({"metric": "weight_bytes", "limit": "300 MB"}, 4e8, "at most 300 (limit 300 MB)"),
    ({"metric": "ppl_ratio", "margin": "2 %"}, 1.5, "at most 1.02 (margin 2 %)"),
])  # fmt: skip
def test_a_reason_has_its_bound_in_the_unit_that_the_rule_has(asked: dict[str, Any], value: float, said: str) -> None:
    assert said in judge(bound_of(Rule(**asked)), metric(value, value, value)).reason


def test_an_empty_baseline_is_exit_2_and_not_none(house: params.Params, capsys: pytest.CaptureFixture[str]) -> None:
    judged(house)
    assert gate.enforce(house, " ") == 2 and "--baseline is empty" in capsys.readouterr().err


def test_without_a_baseline_it_is_said_that_rules_were_not_compared(
    house: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(house)
    assert gate.enforce(house) == 0 and "no baseline named: the rules were not compared" in capsys.readouterr().out
