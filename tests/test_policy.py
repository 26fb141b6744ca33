"""A gate that is looser than at the commit merged into fails, unless its params.yaml gives a new reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from gate_house import commit, finish, git, metric, run, write_metrics
from test_gate import GOOD, damage_params

from pipeline import gate
from pipeline.core import artifacts, params
from pipeline.core.errors import ParamsError
from pipeline.gating import comment
from pipeline.gating.verdicts import Merge, for_merge

KLD = {"metric": "kld_mean", "margin": "0.02 nats"}
ACC = {"metric": "acc_delta/all", "margin": "2 pp", "variants": ["int8", "nf4"]}
SPEED = {"metric": "speed_ratio", "margin": "10 %", "required": False}
RULES = [KLD, ACC, SPEED]


def measure(settings: params.Params, **metrics: Any) -> None:
    all_metrics = {name: m | {"confidence": settings.compare.confidence} for name, m in (GOOD | metrics).items()}
    for name in settings.variants:
        write_metrics(settings, name, all_metrics, model=name)


@pytest.fixture
def house() -> params.Params:
    """Three rules that all pass, on a branch that starts from `main`."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["variants"] = {name: data["variants"][name] for name in ("bf16", "int8", "nf4")}
    data["serving"] = {"variants": {}}
    data["gate"] = {"required": ["int8"], "rules": RULES}
    artifacts.write_text(Path("params.yaml"), yaml.safe_dump(data, sort_keys=False))
    Path(".gitignore").write_text("/artifacts/\n/.dvc/tmp/\n")
    settings = params.load()
    measure(settings)
    git("init", "--quiet", "--initial-branch", "main")
    finish(settings, "rules")
    git("checkout", "--quiet", "-b", "change")
    return settings


def change(rules: list[dict[str, Any]] | None = None, **sections: Any) -> params.Params:
    """The change to be merged: params.yaml with other rules or sections, its results measured and judged."""
    gate_now = {"required": ["int8"], "rules": rules or RULES} | sections.pop("gate", {})
    damage_params(gate=gate_now, **sections)
    settings = params.load()
    measure(settings)
    run(settings)
    return settings


def merged(rules: list[dict[str, Any]] | None = None, **sections: Any) -> Merge:
    return for_merge(change(rules, **sections), "main")


WHY = {"reason": "a smaller model"}
LOOSER: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a wider margin": ([KLD | {"margin": "0.03 nats"}, ACC, SPEED], "margin 0.02 nats → margin 0.03 nats (noise 0.0014 nats)"),
    "of higher is better": ([KLD, ACC | {"margin": "2.1 pp"}, SPEED], "acc_delta/all: margin 2 pp → margin 2.1 pp (noise 0.86 pp)"),
    "of an advisory rule": ([KLD, ACC, SPEED | {"margin": "11 %"}], "10 %, advisory → margin 11 %, advisory (noise unknown)"),
    "a limit in its place": ([{"metric": "kld_mean", "limit": "0.03 nats"}, ACC, SPEED], "margin 0.02 nats → limit 0.03 nats"),
    "from the floor": ([KLD | {"above": "floor"}, ACC, SPEED], "margin 0.02 nats → margin 0.02 nats above the floor"),
    "no longer required": ([KLD | {"required": False}, ACC, SPEED], "margin 0.02 nats → margin 0.02 nats, advisory"),
    "for fewer variants": ([KLD, ACC | {"variants": ["nf4"]}, SPEED], "acc_delta/all: margin 2 pp → no rule for int8"),
}  # fmt: skip


@pytest.mark.parametrize("rules, line", LOOSER.values(), ids=LOOSER)
def test_a_looser_rule_fails_unless_it_says_why_and_the_comment_says_both(
    house: params.Params, rules: list[dict[str, Any]], line: str
) -> None:
    merge = merged(rules)
    (loosened,), v = merge.loosened, merge.verdict["variants"]["int8"]
    assert line in str(loosened) and str(loosened).endswith("; no new reason")
    assert merge.verdict["verdict"] == v["verdict"] == "FAIL"
    assert v["reason"].startswith(f"looser than at the baseline, without a new `reason:` in params.yaml: {loosened.what}")
    assert line in comment.render(merge)
    text = comment.render(merged([rule | (WHY if rule not in RULES else {}) for rule in rules]))
    assert line in text and "; reason: a smaller model\n" in text and "no new reason" not in text


SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a rule taken out": ({"rules": [ACC, SPEED]}, "kld_mean: margin 0.02 nats → no rule"),
    "against another thing": ({"rules": [KLD | {"against": "baseline"}, ACC, SPEED]}, "kld_mean: margin 0.02 nats → no rule"),
    "a variant that decided": ({"gate": {"required": ["nf4"]}}, "gate.required: int8 → taken out"),
    "INCONCLUSIVE passes": ({"gate": {"inconclusive": "passes"}}, "gate.inconclusive: blocks → passes"),
    "narrower intervals": ({"compare": {"confidence": 0.8}}, "compare.confidence: 0.95 → 0.8"),
    "runs that differ by less": ({"compare": {"between_runs": {"ratio": 0.01, "time": 0.1}}}, "between_runs.ratio: 0.05 → 0.01"),
    "runs that are not said to differ": ({"compare": {}}, "compare.between_runs.time: 0.1 → None"),
    "what is cut passes": ({"evaluate": {"allow_truncated": True}}, "evaluate.allow_truncated: False → True"),
}


