"""The stage: a variant behind a server becomes rows, figures and metrics; what fails, or is not there, never passes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from gate_house import run

from pipeline import check, gate, serve, served
from pipeline.core import artifacts, params
from pipeline.core.errors import ParamsError, Unsupported
from pipeline.core.params import Params
from pipeline.gating import merge, verdicts
from pipeline.numbers.stats import quantile_interval
from pipeline.serving import able, launch, measure
from pipeline.serving.client import ServerError
from tests import serving_server
from tests.serving_server import KEY, Server
from tests.test_engines import write_gguf
from tests.test_serving_launch import SCRIPT, family, gone, killed_once

ROOT = Path(__file__).resolve().parent.parent
LOAD = {"concurrency": [1, 2], "rates": [], "requests": 8, "rounds": 2, "warmups": 1, "prompt_tokens": 8, "output_tokens": 3}
GOOD = {"value": 1.0, "low": 0.9, "high": 1.1, "n": 9, "warnings": [], "confidence": 0.95}
SELDOM = GOOD | {"value": 0.1, "low": 0.0, "high": 0.2}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with params, texts, and a variant `q8` that has a manifest and nothing else."""
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"id": "a", "domain": "d", "text": " ".join(map(str, range(9000)))})
    Path("texts.jsonl").write_text(text + "\n", encoding="utf-8")
    for name in ("bf16", "q8"):
        artifacts.write_json(
            artifacts.model_dir(name) / artifacts.MANIFEST,
            {"status": "ok", "reason": None, "digest": f"{name}-1", "files": artifacts.files_of(artifacts.model_dir(name))},
        )


def set_params(who: dict[str, Any], change: Callable[[dict[str, Any]], object] = lambda _: None) -> Params:
    """params.yaml with `who` under serving.variants, and variants bf16 and q8."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["variants"] = {
        "bf16": data["variants"]["bf16"],
        "q8": {"quantizer": "gguf", "engine": "llamacpp", "options": {"type": "Q8_0"}},
    }
    data["serving"] |= {"variants": who, "prompts": "texts.jsonl", "timeout_s": 20.0, "objective": {"ttft_ms": 60000.0}}
    data["tiers"][data["tier"]]["serving"] = dict(LOAD)
    data["gate"]["required"], data["gate"]["rules"] = ["q8"], [{"metric": "kld_mean", "limit": "2 nats"}]
    change(data)
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return params.load()


def as_written(folder: Path) -> None:
    """Let a model's manifest list what is there."""
    manifest = artifacts.read_manifest(folder)
    artifacts.write_json(folder / artifacts.MANIFEST, manifest | {"files": artifacts.files_of(folder)})


