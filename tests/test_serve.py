"""The stage: a variant behind a server becomes rows and metrics; what fails, or is missing, never passes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from gate_house import write_manifest, write_metrics

from pipeline import check, serve
from pipeline.core import artifacts, params
from pipeline.core.errors import ParamsError, Unsupported
from pipeline.core.params import Params
from pipeline.gating import verdicts
from pipeline.preflight import servers
from pipeline.serving import launch, measure
from pipeline.serving import results as server_results
from pipeline.serving.client import ServerError
from pipeline.stats.intervals import quantile_interval
from tests import serving_server
from tests.serving_server import KEY, Server
from tests.test_engines import write_gguf
from tests.test_serving_launch import PLAIN, family, gone, killed_once, share_environments

ROOT = Path(__file__).resolve().parent.parent
LOAD = {"concurrency": [1, 2], "rates": [], "requests": 8, "rounds": 2, "warmups": 1, "prompt_tokens": 8, "output_tokens": 3}
GOOD = {"value": 1.0, "low": 0.9, "high": 1.1, "n": 9, "warnings": [], "confidence": 0.95}
SELDOM = GOOD | {"value": 0.1, "low": 0.0, "high": 0.2}
LIMITS = (
    {"metric": "ttft_p50_ms/closed-2", "limit": "60 s"}, {"metric": "failure_rate/closed-2", "limit": "50 pp"},
    {"metric": "attainment/closed-1", "margin": "30 pp"},
)  # fmt: skip
HERE: dict[str, Any] = {"q8": {"url": "http://h"}}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def project() -> None:
    """A folder with texts and a variant `q8` that has only a manifest."""
    text = json.dumps({"id": "a", "domain": "d", "text": " ".join(map(str, range(9000)))})
    Path("texts.jsonl").write_text(text + "\n", encoding="utf-8")
    for name in ("bf16", "q8"):
        write_manifest(artifacts.model_dir(name), digest=f"{name}-1")


def set_params(who: dict[str, Any], *changes: Change) -> Params:
    """params.yaml with `who` under serving.variants, and variants bf16 and q8."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    gguf = {"quantizer": "gguf", "engine": "llamacpp", "options": {"type": "Q8_0"}}
    data["variants"] = {"bf16": data["variants"]["bf16"], "q8": gguf}
    data["serving"] |= {"variants": who, "prompts": "texts.jsonl", "timeout_s": 20.0, "objective": {"ttft_ms": 60000.0}}
    data["tiers"][data["tier"]]["serving"] = dict(LOAD)
    data["gate"]["required"], data["gate"]["rules"] = ["q8"], [{"metric": "kld_mean", "limit": "2 nats"}]
    for change in changes:
        change(data)
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return params.load()


def served(how: dict[str, Any], *changes: Change) -> Params:
    """Serve q8; returns the params."""
    settings = set_params({"q8": how}, *changes)
    serve.main("q8")
    return settings


def rules(*more: dict[str, Any]) -> Change:
    return lambda data: data["gate"]["rules"].extend(more)


def results(settings: Params) -> dict[str, dict[str, Any]]:
    """Good in-process metrics for every variant."""
    for name in settings.variants:
        write_metrics(settings, name, {"kld_mean": GOOD, "failure_rate": SELDOM}, model=f"{name}-1")
    return verdicts.load_results(settings)


def judged(settings: Params) -> dict[str, Any]:
    """{metric: (verdict, reason)} of q8."""
    verdict = verdicts.of(results(settings), settings)["variants"]["q8"]
    return {r["metric"]: (r["verdict"], r["reason"]) for r in verdict["rules"]} | {"": (verdict["verdict"], verdict["reason"])}


def rows() -> list[dict[str, Any]]:
    return artifacts.read_jsonl(artifacts.serving("q8"))


def report() -> dict[str, Any]:
    return dict(artifacts.read_json(artifacts.served("q8")))


# --- what is written ---------------------------------------------------------------------------------------------


