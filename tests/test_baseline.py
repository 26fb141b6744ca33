"""A merge is judged against the commit it goes into: paired if its rows are available, and never passed if it is missing."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT
from gate_house import EACH, ITEMS, MACHINE, answer_rows, builder, commit, finish, git, make, metric, run, token_rows

from pipeline import gate
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Rule
from pipeline.gating import baseline, comment
from pipeline.gating.paired_difference import items_paired, tokens_paired, unpaired
from pipeline.gating.rules import bound_of
from pipeline.gating.rules import judge as judge_metric
from pipeline.gating.verdicts import for_merge
from pipeline.serving import results as server_results
from pipeline.stats import intervals

RULES = [
    {"metric": "kld_mean", "margin": "0.6 nats"},
    {"metric": "kld_mean", "margin": "0.05 nats", "against": "baseline"},
    {"metric": "acc_delta/all", "margin": "5 pp", "against": "baseline"},
    {"metric": "ppl_ratio", "margin": "20 %", "against": "baseline", "required": False},
]
INT4 = {"quantizer": "rtn", "engine": "hf", "options": {"bits": 4, "group_size": 64}}


def edit(change: Any) -> params.Params:
    data = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    change(data)
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return params.load()


@pytest.fixture(scope="session")
def on_main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose branch `main` has an int4 of 0.25 nats; a branch `change` starts from there."""
    folder = tmp_path_factory.mktemp("on_main")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copy(ROOT / "params.yaml", "params.yaml")
        Path(".gitignore").write_text("/artifacts/\n/.dvc/cache/\n/.dvc/tmp/\n")

        def small(p: dict[str, Any]) -> None:
            p["variants"] = {"bf16": p["variants"]["bf16"], "int4": copy.deepcopy(INT4)}
            p["serving"] = {"variants": {}}
            p["gate"] = {"required": ["int4"], "rules": RULES}
            p["compare"]["resamples"] = 200

        settings = edit(small)
        make(settings, "bf16", 0.0, 20)
        make(settings, "int4", 0.25, 40)
        git("init", "--quiet", "--initial-branch", "main")
        finish(settings, "int4 in groups of 64")
        git("checkout", "--quiet", "-b", "change")
    return folder