def rules(*more: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["gate"]["rules"].extend(more)


def results(settings: Params) -> dict[str, dict[str, Any]]:
    """Metrics in process for every variant, good ones."""
    for name, v in settings.variants.items():
        artifacts.write_json(artifacts.metrics(name), {
            "status": "ok", "reason": None, "metrics": {"kld_mean": GOOD, "failure_rate": SELDOM}, "inputs": {},
            "reference": settings.reference, "quantizer": v.quantizer, "engine": v.engine, "asked": v.options,
            "engine_options": v.engine_options, "model": f"{name}-1",
        })  # fmt: skip
    return merge.load_results(settings)


def judged(settings: Params) -> dict[str, Any]:
    """{metric: (verdict, reason)} of q8."""
    found = verdicts.of(results(settings), settings)["variants"]["q8"]
    return {r["metric"]: (r["verdict"], r["reason"]) for r in found["rules"]} | {"": (found["verdict"], found["reason"])}


def rows() -> list[dict[str, Any]]:
    return artifacts.read_jsonl(artifacts.serving("q8"))


def figures() -> dict[str, Any]:
    found: dict[str, Any] = artifacts.read_json(artifacts.served("q8"))
    return found


def test_a_run_that_is_stopped_leaves_the_rows_of_its_whole_rounds_and_a_whole_one_no_second_file(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, whole = artifacts.serving("q8").with_suffix(".unfinished.jsonl"), measure.closed
    taken: list[int] = []

    async def stopping(*arguments: Any, **more: Any) -> Any:
        taken.append(1)
        if len(taken) == 6:  # two levels' warm-ups and first rounds were taken, and one level of the second
            raise KeyboardInterrupt
        return await whole(*arguments, **more)

    set_params({"q8": {"url": server.url}})
    monkeypatch.setattr(measure, "closed", stopping)
    with pytest.raises(KeyboardInterrupt):
        serve.main("q8")
    kept = artifacts.read_jsonl(left)
    assert len(kept) == 1 + 2 + 2 * 8 and {r["round"] for r in kept} == {None, 0} and not artifacts.serving("q8").exists()
    serve.main("q8")
    assert len(rows()) == 35 and not left.exists()


LIMITS = (
    {"metric": "ttft_p50_ms/closed-2", "limit": "60 s"}, {"metric": "failure_rate/closed-2", "limit": "50 pp"},
    {"metric": "attainment/closed-1", "margin": "30 pp"},
)  # fmt: skip


# --- what is written ---------------------------------------------------------------------------------------------


def test_a_served_variant_has_rows_figures_and_no_key_anywhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.locked = True
    set_params({"q8": {"url": server.url, "key_env": "MY_KEY"}})
    serve.main("q8")
    assert len(rows()) == 2 * 2 * 8 + 1 + 2 and all(r["ok"] and r["forced"] for r in rows())
    meta, found = artifacts.read_json(artifacts.meta_of(artifacts.serving("q8"))), figures()
    assert meta["probe"]["model"] == "m" and meta["launch"] is None and meta["client"]["cores"] and meta["versions"]["numpy"]
    assert found["status"] == "ok" and list(found["levels"]) == ["closed-1", "closed-2"] and found["model"] == "q8-1"
    assert found["levels"]["closed-2"]["ttft_p50_ms"]["n"] == 16 and found["levels"]["closed-1"]["attainment"]["value"] == 1
    assert found["knee"]["value"] is None and "needs three" in found["knee"]["warnings"][0]
    assert found["server_memory_bytes"]["value"] is None and "not started here" in found["server_memory_bytes"]["warnings"][0]
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(KEY in f.read_text(encoding="utf-8") for f in files) and KEY not in "".join(capfd.readouterr())
    assert str(tmp_path) not in artifacts.served("q8").read_text(encoding="utf-8"), "reports are committed: no paths of a machine"


def test_a_server_that_fails_half_way_keeps_its_rows_and_its_failures_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, asked = serving_server.plain, []

    def dying(h: serving_server.Handler, body: dict[str, Any]) -> None:
        asked.append(1)
        good(h, body) if len(asked) < 12 else h.reset()

    server.plays = {"The": good, "Answer": good}  # the probe's
    monkeypatch.setattr(serving_server, "plain", dying)
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    serve.main("q8")
    counted = [r for r in rows() if not r["warmup"]]
    assert len(counted) == 32 and 0 < sum(r["ok"] for r in counted) < 12 and figures()["status"] == "ok"
    assert {r["fault"] for r in counted if not r["ok"]} == {"reset"}
    assert figures()["levels"]["closed-2"]["failure_rate"]["value"] > 0.5
    found = judged(settings)
    assert found["failure_rate/closed-2"][0] != "PASS" != found[""][0]  # two rounds that differ settle little, and pass nothing


def test_a_server_without_one_complete_reply_passes_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.plays = {"The": serving_server.plain, "Answer": serving_server.plain}
    monkeypatch.setattr(serving_server, "plain", serving_server.unavailable)
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    serve.main("q8")
    assert figures()["status"] == "invalid" and "none of 32 requests was complete; the first said: HTTP 503" in figures()["reason"]
    found = judged(settings)
    assert {found[r["metric"]][0] for r in LIMITS} == {"FAIL"} and len(rows()) == 35


@pytest.mark.parametrize("how, words", [
    ({"launch": "llamacpp"}, "llama.cpp's server reads GGUF"), ({"launch": "vllm"}, launch.VLLM),
])  # fmt: skip
def test_a_server_that_cannot_run_here_is_a_result_and_the_run_goes_on(
    how: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launch.VLLM, raising=False)
    settings = set_params({"q8": how}, rules(*LIMITS))
    serve.main("q8")
    assert figures()["status"] == "unsupported" and words in figures()["reason"] and rows() == []
    assert "unsupported" in capsys.readouterr().out
    verdict, reason = judged(settings)["ttft_p50_ms/closed-2"]
    assert verdict == "FAIL" and "the server is unsupported" in reason and words in reason


def test_engine_options_that_a_launched_server_has_no_equal_for_are_refused_by_name(server: Server) -> None:
    def given(data: dict[str, Any]) -> None:
        data["variants"]["q8"] |= {"engine": "hf", "engine_options": {"attention": "eager"}}

    set_params({"q8": {"launch": "vllm"}}, given)
    serve.main("q8")
    assert figures()["status"] == "unsupported" and rows() == []
    assert "engine_options {attention: eager} have no equal in a launched vllm server (it takes none)" in figures()["reason"]
    set_params({"q8": {"url": server.url}}, given)
    serve.main("q8")
    assert figures()["status"] == "ok", "what a server elsewhere was started with is its owner's"


def test_a_variant_that_could_not_be_built_is_not_served() -> None:
    artifacts.write_json(
        artifacts.model_dir("q8") / artifacts.MANIFEST, {"status": "unsupported", "reason": "no kernel", "digest": "x"}
    )
    set_params({"q8": {"launch": "llamacpp"}})
    serve.main("q8")
    assert figures()["status"] == "unsupported" and "no kernel" in figures()["reason"]


def test_a_server_that_is_not_there_is_one_line_and_writes_nothing() -> None:
    set_params({"q8": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(ServerError, match="no server answers at http://127.0.0.1:9/v1"):
        serve.main("q8")
    assert not artifacts.served("q8").exists() and not artifacts.serving("q8").exists()


def test_a_variant_that_nobody_asked_to_serve_is_named() -> None:
    set_params({"q8": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(ParamsError, match=r"serving.variants: variant 'q9' .* did you mean 'q8'"):
        serve.main("q9")


# --- as metrics ----------------------------------------------------------------------------------------------------


def test_rules_judge_a_server_beside_the_variant_in_process(server: Server) -> None:
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS, {"metric": "failure_rate", "limit": "99 pp"}))
    serve.main("q8")
    found = judged(settings)
    assert {v for v, _ in found.values()} == {"PASS"} and found.keys() >= {"failure_rate", "failure_rate/closed-2"}


def test_a_p99_of_few_requests_is_inconclusive_and_says_why(server: Server) -> None:
    settings = set_params({"q8": {"url": server.url}}, rules({"metric": "ttft_p99_ms/closed-2", "limit": "60 s"}))
    serve.main("q8")
    verdict, reason = judged(settings)["ttft_p99_ms/closed-2"]
    assert verdict == "INCONCLUSIVE" and "its interval reaches past the 16 values" in reason


def test_a_variant_that_is_not_served_fails_a_rule_on_its_server(server: Server) -> None:
    settings = set_params({"bf16": {"url": server.url}}, rules(*LIMITS))
    verdict, reason = judged(settings)["ttft_p50_ms/closed-2"]
    assert verdict == "FAIL" and "q8 is not served (serving.variants in params.yaml)" in reason
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    assert "reports/serving/q8.json is missing" in judged(settings)["ttft_p50_ms/closed-2"][1]


@pytest.mark.parametrize("change, words", [
    (lambda d: d["serving"].update(objective={"ttft_ms": 1.0}), "for other params"),
    (lambda d: d["serving"]["variants"]["q8"].update(chat=True), "for other params"),
    (lambda d: d["tiers"][d["tier"]]["serving"].update(requests=9), "for other params"),
])  # fmt: skip
def test_figures_that_were_made_for_other_params_pass_nothing(
    server: Server, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    serve.main("q8")

    def both(data: dict[str, Any]) -> None:
        rules(*LIMITS)(data)
        change(data)

    verdict, reason = judged(set_params({"q8": {"url": server.url}}, both))["ttft_p50_ms/closed-2"]
    assert verdict == "FAIL" and words in reason


def test_figures_of_another_build_of_the_model_pass_nothing(server: Server) -> None:
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    serve.main("q8")
    artifacts.write_json(artifacts.served("q8"), figures() | {"model": "q8-0"})
    verdict, reason = judged(settings)["ttft_p50_ms/closed-2"]
    assert verdict == "FAIL" and "another build" in reason


def test_a_verdict_is_stale_once_what_a_server_did_is_changed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    settings = set_params({"q8": {"url": server.url}}, rules(*LIMITS))
    serve.main("q8")
    (artifacts.model_dir("q8") / artifacts.MANIFEST).unlink()  # as in a clone: its digest here is no build's
    results(settings)
    run(settings)
    assert gate.enforce(settings) == 0
    found = figures()
    artifacts.write_json(artifacts.served("q8"), found | {"knee": found["knee"] | {"n": 99}})
    assert gate.enforce(settings) == gate.STALE and "reports/serving/q8.json" in capsys.readouterr().err
    artifacts.write_json(artifacts.served("q8"), found)
    artifacts.write_jsonl(artifacts.serving("q8"), rows()[1:])
    assert gate.enforce(settings) == gate.STALE and "artifacts/serving/q8.jsonl" in capsys.readouterr().err


def test_without_a_rule_on_servers_a_verdict_rests_on_none(server: Server) -> None:
    settings = set_params({"q8": {"url": server.url}})
    assert judged(settings)[""][0] == "PASS"


def test_a_damaged_file_of_figures_is_named() -> None:
    settings = set_params({"q8": {"url": "http://h"}}, rules(*LIMITS))
    artifacts.write_json(artifacts.served("q8"), ["no figures"])
    with pytest.raises(artifacts.ArtifactError, match=r"reports/serving/q8.json is damaged"):
        results(settings)


# --- params ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric, words", [
    ("ttft_p99_ms/closed-3", "did you mean 'closed-"), ("ttft_p99_ms", "as in 'ttft_p99_ms/closed-1'"),
    ("failure_rate/open-1", "give one of the tier's levels"), ("knee/closed-1", "write 'knee'"),
])  # fmt: skip
def test_a_rule_on_a_level_that_is_not_measured_is_refused(metric: str, words: str) -> None:
    settings = set_params({"q8": {"url": "http://h"}})
    with pytest.raises(ParamsError, match=words):
        check._check_part(metric, settings)


@pytest.mark.parametrize("metric", ["ttft_p99_ms/closed-2", "failure_rate/closed-1", "knee", "server_memory_bytes", "failure_rate"])
def test_a_rule_on_what_is_measured_is_taken(metric: str) -> None:
    check._check_part(metric, set_params({"q8": {"url": "http://h"}}))


def test_a_percentile_that_no_run_can_bound_is_said_before_any_work() -> None:
    asked = [{"metric": f"ttft_{q}_ms/closed-2", "limit": "60 s"} for q in ("p50", "p99")]
    (line,) = served.told(set_params({"q8": {"url": "http://h"}}, rules(*asked, {"metric": "itl_p99_ms/closed-2", "limit": "1 s"})))
    assert line.startswith("ttft_p99_ms/closed-2 will be INCONCLUSIVE: 16 requests bound no p99; about ")
    enough = int(line.split("about ")[1].split()[0])
    for n, bounded in ((enough, True), (enough // 2, False)):
        found = quantile_interval(np.arange(n), np.arange(n), 0.99, confidence=0.95)
        assert (found.high is not None) is bounded, n


def test_a_rule_on_a_server_where_none_is_served_is_refused() -> None:
    with pytest.raises(ParamsError, match="no variant is served"):
        check._check_part("ttft_p99_ms/closed-2", set_params({}))


@pytest.mark.parametrize("who, change, words", [
    ({"q9": {"url": "http://h"}}, lambda d: None, "serving.variants.q9: variant 'q9' .* did you mean 'q8'"),
    ({"q8": {"url": "http://h", "launch": "vllm"}}, lambda d: None, "one of the two"),
    ({"q8": {}}, lambda d: None, "one of the two"),
    ({"q8": {"launch": "lamacpp"}}, lambda d: None, "did you mean 'llamacpp'"),
    ({"q8": {"url": "http://h"}}, lambda d: d["serving"].pop("objective"), "objective is needed and missing"),
    ({"q8": {"url": "http://h"}}, lambda d: d["serving"].update(timeout_s=0.0), "timeout_s"),
    ({"q8": {"url": "http://h"}}, lambda d: d["serving"].update(timeout_s=float("inf")), "timeout_s"),
    ({"q8": {"url": "http://h"}}, lambda d: d["tiers"][d["tier"]].pop("serving"), "tiers.default: serving is needed"),
    ({"q8": {"url": "http://h"}}, lambda d: d["tiers"]["smoke"]["serving"].update(concurrency=[]), "nothing to measure"),
    ({"q8": {"url": "http://h"}}, lambda d: d["tiers"]["smoke"]["serving"].update(concurrency=[0]), "at least 1"),
    ({"q8": {"url": "http://h"}}, lambda d: d["tiers"]["smoke"]["serving"].update(rates=[-1.0]), "more than 0"),
    ({"q8": {"url": "http://h", "key": "sk-1"}}, lambda d: None, "unknown key"),
])  # fmt: skip
def test_a_mistake_in_the_section_is_named(who: dict[str, Any], change: Callable[[dict[str, Any]], object], words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        set_params(who, change)


def as_variant(quantizer: str, engine: str, **more: Any) -> Callable[[dict[str, Any]], object]:
    options = {"cast": {"dtype": "bfloat16"}, "onnx": {"precision": "int4"}, "gguf": {"type": "Q8_0"}}[quantizer]
    made = {"quantizer": quantizer, "engine": engine, "options": options, **more}
    return lambda d: d["variants"].update(q8=made)


@pytest.mark.parametrize("kind", launch.KINDS)
@pytest.mark.parametrize("quantizer, engine", [("cast", "hf"), ("onnx", "onnxruntime"), ("gguf", "llamacpp")])
def test_a_server_that_does_not_read_the_variant_is_a_fault_before_any_work(kind: str, quantizer: str, engine: str) -> None:
    found = able.faults(set_params({"q8": {"launch": kind}}, as_variant(quantizer, engine)))
    reads = {"llamacpp": "llamacpp", "vllm": "hf"}[kind] == engine
    assert len(found) == (not reads), found
    if found:
        assert f"serving.variants.q8: launch: {kind} does not read models of engine {engine!r}" in found[0]
        assert ("launch: vllm, or" in found[0], "launch: llamacpp, or" in found[0]) == (engine == "hf", engine == "llamacpp")


@pytest.mark.parametrize("url, key, words", [
    ("127.0.0.1:8000", "k", "is no address of a server"), ("http://me:secret@h", "k", "carries a password"),
    ("http://h", "two words", "the value of OWN_KEY is no API key"), ("http://h", "k", ""),
])  # fmt: skip
def test_an_address_or_key_that_is_none_is_a_fault_before_any_work(
    url: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", key)
    found = able.faults(set_params({"q8": {"url": url, "key_env": "OWN_KEY"}}))
    assert len(found) == bool(words) and all(words in f and "secret" not in f and "two words" not in f for f in found), found


@pytest.mark.parametrize("python, words", [
    (None, "put the path of the Python"), ("/none/python", "is no program"), (sys.executable, ""),
])  # fmt: skip
def test_a_server_that_this_machine_lacks_is_told_before_any_work_as_the_stage_says_it(
    python: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.VLLM, python) if python else monkeypatch.delenv(launch.VLLM, raising=False)
    settings = set_params({"q8": {"launch": "vllm"}}, as_variant("cast", "hf"))
    assert able.faults(settings) == []
    told = able.told(settings)
    assert len(told) == bool(words) and all(words in line and "FAIL" not in line for line in told), told
    if words:
        serve.main("q8")
        assert figures()["status"] == "unsupported" and words in figures()["reason"]
        ruled = set_params({"q8": {"launch": "vllm"}}, lambda d: (as_variant("cast", "hf")(d), rules(LIMITS[0])(d)))
        assert able.told(ruled)[0].endswith("a required rule judges it: the gate will FAIL")


def test_options_without_an_equal_are_told_before_any_work() -> None:
    settings = set_params({"q8": {"launch": "llamacpp"}}, as_variant("gguf", "llamacpp", engine_options={"flash": True}))
    assert able.faults(settings) == []
    assert ["engine_options {flash: True} have no equal" in line for line in able.told(settings)] == [True]


def test_check_says_what_cannot_be_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "_lm_eval_tasks", set)  # seconds, for tasks whose sets are not in this folder
    settings = set_params({"q8": {"launch": "vllm"}}, as_variant("gguf", "llamacpp"))
    assert any("launch: vllm does not read" in fault for fault in check.faults(settings))
    lacking = set_params({"q8": {"launch": "vllm"}}, as_variant("cast", "hf"))
    monkeypatch.delenv(launch.VLLM, raising=False)
    monkeypatch.setattr(params, "load", lambda: lacking)
    for name in ("faults", "more_than_there"):  # they read sets that are not in this folder
        monkeypatch.setattr(check, name, lambda _: [])
    check.main()
    assert "check      serving.variants.q8 will be unsupported: vLLM has" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    lambda d: None, lambda d: d.pop("serving"), lambda d: d.update(serving={}), lambda d: d.update(serving={"variants": {}}),
    lambda d: (d.pop("serving"), d["tiers"][d["tier"]].pop("serving")),
])  # fmt: skip
def test_a_project_that_serves_nothing_is_sound_and_says_so(change: Callable[[dict[str, Any]], object]) -> None:
    settings = set_params({}, change)
    served.write_asked(settings)
    assert settings.serving.variants == {} and "no variant is served" in artifacts.SERVING_ASKED.read_text(encoding="utf-8")
    assert served.current(results(settings), settings) == ({}, {})


def test_what_is_asked_of_servers_is_written_where_stages_depend_on_it() -> None:
    served.write_asked(set_params({"q8": {"url": "http://h", "key_env": "K"}}))
    first = artifacts.SERVING_ASKED.read_text(encoding="utf-8")
    assert yaml.safe_load(first)["q8"]["load"] == LOAD and yaml.safe_load(first)["q8"]["key_env"] == "K"
    served.write_asked(set_params({"q8": {"url": "http://h", "key_env": "K", "chat": True}}))
    assert artifacts.SERVING_ASKED.read_text(encoding="utf-8") != first


# --- launched ----------------------------------------------------------------------------------------------------


def test_a_launched_llama_cpp_server_is_measured_and_gone(tiny: Path) -> None:
    folder = artifacts.model_dir("q8")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    write_gguf(folder, folder / "model.gguf")
    as_written(folder)
    shutil.copytree(ROOT / "envs", "envs")
    if (ROOT / "artifacts/envs").exists():  # built once for the checkout, not for every run of the tests
        Path("artifacts/envs").symlink_to(ROOT / "artifacts/envs")
    before = {p.pid for p in psutil.Process().children(recursive=True)}

    def asked(data: dict[str, Any]) -> None:
        data["tiers"][data["tier"]]["serving"]["concurrency"] = [1, 2, 4]
        data["variants"]["q8"]["engine_options"] = {"kv_type": "f32"}

    set_params({"q8": {"launch": "llamacpp"}}, asked)
    serve.main("q8")
    found = figures()
    if found["status"] == "unsupported":
        pytest.skip(f"llama.cpp's server: {found['reason']}")
    assert found["status"] == "ok" and len(rows()) == 2 * (8 + 8 + 16) + 1 + 2 + 4
    assert all(r["prompt_tokens"] == 8 and r["output_tokens"] == 3 for r in rows() if r["ok"])
    assert {m["failure_rate"]["value"] for m in found["levels"].values()} == {0.0}
    assert found["launch"]["kind"] == "llamacpp" and found["launch"]["parallel"] == 4 and "log" not in found["launch"]
    assert found["launch"]["engine_options"] == {"kv_type": "f32"}
    if sys.platform == "linux":
        assert found["server_memory_bytes"]["value"] > 2**20
    assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


@pytest.mark.skipif(sys.platform != "linux", reason="the guard finds lost grandchildren with Linux's prctl")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_that_is_killed_leaves_no_server_and_no_half_written_file(number: signal.Signals) -> None:
    set_params({"q8": {"launch": "llamacpp"}})
    hang = "    def do_GET(self):\n        open('asked', 'w').close(); time.sleep(600)\n    def do_POST"
    Path("toy.py").write_text(SCRIPT.format(deaf=False, open=False).replace("    def do_POST", hang), encoding="utf-8")
    program = (
        "import sys\nfrom pipeline import serve\nfrom pipeline.core import cli\nfrom pipeline.serving import launch\n"
        "launch.KINDS['llamacpp'] = lambda folder, port, *_: launch.Command([sys.executable, 'toy.py', str(port)], 'TOY_KEY')\n"
        "cli.run(serve.main)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", program, "q8"], env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    guards = killed_once(run, Path("asked"), number)
    assert len(guards) == 1 and gone([*guards, *family()]) and run.returncode != 0
    assert not Path("reports/serving").exists() and not list(Path("artifacts").rglob("*.jsonl"))


def test_an_environment_that_cannot_be_built_is_unsupported_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (artifacts.model_dir("q8") / "model.gguf").touch()
    as_written(artifacts.model_dir("q8"))

    def broken(name: str) -> Path:
        raise Unsupported(f"environment {name!r} could not be built: no matching distribution")

    monkeypatch.setattr(launch.envs, "python", broken)
    set_params({"q8": {"launch": "llamacpp"}})
    serve.main("q8")
    assert figures()["status"] == "unsupported" and "no matching distribution" in figures()["reason"]