@pytest.mark.parametrize("sections, line", SECTIONS.values(), ids=SECTIONS)
def test_whatever_else_gets_looser_fails_without_a_reason_under_gate(
    house: params.Params, sections: dict[str, Any], line: str
) -> None:
    merge = merged(**sections)
    assert merge.verdict["verdict"] == merge.verdict["variants"]["nf4"]["verdict"] == "FAIL"
    assert line in "".join(map(str, merge.loosened))
    merge = merged(**sections | {"gate": sections.get("gate", {}) | WHY})
    assert "at the baseline" not in str(merge.verdict) and {x.reason for x in merge.loosened} == {WHY["reason"]}


def test_a_limit_that_no_longer_names_its_machine_is_looser(house: params.Params) -> None:
    limit = {"metric": "ttft_ms", "limit": "500 ms", "machine": "51aadf10"}
    finish(change([*RULES, limit]), "a limit")
    git("checkout", "--quiet", "-b", "next")
    change([*RULES, {k: v for k, v in limit.items() if k != "machine"}])
    (loosened,) = for_merge(params.load(), "change").loosened
    assert "ttft_ms: limit 500 ms on machine 51aadf10 → limit 500 ms" in str(loosened)
    change([*RULES, limit])
    assert for_merge(params.load(), "change").loosened == []


def test_a_variant_that_is_no_longer_measured_needs_a_reason(house: params.Params) -> None:
    variants = {name: v.model_dump() for name, v in house.variants.items() if name != "nf4"}
    rules = [KLD, ACC | {"variants": ["int8"]}, SPEED]
    assert gate.enforce(change(rules, variants=variants), "main") == 1
    assert gate.enforce(change(rules, variants=variants, gate=WHY), "main") == 0


@pytest.mark.parametrize("rules", [
    [KLD | {"margin": "0.01 nats"}, ACC, SPEED],
    [KLD, ACC | {"variants": ["nf4", "int8"]}, SPEED | {"required": True, "margin": "6 %"}],
    [*RULES, {"metric": "ppl_ratio", "margin": "2 %"}],
    [KLD, KLD | {"margin": "0.05 nats", "variants": ["nf4"]}, {k: v for k, v in ACC.items() if k != "variants"}, SPEED],
])  # fmt: skip
def test_stricter_and_new_rules_need_no_reason(house: params.Params, rules: list[dict[str, Any]]) -> None:
    merge = merged(rules)
    assert merge.loosened == [] and "at the baseline" not in str(merge.verdict)


def test_an_old_reason_does_not_excuse_a_new_loosening(house: params.Params) -> None:
    """At the base it was the reason of an earlier loosening."""
    finish(change([KLD | {"margin": "0.03 nats"} | WHY, ACC, SPEED], gate=WHY), "looser")
    git("checkout", "--quiet", "-b", "next")
    assert gate.enforce(change([KLD | {"margin": "0.04 nats"} | WHY, ACC, SPEED], gate=WHY), "change") == 1
    assert gate.enforce(change([ACC, SPEED], gate=WHY), "change") == 1
    again = {"reason": "a still smaller one"}
    assert gate.enforce(change([KLD | {"margin": "0.04 nats"} | again, ACC, SPEED], gate=WHY), "change") == 0
    assert gate.enforce(change([ACC, SPEED], gate=again), "change") == 0
    assert gate.enforce(change([KLD | {"margin": "0.03 nats"}, ACC, SPEED]), "change") == 0, "a reason need not stay"


def test_a_rule_of_the_base_that_this_version_does_not_know_counts_as_taken_out(house: params.Params) -> None:
    git("checkout", "--quiet", "main")
    text = Path("params.yaml").read_text(encoding="utf-8").replace("metric: kld_mean", "metric: kld_of_before")
    artifacts.write_text(Path("params.yaml"), text)
    commit("an older version's")
    git("checkout", "--quiet", "change")
    assert [str(x) for x in merged().loosened] == ["kld_of_before: a rule → unknown to this version; no new reason"]


def test_the_noise_is_the_floors_upper_end_and_what_the_interval_of_a_required_variant_resolves(house: params.Params) -> None:
    settings = change([KLD | {"margin": "0.03 nats"}, ACC, SPEED | {"margin": "20 %"}])
    measure(settings, kld_floor=metric(0.002, 0.001, 0.003), speed_ratio=metric(1, 0.95, 1.05, between=0.01))
    wide = artifacts.read_json(artifacts.metrics("nf4"))
    wide["metrics"]["kld_mean"] |= {"low": 0.0001, "high": 0.9}
    artifacts.write_json(artifacts.metrics("nf4"), wide)
    run(settings)
    kld, speed = for_merge(settings, "main").loosened
    errors = 0.001 / 1.959964 * (1.959964 + 0.841621)  # 80 % of runs find a loss of 1.960 + 0.842 standard errors
    assert kld.noise == f"{0.003 + errors:.2g} nats" and speed.noise == "7.1 %"


def test_an_empty_reason_is_refused(house: params.Params) -> None:
    with pytest.raises(ParamsError, match=r"gate.rules.0.reason = ' ': must be a sentence"):
        change([KLD | {"reason": " "}, ACC, SPEED])
