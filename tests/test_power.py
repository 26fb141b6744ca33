"""What a tier can resolve is reported before it runs, from earlier results if there are any, and compared with the margins."""

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gate_house import alone, write_manifest

from pipeline import check
from pipeline.core import artifacts, params
from pipeline.core.params import Rule
from pipeline.preflight import power
from pipeline.stats import intervals

LOADED = functools.cache(power.tasks.load_task)  # the sets are the same in every house


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> params.Params:
    """The project's params, sets and record, in a folder where nothing has run."""
    monkeypatch.setattr(power.tasks, "load_task", LOADED)
    monkeypatch.setattr(check, "_lm_eval_tasks", set)  # seconds
    (tmp_path / "evalsets").symlink_to(ROOT / "evalsets")
    (tmp_path / "reports").mkdir()
    for name in ("params.yaml", "reports/evalsets.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    return params.load()


def metric(value: float, low: float | None = None, high: float | None = None, n: int = 300, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "unit": "", **alone()} | more


def measured(base: str = "b", **metrics: Any) -> None:
    """Leave what an earlier run of int8 would have left."""
    write_manifest(artifacts.BASE, **params.load().model.model_dump() | {"digest": "b"})
    last = artifacts.read_json(ROOT / artifacts.metrics("int8"))
    artifacts.write_json(artifacts.metrics("int8"), last | {"base": base, "metrics": metrics})


def changed(wrong: int, right: int) -> dict[str, Any]:
    return {"flips_to_wrong/facts": metric(wrong), "flips_to_right/facts": metric(right)}


def with_rule(house: params.Params, **rule: str) -> params.Params:
    return house.model_copy(update={"gate": house.gate.model_copy(update={"rules": [Rule(**rule)]})})  # type: ignore[arg-type]


def with_tier(house: params.Params, **changes: Any) -> params.Params:
    return house.model_copy(update={"tiers": house.tiers | {house.tier: house.amount.model_copy(update=changes)}})


def line(settings: params.Params, start: str) -> str:
    (only,) = [x for x in power.lines(settings) if x.startswith(start)]
    return only


def resolves(text: str) -> float:
    number = re.search(r"resolves ([\d.]+) ", text)
    assert number, text
    return float(number[1])


def test_the_record_says_what_a_fresh_clone_can_resolve(house: params.Params) -> None:
    assert line(house, "rule acc_delta/all, margin 2 pp").startswith("rule acc_delta/all, margin 2 pp: n = 696 items resolves")
    assert "reports/evalsets.json: 1.7 % of 592 answers changed" in line(house, "facts")
    assert "the default model, tier full" in power.lines(house)[-1]


def test_what_was_measured_here_goes_before_the_record(house: params.Params) -> None:
    measured(**{"acc_delta/facts": metric(-1, -3.5, 1.5)}, **changed(9, 6))
    assert "int8's last run: 15 of 300 answers changed" in line(house, "facts")
    assert resolves(line(house, "facts")) == pytest.approx(2.5 * 2.8016 / 1.96, abs=0.05)
    assert "evalsets.json" in line(house, "grammar")


def test_what_an_earlier_run_could_not_judge_is_a_warning(house: params.Params) -> None:
    blind = metric(0.0, n=696, warnings=["the reference is at chance"])
    measured(**{"acc_delta/facts": blind, "acc_delta/all": blind})
    for start in ("facts", "rule acc_delta/all"):
        assert "WARNING: INCONCLUSIVE in int8's last run: the reference is at chance" in line(house, start)


def test_another_models_run_is_not_used(house: params.Params) -> None:
    measured("another", **{"acc_delta/facts": metric(-1, -3.5, 1.5)}, **changed(9, 6))
    assert "evalsets.json" in line(house, "facts") and "of another base" in power.lines(house)[-1]


def test_four_times_the_documents_resolve_half(house: params.Params) -> None:
    settings = with_rule(house, metric="ppl_ratio", margin="2 %")
    measured(ppl_ratio=metric(1.0, 0.98, 1.02, 4000, clusters=44))
    few = resolves(line(settings, "rule ppl_ratio"))  # 11 documents in this tier
    measured(ppl_ratio=metric(1.0, 0.98, 1.02, 4000, clusters=11))
    assert few == pytest.approx(2 * resolves(line(settings, "rule ppl_ratio")), rel=0.03)


def test_a_margin_that_cannot_be_resolved_is_a_warning_with_the_items_needed(house: params.Params) -> None:
    said = line(with_rule(house, metric="acc_delta/all", margin="1 pp"), "rule acc_delta/all")
    needed = re.search(r"about (\d+) items \(the sets hold (\d+)\) resolve it", said)
    assert "WARNING" in said and needed
    assert int(needed[1]) == pytest.approx(696 * resolves(said) ** 2, rel=0.06) and int(needed[2]) == 3112
    nothing = line(with_rule(house, metric="acc_delta/all", margin="0 pp"), "rule acc_delta/all")
    assert "WARNING" in nothing and "no number of items" in nothing


def test_a_tier_too_small_for_any_verdict_is_a_warning(house: params.Params) -> None:
    settings = with_tier(house, documents=5, trajectories=6)
    assert "WARNING: always INCONCLUSIVE: 5 texts weigh as 5 equal ones" in line(settings, "rule ppl_ratio")
    assert "WARNING: always INCONCLUSIVE: 11 texts weigh as" in line(settings, "rule kld_mean")
    assert "WARNING" not in line(house, "rule ppl_ratio") + line(house, "rule kld_mean")


def test_a_divergence_is_resolved_in_parts_of_itself(house: params.Params) -> None:
    measured(kld_mean=metric(0.01, 0.008, 0.012, 5000, clusters=27))
    said = line(with_rule(house, metric="kld_mean", margin="0.02 nats"), "rule kld_mean")
    assert resolves(said) == pytest.approx(100 * 0.2 * 2.8016 / 1.96, abs=0.5)
    assert "up to 0.0156 nats passes" in said  # 0.02 / 1.286


def test_how_far_whole_runs_differ_is_not_reduced_by_more_rounds(house: params.Params) -> None:
    measured(speed_ratio=metric(1.2, 1.1, 1.3, 5, between=0.05))
    said = line(with_rule(house, metric="speed_ratio", gain="15 %"), "rule speed_ratio")
    assert "more rounds would not help: whole runs differ too much" in said and resolves(said) > 0.05 * 1.2 * 2.8 * 100


def test_a_task_of_ones_own_is_unknown_until_a_variant_has_been_measured(house: params.Params) -> None:
    settings = with_tier(house, tasks={"facts": 300, "mine": 100})
    assert line(settings, "mine") == "mine: n = 100 items; unknown until a variant has been measured"
    assert "unknown until a variant has been measured: mine" in line(settings, "rule acc_delta/all")


def test_an_edited_set_has_no_record(house: params.Params) -> None:
    record = artifacts.read_json(power.RECORD)
    record["sets"]["tasks/facts"]["files"] = dict.fromkeys(record["sets"]["tasks/facts"]["files"], "0" * 64)
    artifacts.write_json(power.RECORD, record)
    assert "unknown until" in line(house, "facts")


@pytest.mark.parametrize("content", ["{", "[]", '{"sets": []}', '{"sets": {"tasks/facts": 3}}', "{}"])
def test_a_damaged_record_stops_nothing_and_is_named(house: params.Params, content: str) -> None:
    power.RECORD.write_text(content, encoding="utf-8")
    assert "unknown until" in line(house, "facts") and not any("resolves" in x for x in power.lines(house))
    assert line(house, "ignored: reports/evalsets.json is ")


def test_check_prints_it_and_writes_what_it_always_writes(house: params.Params, capsys: pytest.CaptureFixture[str]) -> None:
    check.main()
    fresh = check.CHECKED.read_bytes()
    assert "rule acc_delta/all, margin 2 pp: n = 696" in capsys.readouterr().out
    measured(**{"acc_delta/facts": metric(-1, -9, 7)}, **changed(3, 1))
    check.main()
    assert check.CHECKED.read_bytes() == fresh and "int8's last run" in capsys.readouterr().out


def test_a_variant_without_loss_passes_a_margin_as_large_as_what_is_resolved_in_80_of_100_runs(house: params.Params) -> None:
    score, share, n, rng = 0.7, 0.03, 700, np.random.default_rng(4)
    margin = power._smallest(n, score, share, power.Sources(house)) / 100
    cells = [score - share / 2, share / 2, share / 2, 1 - score - share / 2]
    lows = [intervals.paired_difference(*map(int, t), confidence=0.95).low for t in rng.multinomial(n, cells, 1500)]
    assert 0.72 <= np.mean([low > -margin for low in lows]) <= 0.88  # type: ignore[operator]
