"""Every variant of full.yaml through the whole pipeline, in a clone of this commit, so that this folder's results stay.

python tests/bench/full.py [WORK_FOLDER [TIER]]      -> WORK_FOLDER/reports/
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import yaml


def main(work: Path, tier: str) -> None:
    harness.clone(work)
    variants = yaml.safe_load((harness.ROOT / "tests/bench/full.yaml").read_text(encoding="utf-8"))
    each = {name: {"engine": "hf"} | variant for name, variant in variants.items()}
    harness.write_params(work, harness.settings() | {"variants": each, "tier": tier})
    for command in ([str(harness.BIN / "dvc"), "repro"], [sys.executable, "-m", "pipeline.report", "--summary"]):
        subprocess.run(command, cwd=work, env=harness.environment(work), check=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="quantgate-full-"))
    main(folder, sys.argv[2] if len(sys.argv) > 2 else "smoke")
