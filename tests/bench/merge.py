"""What a merge request sees when one option makes int4 worse, on the rows of the last `make repro`.

python tests/bench/merge.py [--readme] [--source FOLDER_WITH_ARTIFACTS_AND_REPORTS]

Two commits in a throw-away repository: on `main`, int4 is GPTQ in groups of 64; the change sets `quantizer: rtn`, plain
rounding to as many bits in groups as large. Rows and metrics are those that were measured, under the name int4. Printed:
the exit code of `python -m pipeline.gate --enforce --comment --baseline main` and the comment, with the rows of both commits
in DVC's cache, and again without them. `--readme` puts the first comment, uncut, between two marks of docs/gate.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from gate_house import finish, git  # type: ignore[import-not-found]

from pipeline.core import artifacts, cli, params
from pipeline.gating import baseline

RULES = [
    {"metric": "kld_mean", "margin": "0.6 nats"},
    {"metric": "kld_mean", "margin": "0.02 nats", "against": "baseline"},
    {"metric": "top1_agreement", "margin": "2 pp", "against": "baseline"},
    {"metric": "ppl_ratio", "margin": "2 %", "against": "baseline"},
    {"metric": "acc_delta/all", "margin": "2 pp", "against": "baseline"},
]
WHEN = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}  # the same commits each time


def take(source: Path, variant: str, name: str) -> None:
    """A variant's rows and metrics from the source, under another name; rows go into DVC's cache, too."""
    metrics = artifacts.read_json(source / artifacts.metrics(variant))
    metrics["inputs"] = {}
    for path in (artifacts.tokens, artifacts.answers):
        rows = (source / path(variant)).read_bytes()
        md5 = baseline.md5(rows)
        for file in (path(name), baseline.CACHE / md5[:2] / md5[2:]):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(rows)
        metrics["inputs"][str(path(name))] = artifacts.sha256_file(path(name))
    artifacts.write_json(artifacts.metrics(name), metrics)


def commit(source: Path, variant: str) -> None:
    """params and results in which int4 is made by that variant's quantizer."""
    data = harness.settings()
    int4 = data["variants"][variant]
    data["variants"] = {"bf16": data["variants"]["bf16"], "int4": int4}
    data |= {"serving": {"variants": {}}, "gate": {"required": ["int4"], "rules": RULES}}
    harness.write_params(Path(), data)
    for name, measured in (("bf16", "bf16"), ("int4", variant)):
        take(source, measured, name)
    finish(params.load(), f"int4 by {int4['quantizer']}")


def show(title: str) -> str:
    """Print how the gate ends and what it would post; returns that."""
    command = [sys.executable, "-m", "pipeline.gate", "--enforce", "--comment", "--baseline", "main"]
    done = subprocess.run(command, env=harness.environment(), capture_output=True, text=True)
    text = (artifacts.ARTIFACTS / "comment.md").read_text(encoding="utf-8")
    print(f"===== {title}: exit {done.returncode}\n{done.stderr}{text}")
    return text


def main(readme: bool = False, source: Path = harness.ROOT) -> None:
    """Show what a merge request sees when one option makes int4 worse."""
    source = source.resolve()
    os.environ.update(WHEN)
    with tempfile.TemporaryDirectory(prefix="quantgate-merge-") as folder:
        os.chdir(folder)
        Path(".gitignore").write_text("/artifacts/\n/.dvc/cache/\n/.dvc/tmp/\n")
        git("init", "--quiet", "--initial-branch", "main")
        for variant in ("int4-gptq", "int4-rtn"):
            commit(source, variant)
            git("checkout", "--quiet", "-B", "change")
        text = show("rows of both commits")
        shutil.rmtree(baseline.CACHE)
        show("without the baseline's rows")
        os.chdir(harness.ROOT)
    if readme:
        quoted = "".join(f"> {line}".rstrip() + "\n" for line in text.rstrip("\n").split("\n"))
        artifacts.write_between(harness.ROOT / "docs/gate.md", ("<!-- merge -->", "<!-- /merge -->"), f"\n{quoted}")


if __name__ == "__main__":
    cli.run(main)
