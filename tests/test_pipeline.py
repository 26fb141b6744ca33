"""The whole line, by one `dvc repro`, in a git repository of its own, on a two-layer random Llama.

Tests stand in the order in which they change the house; what only reads or judges runs in this process.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, make_model
from dvc.repo import Repo

from pipeline import gate, report, track
from pipeline.reporting import charts
from tests import serving_server
from tests.serving_server import Server

BIN = Path(sys.executable).parent
BF16 = {"quantizer": "cast", "engine": "hf", "options": {"dtype": "bfloat16"}}
INT8 = {"quantizer": "torchao", "engine": "hf", "options": {"scheme": "int8-weight-only"}, "engine_options": {}}
CHAIN = ("quantize", "diverge", "evaluate", "benchmark", "compare")
DYING = {"quantizer": "dies", "engine": "dies", "options": {"whole": True}}
RULE = {"metric": "failure_rate/closed-2", "limit": "50 pp", "variants": ["int8"]}
pytestmark = pytest.mark.filterwarnings("ignore")  # DVC's and MLflow's own
ODD = {"quantizer": "gptq", "engine": "hf", "options": {"bits": 4, "group_size": 128}}


def run(house: Path, *command: str, check: bool = True) -> str:
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(house)}
    done = subprocess.run(command, cwd=house, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert not check or done.returncode == 0, output[-4000:]
    return output


def edit(house: Path, change: Any) -> None:
    path = house / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """What stands for a server of int8."""
    with serving_server.serving() as running:
        yield running


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """A small copy of the project, committed, with params for the tiny model; `dvc repro` has run once."""
    house = tmp_path_factory.mktemp("house")
    for name in ("pipeline", "evalsets", "envs"):
        shutil.copytree(ROOT / name, house / name)  # with what Python made of them, else each process compiles it anew
    for name in ("dvc.yaml", "params.yaml", "constraints.txt", ".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, house / name)
    make_model(house / "artifacts" / "source")
    shutil.copy(ROOT / "tests/dying/engine.py", house / "pipeline/engines/dies.py")
    shutil.copy(ROOT / "tests/dying/quantizer.py", house / "pipeline/quantizers/dies.py")

    def small(p: dict[str, Any]) -> None:
        p["model"] = {"source": "path", "path": "artifacts/source"}
        p["variants"] = {"bf16": BF16, "int8": INT8, "mortal": DYING}
        p["threads"] = 1
        p["calibration"] |= {"rows": 4, "tokens": 32}
        p["evaluate"] |= {"batch_size": 4}
        tasks = {"facts": 3, "arithmetic_copy": 3, "prose_ppl": 3}
        amounts = {"floor": {"tokens": 200, "stepwise": 16}, "benchmark": {"prompt_tokens": 16, "output_tokens": 4, "rounds": 5}}
        p["tier"], p["tiers"] = "tiny", {"tiny": {"tasks": tasks, "documents": 3, "trajectories": 2, "stop": "never"} | amounts}
        p["serving"] |= {"variants": {"int8": {"url": server.url}}, "timeout_s": 20.0}
        load = {"concurrency": [1, 2], "requests": 4, "rounds": 2, "warmups": 1, "prompt_tokens": 8, "output_tokens": 3}
        p["tiers"]["tiny"]["serving"] = load
        p["diverge"] |= {"window": 64}
        p["diverge"]["trajectories"] |= {"tokens": 6}
        p["compare"]["resamples"] = 200

    edit(house, small)
    run(house, "git", "init", "-q")
    Repo.init(str(house)).close()
    shutil.copy(ROOT / ".dvc/config", house / ".dvc")  # without it every command of DVC starts another, to report itself
    run(house, "git", "add", "-A")
    run(house, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "start")
    (house / "repro.log").write_text(run(house, "dvc", "repro"), encoding="utf-8")
    return house


def results(house: Path, variant: str) -> Any:
    return json.loads((house / f"reports/metrics/{variant}.json").read_text(encoding="utf-8"))


@pytest.fixture
def inside(house: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The house, as the working directory; its params are put back afterwards."""
    monkeypatch.chdir(house)
    good = Path("params.yaml").read_text(encoding="utf-8")
    yield house
    Path("params.yaml").write_text(good, encoding="utf-8")


