# ruff: noqa: F811 (`house` and `on_main` are fixtures)
"""Merges: the comment as people see it, posted once and edited; a recipe and a hook that exit by the verdict."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from gate_house import commit, git
from test_baseline import coarser, edit, house, on_main  # noqa: F401

from pipeline import gate
from pipeline.core import artifacts, params
from pipeline.gating import comment
from pipeline.gating.verdicts import Merge, for_merge
from pipeline.reporting.text import with_unit

WORKFLOW = ROOT / ".github/workflows/gate.yml"
STEPS: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["gate"]["steps"]


def tools(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which commands are those scripts, and `python` is this one with this project's pipeline."""
    folder.mkdir(exist_ok=True)
    scripts = {"python": f'exec {sys.executable} "$@"'} | scripts
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": ""}


@pytest.fixture(scope="module")
def merged_once(on_main: Path, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    folder = tmp_path_factory.mktemp("coarser")
    shutil.copytree(on_main, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return for_merge(coarser(), "main")


@pytest.fixture
def merged(merged_once: Merge) -> Merge:
    """What a merge of a worse int4 is judged, to be changed."""
    return copy.deepcopy(merged_once)


def test_text_of_a_comment_makes_no_cell_tag_mention_or_line(merged: Merge) -> None:
    merged.verdict["variants"]["int4"]["reason"] = "a | b\n### no @everyone <img src=x> & so on"
    text = comment.render(merged)
    assert "a \\| b ### no &#64;everyone &lt;img src=x> &amp; so on" in text and "@" not in text


def test_a_comment_without_a_verdict_says_that_nothing_is_passed(house: params.Params) -> None:
    artifacts.GATE.unlink()
    assert gate.enforce(house, "main", write=True) == 2
    text = comment.FILE.read_text(encoding="utf-8")
    assert text.startswith(
        f"{comment.MARK}\n### quantgate: no verdict\n\nthe results are stale; missing or changed: reports/gate.json"
    )


def deltas(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith("- **int4** ")]


def page_s_merge(text: str) -> list[str]:
    """Lines of the comment that `tests/bench/merge.py --readme` put into docs/gate.md."""
    block = text.partition("<!-- merge -->\n")[2].partition("<!-- /merge -->")[0]
    assert block and all(line.startswith(">") for line in block.rstrip("\n").split("\n"))
    return [line[2:] for line in block.rstrip("\n").split("\n")]


def test_the_page_s_merge_has_the_figures_of_reports() -> None:
    """Both as committed. If this fails: `python tests/bench/merge.py --readme`."""
    files = ("docs/gate.md", "reports/metrics/int4-gptq.json", "reports/metrics/int4-rtn.json")
    found = [subprocess.run(["git", "show", f"HEAD:{f}"], cwd=ROOT, capture_output=True, text=True) for f in files]
    if any(f.returncode for f in found):
        pytest.skip("docs/gate.md and reports/ are not committed here")
    lines = page_s_merge(found[0].stdout)
    for metric in ("kld_mean", "top1_agreement", "ppl_ratio"):
        then, now = (json.loads(f.stdout)["metrics"][metric] for f in found[1:])
        both = f"{with_unit(then, interval=False)} → {with_unit(now, interval=False)}"
        assert any(line.startswith(f"- **int4** {metric}: {both}, ") for line in lines), f"{metric}: {both}"


def test_a_comment_of_many_rules_keeps_to_what_can_be_posted(merged: Merge) -> None:
    assert merged.changes is not None
    for k in range(400):
        merged.verdict["variants"][f"v{k}"] = {**merged.verdict["variants"]["int4"], "required": False}
        merged.changes.variants[f"v{k}"] = merged.changes.variants["int4"]
    text = comment.render(merged)
    assert len(text) < 65_536 and "too many for a comment" in text and "- **int4** kld_mean" in text


def test_the_workflow_keeps_the_schema_of_workflows(tmp_path: Path) -> None:
    """By check-jsonschema, which carries the schema: it is there where actionlint is not, and sees less."""
    wrong = tmp_path / "gate.yml"
    wrong.write_text(WORKFLOW.read_text(encoding="utf-8").replace("runs-on:", "run-on:"), encoding="utf-8")
    for workflow, code in ((WORKFLOW, 0), (wrong, 1)):
        asked = ["--builtin-schema", "vendor.github-workflows", str(workflow)]
        # in a process of its own: it changes how ruamel reads dates
        done = subprocess.run([sys.executable, "-m", "check_jsonschema", *asked], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr


def test_the_workflow_knows_the_comment_by_its_file_and_mark() -> None:
    body = next(s for s in STEPS if s.get("name") == "Comment")["run"]
    assert f'startswith("{comment.MARK}")' in body and body.count(f"body=@{comment.FILE}") == 2
    upload = next(s for s in STEPS if "upload-artifact" in s.get("uses", ""))
    assert str(comment.FILE) in upload["with"]["path"] and str(artifacts.REPORTS) in upload["with"]["path"].split()


def test_comment_report_and_what_was_measured_are_kept_even_where_the_verdict_fails_the_job() -> None:
    """`actions/cache` as one step saves only after a job that succeeds: a FAIL would be measured anew by every push."""
    judged = [s.get("name") for s in STEPS].index("Run what changed, and judge it")
    assert STEPS[judged]["run"] == '.github/gate.sh "$BASE"' and "continue-on-error" not in STEPS[judged]
    after = [s for s in STEPS[judged + 1 :] if "cache/save" not in s.get("uses", "")]
    assert all("!cancelled()" in s["if"] for s in after) and len(after) > 1
    assert not [s for s in STEPS if s.get("uses", "").startswith("actions/cache@")]
    restore, save = (next(s for s in STEPS if s.get("uses", "").startswith(f"actions/cache/{how}@")) for how in ("restore", "save"))
    assert STEPS.index(restore) < judged < STEPS.index(save) and save["if"].startswith("${{ always()")
    assert restore["with"]["path"] == save["with"]["path"] == ".dvc/cache" and restore["with"]["key"] == save["with"]["key"]
    assert "github.run_attempt" in save["with"]["key"]  # a key is written once
    assert all(save["with"]["key"].startswith(prefix) for prefix in restore["with"]["restore-keys"].splitlines())


def recipe(*words: str, **scripts: str) -> subprocess.CompletedProcess[str]:
    Path(".github").mkdir(exist_ok=True)
    shutil.copy(ROOT / ".github/gate.sh", ".github/gate.sh")
    env = tools(Path("bin").resolve(), **{"dvc": "exit 0", **scripts})
    return subprocess.run([".github/gate.sh", *words], env=env, capture_output=True, text=True)


def test_the_recipe_exits_by_the_verdict_and_leaves_the_comment(house: params.Params) -> None:
    coarser()
    done = recipe("main")
    assert done.returncode == 1, done.stderr
    assert comment.FILE.read_text(encoding="utf-8").startswith(comment.MARK)


@pytest.mark.parametrize("base, judge, dvc, code, baseline", [
    (["main"], 0, 0, 0, " --baseline main"), (["main"], 3, 0, 3, " --baseline main"), (["main"], 0, 1, 2, " --baseline main"),
    ([], 0, 0, 0, ""), (["0" * 40], 2, 0, 2, ""),
])  # fmt: skip
def test_the_recipe_never_passes_what_its_run_or_its_verdict_does_not(
    house: params.Params, base: list[str], judge: int, dvc: int, code: int, baseline: str
) -> None:
    """The gate itself, here a script, refuses rules against a baseline that nobody names."""
    done = recipe(*base, python=f'echo "$@"; exit {judge}', dvc=f"exit {dvc}")
    assert done.returncode == code and done.stdout == f"-m pipeline.gate --enforce --comment{baseline}\n", done.stderr


def push(branch: str = "HEAD:change", **scripts: str) -> subprocess.CompletedProcess[str]:
    env = tools(Path("artifacts/bin").resolve(), **scripts) | {"QUANTGATE_BASELINE": "main"}
    return subprocess.run(["git", "push", "--quiet", "remote", branch], env=env, capture_output=True, text=True)


def test_the_hook_lets_a_pass_through_and_nothing_else(house: params.Params, tmp_path: Path) -> None:
    remote = tmp_path / "artifacts/remote.git"
    git("init", "--quiet", "--bare", str(remote))
    git("remote", "add", "remote", str(remote))
    git("config", "core.hooksPath", str(ROOT / ".github/hooks"))
    coarser(0.1, 30)
    assert push().returncode == 0
    commit("the same results")
    Path("params.yaml").write_text(Path("params.yaml").read_text(encoding="utf-8") + "\n# a note\n")
    assert "not committed" in push().stderr
    git("checkout", "--quiet", "params.yaml")
    assert "is not checked out" in push("main:main").stderr
    done = push("HEAD:worse", python='echo "$@"; exit 1')
    assert done.returncode == 1 and "-m pipeline.gate --enforce\n" in done.stdout + done.stderr
    assert push(":change").returncode == 0  # deleting a branch ships nothing
    assert git("ls-remote", "remote") == ""
