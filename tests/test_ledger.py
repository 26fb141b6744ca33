"""No bound gets looser without figures that were not evidence before; whatever is tried otherwise fails with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_house import commit, git, judge, keep_ledger, lock
from test_gate import GOOD, metric

from pipeline import gate, report
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.params import BetweenRuns, Rule
from pipeline.gating import evidence, justify, ledger, proof, verdicts
from pipeline.gating.rules import bound_of

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
        ({"": {"reference": "int8"}}, "bounds count from int8 instead of bf16"),
        ({"compare": {"between_runs": BetweenRuns(ratio=0.9)}}, "whole runs are taken to differ by {'ratio': 0.9, 'time': None}"),
        ({"compare": {"between_runs": BetweenRuns()}}, "whole runs are taken to differ by {'ratio': None, 'time': None}"),
    ],
)
def test_a_looser_policy_fails_the_gate(house: params.Params, change: dict[str, dict[str, Any]], reason: str) -> None:
    for section, values in change.items():
        update = {section: getattr(house, section).model_copy(update=values)} if section else values
        house = house.model_copy(update=update)
    if house.reference == "int8":
        house = with_rules(house, RULES, required=["nf4"])
    for name in house.variants:
        found = artifacts.read_json(artifacts.metrics(name))
        own = {k: m | {"confidence": house.compare.confidence} for k, m in found["metrics"].items()}
        artifacts.write_json(artifacts.metrics(name), found | {"reference": house.reference, "metrics": own})
    found = judge(house)
    assert found["verdict"] == "FAIL" and reason in found["variants"]["nf4"]["reason"]
    with pytest.raises(ArtifactError, match="give --reason WHY"):
        justify.justify("policy", house, results(house))
    justify.justify("policy", house, results(house), "a new variant ships")
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
    justify.justify("ppl_ratio", more, results(more))
    assert judge(more)["verdict"] == "PASS"


@pytest.mark.parametrize("how", ["margin", "evidence", "policy", "removed"])
def test_an_entry_edited_by_hand_vouches_for_nothing(house: params.Params, how: str) -> None:
    if how == "removed":
        justify.justify("speed_ratio", with_rules(house, RULES[:2]), results(house), "not timed any more")
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


@pytest.mark.parametrize("change", [{"noise": None, "date": None}, {"noise": "much"}, {"of": ["int8"]}, {"n": {}}])
def test_evidence_of_another_shape_is_no_traceback(house: params.Params, change: dict[str, Any]) -> None:
    book = ledger.read()
    for k, entry in enumerate(book["rules"]):
        bare = {key: v for key, v in entry["evidence"][0].items() if key != "noise"}
        book["rules"][k] = ledger.sealed(entry | {"evidence": [bare | change]})
    ledger.write(book)
    judge(with_rules(house, [KLD | {"margin": "0.5 nats"}, ACC, SPEED]))
    assert gate.enforce(with_rules(house, [KLD | {"margin": "0.5 nats"}, ACC, SPEED])) in (1, 2)
    ledger.write(book | {"rules": [ledger.sealed(e | {"evidence": [{"figures": "x"}]}) for e in book["rules"]]})
    assert "is damaged (" in judge(house)["ledger"][0]
    assert proof.doubt("kld_mean", {"figures": "x"}) == "it is damaged (KeyError)"


@pytest.mark.parametrize("rule, noise, expected", [
    ({"metric": "top1_agreement", "margin": "7 pp"}, 0.0123, "1.2 pp"), ({"metric": "ppl_ratio", "margin": "2 %"}, 0.004, "0.4 %"),
    ({"metric": "kld_mean", "margin": "0.02 nats"}, 0.003, "0.003 nats"), ({"metric": "ttft_ms", "limit": "1 s"}, 250.0, "0.25 s"),
    ({"metric": "size_ratio", "gain": "30 %"}, 0.01, "1 %"), ({"metric": "acc_delta/all", "margin": "2 pp"}, 1.5, "1.5 pp"),
])  # fmt: skip
def test_a_noise_is_told_in_the_unit_of_the_bound_beside_it(rule: dict[str, Any], noise: float, expected: str) -> None:
    made = Rule.model_validate(rule)
    bound_of(made)
    assert ledger.noise_in_words(made, noise) == expected
    entry = {"rule": rule, "evidence": [{"date": "d", "of": "int8", "n": 9, "noise": noise, "unit": "fraction"}]}
    assert ledger._evidence_line(entry).endswith(f"n = 9, noise {expected}")


DAMAGED = [
    ("rules: [", "line 1 is not valid YAML"), ("policy: {}", "'rules' is missing"), ("rules: 3", "not what --justify writes"),
    ("", "not what --justify writes"), ("\xff", "is not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize("text, words", DAMAGED)
def test_a_damaged_ledger_is_named_with_what_is_wrong_and_what_to_do(
    house: params.Params, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    monkeypatch.setattr(params, "load", lambda: house)
    verdict = judge(house)
    ledger.FILE.write_bytes(text.encode("latin-1"))
    assert gate._enforce_or_stale() == gate.STALE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gate: reports/ledger.yaml") and words in line and "stale" not in line
    assert words in str(report.stale_line(verdict, house))
    gate.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("gate       FAIL") and second.startswith("ledger     reports/ledger.yaml") and words in second
    for told in (line, second):
        assert "take it back from git" in told or "save it as UTF-8" in told


def test_the_stage_says_why_a_looser_bound_fails(
    house: params.Params, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(params, "load", lambda: house)
    gate.main()
    assert len(capsys.readouterr().out.splitlines()) == 1
    looser = with_rules(house, [KLD | {"margin": "0.5 nats"}, ACC, SPEED])
    monkeypatch.setattr(params, "load", lambda: looser)
    gate.main()
    assert "\nledger     kld_mean: margin 0.5 nats is looser than" in capsys.readouterr().out


def test_without_a_ledger_nothing_passes(house: params.Params) -> None:
    ledger.FILE.unlink()
    found = judge(house)
    assert found["verdict"] == "FAIL" and "has no entry" in str(found["ledger"]) and gate.enforce(house) == 2


# --- --justify ---------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(house: params.Params) -> params.Params:
    """The house with a ledger whose evidence is the house's own figures."""
    ledger.FILE.unlink()
    justify.justify("all", house, results(house))
    return house