def test_a_served_variant_has_rows_metrics_and_no_key_anywhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.locked = True
    served({"url": server.url, "key_env": "MY_KEY"}, in_hf)  # a server elsewhere need not have the engine options
    assert len(rows()) == 2 * 2 * 8 + 1 + 2 and all(r["ok"] and r["forced"] for r in rows())
    meta, written = artifacts.read_json(artifacts.meta_of(artifacts.serving("q8"))), report()
    assert meta["probe"]["model"] == "m" and meta["launch"] is None and meta["client"]["cores"] and meta["versions"]["numpy"]
    assert written["status"] == "ok" and list(written["levels"]) == ["closed-1", "closed-2"] and written["model"] == "q8-1"
    assert written["levels"]["closed-2"]["ttft_p50_ms"]["n"] == 16 and written["levels"]["closed-1"]["attainment"]["value"] == 1
    assert written["knee"]["value"] is None and "needs three" in written["knee"]["warnings"][0]
    assert written["server_memory_bytes"]["value"] is None and "not started here" in written["server_memory_bytes"]["warnings"][0]
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(KEY in f.read_text(encoding="utf-8") for f in files) and KEY not in "".join(capfd.readouterr())
    assert str(tmp_path) not in artifacts.served("q8").read_text(encoding="utf-8"), "reports are committed: no paths of a machine"