def exit_code(stage: Any, **options: Any) -> int:
    """What a stage's `main` ends with."""
    try:
        stage.main(**options)
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_every_variant_has_results_and_the_reference_is_exactly_itself(house: Path) -> None:
    bf16, int8 = results(house, "bf16"), results(house, "int8")
    assert bf16["status"] == int8["status"] == "ok"
    assert bf16["metrics"]["kld_mean"]["value"] == bf16["metrics"]["kld_max"]["value"] == 0
    assert bf16["metrics"]["kld_mean"]["n"] > 100
    assert 0 < int8["metrics"]["kld_mean"]["low"] < int8["metrics"]["kld_mean"]["high"]
    assert int8["metrics"]["speed_ratio"]["n"] == 5 and int8["metrics"]["acc_delta/all"]["n"] == 6


def test_an_engine_that_dies_costs_its_own_variant_only(house: Path) -> None:
    mortal = results(house, "mortal")
    assert mortal["status"] == "crashed"
    assert mortal["reason"].count("diverge: the process died of SIGILL") == mortal["reason"].count("SIGILL") == 1
    assert "evaluate: the process died of SIGSEGV" in mortal["reason"]
    assert "benchmark: a library ended the process by exit(1); its last words: terminate called" in mortal["reason"]
    verdict = json.loads((house / "reports/gate.json").read_text(encoding="utf-8"))["variants"]["mortal"]
    assert verdict["verdict"] == "FAIL" and "crashed" in verdict["reason"]
    assert "died of SIGILL" in (house / "reports/report.html").read_text(encoding="utf-8")