def test_justify_writes_n_noise_interval_date_and_commit(measured: params.Params) -> None:
    entry = ledger.read()["rules"][0]
    found = entry["evidence"][0]
    # 0.002 wide: its error is 0.001 / 1.960, and 1.960 + 0.842 errors are found in 80 % of runs
    assert found["noise"] == pytest.approx(0.001 / 1.959964 * (1.959964 + 0.841621), rel=1e-5)
    assert found["interval_width"] == pytest.approx(0.002) and found["n"] == 100 and found["of"] == "int8"
    assert found["floor"] is None and "no rerun of the reference" in found["from"] and found["date"] and "commit" in found
    assert judge(measured)["verdict"] == "PASS"


@pytest.mark.parametrize(
    "metric, between, noise",
    [("speed_ratio", None, None), ("speed_ratio", 0.05, 0.1), ("ttft_ms", None, None), ("acc_delta/all", None, 0.1)],
)
def test_the_noise_of_a_timed_figure_is_known_only_where_whole_runs_are(
    metric: str, between: float | None, noise: float | None
) -> None:
    """Rounds of one run share its minutes: their spread alone explains no looser bound."""
    figure = {"low": 0.9, "high": 1.1, "confidence": 0.95, "between": between}
    assert evidence.noise(metric, figure, None) == (noise and pytest.approx(noise * (1.959964 + 0.841621) / 1.959964, rel=1e-5))


def timed_anew(between: float | None, high: float) -> None:
    found = artifacts.read_json(artifacts.metrics("int8"))
    speed = metric(1.5, 1.2, high, confidence=0.95, clusters=None, between=between)
    artifacts.write_json(artifacts.metrics("int8"), found | {"metrics": found["metrics"] | {"speed_ratio": speed}})