def test_a_stopped_run_keeps_the_rows_of_its_whole_rounds_and_a_whole_run_leaves_no_second_file(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, whole = artifacts.serving("q8").with_suffix(".unfinished.jsonl"), measure.closed
    calls: list[int] = []

    async def stopping(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:  # after two levels' warm-ups and first rounds, and one level of the second
            raise KeyboardInterrupt
        return await whole(*arguments, **more)

    monkeypatch.setattr(measure, "closed", stopping)
    with pytest.raises(KeyboardInterrupt):
        served({"url": server.url})
    kept = artifacts.read_jsonl(left)
    assert len(kept) == 1 + 2 + 2 * 8 and {r["round"] for r in kept} == {None, 0} and not artifacts.serving("q8").exists()
    serve.main("q8")
    assert len(rows()) == 35 and not left.exists()


@pytest.mark.parametrize("good", [12, 0])
def test_a_server_that_fails_keeps_its_rows_and_its_failures_count(
    server: Server, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    answer, asked = serving_server.plain, []

    def dying(h: serving_server.Handler, body: dict[str, Any]) -> None:
        asked.append(1)
        answer(h, body) if len(asked) < good else h.reset()

    server.plays = {"The": answer, "Answer": answer}  # the probe's
    monkeypatch.setattr(serving_server, "plain", dying)
    verdict = judged(served({"url": server.url}, rules(*LIMITS)))
    counted = [r for r in rows() if not r["warmup"]]
    assert len(rows()) == 35 and {r["fault"] for r in counted if not r["ok"]} == {"reset"}
    if good:
        assert 0 < sum(r["ok"] for r in counted) < good and report()["status"] == "ok"
        assert report()["levels"]["closed-2"]["failure_rate"]["value"] > 0.5
        assert verdict["failure_rate/closed-2"][0] != "PASS" != verdict[""][0], "two rounds that differ settle little"
    else:
        assert report()["status"] == "invalid" and "none of 32 requests was complete; the first failed" in report()["reason"]
        assert {verdict[r["metric"]][0] for r in LIMITS} == {"FAIL"}


def not_built(data: dict[str, Any]) -> None:
    write_manifest(artifacts.model_dir("q8"), status="unsupported", reason="no kernel", digest="q8-1")


def in_hf(data: dict[str, Any]) -> None:
    data["variants"]["q8"] |= {"engine": "hf", "engine_options": {"attention": "eager"}}


def no_environment(data: dict[str, Any]) -> None:
    (artifacts.model_dir("q8") / "model.gguf").touch()
    write_manifest(artifacts.model_dir("q8"), digest="q8-1")


@pytest.mark.parametrize("kind, change, words", [
    ("llamacpp", rules(), "llama.cpp's server reads GGUF"), ("vllm", rules(), launch.VLLM), ("llamacpp", not_built, "no kernel"),
    ("vllm", in_hf, "a launched vllm server does not have engine_options {attention: eager} (it has kv and tensor_parallel)"),
    ("llamacpp", no_environment, "no matching distribution"),
])  # fmt: skip
def test_a_server_that_cannot_run_here_is_a_result_and_the_run_goes_on(
    kind: str, change: Change, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> Path:
        raise Unsupported(f"environment {name!r} could not be built: no matching distribution")

    monkeypatch.setattr(launch.venvs, "python", broken)
    monkeypatch.delenv(launch.VLLM, raising=False)
    verdict, reason = judged(served({"launch": kind}, change, rules(*LIMITS)))["ttft_p50_ms/closed-2"]
    assert report()["status"] == "unsupported" and words in report()["reason"] and rows() == []
    assert "unsupported" in capsys.readouterr().out
    assert verdict == "FAIL" and "the server is unsupported" in reason and words in reason


@pytest.mark.parametrize("variant, error, words", [
    ("q8", ServerError, "no server answers at http://127.0.0.1:9/v1"),
    ("q9", ParamsError, r"serving.variants: variant 'q9' .* did you mean 'q8'"),
])  # fmt: skip
def test_no_server_and_no_such_variant_are_one_line_and_write_nothing(variant: str, error: type[Exception], words: str) -> None:
    set_params({"q8": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(error, match=words):
        serve.main(variant)
    assert not artifacts.served("q8").exists() and not artifacts.serving("q8").exists()


# --- as metrics ----------------------------------------------------------------------------------------------------


def test_rules_judge_a_server_beside_the_variant_in_process(server: Server) -> None:
    more = {"metric": "failure_rate", "limit": "99 pp"}, {"metric": "ttft_p99_ms/closed-2", "limit": "60 s"}
    verdict = judged(served({"url": server.url}, rules(*LIMITS, *more)))
    assert verdict.keys() >= {"failure_rate", "failure_rate/closed-2"}
    few = verdict.pop("ttft_p99_ms/closed-2")
    assert few[0] == verdict.pop("")[0] == "INCONCLUSIVE" and "its interval reaches past the 16 values" in few[1]
    assert {v for v, _ in verdict.values()} == {"PASS"}


def other_build(_: dict[str, Any]) -> None:
    artifacts.write_json(artifacts.served("q8"), report() | {"model": "q8-0"})


def no_report(_: dict[str, Any]) -> None:
    artifacts.served("q8").unlink()


@pytest.mark.parametrize("change, words", [
    (lambda d: d["serving"].update(objective={"ttft_ms": 1.0}), "for other params"),
    (lambda d: d["serving"]["variants"]["q8"].update(chat=True), "for other params"),
    (lambda d: d["tiers"][d["tier"]]["serving"].update(requests=9), "for other params"), (other_build, "another build"),
    (no_report, "reports/serving/q8.json is missing"),
    (lambda d: d["serving"].update(variants={"bf16": {"url": "http://h"}}), "q8 is not served (serving.variants in params.yaml)"),
])  # fmt: skip
def test_missing_results_or_those_of_other_params_or_another_build_pass_nothing(server: Server, change: Change, words: str) -> None:
    served({"url": server.url}, rules(*LIMITS))
    verdict, reason = judged(set_params({"q8": {"url": server.url}}, rules(*LIMITS), change))["ttft_p50_ms/closed-2"]
    assert verdict == "FAIL" and words in reason


def test_without_a_rule_on_servers_a_verdict_rests_on_none() -> None:
    assert judged(set_params(HERE))[""][0] == "PASS"


def test_a_damaged_file_of_results_is_named() -> None:
    settings = set_params(HERE, rules(*LIMITS))
    artifacts.write_json(artifacts.served("q8"), ["no figures"])
    with pytest.raises(artifacts.ArtifactError, match=r"reports/serving/q8.json is damaged"):
        results(settings)


# --- params ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric, who, words", [
    ("ttft_p99_ms/closed-3", HERE, "did you mean 'closed-"), ("ttft_p99_ms", HERE, "as in 'ttft_p99_ms/closed-1'"),
    ("failure_rate/open-1", HERE, "give one of the tier's levels"), ("knee/closed-1", HERE, "write 'knee'"),
    ("ttft_p99_ms/closed-2", {}, "no variant is served"), ("ttft_p99_ms/closed-2", HERE, ""), ("failure_rate/closed-1", HERE, ""),
    ("knee", HERE, ""), ("server_memory_bytes", HERE, ""), ("failure_rate", HERE, ""),
])  # fmt: skip
def test_a_rule_on_what_is_not_measured_is_refused_and_others_are_not(metric: str, who: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError, match=words) if words else nullcontext():
        check._check_part(metric, set_params(who))


def test_a_percentile_that_no_run_can_bound_is_said_before_any_work() -> None:
    asked = [{"metric": f"ttft_{q}_ms/closed-2", "limit": "60 s"} for q in ("p50", "p99")]
    asked.append({"metric": "itl_p99_ms/closed-2", "limit": "1 s"})
    (line,) = servers.inconclusive(set_params(HERE, rules(*asked)))
    assert line.startswith("ttft_p99_ms/closed-2 will be INCONCLUSIVE: 16 requests are too few for a p99 interval; about ")
    enough = int(line.split("about ")[1].split()[0])
    for n, is_bounded in ((enough, True), (enough // 2, False)):
        interval = quantile_interval(np.arange(n), np.arange(n), 0.99, confidence=0.95)
        assert (interval.high is not None) is is_bounded, n


@pytest.mark.parametrize("who, change, words", [
    ({"q9": {"url": "http://h"}}, rules(), "serving.variants.q9: variant 'q9' .* did you mean 'q8'"),
    ({"q8": {"url": "http://h", "launch": "vllm"}}, rules(), "give either launch"), ({"q8": {}}, rules(), "give either launch"),
    ({"q8": {"launch": "lamacpp"}}, rules(), "did you mean 'llamacpp'"),
    ({"q8": {"url": "http://h", "key": "sk-1"}}, rules(), "unknown key"),
    (HERE, lambda d: d["serving"].pop("objective"), "objective is missing"),
    (HERE, lambda d: d["serving"].update(timeout_s=0.0), "timeout_s"),
    (HERE, lambda d: d["serving"].update(timeout_s=float("inf")), "timeout_s"),
    (HERE, lambda d: d["tiers"][d["tier"]].pop("serving"), "tiers.default: serving is missing"),
    (HERE, lambda d: d["tiers"]["smoke"]["serving"].update(concurrency=[]), "nothing to measure"),
    (HERE, lambda d: d["tiers"]["smoke"]["serving"].update(concurrency=[0]), "at least 1"),
    (HERE, lambda d: d["tiers"]["smoke"]["serving"].update(rates=[-1.0]), "more than 0"),
])  # fmt: skip
def test_a_mistake_in_the_section_is_named(who: dict[str, Any], change: Change, words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        set_params(who, change)


def as_variant(quantizer: str, engine: str, **more: Any) -> Change:
    options = {"cast": {"dtype": "bfloat16"}, "onnx": {"precision": "int4"}, "gguf": {"type": "Q8_0"}}[quantizer]
    return lambda d: d["variants"].update(q8={"quantizer": quantizer, "engine": engine, "options": options, **more})


@pytest.mark.parametrize("kind", launch.KINDS)
@pytest.mark.parametrize("quantizer, engine", [("cast", "hf"), ("onnx", "onnxruntime"), ("gguf", "llamacpp")])
def test_a_server_that_does_not_read_the_variant_is_a_fault_before_any_work(kind: str, quantizer: str, engine: str) -> None:
    faults = servers.faults(set_params({"q8": {"launch": kind}}, as_variant(quantizer, engine)))
    reads = {"llamacpp": "llamacpp", "vllm": "hf"}[kind]
    assert len(faults) == (reads != engine), faults
    if faults:
        assert f"serving.variants.q8: launch: {kind} reads models of engine {reads!r}, not {engine!r}" in faults[0]
        assert ("launch: vllm, or" in faults[0], "launch: llamacpp, or" in faults[0]) == (engine == "hf", engine == "llamacpp")


@pytest.mark.parametrize("url, key, words", [
    ("127.0.0.1:8000", "k", "invalid server URL"), ("http://me:secret@h", "k", "contains a password"),
    ("http://h", "two words", "OWN_KEY is not a valid API key"), ("http://h", "k", ""),
])  # fmt: skip
def test_an_invalid_url_or_key_is_a_fault_before_any_work(url: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", key)
    faults = servers.faults(set_params({"q8": {"url": url, "key_env": "OWN_KEY"}}))
    assert len(faults) == bool(words) and all(words in f and "secret" not in f and "two words" not in f for f in faults), faults


@pytest.mark.parametrize("how, variant, python, words", [
    ("vllm", as_variant("cast", "hf"), None, "needs its own environment"),
    ("vllm", as_variant("cast", "hf"), "/none/python", "is not a program"), ("vllm", as_variant("cast", "hf"), sys.executable, ""),
    ("llamacpp", as_variant("gguf", "llamacpp", engine_options={"flash": True}), None, "not have engine_options {flash: True}"),
])  # fmt: skip
def test_what_this_machine_or_the_server_lacks_is_said_before_any_work_as_the_stage_says_it(
    how: str, variant: Change, python: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.VLLM, python) if python else monkeypatch.delenv(launch.VLLM, raising=False)
    settings = set_params({"q8": {"launch": how}}, variant)
    lines = servers.unsupported(settings)
    assert servers.faults(settings) == [] and len(lines) == bool(words)
    assert all(words in line and "FAIL" not in line for line in lines), lines
    if words:
        serve.main("q8")
        assert report()["status"] == "unsupported" and words in report()["reason"]
        ruled = set_params({"q8": {"launch": how}}, variant, rules(LIMITS[0]))
        assert servers.unsupported(ruled)[0].endswith("a required rule judges it: the gate will FAIL")


def test_check_says_what_cannot_be_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "_lm_eval_tasks", set)  # slow, and their sets are not in this folder
    settings = set_params({"q8": {"launch": "vllm"}})
    assert any("launch: vllm reads models of engine" in fault for fault in check.faults(settings))
    lacking = set_params({"q8": {"launch": "vllm"}}, as_variant("cast", "hf"))
    monkeypatch.delenv(launch.VLLM, raising=False)
    monkeypatch.setattr(params, "load", lambda: lacking)
    monkeypatch.setattr(check, "faults", lambda _: [])  # it reads sets that are not in this folder
    check.main()
    assert "check      serving.variants.q8 will be unsupported: vLLM needs" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    lambda d: None, lambda d: d.pop("serving"), lambda d: d.update(serving={}), lambda d: d.update(serving={"variants": {}}),
    lambda d: (d.pop("serving"), d["tiers"][d["tier"]].pop("serving")),
])  # fmt: skip
def test_a_project_that_serves_nothing_is_valid_and_says_so(change: Change) -> None:
    settings = set_params({}, change)
    server_results.write_asked(settings)
    assert settings.serving.variants == {} and "no variant is served" in artifacts.SERVING_ASKED.read_text(encoding="utf-8")
    assert server_results.current(results(settings), settings) == ({}, {})


def test_what_is_asked_of_servers_is_written_where_stages_depend_on_it() -> None:
    written = []
    for chat in (False, True):
        server_results.write_asked(set_params({"q8": {"url": "http://h", "key_env": "K", "chat": chat}}))
        written.append(yaml.safe_load(artifacts.SERVING_ASKED.read_text(encoding="utf-8"))["q8"])
    assert written[0]["load"] == LOAD and written[0]["key_env"] == "K" and written[0] | {"chat": True} == written[1] != written[0]


# --- launched ----------------------------------------------------------------------------------------------------


def test_a_launched_llama_cpp_server_is_measured_and_gone(tiny: Path) -> None:
    folder = artifacts.model_dir("q8")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    write_gguf(folder, folder / "model.gguf")
    write_manifest(folder, digest="q8-1")
    share_environments()
    before = {p.pid for p in psutil.Process().children(recursive=True)}

    def asked(data: dict[str, Any]) -> None:
        data["tiers"][data["tier"]]["serving"] |= {"concurrency": [1, 2, 4], "rates": [50.0]}
        data["variants"]["q8"]["engine_options"] = {"kv": "f32"}

    served({"launch": "llamacpp"}, asked)
    written = report()
    if written["status"] == "unsupported":
        pytest.skip(f"llama.cpp's server: {written['reason']}")
    assert written["status"] == "ok" and len(rows()) == 2 * (8 + 8 + 16 + 8) + 1 + 2 + 4 + 1
    assert all(r["prompt_tokens"] == 8 and r["output_tokens"] == 3 for r in rows() if r["ok"])
    assert {m["failure_rate"]["value"] for m in written["levels"].values()} == {0.0} and "open-50" in written["levels"]
    assert written["launch"]["kind"] == "llamacpp" and written["launch"]["parallel"] == 4 and "log" not in written["launch"]
    assert written["launch"]["engine_options"] == {"kv": "f32"}
    assert sys.platform != "linux" or written["server_memory_bytes"]["value"] > 2**20
    assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


@pytest.mark.skipif(sys.platform != "linux", reason="the guard finds lost grandchildren with Linux's prctl")
def test_a_stage_that_is_killed_leaves_no_server_and_no_half_written_file() -> None:
    """How a run ends by other signals: test_serving_launch.py."""
    set_params({"q8": {"launch": "llamacpp"}})
    hang = "    def do_GET(self):\n        open('asked', 'w').close(); time.sleep(600)\n    def do_POST"
    Path("toy.py").write_text(PLAIN.replace("    def do_POST", hang), encoding="utf-8")
    program = (
        "import sys\nfrom pipeline import serve\nfrom pipeline.core import cli\nfrom pipeline.serving import launch\n"
        "launch.KINDS['llamacpp'] = lambda folder, port, *_: launch.Command([sys.executable, 'toy.py', str(port)], 'TOY_KEY')\n"
        "cli.run(serve.main)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", program, "q8"], env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    guards = killed_once(run, Path("asked"), signal.SIGKILL)
    assert len(guards) == 1 and gone([*guards, *family()]) and run.returncode != 0
    assert not Path("reports/serving").exists() and not list(Path("artifacts").rglob("*.jsonl"))
