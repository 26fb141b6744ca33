"""The house rules: which heavy packages a file may import, and that dvc.yaml lists what its stages read."""

import ast
import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.report import README_ENDS, STAGES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))
PROTOCOL = "pipeline/protocol.yaml"
PURE = sorted(PACKAGE.glob("stats/*.py"))
# Packages that take seconds to import: inside functions only, so that params are checked without them.
HEAVY = {
    "bitsandbytes", "dvc", "gptqmodel", "jinja2", "llama_cpp", "lm_eval", "mlflow", "onnx", "onnxruntime_genai", "ray", "torch",
    "torchao", "transformers", "vl_convert",
}  # fmt: skip
LIGHT = {"engines/_head.py", "engines/_lm_eval.py"}


@functools.lru_cache
def imports(path: Path, top_level_only: bool = False) -> frozenset[str]:
    """Packages that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    packages = set()
    for node in tree.body if top_level_only else list(ast.walk(tree)):
        if isinstance(node, ast.Import):
            packages |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.split(".")[0])
    return frozenset(packages)


def test_heavy_packages_are_imported_late() -> None:
    for path in FILES:
        name, early = str(path.relative_to(PACKAGE)), imports(path, top_level_only=True) & HEAVY
        assert not early or name in LIGHT, f"{name} imports {early} at its top"


def test_pure_modules_use_numpy_and_scipy_only() -> None:
    allowed = {
        "numpy", "scipy", "__future__", "warnings", "dataclasses", "functools", "typing", "collections", "itertools", "math",
        "pipeline",
    }  # fmt: skip
    for path in PURE:
        assert not (more := imports(path) - allowed), f"{path.name} imports {more}"
        text = path.read_text(encoding="utf-8")
        impure = re.search(r"\bopen\(|\btime\.|Path\(|default_rng|np\.random\.seed", text)
        assert not impure, f"{path.name}: no files, clock or seeds in what is pure"


def _stages() -> dict[str, dict[str, Any]]:
    """{stage: its entry in dvc.yaml, or the one that it has for each variant}."""
    found = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return {name: stage.get("do", stage) for name, stage in found.items()}


HF, OWN = "pipeline/engines/hf.py", "pipeline/engines/${item.engine}.py"
CODE = {  # of stages that measure: what a person edits to change one variant's results
    "download": set(), "calibrate": {HF}, "quantize": {"pipeline/quantizers/${item.quantizer}.py"}, "reference": {HF},
    "floor": {HF}, "diverge": {OWN}, "evaluate": {OWN}, "benchmark": {OWN, HF}, "serve": set(),
}  # fmt: skip


def test_a_stage_that_measures_lists_its_number_and_no_code_but_an_engine_s_or_a_quantizer_s() -> None:
    numbers = yaml.safe_load((ROOT / PROTOCOL).read_text(encoding="utf-8"))
    assert numbers.keys() == CODE.keys() and all(type(n) is int and n > 0 for n in numbers.values())
    for name, stage in _stages().items():
        code = {dep for dep in stage["deps"] if dep.startswith("pipeline")}
        if name in CODE:
            assert {PROTOCOL: [name]} in stage["params"] and "constraints.txt" in stage["deps"], name
            times = "hardware.note()" in (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
            assert times == ({"reports/machine.yaml": ["machine"]} in stage["params"]), name
        assert code == CODE.get(name, {"pipeline"}), name


def test_dvc_lists_every_section_of_params_a_stage_reads() -> None:
    """`check` depends on the whole file; any other stage on the sections it takes from `settings`, or on what holds them: a
    model's manifest and gate.json its variants' params, a path its file."""
    for stage in STAGES:
        if stage == "check":
            continue
        body = _stages()[stage]
        params = [p for p in body["params"] if isinstance(p, str)]
        listed = {p.replace("tiers.${tier}.", "tier's ").split(".")[0] for p in params}
        listed |= {section for dep in body["deps"] for section in re.findall(r"\$\{(\w+)", dep)}
        if any(dep.startswith("artifacts/models/") or dep == "reports/gate.json" for dep in body["deps"]):
            listed |= {"variants", "gate"} if "reports/gate.json" in body["deps"] else {"variants"}
        text = (PACKAGE / f"{stage}.py").read_text(encoding="utf-8")
        read = set(re.findall(r"\bsettings\.(\w+)", text)) - {"model_copy", "model_dump", "amount"}
        names = {"variant": "variants", "thread_count": "threads"}
        amounts = {f"tier's {what}" for what in re.findall(r"\bamount\.(\w+)", text)}
        missing = ({names.get(r, r) for r in read} | amounts) - listed
        assert not missing, f"{stage} in dvc.yaml does not list {sorted(missing)}"


def test_packages_that_can_change_a_figure_are_pinned_where_the_stages_that_measure_look() -> None:
    """All that pyproject.toml asks for, but what only runs the stages, draws and tracks."""
    pins = {file: _names((ROOT / file).read_text(encoding="utf-8")) for file in ("constraints.txt", "constraints-dev.txt")}
    asked = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("dependencies = [")[2].partition("\n]")[0]
    asked = asked.replace(' "', "").replace('"', "")
    assert not pins["constraints.txt"] & pins["constraints-dev.txt"]
    assert pins["constraints-dev.txt"] & _names(asked) == {"dvc", "mlflow", "ruamel-yaml", "vl-convert-python"}
    assert _names(asked) <= pins["constraints.txt"] | pins["constraints-dev.txt"]


def _names(requirements: str) -> set[str]:
    """Packages of a text with a requirement a line, in one spelling."""
    return {re.sub("[-_.]+", "-", n).lower() for n in re.findall(r"^ *([A-Za-z][\w.-]*)", requirements, re.MULTILINE)}


def test_no_registry_address_is_committed() -> None:
    for name in ("constraints.txt", "constraints-dev.txt", "pyproject.toml", "Makefile"):
        assert not re.search(r"https?://(?!127\.0\.0\.1)", (ROOT / name).read_text(encoding="utf-8")), name


def test_the_readme_s_numbers_are_those_of_reports() -> None:
    """Both as committed: a run of one's own changes reports/ and leaves README alone."""
    git = [
        subprocess.run(["git", "show", f"HEAD:{f}"], cwd=ROOT, capture_output=True, text=True)
        for f in ("README.md", "reports/report.md")
    ]
    if any(g.returncode for g in git):
        pytest.skip("README.md and reports/report.md are not both committed here")
    rows = [line for line in git[1].stdout.split(README_ENDS)[0].split("\n") if line.startswith("|")]
    assert len(rows) > 3 and all(row in git[0].stdout for row in rows)
