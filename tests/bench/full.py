"""Every variant of full.yaml through the whole pipeline, in a clone of this commit, so that this folder's results stay.

python tests/bench/full.py [WORK_FOLDER [TIER]]      -> WORK_FOLDER/reports/
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent


def main(work: Path, tier: str) -> None:
    if not (work / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(work)], check=True)
    path = work / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    variants = yaml.safe_load((ROOT / "tests/bench/full.yaml").read_text(encoding="utf-8"))
    data["variants"] = {name: {"engine": "hf"} | variant for name, variant in variants.items()}
    data["tier"] = tier
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    own = Path(sys.executable).parent  # stages say `python`: this one
    environment = os.environ | {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([own / "dvc", "repro"], cwd=work, env=environment, check=True)
    subprocess.run([sys.executable, "-m", "pipeline.report", "--summary"], cwd=work, check=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="quantgate-full-"))
    main(folder, sys.argv[2] if len(sys.argv) > 2 else "smoke")
