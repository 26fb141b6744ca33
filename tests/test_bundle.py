"""A bundle holds what checks a claim and no secrets; a bundle from elsewhere is not trusted."""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reported
import yaml

from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError
from tools import bundle

KEY = "sk-0123456789abcdef0123"
Members = dict[str, bytes]
Change = Callable[[Any], Any]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The committed results with rows, and with everything that must not leave."""
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


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as old:
        return {n: old.read(n) for n in old.namelist()}


def changed(path: Path, change: Callable[[Members], Any], indexed: bool = True) -> Path:
    """A bundle with other members; indexed: its index lists them as they now are."""
    content = members(path)
    change(content)
    if indexed:
        index = json.loads(content.pop(bundle.INDEX))
        index["files"] = {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in content.items()}
        content[bundle.INDEX] = json.dumps(index).encode()
    other = path.with_name("changed.zip")
    with zipfile.ZipFile(other, "w") as new:
        for name, data in content.items():
            new.writestr(name, data)
    return other


def test_a_bundle_has_everything_that_checks_the_claim_and_no_weights_and_no_secrets(house: Path) -> None:
    content = members(packed(house))
    index = json.loads(content[bundle.INDEX])
    assert {"params.yaml", "environment.json", "reports/gate.json", "reports/metrics/int8.json", "artifacts/answers/int8.jsonl",
            "artifacts/answers/int8.meta.json", "artifacts/models/int8/manifest.json", "artifacts/broke/int8.json",
            "artifacts/logs/gptq.log"} <= content.keys()  # fmt: skip
    assert index["files"].keys() == content.keys() - {bundle.INDEX}
    assert index["conditions"]["sets"]["evalsets/tasks/facts.jsonl"] == "f" * 64
    assert any(n.startswith("evalsets/corpus/") for n in index["conditions"]["sets"])
    assert json.loads(content["environment.json"])["packages"]["numpy"]
    assert "dvc pull" in index["absent"]["artifacts/tokens/int8.parquet"] and "artifacts/answers/int8.jsonl" not in index["absent"]
    assert not [n for n in content if n.endswith((".safetensors", ".gguf", ".bin", ".onnx"))]
    assert b"postgresql://(hidden)@db/x" in content["params.yaml"]
    for secret in (b"WEIGHTS", b"hunter2", KEY.encode(), b"secretpw"):
        assert secret not in b"\n".join(content.values()), secret
    assert set(index["hidden"]) == {"params.yaml", "artifacts/logs/gptq.log"}
    assert packed(house).read_bytes() == packed(house, "again.zip").read_bytes(), "equal results give equal bytes"


def test_no_secret_leaves_in_what_is_written_for_the_bundle_itself(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index repeats params. Any text is searched, whatever its file name. A secret may be a folder's name."""
    artifacts.write_text(Path("envs/own.cfg"), f"index-url = https://me:hunter2pass@pypi/simple\n{KEY}\n")
    for name in params.load().variants:
        path = artifacts.metrics(name)
        artifacts.write_json(path, artifacts.read_json(path) | {"options": {"index": "https://me:hunter2pass@h", "k": [KEY]}})
    data = yaml.safe_load((house / "params.yaml").read_text(encoding="utf-8"))
    data["serving"]["variants"] = {"int8": {"url": "http://me:hunter2pass@host:8000"}}
    (house / "params.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    monkeypatch.setenv("TOKENS_FOLDER", "artifacts/answers")
    path = packed(house)
    for name, content in members(path).items():
        assert not re.search(rb"hunter2|sk-0123456789|secretpw", content), name
    assert "artifacts/answers/int8.jsonl" in bundle.read(path)[0]["files"]
    other = bundle.compared(params.load(), path)
    assert "hunter2" not in other and KEY not in other


def test_a_log_cut_to_its_end_has_no_half_of_a_secret(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = artifacts.LOGS / "gptq.log"
    monkeypatch.setattr(bundle, "MAX_LOG_BYTES", 1010)
    for text, hidden in ((f"{KEY}\n{'x' * 1000}", True), ("y" * 5000, False)):
        artifacts.write_text(log, text)
        content = members(packed(house))
        assert b"cdef0123" not in content[str(log)] and (str(log) in json.loads(content[bundle.INDEX])["hidden"]) is hidden


@pytest.mark.parametrize("break_it, words", [
    (lambda: artifacts.write_jsonl(artifacts.answers("int8"), [{"item": 2}]),
     r"answers/int8\.jsonl is not what the metrics of int8 were computed from; run `dvc repro`"),
    (artifacts.GATE.unlink, "is missing; run `dvc repro`"), (artifacts.metrics("int8").unlink, "is missing; run `dvc repro`"),
])  # fmt: skip
def test_stale_or_missing_results_make_no_bundle(house: Path, break_it: Callable[[], object], words: str) -> None:
    break_it()
    with pytest.raises(ArtifactError, match=words):
        packed(house)
    assert not (house / "out.zip").exists()


def put(name: str, data: bytes) -> Callable[[Members], None]:
    return lambda content: content.update({name: data})


def edited(name: str, change: Change) -> Callable[[Members], None]:
    """Change the value that a member's JSON holds."""

    def edit(content: Members) -> None:
        value = json.loads(content[name])
        change(value)
        content[name] = json.dumps(value).encode()

    return edit


def test_a_name_that_leads_out_of_the_folder_is_refused(house: Path) -> None:
    good = packed(house)
    for name in ("../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "C:evil", "./evil", "a//evil"):
        bad = changed(good, put(name, b"x"))
        before = sorted(house.rglob("*"))
        with pytest.raises(ArtifactError, match="not a plain name inside"):
            bundle.read(bad)
        assert sorted(house.rglob("*")) == before and not Path("/etc/evil").exists(), name


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name, attributes, words", [("link", 0o120777 << 16, "not a plain name"), ("params.yaml", 0, "twice")])
def test_a_link_and_a_name_given_twice_are_refused(house: Path, name: str, attributes: int, words: str) -> None:
    path, info = packed(house), zipfile.ZipInfo(name)
    info.external_attr = attributes
    with zipfile.ZipFile(path, "a") as more:
        more.writestr(info, "/etc/passwd")
    with pytest.raises(ArtifactError, match=words):
        bundle.read(path)


@pytest.mark.parametrize("limit", ["MAX_MEMBER_BYTES", "MAX_TOTAL_BYTES", "MAX_MEMBERS"])
def test_what_would_fill_the_memory_is_refused_unread(house: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    path = packed(house)
    monkeypatch.setattr(bundle, limit, 3)
    with pytest.raises(ArtifactError, match=r"over 3\b"):
        bundle.read(path)


def listed_wrongly(content: Members) -> None:
    """Add a member whose name is a command to the terminal, with another digest in the index."""
    put("\x1b[2J", b"x")(content)
    edited(bundle.INDEX, lambda index: index["files"].update({"\x1b[2J": {"bytes": 1, "sha256": "0"}}))(content)


INCOHERENT: list[tuple[Callable[[Members], Any], bool, str]] = [
    (put("reports/metrics/int8.json", b"{}"), False, "was changed after the bundle was made"),
    (put("more.txt", b"x"), False, "does not list what the bundle holds"),
    (listed_wrongly, False, " [2J was changed after the bundle was made"),
    (lambda m: m.pop("params.yaml"), False, "does not list what the bundle holds"),
    (lambda m: m.pop(bundle.INDEX), False, "not a bundle"),
    (lambda m: m.pop("reports/gate.json"), True, "holds no reports/gate.json"),
    (put("reports/gate.json", b"[1]"), True, "reports/gate.json is damaged (the whole: input should be a valid dictionary"),
    (put("reports/gate.json", b"[" * 100_000), True, "is not JSON"),
    (put("artifacts/answers/int8.jsonl", b"{}"), True, "is not what the metrics of int8 were computed from"),
    (put(bundle.INDEX, b'{"format": 99}'), False, "format 99, not 1"),
    (edited("reports/gate.json", lambda verdict: verdict.update(variants={"\x1b[2J": 7})), True, "damaged (variants. [2J: "),
    *((edited("reports/metrics/int8.json", lambda r, v=value: r["metrics"]["kld_mean"].update(value=v)), True, words)
      for value, words in ((float("nan"), "NaN is not a JSON value"), (float("inf"), "Infinity is not a JSON value"), *(
          (junk, "int8.json is damaged (metrics.kld_mean.value: ") for junk in (10**400, True, "1", [1], {"value": 1})))),
]  # fmt: skip


def test_an_incoherent_or_damaged_bundle_is_refused_in_one_line(house: Path) -> None:
    good, damaged, folder = packed(house), house / "damaged.zip", house / "folder.zip"
    for change, indexed, words in INCOHERENT:
        bad = changed(good, change, indexed)
        with pytest.raises(ArtifactError, match=re.escape(words)) as error:
            bundle.read(bad)
        assert not {"\n", "\x1b"} & set(str(error.value)) and str(bad) in str(error.value)
    data = good.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes(b ^ 255 for b in data[middle : middle + 4000]) + data[middle + 4000 :]
    folder.mkdir()
    for path, content in ((folder, b""), (damaged, data[:middle]), (damaged, flipped), (damaged, b"hello"), (damaged, b"")):
        if path is damaged:
            path.write_bytes(content)
        with pytest.raises(ArtifactError) as error:
            bundle.read(path)
        assert "\n" not in str(error.value) and path.name in str(error.value)


# --- side by side ------------------------------------------------------------------------------------------------


def compared(house: Path, change: Change = lambda value: None, what: str = "reports/metrics/int8.json") -> str:
    """The comparison with a bundle whose member `what` was changed."""
    return bundle.compared(params.load(), changed(packed(house), edited(what, change)))


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

    by = {r[1]: r for r in rows_of(compared(house, worse), "int8")}
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


def test_nothing_from_elsewhere_reaches_the_terminal_as_a_command(house: Path) -> None:
    evil = "\x1b[2J\x07|pwned|\n## Verdicts\u202e" + "x" * 10_000
    text = compared(house, lambda i: i["conditions"]["machine"].update({"cpu": evil, evil: evil}), bundle.INDEX)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text) and text.count("\n## Verdicts") == 1
    assert max(map(len, text.split("\n"))) < 2000
