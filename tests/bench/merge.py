"""What a merge request sees when one option makes int4 worse, on the rows of the last `make repro`.

python tests/bench/merge.py [--readme] [FOLDER_WITH_ARTIFACTS_AND_REPORTS]

Two commits in a throw-away repository: on `main`, int4 is GPTQ in groups of 64; the change sets `quantizer: rtn`, plain
rounding to as many bits in groups as large. Rows and metrics are those that were measured, under the name int4. Printed:
the exit code of `python -m pipeline.gate --enforce --comment --baseline main` and the comment, with the rows of both commits
in DVC's cache, and again without them. `--readme` puts the first comment, uncut, between README's two marks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from gate_house import finish, git  # type: ignore[import-not-found]  # noqa: E402

from pipeline.core import artifacts, params  # noqa: E402
from pipeline.gating import baseline  # noqa: E402

RULES = [
    {"metric": "kld_mean", "margin": "0.6 nats"},
    {"metric": "kld_mean", "margin": "0.02 nats", "against": "baseline"},
    {"metric": "top1_agreement", "margin": "2 pp", "against": "baseline"},
    {"metric": "ppl_ratio", "margin": "2 %", "against": "baseline"},
    {"metric": "acc_delta/all", "margin": "2 pp", "against": "baseline"},
]
STATES = {"int4-gptq": "gptq", "int4-rtn": "rtn"}
README_MARKS = ("<!-- merge -->", "<!-- /merge -->")
WHEN = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}  # the same commits each time


def take(source: Path, variant: str, name: str) -> None:
    """A variant's rows and metrics from the source, under another name; rows go into DVC's cache, too."""
    metrics = artifacts.read_json(source / artifacts.metrics(variant))
    taken = []
    for make in (artifacts.tokens, artifacts.answers):
        make(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / make(variant), make(name))
        md5 = baseline.md5(make(name).read_bytes())
        (baseline.CACHE / md5[:2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(make(name), baseline.CACHE / md5[:2] / md5[2:])
        taken.append(make(name))
    metrics["inputs"] = {str(f): artifacts.sha256_file(f) for f in taken}
    artifacts.write_json(artifacts.metrics(name), metrics)


def state(source: Path, variant: str) -> None:
    """params and results in which int4 is made by that variant's quantizer, committed."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    int4 = data["variants"][variant]
    data["variants"] = {"bf16": data["variants"]["bf16"], "int4": int4}
    data["serving"] = {"variants": {}}
    data["gate"] = {"required": ["int4"], "rules": RULES}
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    settings = params.load()
    for name, taken in (("bf16", "bf16"), ("int4", variant)):
        take(source, taken, name)
    finish(settings, f"int4 by {int4['quantizer']}")


def show(title: str) -> str:
    """Print how the gate ends and what it would post; returns that."""
    command = [sys.executable, "-m", "pipeline.gate", "--enforce", "--comment", "--baseline", "main"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    text = (artifacts.ARTIFACTS / "comment.md").read_text(encoding="utf-8")
    print(f"===== {title}: exit {done.returncode}\n{done.stderr}{text}")
    return text


def quoted(text: str) -> str:
    """A comment as a quotation of Markdown."""
    return "".join(f"> {line}".rstrip() + "\n" for line in text.rstrip("\n").split("\n"))


def main(source: Path, readme: bool) -> None:
    os.environ.update(WHEN)
    with tempfile.TemporaryDirectory(prefix="quantgate-merge-") as folder:
        os.chdir(folder)
        Path(".gitignore").write_text("/artifacts/\n/.dvc/cache/\n/.dvc/tmp/\n")
        git("init", "--quiet", "--initial-branch", "main")
        for variant in STATES:
            state(source, variant)
            git("checkout", "--quiet", "-B", "change")
        text = show("rows of both commits")
        shutil.rmtree(baseline.CACHE)
        show("without the baseline's rows")
        os.chdir(ROOT)
    if readme:
        artifacts.write_between(ROOT / "README.md", README_MARKS, f"\n{quoted(text)}")


if __name__ == "__main__":
    words = [w for w in sys.argv[1:] if w != "--readme"]
    main(Path(words[0] if words else ROOT).resolve(), "--readme" in sys.argv[1:])