def test_timings_of_one_run_justify_a_looser_speed_only_with_a_reason(
    measured: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    then, looser = ledger.read(), with_rules(measured, [KLD, ACC, SPEED | {"margin": "40 %"}])
    timed_anew(None, 1.9)
    lock(looser)
    with pytest.raises(ArtifactError, match="margin 40 % is more than noise explains: it is not known"):
        justify.justify("speed_ratio", looser, results(looser))
    told = justify.justify("speed_ratio", looser, results(looser), "another machine")
    assert "noise unknown (" in told[0] and "one run: how far whole runs differ is not known (compare.between_runs)" in told[0]
    assert ledger.faults(looser, ledger.read()) == []
    ledger.write(then)
    timed_anew(0.05, 1.9)
    lock(looser)
    told = justify.justify("speed_ratio", looser, results(looser))
    assert "noise 50 % (" in told[0] and "with the 5 % that whole runs differ by" in told[0]


def test_noise_that_was_written_of_one_run_explains_no_looser_speed(measured: params.Params) -> None:
    timed_anew(None, 1.9)
    lock(measured)
    m = results(measured)["int8"]["metrics"]["speed_ratio"]
    found = {k: m[k] for k in ("value", "low", "high", "n")} | {"of": "int8", "floor": None, "noise": 0.5}
    found |= {"figures": evidence.figures("int8", m, None)}
    assert "its noise of 0.5 is one run's" in proof.doubt("speed_ratio", found)
    assert proof.doubt("speed_ratio", found | {"noise": None}) == ""


def test_justifying_again_with_the_same_figures_changes_nothing(measured: params.Params) -> None:
    before = ledger.FILE.read_text(encoding="utf-8")
    told = justify.justify("kld_mean", measured, results(measured))
    assert ledger.FILE.read_text(encoding="utf-8") == before and "nothing is added" in told[0]


def test_noise_counts_from_the_upper_end_of_the_floor(measured: params.Params) -> None:
    own = artifacts.read_json(artifacts.metrics("bf16"))
    floor = {"value": 0.002, "low": 0.001, "high": 0.003, "n": 900}
    artifacts.write_json(
        artifacts.metrics("bf16"), own | {"metrics": own["metrics"] | {"kld_floor": floor, "kld_floor/rerun": floor}}
    )
    justify.justify("kld_mean", measured, results(measured))
    first, second = ledger.read()["rules"][0]["evidence"]
    assert second["noise"] == pytest.approx(first["noise"] + 0.003) and second["floor"]["by"] == {"rerun": 0.002}


def test_the_same_figures_justify_nothing_new(measured: params.Params) -> None:
    looser = with_rules(measured, [KLD | {"margin": "0.021 nats"}, ACC, SPEED])
    before = ledger.FILE.read_text(encoding="utf-8")
    with pytest.raises(ArtifactError, match="evidence in reports/ledger.yaml already; measure anew"):
        justify.justify("kld_mean", looser, results(looser), "please")
    assert ledger.FILE.read_text(encoding="utf-8") == before and judge(looser)["verdict"] == "FAIL"


def test_new_figures_justify_what_their_noise_explains_and_more_only_with_a_reason(measured: params.Params) -> None:
    remeasure(0.03)  # noise 0.015 / 1.96 * 2.80 = 0.0214
    within, beyond = (with_rules(measured, [KLD | {"margin": m}, ACC, SPEED]) for m in ("0.021 nats", "0.03 nats"))
    with pytest.raises(ArtifactError, match=r"margin 0.03 nats is more than the noise of 0.021 nats explains"):
        justify.justify("kld_mean", beyond, results(beyond))
    justify.justify("kld_mean", within, results(within))
    assert ledger.faults(within, ledger.read()) == []
    remeasure(0.032)
    justify.justify("kld_mean", beyond, results(beyond), "a smaller model")
    entry = next(e for e in ledger.read()["rules"] if e["rule"]["metric"] == "kld_mean")
    assert ledger.faults(beyond, ledger.read()) == [] and entry["reason"] == "a smaller model" and len(entry["evidence"]) == 3


def test_a_rule_is_taken_out_only_with_a_reason_that_stays(measured: params.Params) -> None:
    fewer = with_rules(measured, [ACC, SPEED])
    with pytest.raises(ArtifactError, match="give --reason WHY"):
        justify.justify("kld_mean", fewer, results(fewer))
    justify.justify("kld_mean", fewer, results(fewer), "top1_agreement says it")
    assert ledger.faults(fewer, ledger.read()) == [] and ledger.read()["removed"][0]["reason"] == "top1_agreement says it"


@pytest.mark.parametrize(
    "name, error, message",
    [("kld_maen", ParamsError, "did you mean 'kld_mean'"), ("kld_mean", ArtifactError, "no interval in the results")],
)
def test_what_cannot_be_justified_is_one_line(measured: params.Params, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        justify.justify(name, measured, {})


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
    verdict = verdicts.of(results(looser), looser)
    assert ledger.judged(verdict, looser)["ledger"] == []
    held = ledger.judged(verdict, looser, {ledger.BASELINE: then})
    assert held["verdict"] == "FAIL" and "since the baseline" in held["ledger"][0]
    ledger.write(then)
    remeasure(0.03)
    lock(looser)
    justify.justify("kld_mean", looser, results(looser))
    held = ledger.judged(verdict, looser, {ledger.BASELINE: then})
    assert held["verdict"] == verdict["verdict"] and "0.021 nats is looser" in held["loosened"][0]


def test_a_rule_taken_out_with_a_reason_is_no_fault_since_the_baseline(measured: params.Params) -> None:
    then, fewer = ledger.read(), with_rules(measured, [ACC, SPEED])
    justify.justify("kld_mean", fewer, results(fewer), "why not")
    held = ledger.judged(verdicts.of(results(fewer), fewer), fewer, {ledger.BASELINE: then})
    assert held["ledger"] == [] and "kld_mean" in held["loosened"][0]


# --- since a commit ----------------------------------------------------------------------------------------------


@pytest.fixture
def committed(measured: params.Params) -> params.Params:
    """The house in git, its ledger among what HEAD holds."""
    git("init", "--quiet")
    judge(measured)
    commit("rules with their evidence")
    return measured


WIDER = [KLD | {"margin": "0.021 nats"}, ACC, SPEED]


def take_out(metric: str | None) -> None:
    """By hand: an entry, the policy, or (None) the whole file."""
    if metric is None:
        ledger.FILE.unlink()
        return
    book = ledger.read()
    left = [e for e in book["rules"] if e["rule"]["metric"] != metric]
    ledger.write(book | ({"policy": None} if metric == "policy" else {"rules": left}))


@pytest.mark.parametrize("kept", ["here", "committed"])
@pytest.mark.parametrize("out", ["kld_mean", None])
def test_an_entry_taken_out_by_hand_still_holds_where_a_looser_margin_is_to_be_justified(
    committed: params.Params, out: str | None, kept: str
) -> None:
    looser = with_rules(committed, WIDER)
    take_out(out)
    if kept == "committed":
        commit("no entry, no question")
    assert "has no entry" in str(judge(looser)["ledger"])
    with pytest.raises(ArtifactError, match="these figures are evidence in reports/ledger.yaml already"):
        justify.justify("kld_mean", looser, results(looser), "please")
    remeasure(0.03)
    justify.justify("kld_mean", looser, results(looser))  # evidence that supports it
    entry = next(e for e in ledger.read()["rules"] if e["rule"]["metric"] == "kld_mean")
    assert len(entry["evidence"]) == 2 and entry["evidence"][1]["noise"] > 0.021 and entry["evidence"][1]["commit"]


def test_an_entry_taken_out_by_hand_comes_back_with_its_evidence_where_the_margin_is_the_same(committed: params.Params) -> None:
    then = ledger.FILE.read_text(encoding="utf-8")
    take_out("kld_mean")
    justify.justify("kld_mean", committed, results(committed))
    assert {ledger.seal(e) for e in ledger.read()["rules"]} == {e["seal"] for e in yaml.safe_load(then)["rules"]}


def test_the_policy_taken_out_by_hand_still_holds(committed: params.Params) -> None:
    laxer = with_rules(committed, RULES, required=["nf4"])
    take_out("policy")
    with pytest.raises(ArtifactError, match="no longer required: int8: no figure can say why; give --reason WHY"):
        justify.justify("policy", laxer, results(laxer))


def forge(settings: params.Params) -> None:
    """An entry for what params ask now, sealed, with the evidence of before: what `--justify` would not have written."""
    book = ledger.read()
    old = next(e for e in book["rules"] if e["rule"]["metric"] == "kld_mean")
    new = {"rule": settings.gate.rules[0].model_dump(exclude_defaults=True), "reason": "r", "evidence": old["evidence"]}
    ledger.write(book | {"rules": [ledger.sealed(new), *(e for e in book["rules"] if e is not old)]})


@pytest.mark.parametrize("kept", ["here", "committed", "two commits ago"])
def test_what_a_commit_s_ledger_held_fails_a_looser_entry_that_nothing_new_vouches_for(
    committed: params.Params, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    looser = with_rules(committed, WIDER)
    if kept == "two commits ago":
        take_out("kld_mean")
        commit("first out")
        git("checkout", "--quiet", "HEAD~1", "--", str(ledger.FILE))
    forge(looser)
    assert judge(looser)["ledger"] == []  # the stage follows from files alone
    if kept != "here":
        commit("then in")
    lock(looser)
    assert gate.enforce(looser) == 1
    said = capsys.readouterr().out
    assert "since commit " in said and "margin 0.021 nats is looser than the margin 0.02 nats" in said


def test_an_entry_that_vanished_while_its_rule_stands_fails_and_is_named(
    committed: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    take_out("kld_mean")
    judge(committed)
    assert gate.enforce(committed) == 1 and "kld_mean: the rule has no entry" in capsys.readouterr().out


@pytest.mark.parametrize("reason, code", [(None, 1), ("a smaller model", 0)])
def test_new_figures_that_do_not_explain_a_looser_entry_are_no_support_without_a_reason(
    committed: params.Params, reason: str | None, code: int
) -> None:
    looser = with_rules(committed, [KLD | {"margin": "0.05 nats"}, ACC, SPEED])
    remeasure(0.03)
    lock(looser)
    justify.justify("kld_mean", looser, results(looser), "a smaller model")
    book = ledger.read()
    ledger.write(book | {"rules": [ledger.sealed(e | {"reason": reason}) for e in book["rules"]]})
    assert judge(looser)["verdict"] == "PASS" and gate.enforce(looser) == code


def with_evidence(settings: params.Params, change: dict[str, Any]) -> None:
    """One more piece of evidence for the rule on kld_mean, with a digest and noise that agree with it unless they are given."""
    book = ledger.read()
    old = next(e for e in book["rules"] if e["rule"]["metric"] == "kld_mean")
    found = old["evidence"][0] | change
    agree = {"figures": evidence.figures(found["of"], found, found["floor"])}
    agree |= {"noise": evidence.noise("kld_mean", found | {"confidence": 0.95}, found["floor"])}
    new = {
        "rule": settings.gate.rules[0].model_dump(exclude_defaults=True), "reason": None,
        "evidence": [*old["evidence"], found | agree | change],
    }  # fmt: skip
    ledger.write(book | {"rules": [ledger.sealed(new), *(e for e in book["rules"] if e is not old)]})


FORGED: list[tuple[dict[str, Any], str]] = [
    ({"figures": "deadbeefdeadbeef", "noise": 0.6, "commit": "0000000"}, "deadbeefdeadbeef is not the digest of the figures"),
    ({"low": -0.6, "high": 0.6, "commit": "0000000"}, "kld_mean of int8 = 0.006 (n = 100) stands in no results that a dvc.lock"),
    ({"of": "../../elsewhere"}, "stands in no results"),
    ({"floor": {"value": 0.5, "low": 0.5, "high": 0.6, "n": 9, "by": {}, "runs": 0}}, "stands in no results"),
    ({"of": "nf4", "noise": 0.6}, "its noise of 0.6 is 0.00143 by the figures"),
    ({"of": "nf4", "value": "much", "figures": "x"}, "x is not the digest"),
]


@pytest.mark.parametrize("change, said", FORGED)
def test_evidence_that_nobody_measured_supports_no_looser_bound(
    committed: params.Params, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    looser = with_rules(committed, [KLD | {"margin": "0.5 nats"}, ACC, SPEED])
    with_evidence(looser, change)
    assert judge(looser)["ledger"] == []  # seal and all are as they should be
    commit("a wider margin, and noise that nobody measured")
    assert gate.enforce(looser) == 1
    out = capsys.readouterr().out
    assert "; its evidence supports nothing: " in out and said in out


def test_evidence_supports_only_where_the_lock_vouches_for_the_results_it_is_of(committed: params.Params) -> None:
    """Results under a name that no verdict looks at, made by hand."""
    looser = with_rules(committed, [KLD | {"margin": "0.5 nats"}, ACC, SPEED])
    wide = artifacts.read_json(artifacts.metrics("int8"))
    wide["metrics"]["kld_mean"] |= {"low": -0.6, "high": 0.6}
    artifacts.write_json(artifacts.metrics("mine"), wide)
    with_evidence(looser, {"of": "mine", "low": -0.6, "high": 0.6})
    judge(looser)
    assert gate.enforce(looser) == 1


def clone(settings: params.Params, into: Path, *options: str) -> None:
    git("clone", "--quiet", *options, f"file://{Path.cwd()}", str(into))


@pytest.mark.parametrize("options, code", [((), 0), (("--depth", "1"), 1)])
def test_evidence_of_a_commit_that_is_not_here_is_not_known_and_passes_nothing(
    committed: params.Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], code: int,
) -> None:  # fmt: skip
    """The figures that explained the wider margin are a commit's; a later one was measured anew."""
    looser, then = with_rules(committed, WIDER), ledger.FILE.read_text(encoding="utf-8")
    remeasure(0.03)
    lock(looser)
    justify.justify("kld_mean", looser, results(looser))
    commit("noise, and a margin that it explains")
    remeasure(0.002)
    lock(looser)
    judge(looser)
    commit("measured anew")
    clone(looser, tmp_path / "clone", *options)
    monkeypatch.chdir(tmp_path / "clone")
    book = ledger.parse(then, "then")
    held = ledger.judged(verdicts.of(results(looser), looser), looser, {ledger.BASELINE: book})
    assert (held["verdict"] == "FAIL") == bool(code) == bool(held["ledger"])
    assert not code or "is not known in a clone without its history; `git fetch --unshallow`" in held["ledger"][0]
    assert gate.enforce(looser) == 0  # a ledger that says what it said loosens nothing


def test_what_was_justified_step_by_step_passes_in_every_commit(committed: params.Params) -> None:
    settings = committed
    for width, margin, reason in ((0.03, "0.021 nats", None), (0.032, "0.03 nats", "a smaller model"), (0.033, "0.025 nats", None)):
        remeasure(width)
        settings = with_rules(committed, [KLD | {"margin": margin}, ACC, SPEED])
        justify.justify("kld_mean", settings, results(settings), reason)
        lock(settings)
        judge(settings)
        commit(margin)
        assert gate.enforce(settings) == 0
    fewer = with_rules(settings, [ACC, SPEED])
    justify.justify("kld_mean", fewer, results(fewer), "top1_agreement says it")
    judge(fewer)
    commit("out")
    assert gate.enforce(fewer) == 0
    justify.justify("all", fewer, results(fewer))
    judge(fewer)
    assert gate.enforce(fewer) == 0


def test_a_rule_taken_out_and_asked_for_again_is_held_to_what_it_was(committed: params.Params) -> None:
    fewer, looser = with_rules(committed, [ACC, SPEED]), with_rules(committed, WIDER)
    justify.justify("kld_mean", fewer, results(fewer), "not now")
    commit("out")
    with pytest.raises(ArtifactError, match="these figures are evidence in reports/ledger.yaml already"):
        justify.justify("kld_mean", looser, results(looser))
    forge_in = with_rules(committed, WIDER).gate.rules[0].model_dump(exclude_defaults=True)
    book = ledger.read()
    ledger.write(book | {"rules": [ledger.sealed({"rule": forge_in, "reason": "r", "evidence": []}), *book["rules"]]})
    judge(looser)
    assert gate.enforce(looser) == 1


def test_one_of_two_rules_on_a_metric_goes_only_with_a_reason_that_stays(committed: params.Params) -> None:
    both = with_rules(committed, [*RULES, KLD | {"against": "baseline"}])
    justify.justify("kld_mean", both, results(both))
    remeasure(0.03)
    with pytest.raises(ArtifactError, match="kld_mean against the baseline is gone from params.yaml; .* give --reason WHY"):
        justify.justify("kld_mean", committed, results(committed))
    justify.justify("kld_mean", committed, results(committed), "merges are judged elsewhere")
    assert ledger.read()["removed"][0]["rules"] == [KLD | {"against": "baseline"}]
    assert ledger.faults(committed, ledger.read()) == []


@pytest.mark.parametrize("name, reason, said", [("all", "x", "a reason is one rule's"), ("kld_mean", "  ", "is empty")])
def test_a_reason_is_words_for_one_rule(measured: params.Params, name: str, reason: str, said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        justify.justify(name, measured, results(measured), reason)


def test_a_reason_stays_with_the_policy_when_it_is_written_again(committed: params.Params) -> None:
    laxer = with_rules(committed, RULES, required=["nf4"])
    justify.justify("policy", laxer, results(laxer), "nf4 ships")
    justify.justify("all", laxer, results(laxer))
    judge(laxer)
    assert ledger.read()["policy"]["reason"] == "nf4 ships" and gate.enforce(laxer) == 0


def test_another_variant_s_noise_is_no_evidence_on_what_a_required_one_must_keep(house: params.Params) -> None:
    wide = artifacts.read_json(artifacts.metrics("nf4"))
    kld = metric(0.006, 0.001, 0.9, confidence=0.95, clusters=None)
    artifacts.write_json(artifacts.metrics("nf4"), wide | {"metrics": wide["metrics"] | {"kld_mean": kld}})
    both = with_rules(house, RULES, required=["nf4", "int8"])
    rule = Rule.model_validate(KLD)
    assert evidence.evidence(rule, both, results(both))["of"] == "int8", "the least noise of those that decide"
    book = ledger.read()
    entry = next(e for e in book["rules"] if e["rule"]["metric"] == "kld_mean")
    assert ledger._speaks("int8", entry, book) and not ledger._speaks("nf4", entry, book)
    only = entry | {"rule": {**KLD, "variants": ["nf4"]}}
    assert ledger._speaks("nf4", only, book), "where no required variant has the rule, others speak for it"


def test_a_rule_for_fewer_variants_needs_words_as_one_taken_out_does(house: params.Params) -> None:
    fewer = with_rules(house, [KLD | {"variants": ["nf4"]}, ACC, SPEED])
    with pytest.raises(ArtifactError, match="kld_mean holds for fewer variants than before; .* give --reason WHY"):
        justify.justify("kld_mean", fewer, results(fewer))
    justify.justify("kld_mean", fewer, results(fewer), "int8 ships no more")
    assert judge(fewer)["ledger"] == []


@pytest.mark.parametrize("now, then, fewer", [
    ([None], [None], False), ([["a"]], [None], True), ([["a"], ["b"]], [["a", "b"]], False), ([["a"]], [["a", "b"]], True),
    ([None], [["a"]], False), ([["a"], None], [None], False),
])  # fmt: skip
def test_a_rule_holds_for_fewer_variants_where_none_of_its_own_covers_one(now: list[Any], then: list[Any], fewer: bool) -> None:
    ours, theirs = ({"rules": [{"rule": KLD | ({"variants": v} if v else {})} for v in own]} for own in (now, then))
    assert ledger.lost(("kld_mean", "reference"), ours, theirs) is fewer
