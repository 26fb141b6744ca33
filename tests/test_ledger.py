"""No bound gets looser without figures that were not evidence before; whatever is tried otherwise fails with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_house import judge, keep_ledger, lock
from test_gate import GOOD, metric

from pipeline import gate
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.params import Rule
from pipeline.judging import ledger

ROOT = Path(__file__).resolve().parent.parent
RULES = [
    {"metric": "kld_mean", "margin": "0.02 nats"},
    {"metric": "acc_delta/all", "margin": "2 pp"},
    {"metric": "speed_ratio", "margin": "10 %", "required": False},
]


def with_rules(settings: params.Params, rules: list[dict[str, Any]], **more: Any) -> params.Params:
    changed = {"rules": [Rule.model_validate(r) for r in rules]} | more
    return settings.model_copy(update={"gate": settings.gate.model_copy(update=changed)})


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> params.Params:
    """Three rules that all pass, and a ledger that agrees with them."""
    monkeypatch.chdir(tmp_path)
    settings = with_rules(params.load(ROOT / "params.yaml"), RULES)
    settings = settings.model_copy(update={"variants": {n: settings.variants[n] for n in ("bf16", "int8", "nf4")}})
    for name, v in settings.variants.items():
        artifacts.write_json(artifacts.metrics(name), {
            "status": "ok", "reason": None, "metrics": {k: m | {"confidence": 0.95, "clusters": None} for k, m in GOOD.items()},
            "inputs": {}, "reference": "bf16", "quantizer": v.quantizer, "engine": v.engine, "asked": v.options,
            "engine_options": v.engine_options,
        })  # fmt: skip
    lock(settings)
    keep_ledger(settings)
    return settings


def results(settings: params.Params) -> dict[str, dict[str, Any]]:
    return gate._results(settings)


def remeasure(width: float) -> None:
    """Another run: kld_mean with another interval."""
    for name in ("bf16", "int8", "nf4"):
        found = artifacts.read_json(artifacts.metrics(name))
        kld = metric(0.006, 0.006 - width / 2, 0.006 + width / 2, confidence=0.95, clusters=None)
        artifacts.write_json(artifacts.metrics(name), found | {"metrics": found["metrics"] | {"kld_mean": kld}})


def test_rules_that_the_ledger_knows_pass(house: params.Params) -> None:
    found = judge(house)
    assert found["verdict"] == "PASS" and found["ledger"] == [] and gate.enforce(house) == 0


def test_the_committed_rules_have_entries_that_vouch_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    book = ledger.read()
    assert ledger.faults(params.load(), book) == []
    for entry in book["rules"]:
        last = entry["evidence"][-1]
        assert last["n"] > 0 and last["commit"] and last["date"] and last["noise"] >= 0 and last["interval_width"] >= 0


KLD, ACC, SPEED = RULES
LOOSER = [
    ("a wider margin", [KLD | {"margin": "0.03 nats"}, ACC, SPEED], "margin 0.03 nats is looser than the margin 0.02 nats"),
    ("a wider margin of a higher-is-better metric", [KLD, ACC | {"margin": "2.1 pp"}, SPEED], "2.1 pp is looser"),
    ("a wider margin of an advisory rule", [KLD, ACC, SPEED | {"margin": "11 %"}], "11 % is looser"),
    ("a limit in place of the margin", [{"metric": "kld_mean", "limit": "0.03 nats"}, ACC, SPEED], "limit 0.03 nats is looser"),
    ("the margin counts from the floor", [KLD | {"above": "floor"}, ACC, SPEED], "now counts from the floor"),
    ("required no longer", [KLD | {"required": False}, ACC, SPEED], "is no longer required"),
    ("taken out", [ACC, SPEED], "no rule of params.yaml asks for it"),
    ("for fewer variants", [KLD | {"variants": ["nf4"]}, ACC, SPEED], "no rule of params.yaml asks for it"),
    ("against another thing", [KLD | {"against": "baseline"}, ACC, SPEED], "no rule of params.yaml asks for it"),
]


@pytest.mark.parametrize("rules, reason", [case[1:] for case in LOOSER], ids=[case[0] for case in LOOSER])
def test_a_looser_rule_fails_the_gate_and_says_so(house: params.Params, rules: list[dict[str, Any]], reason: str) -> None:
    found = judge(with_rules(house, rules))
    assert found["verdict"] == "FAIL" and reason in found["variants"]["int8"]["reason"]
    assert any(reason in text and "--justify" in text for text in found["ledger"])
    assert gate.enforce(with_rules(house, rules)) in (1, 2)  # 2: a floor or a baseline is asked for that is not there


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"gate": {"required": ["nf4"]}}, "no longer required: int8"),
        ({"gate": {"inconclusive": "passes"}}, "INCONCLUSIVE no longer blocks"),
        ({"compare": {"confidence": 0.8}}, "confidence 0.8 instead of 0.95"),
    ],
)
def test_a_looser_policy_fails_the_gate(house: params.Params, change: dict[str, dict[str, Any]], reason: str) -> None:
    for section, values in change.items():
        house = house.model_copy(update={section: getattr(house, section).model_copy(update=values)})
    found = judge(house)
    assert found["verdict"] == "FAIL" and reason in found["variants"]["nf4"]["reason"]
    with pytest.raises(ArtifactError, match="give --reason WHY"):
        ledger.justify("policy", house, results(house))
    ledger.justify("policy", house, results(house), "a new variant ships")
    assert judge(house)["verdict"] == "PASS" and ledger.read()["policy"]["reason"] == "a new variant ships"


@pytest.mark.parametrize(
    "rules",
    [
        [KLD | {"margin": "0.01 nats"}, ACC, SPEED],
        [KLD, ACC, SPEED | {"required": True}],
        [KLD, KLD | {"margin": "0.05 nats", "variants": ["nf4"]}, ACC, SPEED],
    ],
)
def test_a_rule_that_asks_for_as_much_or_more_needs_no_evidence(house: params.Params, rules: list[dict[str, Any]]) -> None:
    assert judge(with_rules(house, rules))["ledger"] == []


def test_a_rule_without_an_entry_fails_until_its_evidence_is_written(house: params.Params) -> None:
    more = with_rules(house, [*RULES, {"metric": "ppl_ratio", "margin": "2 %"}])
    assert "ppl_ratio: the rule has no entry" in judge(more)["variants"]["int8"]["reason"]
    ledger.justify("ppl_ratio", more, results(more))
    assert judge(more)["verdict"] == "PASS"


@pytest.mark.parametrize("how", ["margin", "evidence", "policy", "removed"])
def test_an_entry_edited_by_hand_vouches_for_nothing(house: params.Params, how: str) -> None:
    if how == "removed":
        ledger.justify("speed_ratio", with_rules(house, RULES[:2]), results(house), "not timed any more")
    book = yaml.safe_load(ledger.FILE.read_text(encoding="utf-8"))
    if how == "margin":
        book["rules"][0]["rule"]["margin"] = "0.5 nats"
    elif how == "evidence":
        book["rules"][0]["evidence"][0]["noise"] = 0.5
    elif how == "policy":
        book["policy"]["required"] = ["nf4"]
    else:
        book["removed"][0]["reason"] = "another"
    ledger.write(book)
    found = judge(with_rules(house, [KLD | {"margin": "0.5 nats"}, ACC, SPEED]))
    assert found["verdict"] == "FAIL" and "edited by hand" in found["variants"]["int8"]["reason"]


@pytest.mark.parametrize("text", ["", "[]", "rules: 3", "policy: {}", "\t", "rules: [{rule: {metric: kld_mean}}]\npolicy: null"])
def test_a_damaged_ledger_fails_with_one_line(house: params.Params, text: str) -> None:
    artifacts.write_text(ledger.FILE, text)
    found = judge(house)
    assert found["verdict"] == "FAIL" and "is damaged" in found["ledger"][0] and "\n" not in found["ledger"][0]


def test_without_a_ledger_nothing_passes(house: params.Params) -> None:
    ledger.FILE.unlink()
    found = judge(house)
    assert found["verdict"] == "FAIL" and "has no entry" in str(found["ledger"]) and gate.enforce(house) == 2


# --- --justify ---------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(house: params.Params) -> params.Params:
    """The house with a ledger whose evidence is the house's own figures."""
    ledger.FILE.unlink()
    ledger.justify("all", house, results(house))
    return house