def test_a_quantizer_that_dies_leaves_its_reason_and_no_weights(inside: Path) -> None:
    edit(inside, lambda p: p["variants"].update(unbuilt=DYING | {"options": {"whole": False}}))
    run(inside, sys.executable, "-m", "pipeline.quantize", "unbuilt")
    manifest = json.loads(Path("artifacts/models/unbuilt/manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "crashed" and "quantize unbuilt: the process died of SIGABRT" in manifest["reason"]
    assert not list(Path("artifacts/models/unbuilt").glob("*.safetensors"))


def test_the_report_holds_every_variant_and_needs_no_network(house: Path) -> None:
    page = (house / "reports/report.html").read_text(encoding="utf-8")
    assert all(f'<th scope="row">{name}</th>' in page for name in ("bf16", "int8"))
    assert "Where it broke" in page and "<summary><strong>int8</strong>: " in page
    page = page.replace(charts.library(), "")
    assert "src=" not in page and "<link" not in page and "@import" not in page
    assert "| int8 |" in (house / "reports/report.md").read_text(encoding="utf-8")
    assert (house / "reports/figures/tradeoff.svg").stat().st_size > 1000


def test_a_served_variant_stands_in_the_trade_off_table_beside_itself_in_process(house: Path) -> None:
    with (house / "reports/tradeoff_table.csv").open(encoding="utf-8") as f:
        rows = [(r["variant"], r["measured"], r["at_once"]) for r in csv.DictReader(f)]
    assert {("bf16", "in process", "1"), ("int8", "in process", "1"), ("int8", "server", "1"), ("int8", "server", "2")} <= set(rows)
    assert not [r for r in rows if r[:2] == ("bf16", "server")]
    page = (house / "reports/report.html").read_text(encoding="utf-8")
    assert "<h3>int8</h3>" in page and "Levels of int8" in page and "replies of forced length is not known" in page


def test_a_stage_says_one_line_and_libraries_stay_quiet(house: Path) -> None:
    log = (house / "repro.log").read_text(encoding="utf-8")
    own = [line for line in log.replace("\r", "\n").split("\n") if line.startswith("quantize ")]
    assert len(own) == 3 and "GPT-QModel" not in log and "INFO  " not in log


def test_git_would_add_no_weights(house: Path) -> None:
    run(house, "git", "add", "-A")
    staged = run(house, "git", "diff", "--cached", "--name-only").split()
    assert not [f for f in staged if f.startswith("artifacts") or f.endswith((".safetensors", ".db"))]
    assert "dvc.lock" in staged and "reports/metrics/int8.json" in staged


def test_nothing_changed_runs_nothing_and_makes_no_mlflow_run(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("reports/mlflow.json").read_bytes()
    with Repo() as repo:
        assert repo.status() == {}
    track.main()
    assert "0 new MLflow runs" in capsys.readouterr().out
    assert Path("reports/mlflow.json").read_bytes() == before


def test_a_merge_into_the_state_it_is_changes_nothing_and_an_edited_result_is_no_verdict(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With DVC's own lock and cache: the baseline's rows are found, and a result that no stage wrote is exit 2."""
    run(inside, "git", "add", "-A")
    run(inside, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "results")
    verdict, path = Path("reports/gate.json").read_bytes(), Path("reports/metrics/int8.json")
    enforce = {"enforcing": True, "commenting": True, "rev": "HEAD"}
    assert exit_code(gate, enforcing=True) == exit_code(gate, **enforce) == gate.EXIT[json.loads(verdict)["verdict"]]
    assert "unchanged" in Path("artifacts/comment.md").read_text(encoding="utf-8")
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace('"n": ', '"n": 1'), encoding="utf-8")
    gate.main()
    code = exit_code(gate, **enforce)
    path.write_text(good, encoding="utf-8")
    Path("reports/gate.json").write_bytes(verdict)
    assert code == gate.STALE and "missing or changed: reports/gate.json, reports/metrics/int8.json" in capsys.readouterr().err


def test_a_rule_on_a_server_is_judged_and_asks_no_server_again(inside: Path, server: Server) -> None:
    asked = len(server.asked)
    edit(inside, lambda p: p["gate"]["rules"].append(RULE))
    gate.main()
    verdict = json.loads(Path("reports/gate.json").read_text(encoding="utf-8"))
    judged = {r["metric"]: r["verdict"] for r in verdict["variants"]["int8"]["rules"]}
    assert judged["failure_rate/closed-2"] == "PASS" and len(server.asked) == asked


def test_a_changed_option_or_an_added_variant_reruns_its_own_chain_and_a_rule_reruns_no_measurement(inside: Path) -> None:
    def change(p: dict[str, Any]) -> None:
        p["variants"]["int8"]["engine_options"].update(attention="eager")
        p["variants"]["new"] = ODD
        p["gate"]["rules"].append(RULE)

    edit(inside, change)
    with Repo() as repo:
        changed = repo.status()
    # what follows quantize@int8 depends on its manifest, in which the option stands
    assert {s for s in changed if "@" in s} == {"quantize@int8"} | {f"{s}@new" for s in CHAIN}
    assert "gate" in changed and not {"reference", "calibrate", "floor", "serve"} & changed.keys()


def test_what_is_taken_out_appears_nowhere_and_a_project_without_servers_needs_no_section(inside: Path) -> None:
    edit(inside, lambda p: (p["variants"].pop("mortal"), p.pop("serving"), p["tiers"]["tiny"].pop("serving")))
    with Repo() as repo:
        assert {stage.addressing for stage in repo.reproduce("report", dry=True)} == {"check", "gate", "report"}
    for stage in (gate, report):
        stage.main()
    for name in ("gate.json", "report.html", "report.md", "summary.json"):
        assert "mortal" not in Path("reports", name).read_text(encoding="utf-8"), name
    assert ",server," not in Path("reports/tradeoff_table.csv").read_text(encoding="utf-8")


def test_a_fault_in_params_stops_everything_before_any_work(inside: Path) -> None:
    edit(inside, lambda p: p["variants"]["int8"]["options"].update(shceme="int8"))
    output = run(inside, "dvc", "repro", check=False)
    assert "unknown option 'shceme'" in output and "did you mean 'scheme'" in output and "Traceback" not in output
    assert [line.split("'")[1] for line in output.split("\n") if line.startswith("Running stage '")] == ["check"]
