"""A stage's rows change if and only if its number in pipeline/protocol.yaml rises, and an edit that changes none reruns none."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden import renew

ROOT = Path(__file__).resolve().parent.parent
STAGES = list(renew.numbers())
Cases = dict[str, Any]


@pytest.fixture(scope="module")
def fresh() -> dict[str, Cases]:
    """What every stage writes now."""
    return renew.measured()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_writes_what_it_wrote_by_its_number(fresh: dict[str, Cases], stage: str) -> None:
    message, _ = renew.fault(stage, renew.numbers()[stage], fresh[stage], renew.on_file(stage), renew.raised())
    assert not message, message


def changed(stage: str, change: Callable[[Cases], object]) -> Cases:
    cases: Cases = renew.on_file(stage)["cases"]  # read anew at each call
    change(cases)
    return cases


def scale(values: list[Any], by: float) -> None:
    values[:] = [by * v for v in values]


CHANGES: list[tuple[str, Callable[[Cases], object], str]] = [
    ("diverge", lambda c: scale(c["hf-float32"]["columns"]["kld"], 1.01), "hf-float32.columns.kld[0]: "),
    ("diverge", lambda c: c["onnxruntime-packed"]["columns"]["kld"].update(about=1.0), "onnxruntime-packed.columns.kld.about: "),
    ("diverge", lambda c: c["reference"]["replies"][0]["token_ids"].reverse(), "reference.replies[0].token_ids[0]: "),
    ("evaluate", lambda c: c["reference"]["rows"][0].pop("cluster"), 'reference.rows[0].cluster: "q0" -> nothing'),
    ("floor", lambda c: c["float32"]["metrics"]["kld_floor/batch"].update(high=None), "kld_floor/batch.high: "),
    ("quantize", lambda c: c["rtn"].update(weights="other"), "rtn.weights: "),
    ("serve", lambda c: c["url"]["fields"].pop(), "url.fields: "),
]  # fmt: skip


@pytest.mark.parametrize("stage, change, where", CHANGES, ids=[f"{stage}-{k}" for k, (stage, _, _) in enumerate(CHANGES)])
def test_changed_rows_ask_for_a_raised_number_and_a_raised_number_for_renewal(
    stage: str, change: Callable[[Cases], object], where: str
) -> None:
    golden, cases = renew.on_file(stage), changed(stage, change)
    message, mends = renew.fault(stage, golden["protocol"], cases, golden)
    assert message.startswith(f"rows of {stage} changed: raise {stage} in pipeline/protocol.yaml, then `{renew.RENEW}`")
    assert where in message and not mends
    assert renew.fault(stage, golden["protocol"] - 1, cases, golden)[1] is False, "numbers only rise"
    message, mends = renew.fault(stage, golden["protocol"] + 1, cases, golden)
    assert message == f"{stage} was raised to {golden['protocol'] + 1}: run `{renew.RENEW}`" and mends


def test_rows_may_change_with_a_stage_before_and_with_no_other() -> None:
    golden, cases = renew.on_file("floor"), changed("floor", lambda c: c["float32"]["windows"].pop())
    message, mends = renew.fault("floor", golden["protocol"], cases, golden, {"reference", "evaluate"})
    assert message == f"rows of floor changed with reference, which rose: run `{renew.RENEW}`" and mends
    assert not renew.fault("floor", golden["protocol"], cases, golden, {"evaluate", "diverge"})[1]


def test_a_number_raised_for_nothing_renews_nothing_and_a_new_case_needs_no_raise() -> None:
    golden = renew.on_file("download")
    message, mends = renew.fault("download", golden["protocol"] + 1, golden["cases"], golden)
    assert "but its rows are as before" in message and "take the number back" in message and not mends
    message, mends = renew.fault("download", golden["protocol"], golden["cases"] | {"hub": {}}, golden)
    assert message == f"download has no golden rows of hub: run `{renew.RENEW}`" and mends


@pytest.mark.parametrize("by, same", [(1 + 2e-4, True), (1 + 2e-3, False)])
def test_what_another_processor_sums_otherwise_is_no_change(by: float, same: bool) -> None:
    golden = renew.on_file("diverge")["cases"]
    cases = changed("diverge", lambda c: scale(c["hf-float32"]["columns"]["logp"], by))
    assert (renew.differing(golden, cases) == []) is same


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project as it is here, without data."""
    import dvc.repo
    import scmrepo.git

    for name in ("pipeline", "evalsets", "envs", "reports"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "dvc.lock", "params.yaml", "constraints.txt", "constraints-dev.txt", ".dvcignore"):
        shutil.copy(ROOT / name, tmp_path)
    scmrepo.git.Git.init(str(tmp_path)).close()
    dvc.repo.Repo.init(str(tmp_path)).close()
    return tmp_path


def changed_stages() -> set[str]:
    """Stages that measure and that `dvc status` calls changed, beyond their data being absent."""
    from dvc.repo import Repo

    with Repo() as repo:
        status = {name: json.dumps(why) for name, why in repo.status().items() if name.split("@")[0] in STAGES}
    return {name for name, why in status.items() if '"modified"' in why or '"new"' in why}


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def cut_last_function(path: Path) -> str:
    """Take a module's last function out of it; returns its text."""
    text = path.read_text(encoding="utf-8")
    last = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)][-1]
    lines = text.splitlines(keepends=True)
    path.write_text("".join(lines[: last.lineno - 1] + lines[last.end_lineno :]), encoding="utf-8")
    return "".join(lines[last.lineno - 1 : last.end_lineno])


@pytest.mark.filterwarnings("ignore")  # DVC's own
def test_tidying_measures_nothing_and_an_engine_a_quantizer_or_a_number_what_depends_on_it(project: Path) -> None:
    before = changed_stages()
    for path in (project / "pipeline").rglob("*.py"):
        if path.parent.name not in ("engines", "quantizers") or path.name.startswith("_"):
            append(path, "\n# a comment\n")
    append(project / "pipeline/divergence/distributions.py", "\n\n" + cut_last_function(project / "pipeline/divergence/store.py"))
    replace(project / "pipeline/engines/_worker.py", "_times(", "_when(")
    append(project / "constraints-dev.txt", "ruff==99\n")
    assert changed_stages() == before
    append(project / "pipeline/engines/onnxruntime.py", "\n# a comment\n")
    append(project / "pipeline/quantizers/bnb.py", "\n# a comment\n")
    number = renew.numbers()["floor"]
    replace(project / "pipeline/protocol.yaml", f"floor: {number}", f"floor: {number + 1}")
    variants = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))["variants"]
    run = {f"{s}@{n}" for n, v in variants.items() if v["engine"] == "onnxruntime" for s in ("diverge", "evaluate", "benchmark")}
    run |= {f"quantize@{n}" for n, v in variants.items() if v["quantizer"] == "bnb"} | {"floor"}
    assert len(run) > 4 and changed_stages() == before | run