def test_justify_writes_n_noise_interval_date_and_commit(measured: params.Params) -> None:
    entry = ledger.read()["rules"][0]
    found = entry["evidence"][0]
    # 0.002 wide: its error is 0.001 / 1.960, and 1.960 + 0.842 errors are found in 80 % of runs
    assert found["noise"] == pytest.approx(0.001 / 1.959964 * (1.959964 + 0.841621), rel=1e-5)
    assert found["interval_width"] == pytest.approx(0.002) and found["n"] == 100 and found["of"] == "int8"
    assert found["floor"] is None and "no rerun of the reference" in found["from"] and found["date"] and "commit" in found
    assert judge(measured)["verdict"] == "PASS"


def test_justifying_again_with_the_same_figures_changes_nothing(measured: params.Params) -> None:
    before = ledger.FILE.read_text(encoding="utf-8")
    told = ledger.justify("kld_mean", measured, results(measured))
    assert ledger.FILE.read_text(encoding="utf-8") == before and "nothing is added" in told[0]


def test_noise_counts_from_the_upper_end_of_the_floor(measured: params.Params) -> None:
    own = artifacts.read_json(artifacts.metrics("bf16"))
    floor = {"value": 0.002, "low": 0.001, "high": 0.003, "n": 900}
    artifacts.write_json(
        artifacts.metrics("bf16"), own | {"metrics": own["metrics"] | {"kld_floor": floor, "kld_floor/rerun": floor}}
    )
    ledger.justify("kld_mean", measured, results(measured))
    first, second = ledger.read()["rules"][0]["evidence"]
    assert second["noise"] == pytest.approx(first["noise"] + 0.003) and second["floor"]["by"] == {"rerun": 0.002}


