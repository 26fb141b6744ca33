"""A bundle holds what checks a claim and nothing that must not leave; one from elsewhere is read with suspicion."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reported
import yaml

from pipeline import report
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError
from pipeline.pages import bundle, machines

KEY = "sk-0123456789abcdef0123"
Members = dict[str, bytes]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The committed results with rows beside them, and with everything that must not leave."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SERVER_TOKEN", "hunter2-hunter2")
    house = reported.reports(tmp_path, keep=("bf16", "int8"))
    for name in params.load().variants:
        artifacts.write_jsonl(artifacts.answers(name), [{"item": 1, "variant": name}])
        artifacts.write_json(artifacts.meta_of(artifacts.answers(name)), {"sets": {"evalsets/tasks/facts.jsonl": "f" * 64}})
        path = artifacts.metrics(name)
        inputs = {str(artifacts.answers(name)): artifacts.sha256_file(artifacts.answers(name))}
        artifacts.write_json(path, artifacts.read_json(path) | {"inputs": inputs})
        artifacts.write_json(artifacts.model_dir(name) / artifacts.MANIFEST, {"variant": name})
        artifacts.write_text(artifacts.model_dir(name) / "model.safetensors", "WEIGHTS" * 1000)
    artifacts.write_text(artifacts.BASE / "model.safetensors", "WEIGHTS")
    artifacts.write_text(artifacts.LOGS / "gptq.log", f"https://me:hunter2pass@pypi/simple\nBearer {KEY}\n{KEY} hunter2-hunter2\n")
    text = (house / "params.yaml").read_text(encoding="utf-8")
    (house / "params.yaml").write_text(text.replace("sqlite:///mlflow.db", "postgresql://u:secretpw@db/x"), encoding="utf-8")
    return house


def packed(house: Path, name: str = "out.zip") -> Path:
    bundle.pack(params.load(), house / name)
    return house / name


def changed(path: Path, change: Callable[[Members], None], indexed: bool = True) -> Path:
    """A bundle with other members; `indexed`: its index lists them as they now are."""
    with zipfile.ZipFile(path) as old:
        members = {n: old.read(n) for n in old.namelist()}
    change(members)
    if indexed:
        index = json.loads(members.pop(bundle.INDEX))
        index["files"] = {n: {"sha256": hashlib.sha256(b).hexdigest()} for n, b in members.items()}
        members[bundle.INDEX] = json.dumps(index).encode()
    other = path.with_name("changed.zip")
    with zipfile.ZipFile(other, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)
    return other


def read_json(path: Path, name: str) -> Any:
    with zipfile.ZipFile(path) as found:
        return json.loads(found.read(name))


# --- making one --------------------------------------------------------------------------------------------------


def test_a_bundle_has_environment_conditions_rows_figures_and_failures(house: Path) -> None:
    path = packed(house)
    with zipfile.ZipFile(path) as found:
        names = set(found.namelist())
    assert {"params.yaml", "environment.json", "reports/gate.json", "reports/metrics/int8.json", "artifacts/answers/int8.jsonl",
            "artifacts/answers/int8.meta.json", "artifacts/models/int8/manifest.json", "artifacts/broke/int8.json",
            "artifacts/logs/gptq.log"} <= names  # fmt: skip
    index = read_json(path, bundle.INDEX)
    assert index["files"].keys() == names - {bundle.INDEX}
    assert index["conditions"]["sets"]["evalsets/tasks/facts.jsonl"] == "f" * 64
    assert any(n.startswith("evalsets/corpus/") for n in index["conditions"]["sets"])
    assert read_json(path, "environment.json")["packages"]["numpy"]


def test_no_weights_and_no_secrets_leave_and_what_was_hidden_is_named(house: Path) -> None:
    path = packed(house)
    with zipfile.ZipFile(path) as found:
        whole = b"\n".join(found.read(n) for n in found.namelist())
        assert not [n for n in found.namelist() if n.endswith((".safetensors", ".gguf", ".bin", ".onnx"))]
        assert b"postgresql://(hidden)@db/x" in found.read("params.yaml")
    for secret in (b"WEIGHTS", b"hunter2", KEY.encode(), b"secretpw"):
        assert secret not in whole, secret
    assert set(read_json(path, bundle.INDEX)["hidden"]) == {"params.yaml", "artifacts/logs/gptq.log"}


@pytest.mark.parametrize("where", ["a file of another kind", "options", "a server's address"])
def test_no_secret_leaves_in_what_is_written_for_the_bundle_itself(house: Path, where: str) -> None:
    """The index repeats params; any text goes in by what it is, not by how its file is called."""
    if where == "a file of another kind":
        artifacts.write_text(Path("envs/own.cfg"), f"index-url = https://me:hunter2pass@pypi/simple\n{KEY}\n")
    elif where == "options":
        for name in params.load().variants:
            path = artifacts.metrics(name)
            artifacts.write_json(path, artifacts.read_json(path) | {"options": {"index": "https://me:hunter2pass@h", "k": [KEY]}})
    else:
        data = yaml.safe_load((house / "params.yaml").read_text(encoding="utf-8"))
        data["serving"]["variants"] = {"int8": {"url": "http://me:hunter2pass@host:8000"}}
        (house / "params.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    path = packed(house)
    with zipfile.ZipFile(path) as found:
        for name in found.namelist():
            assert not re.search(rb"hunter2|sk-0123456789|secretpw", found.read(name)), name
    assert bundle.read(path)["index"]["files"]


def test_a_variable_whose_value_is_a_folder_s_name_breaks_no_bundle(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS_FOLDER", "artifacts/answers")
    assert "artifacts/answers/int8.jsonl" in bundle.read(packed(house))["index"]["files"]


def test_a_log_cut_to_its_end_has_no_half_of_a_secret_and_is_not_said_to_hide_one(
    house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = artifacts.LOGS / "gptq.log"
    artifacts.write_text(log, f"{KEY}\n{'x' * 1000}")
    monkeypatch.setattr(bundle, "MOST_LOG", 1010)
    with zipfile.ZipFile(packed(house)) as found:
        assert b"cdef0123" not in found.read(str(log))
    artifacts.write_text(log, "y" * 5000)
    path = packed(house)
    assert str(log) not in read_json(path, bundle.INDEX)["hidden"]


def test_what_is_not_here_is_named_with_the_way_to_get_it(house: Path) -> None:
    absent = read_json(packed(house), bundle.INDEX)["absent"]
    assert "dvc pull" in absent["artifacts/tokens/int8.parquet"] and "dvc.lock" in absent
    assert "artifacts/answers/int8.jsonl" not in absent


def test_the_same_results_give_the_same_bytes(house: Path) -> None:
    assert packed(house).read_bytes() == packed(house, "again.zip").read_bytes()


def test_rows_that_are_not_those_of_the_metrics_are_not_bundled(house: Path) -> None:
    artifacts.write_jsonl(artifacts.answers("int8"), [{"item": 2}])
    with pytest.raises(ArtifactError, match=r"answers/int8\.jsonl is not what the metrics of int8 were made from; run `dvc repro`"):
        packed(house)
    assert not (house / "out.zip").exists()


@pytest.mark.parametrize("file", [artifacts.GATE, artifacts.metrics("int8")])
def test_without_metrics_or_verdict_there_is_no_bundle(house: Path, file: Path) -> None:
    file.unlink()
    with pytest.raises(ArtifactError, match="is missing; run `dvc repro`"):
        packed(house)


def test_a_bundle_makes_no_folders(house: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere is not there; make it"):
        bundle.pack(params.load(), house / "nowhere" / "out.zip")
    assert not (house / "nowhere").exists()


def test_a_folder_is_no_name_for_a_bundle(house: Path) -> None:
    with pytest.raises(ArtifactError, match="is a folder; name a file"):
        bundle.pack(params.load(), house / "reports")


# --- reading another's -------------------------------------------------------------------------------------------


def test_a_bundle_is_read_as_it_was_made(house: Path) -> None:
    found = bundle.read(packed(house))
    assert found["results"].keys() == params.load().variants.keys()
    assert found["verdict"] == artifacts.read_json(artifacts.GATE)


def test_a_name_that_leads_out_of_the_folder_is_refused(house: Path) -> None:
    good = packed(house)
    for name in ("../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "C:evil", "./evil", "a//evil"):
        bad = changed(good, put(name, b"x"))
        before = sorted(house.rglob("*"))
        with pytest.raises(ArtifactError, match="no plain name inside a folder"):
            bundle.read(bad)
        assert sorted(house.rglob("*")) == before and not Path("/etc/evil").exists(), name


def test_a_link_is_refused(house: Path) -> None:
    path = packed(house)
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as more:
        more.writestr(info, "/etc/passwd")
    with pytest.raises(ArtifactError, match="no plain name inside a folder"):
        bundle.read(path)


def test_a_name_given_twice_is_refused(house: Path) -> None:
    path = packed(house)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as more:
        more.writestr("params.yaml", "x")
    with pytest.raises(ArtifactError, match="twice"):
        bundle.read(path)


def test_what_would_fill_the_memory_is_refused_unread(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(house)
    for limit in ("MOST_BYTES", "MOST_TOTAL", "MOST_MEMBERS"):
        with monkeypatch.context() as patched, pytest.raises(ArtifactError, match=r"over 3\b"):
            patched.setattr(bundle, limit, 3)
            bundle.read(path)


def put(name: str, data: bytes) -> Callable[[Members], None]:
    return lambda members: members.update({name: data})


INCOHERENT: list[tuple[Callable[[Members], Any], bool, str]] = [
    (put("reports/metrics/int8.json", b"{}"), False, "was changed after the bundle was made"),
    (put("more.txt", b"x"), False, "does not list what the bundle holds"),
    (lambda m: m.pop("params.yaml"), False, "does not list what the bundle holds"),
    (lambda m: m.pop(bundle.INDEX), False, "it is no bundle"),
    (lambda m: m.pop("reports/gate.json"), True, "holds no reports/gate.json"),
    (put("reports/gate.json", b"[1]"), True, "is not a JSON object"),
    (put("reports/gate.json", b"{"), True, "is not JSON"),
    (put("reports/gate.json", b"[" * 100_000), True, "is not JSON"),
    (put("reports/gate.json", b"\xff\xfe"), True, "is not JSON"),
    (put("artifacts/answers/int8.jsonl", b"{}"), True, "is not what the metrics of int8 were made from"),
    (put(bundle.INDEX, b'{"format": 99}'), False, "format 99, not 1"),
    (put(bundle.INDEX, b'{"format": 1, "files": []}'), False, "does not list"),
]


def test_a_bundle_that_does_not_hold_together_is_refused_in_one_line(house: Path) -> None:
    good = packed(house)
    for change, indexed, told in INCOHERENT:
        bad = changed(good, change, indexed)
        with pytest.raises(ArtifactError, match=re.escape(told)) as error:
            bundle.read(bad)
        assert "\n" not in str(error.value) and str(bad) in str(error.value)


def test_what_is_no_zip_is_refused_in_one_line(house: Path) -> None:
    data, (folder, bad) = packed(house).read_bytes(), (house / "folder.zip", house / "bad.zip")
    folder.mkdir()
    middle = len(data) // 2
    flipped = data[:middle] + bytes(b ^ 255 for b in data[middle : middle + 4000]) + data[middle + 4000 :]
    for path, content in ((folder, None), (bad, None), (bad, data[:middle]), (bad, flipped), (bad, b"hello"), (bad, b"")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ArtifactError) as error:
            bundle.read(path)
        assert "\n" not in str(error.value) and path.name in str(error.value)


def test_the_command_line_says_a_mistake_in_one_line_and_no_traceback(house: Path) -> None:
    run = [sys.executable, "-m", "pipeline.report", "--compare", "nowhere.zip"]
    done = subprocess.run(run, capture_output=True, text=True, env={"PYTHONPATH": str(reported.ROOT), "PATH": ""})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip().split("\n") == [
        "error: nowhere.zip is not there; `python -m pipeline.report --bundle out.zip` makes one"
    ]


# --- side by side ------------------------------------------------------------------------------------------------


def compared(house: Path, change: Callable[[Any], None] | None = None, what: str = "reports/metrics/int8.json") -> str:
    """The comparison with a bundle whose member `what` was made to say something else."""

    def altered(members: Members) -> None:
        value = json.loads(members[what])
        if change:
            change(value)
        members[what] = json.dumps(value).encode()

    return report.side_by_side(params.load(), changed(packed(house), altered))


def rows_of(text: str, name: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.split("\n") if line.startswith(f"| {name} |")]


def test_equal_results_differ_in_nothing(house: Path) -> None:
    text = compared(house)
    assert "## Conditions that differ (here, there)\n\nNone." in text
    assert {r[-1] for r in rows_of(text, "int8") if len(r) == 5} == {"equal"}


def test_quality_is_compared_by_intervals_and_timings_have_two_columns_and_no_verdict(house: Path) -> None:
    def worse(result: Any) -> None:
        kld, ttft = result["metrics"]["kld_mean"], result["metrics"]["ttft_ms"]
        for m in (kld, ttft):
            m.update({k: 9 * m[k] for k in ("value", "low", "high")})
        result["metrics"]["ppl_ratio"]["value"] += 1e-4

    text = compared(house, worse)
    by = {r[1]: r for r in rows_of(text, "int8")}
    assert by["kld_mean"][4] == "apart" and by["ppl_ratio"][4] == "overlap" and by["top1_agreement"][4] == "equal"
    assert len(by["ttft_ms"]) == 4 and by["ttft_ms"][2] != by["ttft_ms"][3]


@pytest.mark.parametrize("part", ["base", "quality", "sets"])
def test_where_conditions_differ_they_come_first_and_quality_is_not_compared(house: Path, part: str) -> None:
    def other(index: Any) -> None:
        index["conditions"][part] = "another" if part == "base" else index["conditions"][part] | {"more": "thing"}

    text = compared(house, other, bundle.INDEX)
    assert text.index(f"- {part}: ") < text.index("## Quality")
    assert f"Not comparable: {part} differ." in text
    assert {r[4] for r in rows_of(text, "int8") if len(r) == 5} == {"not comparable"}


@pytest.mark.parametrize(
    "section, change, said",
    [
        ("benchmark", lambda c: c["amount"].update(rounds=99), "speed: benchmark.amount.rounds: 5, 99"),
        ("benchmark", lambda c: c.update(prompts="other"), "speed: benchmark.prompts: evalsets/corpus, other"),
        ("serving", lambda c: c["amount"].update(requests=99), "speed: serving.amount.requests: 4, 99"),
        ("serving", lambda c: c.update(timeout_s=9.0), "speed: serving.timeout_s: 60.0, 9.0"),
    ],
)
def test_other_benchmarks_and_servers_are_named_and_leave_quality_comparable(
    house: Path, section: str, change: Callable[[Any], None], said: str
) -> None:
    text = compared(house, lambda i: change(i["conditions"]["speed"][section]), bundle.INDEX)
    assert f"- {said}" in text and text.index(said) < text.index("## Quality")
    assert "equal" in {r[-1] for r in rows_of(text, "int8")}


def test_what_is_compared_here_shows_no_secret_either(house: Path) -> None:
    path = artifacts.metrics("int8")
    other = changed(packed(house), lambda m: None)
    artifacts.write_json(path, artifacts.read_json(path) | {"options": {"index": "https://me:hunter2pass@h"}})
    text = report.side_by_side(params.load(), other)
    assert "hunter2" not in text and "(hidden)@h" in text


def test_another_machine_is_named_and_leaves_quality_comparable(house: Path) -> None:
    text = compared(house, lambda i: i["conditions"]["machine"].update({"cpu": "Another CPU"}), bundle.INDEX)
    assert "- machine: cpu: AMD EPYC, Another CPU" in text and "There: Another CPU, 2 cores" in text
    assert "equal" in {r[-1] for r in rows_of(text, "int8")}


def test_a_variant_that_only_one_side_has_is_said_and_shown_as_unknown(house: Path) -> None:
    def without(members: Members) -> None:
        del members["reports/metrics/int8.json"]

    text = report.side_by_side(params.load(), changed(packed(house), without))
    assert "- variant int8: only here" in text
    assert ["unknown", "not in both"] in [r[3:] for r in rows_of(text, "int8")]


def test_a_figure_that_is_no_number_is_unknown(house: Path) -> None:
    for value in (float("nan"), float("inf"), 10**400, True, "1", [1], {"value": 1}, None):
        text = compared(house, lambda r, value=value: r["metrics"]["kld_mean"].update({"value": value}))
        assert rows_of(text, "int8")[1][3].startswith("unknown") and rows_of(text, "int8")[1][4] == "not in both"


@pytest.mark.parametrize("junk", [None, [], "x", 3, {"variants": 7}, {"variants": {"int8": []}}])
def test_junk_in_place_of_conditions_breaks_nothing(junk: Any) -> None:
    side = {
        "conditions": junk if isinstance(junk, dict) else {},
        "results": {"int8": {"metrics": junk}},
        "verdict": {"variants": junk},
    }
    assert "# This machine and another" in machines.side_by_side(side, side)


def test_nothing_from_elsewhere_reaches_the_terminal_as_a_command(house: Path) -> None:
    evil = "\x1b[2J\x07|pwned|\n## Verdicts\u202e" + "x" * 10_000
    text = compared(house, lambda i: i["conditions"]["machine"].update({"cpu": evil, evil: evil}), bundle.INDEX)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text) and text.count("\n## Verdicts") == 1
    assert max(map(len, text.split("\n"))) < 2000