@pytest.fixture
def house(on_main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> params.Params:
    """A copy of that repository, as the working directory."""
    shutil.copytree(on_main, tmp_path, dirs_exist_ok=True)
    monkeypatch.delenv(baseline.VARIABLE, raising=False)
    return params.load()


def coarser(loss: float = 0.5, wrong: int = 60, **sizes: int) -> params.Params:
    """The change: one option of int4, and the results that it gives."""
    settings = edit(lambda p: p["variants"]["int4"]["options"].update(group_size=-1))
    make(settings, "int4", loss, wrong, **sizes)
    finish(settings, "int4 in whole rows")
    return settings


def merged(settings: params.Params) -> Any:
    """How a merge into main judges int4."""
    return for_merge(settings, "main").verdict["variants"]["int4"]


def differences(settings: params.Params) -> dict[str, Any]:
    changes = for_merge(settings, "main").changes
    assert changes is not None
    return dict(changes.variants["int4"].differences)


def rule(v: Any, metric: str, against: str = "baseline") -> Any:
    return next(r for r in v["rules"] if (r["metric"], r["against"]) == (metric, against))


# --- the demonstration: one option makes int4 worse -----------------------------------------------------------------


def test_an_int4_made_worse_by_one_option_fails_against_the_baseline_with_the_reason(house: params.Params) -> None:
    settings = coarser()
    v = merged(settings)
    kld = rule(v, "kld_mean")
    truth = np.mean(token_rows(0.5)["kld"]) - np.mean(token_rows(0.25)["kld"])
    assert v["verdict"] == "FAIL" and kld["verdict"] == "FAIL" and kld["value"] == pytest.approx(truth)
    assert "kld_mean: the whole interval is past the bound: at most 0.05 (margin 0.05 nats against the baseline)" in v["reason"]
    assert rule(v, "kld_mean", "reference")["verdict"] == "PASS"  # by itself it is good enough: only the merge makes it worse
    assert v["family"]["rules"] == 3, "against reference and baseline; the advisory rule is not one"


def test_the_comment_says_the_verdict_the_three_differences_and_folds_the_rest(house: params.Params) -> None:
    assert gate.enforce(coarser(), "main", write=True) == 1
    lines = comment.FILE.read_text(encoding="utf-8").split("\n")
    assert lines[0] == comment.MARK and lines[1].startswith("### quantgate: FAIL against `main` (")
    assert lines[3].startswith("- **int4**: FAIL")
    deltas = [line for line in lines[5:10] if line.startswith("- **int4** ")]
    assert "Brackets: 95 % intervals; arrows: from the baseline to this change. Reference: `bf16`." in lines
    assert len(deltas) == comment.DELTAS and deltas[0].startswith("- **int4** kld_mean: 0.2")
    assert all(part in line for line in deltas for part in ("→", "[", "n = ", "paired by"))
    assert all(any(unit in line for unit in (" nats", " pp", " ×")) for line in deltas)
    assert "nats, +0.2" in deltas[0] and "(paired by token, n = 1000): FAIL, margin 0.05 nats against the baseline" in deltas[0]
    fold = lines.index("</details>")
    assert any(line.startswith("| variant |") for line in lines[10:fold]) and lines[fold + 1 :] == [""]


def test_an_int4_as_it_was_and_a_better_one_pass(house: params.Params) -> None:
    settings = edit(lambda p: p["track"].update(experiment="another"))
    run(settings)
    v = merged(settings)
    assert v["verdict"] == "PASS" and rule(v, "kld_mean")["low"] == rule(v, "kld_mean")["high"] == 0
    assert rule(v, "ppl_ratio")["value"] == 1 and gate.enforce(settings, "main") == 0
    v = merged(coarser(0.1, 30))
    assert v["verdict"] == "PASS" and rule(v, "kld_mean")["high"] < 0 and rule(v, "acc_delta/all")["value"] > 0


# --- pairing -----------------------------------------------------------------------------------------------------


def test_paired_differences_are_those_of_the_closed_forms_and_narrower_than_unpaired_ones(house: params.Params) -> None:
    v = merged(coarser(0.3, 60))
    acc = rule(v, "acc_delta/all")
    newcombe = intervals.paired_difference(ITEMS - 60, 20, 0, 40, confidence=0.95)  # 40 wrong before, the same and 20 more now
    expected = [100 * x for x in (newcombe.value, newcombe.low, newcombe.high)]
    assert [acc["value"], acc["low"], acc["high"]] == pytest.approx(expected)
    kld, alone = rule(v, "kld_mean"), rule(v, "kld_mean", "reference")
    assert kld["high"] - kld["low"] < 0.5 * (alone["high"] - alone["low"])
    ratio = rule(v, "ppl_ratio")
    loss = np.array(token_rows(0.25)["logp"]) - np.array(token_rows(0.3)["logp"])
    assert ratio["value"] == pytest.approx(np.exp(loss.mean()))


def test_without_the_baselines_rows_summaries_are_compared_and_say_that_pairing_was_lost(house: params.Params) -> None:
    settings = coarser()
    paired = rule(merged(settings), "kld_mean")
    then = baseline.read("main").lock["artifacts/tokens/int4.parquet"]
    shutil.copy(artifacts.tokens("int4"), baseline.CACHE / then[:2] / then[2:])  # not those of the metrics
    assert "is not what the metrics were made from" in rule(merged(settings), "kld_mean")["reason"]
    shutil.rmtree(baseline.CACHE)
    kld = rule(merged(settings), "kld_mean")
    assert kld["value"] == pytest.approx(paired["value"]) and kld["high"] - kld["low"] > paired["high"] - paired["low"]
    assert "pairing was lost: artifacts/tokens/int4.parquet" in kld["reason"] and kld["verdict"] == "FAIL"
    assert differences(settings)["kld_mean"]["how"] == "unpaired"


def test_only_what_was_asked_both_times_is_paired_and_the_rest_is_counted(house: params.Params) -> None:
    make(house, "bf16", 0.0, 20, items=ITEMS + 100)
    settings = coarser(0.5, 60, documents=50, items=ITEMS + 100)
    found = differences(settings)
    for name, n, left in (("kld_mean", 1000, "250 tokens"), ("acc_delta/all", ITEMS, "100 items")):
        assert found[name]["n"] == n and f"{left} of this run have no baseline" in found[name]["warnings"]
    assert "250 tokens of this run" in rule(merged(settings), "kld_mean")["reason"]


def test_pairing_is_by_token_and_item_and_not_by_order() -> None:
    now, then = token_rows(0.5), token_rows(0.25)
    turned = {k: list(reversed(v)) for k, v in then.items()}
    assert tokens_paired(builder(), "kld_mean", now, turned) == tokens_paired(builder(), "kld_mean", now, then)
    answers = items_paired(builder(), answer_rows(60), list(reversed(answer_rows(40))))
    assert answers == items_paired(builder(), answer_rows(60), answer_rows(40))
    assert answers["acc/all"]["value"] == pytest.approx(-20 / ITEMS) and answers["acc/all"]["unit"] == "fraction"


@pytest.mark.parametrize("part", ["code", "trajectory", "position:1-31", "position:32-127", "class:digits"])
def test_a_part_of_the_tokens_is_paired_over_that_part(part: str) -> None:
    now, then = token_rows(0.5), token_rows(0.25)
    for rows in (now, then):
        rows["set"] = ["code" if k % 3 else "trajectory" for k in range(1000)]
        rows["position"] = [40 if k % 5 == 0 else k % EACH + 1 for k in range(1000)]
        rows["token_class"] = ["digits" if k % 7 == 0 else "words" for k in range(1000)]
        rows["window"] = [str(k) for k in range(1000)]
    kind, _, name = part.rpartition(":")
    own = {
        "": [s == name for s in now["set"]],
        "class": [c == name for c in now["token_class"]],
        "position": [(p >= 32) == (name == "32-127") for p in now["position"]],
    }[kind]
    found = tokens_paired(builder(), f"kld_mean/{part}", now, then)
    change = (np.array(now["kld"]) - np.array(then["kld"]))[own]
    assert found is not None and found["n"] == sum(own) and found["value"] == pytest.approx(change.mean())


def test_rows_without_a_token_or_item_in_common_give_no_pair() -> None:
    other = token_rows(0.25) | {"window": ["elsewhere"] * 1000, "position": list(range(1000))}
    assert tokens_paired(builder(), "kld_mean", token_rows(0.5), other) is None
    renamed = [row | {"prompt_hash": "asked otherwise"} for row in answer_rows(40)]
    assert items_paired(builder(), answer_rows(60), renamed) == {}


def test_a_token_that_stands_twice_is_refused() -> None:
    twice = {k: v + v[:1] for k, v in token_rows(0.25).items()}
    for now, then in ((twice, token_rows(0.5)), (token_rows(0.5), twice)):
        with pytest.raises(ArtifactError, match="stands twice"):
            tokens_paired(builder(), "kld_mean", now, then)


# --- without rows ------------------------------------------------------------------------------------------------


def test_unpaired_limits_add_by_their_squares_and_what_whole_runs_differ_by_stays() -> None:
    ttft = unpaired("ttft_ms", metric(110, 107, 114, between=0.03), metric(100, 96, 103, between=0.03), "", same_machine=True)
    assert [ttft["value"], ttft["low"], ttft["high"]] == pytest.approx([10, 10 - np.hypot(3, 3), 10 + np.hypot(4, 4)])
    assert ttft["between"] == pytest.approx(np.hypot(3, 3.3) / 10)
    ratio = unpaired("speed_ratio", metric(2, 1.8, 2.2, between=0.03), metric(1, 0.9, 1.1, between=0.03), "", same_machine=True)
    away = [np.hypot(np.log(2 / 1.8), np.log(1.1)), np.hypot(np.log(1.1), np.log(1 / 0.9))]
    expected = [2, 2 / np.exp(away[0]), 2 * np.exp(away[1])]
    assert [ratio["value"], ratio["low"], ratio["high"]] == pytest.approx(expected)
    assert ratio["between"] == pytest.approx(0.03 * np.sqrt(2))
    assert unpaired("ttft_ms", metric(2, 1, 3), metric(1, 0, 2), "", same_machine=True)["between"] is None


def test_perplexity_from_10_to_12_fails_and_accuracy_from_89_to_91_percent_passes() -> None:
    for name, margin, now, then, verdict in (
        ("ppl", "1 ppl", metric(12, 11.9, 12.1), metric(10, 9.9, 10.1), "FAIL"),
        ("acc/all", "1 pp", metric(0.91, 0.905, 0.915), metric(0.89, 0.885, 0.895), "PASS"),
    ):
        change = unpaired(name, now, then, "", same_machine=True)
        bound = bound_of(Rule.model_validate({"metric": name, "margin": margin, "against": "baseline"}))
        assert judge_metric(bound, change).verdict == verdict


@pytest.mark.parametrize("name, now, then, same, reason", [
    ("ttft_ms", metric(1, 1, 1), metric(1, 1, 1), False, "another machine"),
    ("speed_ratio", metric(1, 0.9, 1.1), metric(1, 0.9, 1.1), False, "another machine"),
    ("kld_mean", metric(1, 0, 2), metric(1, 0, 2, confidence=0.9), True, "0.95 and 0.9 confidence"),
    ("kld_max", metric(1, None, None), metric(1, None, None), True, "no interval"),
    ("ppl_ratio", metric(1, 0, 2), metric(1, 1, 1), True, "down to zero"),
])  # fmt: skip
def test_figures_that_cannot_be_compared_have_no_interval(name: str, now: Any, then: Any, same: bool, reason: str) -> None:
    found = unpaired(name, now, then, "", same_machine=same)
    assert found["low"] is None and reason in found["warnings"][0]


# --- fail closed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rev", ["nowhere", "--help", "", "HEAD~9", "main:params.yaml"])
def test_a_baseline_that_is_no_commit_is_exit_2(house: params.Params, rev: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = coarser(0.1, 30)
    assert gate.enforce(settings, rev) == 2 and "no baseline" in capsys.readouterr().err


def test_rules_against_a_baseline_that_nobody_names_never_pass(house: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = coarser(0.1, 30)
    found = artifacts.read_json(artifacts.GATE)
    assert found["verdict"] == "INCONCLUSIVE" and "--enforce --baseline REV" in found["variants"]["int4"]["reason"]
    lax = edit(lambda p: p["gate"].update(inconclusive="passes"))
    run(lax)
    assert gate.enforce(lax) == 2
    monkeypatch.setenv(baseline.VARIABLE, "main")
    assert baseline.wanted(None, settings) == "main" and baseline.wanted("HEAD", settings) == "HEAD"
    named = edit(lambda p: p["gate"].update(baseline="trunk"))
    assert baseline.wanted(None, named) == "main"
    monkeypatch.delenv(baseline.VARIABLE)
    assert baseline.wanted(None, named) == "trunk"


@pytest.mark.parametrize("damage, reason", [
    (lambda: Path("dvc.lock").unlink(), "has no dvc.lock"), (lambda: Path("dvc.lock").write_text("stages: ["), "dvc.lock of"),
    (lambda: artifacts.metrics("int4").write_text("{}"), "is not what its dvc.lock says"),
    (lambda: [artifacts.metrics(n).unlink() for n in ("bf16", "int4")], "holds no reports/metrics"),
    (lambda: Path("params.yaml").write_text("seed: 1"), "names no variants"),
])  # fmt: skip
def test_a_baseline_without_results_of_its_own_pipeline_is_exit_2(
    house: params.Params, damage: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage()
    broken = commit("a baseline to be refused")
    git("checkout", "--quiet", "main")
    assert gate.enforce(params.load(), broken) == 2 and reason in capsys.readouterr().err


def rewrite(variant: str, **fields: Any) -> params.Params:
    """Results of this run changed as if another pipeline had given them."""
    settings = params.load()
    path = artifacts.metrics(variant)
    artifacts.write_json(path, artifacts.read_json(path) | fields)
    finish(settings, "other results")
    return settings


def test_a_metric_that_the_baseline_has_and_this_run_lacks_fails(house: params.Params) -> None:
    coarser(0.1, 30)
    metrics = artifacts.read_json(artifacts.metrics("int4"))["metrics"]
    fewer = {k: m for k, m in metrics.items() if k not in ("jsd_mean", "recovery/facts")} | {"kld_mean/code": metrics["kld_mean"]}
    settings = rewrite("int4", metrics=fewer)
    v = merged(settings)
    assert v["verdict"] == "FAIL" and v["reason"] == "lost since the baseline, which has them: jsd_mean, recovery/facts"
    assert gate.enforce(settings, "main", write=True) == 1
    early = {"diverge": {"look": 1, "looks": 4, "share": 0.25, "saved_s": 9.0}}  # the part has not come yet
    assert merged(rewrite("int4", looks=early))["reason"] == "lost since the baseline, which has them: recovery/facts"
    v = merged(rewrite("bf16", model="built anew"))  # by its rules alone it would be INCONCLUSIVE
    assert v["verdict"] == "FAIL" and v["reason"].startswith("lost since the baseline")


@pytest.mark.parametrize("gone", [None, metric(None, None, None, n=0, unit="pp")])
def test_a_ruled_metric_that_was_lost_fails_its_rule(house: params.Params, gone: Any) -> None:
    coarser(0.1, 30)
    artifacts.answers("bf16").unlink()  # with both answers here it is not what its rows say
    metrics = artifacts.read_json(artifacts.metrics("int4"))["metrics"] | {"acc_delta/all": gone}
    settings = rewrite("int4", metrics={k: m for k, m in metrics.items() if m is not None})
    assert rule(merged(settings), "acc_delta/all")["verdict"] == "FAIL" and merged(settings)["verdict"] == "FAIL"


def test_an_unknown_figure_with_its_reason_is_not_lost(house: params.Params) -> None:
    coarser(0.1, 30)
    metrics = artifacts.read_json(artifacts.metrics("int4"))["metrics"]
    metrics["p_mcnemar/all"] |= {"value": None, "warnings": ["no item changed: there is nothing to test"]}
    assert merged(rewrite("int4", metrics=metrics))["verdict"] == "PASS"


def test_a_variant_that_the_baseline_lacks_never_passes_a_rule_against_it(house: params.Params) -> None:
    settings = edit(lambda p: p["variants"].update({"int3": INT4 | {"options": {"bits": 3, "group_size": 64}}}))
    make(settings, "int3", 0.1, 30)
    finish(settings, "int3")
    merge = for_merge(settings, "main")
    variants = merge.verdict["variants"]
    assert variants["int3"]["verdict"] == "INCONCLUSIVE" and variants["int4"]["verdict"] == "PASS"
    assert "no baseline: kld_mean is new" in variants["int3"]["reason"]


def test_a_variant_that_the_baseline_had_taken_out_before_is_no_baseline(house: params.Params) -> None:
    """Its file was left behind on main; params of main no longer name it."""
    settings = edit(lambda p: p["variants"].update({"old": INT4}))
    make(settings, "old", 0.1, 30)
    finish(settings, "with old")
    edit(lambda p: p["variants"].pop("old"))
    then = commit("without old, its file left behind")
    assert artifacts.metrics("old").exists() and "old" not in baseline.read(then).results


@pytest.mark.parametrize("share, verdict", [(1.1, "FAIL"), (0.9, "PASS")])
def test_a_margin_as_wide_as_the_baselines_whole_value_fails(house: params.Params, share: float, verdict: str) -> None:
    had = artifacts.read_json(artifacts.metrics("int4"))["metrics"]["ppl"]["value"]
    rules = [{"metric": "ppl", "margin": f"{share * had:.3f} ppl", "against": "baseline"}]
    settings = edit(lambda p: p["gate"].update(rules=rules))
    run(settings)
    found = rule(merged(settings), "ppl")
    assert found["verdict"] == verdict and ("so it protects nothing" in found["reason"]) is (verdict == "FAIL")


def test_differences_to_a_rebuilt_reference_are_not_judged(house: params.Params) -> None:
    """A reference made worse brings every variant nearer to it; answers do not count from it."""
    coarser(0.1, 30)
    v = merged(rewrite("bf16", model="built anew"))
    kld, acc = rule(v, "kld_mean"), rule(v, "acc_delta/all")
    assert kld["verdict"] == "INCONCLUSIVE" and "the reference is not built as at main" in kld["reason"]
    assert acc["verdict"] == "PASS" and v["verdict"] == "INCONCLUSIVE"


def test_a_baseline_measured_against_another_reference_or_of_another_base_model_is_exit_2(
    house: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.enforce(rewrite("bf16", base="another"), "main") == 2 and "another base model" in capsys.readouterr().err
    rewrite("int4", reference="fp16")
    git("checkout", "--quiet", "-b", "next")
    settings = rewrite("int4", reference="bf16")
    assert gate.enforce(settings, "change") == 2 and "against another reference than bf16" in capsys.readouterr().err


# --- servers -----------------------------------------------------------------------------------------------------

TTFT = "ttft_p50_ms/closed-1"


def serve(settings: params.Params, ttft: float, **more: Any) -> None:
    """What int4's server did, as `serve` writes it."""
    memory = metric(1e6, 1e6, 1e6, unit="bytes")
    levels = {"closed-1": {"ttft_p50_ms": metric(ttft, ttft - 1, ttft + 1, unit="ms")}}
    artifacts.write_json(artifacts.served("int4"), {
        "variant": "int4", "model": artifacts.read_json(artifacts.metrics("int4"))["model"], "status": "ok", "reason": None,
        "asked": server_results.asked("int4", settings), "client": MACHINE, "levels": levels, "knee": memory, "launch": None,
        "server_memory_bytes": memory, "inputs": {},
    } | more)  # fmt: skip


@pytest.fixture
def serving(house: params.Params) -> params.Params:
    """`main` has an int4 whose server takes 100 ms to the first token, and a rule on it; a branch starts from there."""
    git("checkout", "--quiet", "main")

    def ask(p: dict[str, Any]) -> None:
        how = {"int4": {"launch": "llamacpp"}}
        p["serving"] = {"variants": how, "prompts": "x", "objective": {"ttft_ms": 500.0}, "timeout_s": 60.0}
        p["gate"]["rules"].append({"metric": TTFT, "margin": "20 ms", "against": "baseline"})

    settings = edit(ask)
    serve(settings, 100)
    finish(settings, "int4 is served")
    git("checkout", "--quiet", "-b", "served")
    return settings


@pytest.mark.parametrize("ttft, verdict", [(150.0, "FAIL"), (105.0, "PASS"), (90.0, "PASS")])
def test_a_server_is_judged_against_the_baselines_server(serving: params.Params, ttft: float, verdict: str) -> None:
    serve(serving, ttft)
    finish(serving, "another run")
    v = merged(serving)
    found = rule(v, TTFT)
    assert (found["value"], found["verdict"], v["verdict"]) == (pytest.approx(ttft - 100), verdict, verdict)
    assert differences(serving)["kld_mean"]["how"] == "unchanged"  # the variant itself is what it was, byte for byte


def test_a_server_on_another_machine_has_no_interval_and_a_level_that_was_lost_fails(serving: params.Params) -> None:
    assert {d["how"] for d in differences(serving).values()} == {"unchanged"} and merged(serving)["verdict"] == "PASS"
    serve(serving, 101, client=MACHINE | {"cpu": "another"})
    finish(serving, "elsewhere")
    ttft = rule(merged(serving), TTFT)
    assert ttft["verdict"] == "INCONCLUSIVE" and "another machine" in ttft["reason"]
    serve(serving, 100, levels={"closed-2": {"ttft_p50_ms": metric(100, 99, 101, unit="ms")}})
    finish(serving, "other levels")
    v = merged(serving)
    assert v["verdict"] == "FAIL" and rule(v, TTFT)["verdict"] == "FAIL"


@pytest.mark.parametrize("then, said", [
    (lambda s: artifacts.served("int4").unlink(), "reports/serving/int4.json is missing"),
    (lambda s: serve(s, 100, asked={"load": "another"}), "int4's server was measured for other params"),
    (lambda s: serve(s, 100, model="another"), "int4's server had another build of the model"),
    (lambda s: serve(s, 100, levels={}), "the server's run has no such metric"),
    (lambda s: serve(s, 100, status="unsupported", reason="no port"), "the server is unsupported: no port"),
])  # fmt: skip
def test_without_the_baselines_figures_of_a_server_a_rule_against_them_never_passes(
    serving: params.Params, then: Any, said: str
) -> None:
    git("checkout", "--quiet", "main")
    then(serving)
    finish(serving, "another baseline")
    git("checkout", "--quiet", "served")
    v = merged(serving)
    found = rule(v, TTFT)
    assert found["verdict"] == "INCONCLUSIVE" == v["verdict"]
    assert f"no baseline: {TTFT}" in found["reason"] and said in found["reason"] and "dvc repro" not in found["reason"]


def test_a_baselines_figures_of_a_server_that_its_pipeline_did_not_write_are_exit_2(
    serving: params.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    git("checkout", "--quiet", "main")
    artifacts.served("int4").write_text('{"levels": {}}')
    commit("a baseline to be refused")
    git("checkout", "--quiet", "served")
    assert gate.enforce(serving, "main") == 2
    assert "no baseline: reports/serving/int4.json of main (" in capsys.readouterr().err