def test_the_same_figures_justify_nothing_new(measured: params.Params) -> None:
    looser = with_rules(measured, [KLD | {"margin": "0.021 nats"}, ACC, SPEED])
    before = ledger.FILE.read_text(encoding="utf-8")
    with pytest.raises(ArtifactError, match="evidence in reports/ledger.yaml already; measure anew"):
        ledger.justify("kld_mean", looser, results(looser), "please")
    assert ledger.FILE.read_text(encoding="utf-8") == before and judge(looser)["verdict"] == "FAIL"


def test_new_figures_justify_what_their_noise_explains_and_more_only_with_a_reason(measured: params.Params) -> None:
    remeasure(0.03)  # noise 0.015 / 1.96 * 2.80 = 0.0214
    within, beyond = (with_rules(measured, [KLD | {"margin": m}, ACC, SPEED]) for m in ("0.021 nats", "0.03 nats"))
    with pytest.raises(ArtifactError, match=r"margin 0.03 nats is more than the noise of 0.021 nats explains"):
        ledger.justify("kld_mean", beyond, results(beyond))
    ledger.justify("kld_mean", within, results(within))
    assert ledger.faults(within, ledger.read()) == []
    remeasure(0.032)
    ledger.justify("kld_mean", beyond, results(beyond), "a smaller model")
    entry = next(e for e in ledger.read()["rules"] if e["rule"]["metric"] == "kld_mean")
    assert ledger.faults(beyond, ledger.read()) == [] and entry["reason"] == "a smaller model" and len(entry["evidence"]) == 3


def test_a_rule_is_taken_out_only_with_a_reason_that_stays(measured: params.Params) -> None:
    fewer = with_rules(measured, [ACC, SPEED])
    with pytest.raises(ArtifactError, match="give --reason WHY"):
        ledger.justify("kld_mean", fewer, results(fewer))
    ledger.justify("kld_mean", fewer, results(fewer), "top1_agreement says it")
    assert ledger.faults(fewer, ledger.read()) == [] and ledger.read()["removed"][0]["reason"] == "top1_agreement says it"


@pytest.mark.parametrize(
    "name, error, message",
    [("kld_maen", ParamsError, "did you mean 'kld_mean'"), ("kld_mean", ArtifactError, "no interval in the results")],
)
def test_what_cannot_be_justified_is_one_line(measured: params.Params, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ledger.justify(name, measured, {})


# --- since the baseline ------------------------------------------------------------------------------------------


def test_a_ledger_changed_along_with_the_rule_needs_evidence_that_the_baseline_had_not(measured: params.Params) -> None:
    """Who edits both files, seal and all, is seen by the ledger of the commit that is merged into."""
    then = ledger.read()
    looser = with_rules(measured, [KLD | {"margin": "0.021 nats"}, ACC, SPEED])
    book = ledger.read()
    book["rules"][0] = ledger.sealed(
        {k: v for k, v in book["rules"][0].items() if k != "seal"}
        | {"rule": looser.gate.rules[0].model_dump(exclude_defaults=True)}
    )
    ledger.write(book)
    verdict = gate.gate(results(looser), looser)
    assert ledger.judged(verdict, looser)["ledger"] == []
    held = ledger.judged(verdict, looser, then)
    assert held["verdict"] == "FAIL" and "since the baseline" in held["ledger"][0]
    ledger.write(then)
    remeasure(0.03)
    ledger.justify("kld_mean", looser, results(looser))
    held = ledger.judged(verdict, looser, then)
    assert held["verdict"] == verdict["verdict"] and "0.021 nats is looser" in held["loosened"][0]


def test_a_rule_taken_out_with_a_reason_is_no_fault_since_the_baseline(measured: params.Params) -> None:
    then, fewer = ledger.read(), with_rules(measured, [ACC, SPEED])
    ledger.justify("kld_mean", fewer, results(fewer), "why not")
    held = ledger.judged(gate.gate(results(fewer), fewer), fewer, then)
    assert held["ledger"] == [] and "kld_mean" in held["loosened"][0]
