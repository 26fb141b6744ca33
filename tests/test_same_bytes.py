"""Equal inputs give equal files: under other hash seeds, with other threads, and as another processor would compute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import quantize
from pipeline.core import artifacts
from pipeline.core.errors import Unsupported
from pipeline.core.params import Variant
from pipeline.evalset.calibration import Calibration
from pipeline.quantizers import gguf
from pipeline.quantizers._reproducible import ANY_MACHINE, SAME_MACHINE

ROOT = Path(__file__).resolve().parent.parent
ANYWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "onnx-int4": ("onnx", {"precision": "int4"}),
    "bf16": ("cast", {"dtype": "bfloat16"}),
    "int8": ("torchao", {"scheme": "int8-weight-only"}),
    "int8-dynamic": ("torchao", {"scheme": "int8-dynamic"}),
    "rtn": ("rtn", {"bits": 4, "group_size": 64}),
    "bnb-int8": ("bnb", {"type": "int8"}),
    "nf4": ("bnb", {"type": "nf4"}),
    "gguf-q8_0": ("gguf", {"type": "Q8_0"}),
}
HERE: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"bits": 4, "group_size": 64}),
    "awq": ("awq", {"bits": 4, "group_size": 64}),
    "nf4-double": ("bnb", {"type": "nf4", "double_quant": True}),
}
SEED = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
PRETENDED = {  # SSE only, as far as each library lets itself be told; MKL heeds it on Intel
    "PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F",
}  # fmt: skip
Built = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """{variant: its manifest's facts and its files}, twice, in fresh processes that run at once."""
    from conftest import make_model
    from model_house import calibration

    home = tmp_path_factory.mktemp("same")
    make_model(home / "base", hidden=128, dtype="bfloat16")
    calibration(home / "calibration")
    for command in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run(["git", "-C", str(home), *command], check=True)
    runs = [
        _start(home / "first", [*ANYWHERE, *HERE], SEED),
        _start(home / "pretended", [*ANYWHERE], PRETENDED | {"GIT_DIR": str(home / ".git")}),  # and at another commit
        _start(home / "again", [*HERE], SEED | {"PYTHONHASHSEED": "2"}),
    ]
    for run in runs:
        assert run.wait() == 0, (Path(str(run.args[-1])) / "log").read_text()  # type: ignore[index]
    first, pretended, again = (artifacts.read_json(home / name / "built.json") for name in ("first", "pretended", "again"))
    return first, pretended | again


def _start(out: Path, names: list[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
    shutil.copytree(ROOT / "envs", out / "envs")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    with (out / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *names, str(out)],
            cwd=out, env=os.environ | settings | {"PYTHONPATH": paths}, stdout=log, stderr=log,
        )  # fmt: skip


def build(names: list[str]) -> None:
    """Build variants in this folder, from its neighbours `base` and `calibration`."""
    results: Built = {}
    for name in names:
        method, options = (ANYWHERE | HERE)[name]
        out, variant = Path(name), Variant(quantizer=method, options=options)
        out.mkdir()
        try:
            facts = quantize.quantize(variant, Path("../base"), out, calibration=Calibration(Path("../calibration")), seed=1)
        except Unsupported as e:
            results[name] = {"unsupported": str(e)}
        else:
            facts.pop("probe", None)  # a fresh process is asked it, and no file holds it
            results[name] = {"facts": facts, "files": artifacts.files_of(out)}
    artifacts.write_json(Path("built.json"), results)


@pytest.mark.parametrize("name", [*ANYWHERE, *HERE])
def test_equal_inputs_give_equal_files_and_manifests(built: tuple[Built, Built], name: str) -> None:
    one, other = built[0][name], built[1][name]
    if "unsupported" in one:
        pytest.skip(one["unsupported"])
    assert one == other
    assert one["facts"]["reproducible"] == (ANY_MACHINE if name in ANYWHERE else SAME_MACHINE)


if __name__ == "__main__":
    import conftest  # noqa: F401  # ONNX Runtime's builder in this process

    from tests.test_engines import write_gguf

    gguf._convert = write_gguf  # llama.cpp's converter knows tokenizers by their hash, and takes none that was made here
    build(sys.argv[1:-1])
