"""The house rules: who may import what, and that dvc.yaml lists what its stages import."""

from __future__ import annotations

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
PURE = [f"numbers/{path.name}" for path in sorted(PACKAGE.glob("numbers/*.py"))]
# What the modules of a folder may import of the package besides their own folder.
BELOW = {
    "core": set(),
    "numbers": {"core"},
    "figures": {"core", "numbers", "evalset"},
    "judging": {"core", "numbers", "figures", "served"},
    "pages": {"core", "numbers", "figures", "judging"},
    "runs": {"core", "numbers", "judging", "served"},
}
# Heavy packages and the files that may import them, anywhere in the file.
ALLOWED = {
    "torch": {
        "engines/hf.py",
        "engines/_head.py",
        "engines/_lm_eval.py",
        "quantizers/_gptqmodel.py",
        "quantizers/_probe.py",
        "quantizers/bnb.py",
        "quantizers/cast.py",
        "quantizers/torchao.py",
        "download.py",
        "sound.py",
        "hardware.py",
        "weights.py",  # a model's class without its weights
    },
    "transformers": {
        "weights.py",
        "quantizers/cast.py",
        "quantizers/bnb.py",
        "engines/llamacpp.py",
        "engines/onnxruntime.py",
        "engines/_lm_eval.py",
        "engines/hf.py",
        "engines/_head.py",
        "quantizers/torchao.py",
        "download.py",
        "sound.py",
        "benchmark.py",  # what it takes for a config that does not say
    },
    "mlflow": {"runs/tracking.py", "runs/reach.py"},  # both belong to the stage `track`, which hands its client on
    "matplotlib": {"pages/pictures.py", "runs/run_picture.py"},
    "jinja2": {"report.py", "evaluate.py"},
    "lm_eval": {"evaluate.py", "check.py", "engines/_lm_eval.py"},
    "gptqmodel": {"quantizers/_gptqmodel.py", "engines/_gptq.py"},
    "bitsandbytes": {"quantizers/bnb.py"},
    "llama_cpp": {"quantizers/gguf.py", "engines/llamacpp.py"},
    "onnxruntime_genai": {"engines/onnxruntime.py"},
    "onnx": {"formats.py", "engines/onnxruntime.py", "quantizers/onnx.py"},
    "torchao": {"quantizers/torchao.py"},
    "dvc": set(),
}
# Only these may be imported when a backend's file is merely looked at: params are checked without loading torch.
LIGHT = {"engines/_head.py", "engines/_lm_eval.py"}


@functools.lru_cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names a file imports; `from pipeline import a` counts as pipeline.a."""
    tree = parsed(path)
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module.startswith("pipeline"):
                found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def module_file(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    if (path / "__init__.py").exists():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else None


def closure(*starts: Path) -> set[Path]:
    """Every file of the package that these files import, directly or not."""
    seen: set[Path] = set()
    todo = list(starts)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        todo += [f for name in imports(path) if name.startswith("pipeline.") and (f := module_file(name))]
    return seen - {PACKAGE / "__init__.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_stay_in_their_rooms(path: Path) -> None:
    own = str(path.relative_to(PACKAGE))
    for package, rooms in ALLOWED.items():
        if any(name.split(".")[0] == package for name in imports(path)):
            assert own in rooms, f"{own} imports {package}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_late(path: Path) -> None:
    own = str(path.relative_to(PACKAGE))
    found = {name.split(".")[0] for name in imports(path, top_level_only=True)} & ALLOWED.keys()
    assert not found or own in LIGHT, f"{own} imports {found} at its top"


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_another(stage: str) -> None:
    others = {f"pipeline.{s}" for s in STAGES if s != stage}
    assert not imports(PACKAGE / f"{stage}.py") & others


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_use_numpy_and_scipy_only(name: str) -> None:
    allowed = {
        "numpy",
        "scipy",
        "__future__",
        "warnings",
        "dataclasses",
        "typing",
        "collections",
        "concurrent",
        "itertools",
        "math",
        "random",  # sweep: a generator of its own, from the seed it is given
        "re",
        "pipeline",
    }
    assert {n.split(".")[0] for n in imports(PACKAGE / name)} <= allowed
    text = (PACKAGE / name).read_text(encoding="utf-8")
    assert not re.search(r"\bopen\(|\btime\.|Path\(|default_rng|np\.random\.seed", text), "pure: no files, clock or seeds"


@pytest.mark.parametrize("folder", BELOW)
def test_folders_import_one_way(folder: str) -> None:
    for path in (PACKAGE / folder).glob("*.py"):
        used = {n.split(".")[1] for n in imports(path) if n.startswith("pipeline.")} - {folder}
        assert used <= BELOW[folder], f"{path.name} of {folder}/ imports {sorted(used - BELOW[folder])}"


def test_no_backend_imports_a_stage() -> None:
    for path in [*PACKAGE.glob("engines/*.py"), *PACKAGE.glob("quantizers/*.py")]:
        assert not imports(path) & {f"pipeline.{s}" for s in STAGES}, path


def _stages() -> list[tuple[str, str, dict[str, Any], list[str]]]:
    """(stage@key, stage, the variant or {}, its deps with the templates filled in) for each stage of dvc.yaml."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    flat = {"reference": params["reference"], "calibration.set": params["calibration"]["set"], "tier": params["tier"]}
    flat["serving.prompts"] = params["serving"]["prompts"]
    flat |= {"diverge.corpus": params["diverge"]["corpus"], "benchmark.prompts": params["benchmark"]["prompts"]}
    flat["diverge.trajectories.prompts"] = params["diverge"]["trajectories"]["prompts"]
    found = []
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"].items():
        each = params["serving"]["variants"] if name == "serve" else params["variants"]
        for key, item in each.items() if "foreach" in stage else [("", {})]:
            body = stage.get("do", stage)
            values = flat | {"key": key} | {f"item.{k}": v for k, v in item.items()}
            deps = [re.sub(r"\$\{([\w.]+)\}", lambda m, v=values: str(v[m[1]]), d) for d in body["deps"]]  # type: ignore[misc]
            found.append((f"{name}@{key}" if key else name, name, item, deps))
    return found


@pytest.mark.parametrize("label, stage, item, deps", _stages(), ids=lambda x: x if isinstance(x, str) else "")
def test_dvc_lists_every_file_a_stage_imports(label: str, stage: str, item: dict[str, Any], deps: list[str]) -> None:
    starts = [PACKAGE / f"{stage}.py"]
    if PACKAGE / "engines/__init__.py" in closure(*starts):
        starts += [PACKAGE / "engines" / f"{item.get('engine', 'hf')}.py"]
        starts += [PACKAGE / "engines/hf.py"] if stage == "benchmark" else []  # the reference runs beside
    if stage == "quantize":
        starts += [PACKAGE / "quantizers" / f"{item['quantizer']}.py"]
    needed = {str(f.relative_to(ROOT)) for f in closure(*starts)}
    missing = {f for f in needed if not any(f == d or f.startswith(f"{d}/") for d in deps)}
    assert not missing, f"{label} in dvc.yaml does not list {sorted(missing)}"


@pytest.mark.parametrize("stage", [s for s in STAGES if s != "check"])
def test_dvc_lists_every_section_of_params_a_stage_reads(stage: str) -> None:
    """`check` depends on the whole file; any other stage on the sections it takes from `settings`."""
    body = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"][stage]
    listed = {p.replace("tiers.${tier}.", "tier's ").split(".")[0] for p in body.get("do", body)["params"]}
    text = (PACKAGE / f"{stage}.py").read_text(encoding="utf-8")
    read = set(re.findall(r"\bsettings\.(\w+)", text)) - {"model_dump", "amount"}
    names = {"variant": "variants", "thread_count": "threads"}
    amounts = {f"tier's {what}" for what in re.findall(r"\bamount\.(\w+)", text)}
    missing = ({names.get(r, r) for r in read} | amounts) - listed
    assert not missing, f"{stage} in dvc.yaml does not list {sorted(missing)}"


def test_control_flow_fits_on_a_few_screens() -> None:
    long = {str(f.relative_to(ROOT)): n for f in FILES if (n := f.read_text(encoding="utf-8").count("\n")) > 310}
    assert not long, f"split these: {long}"


def test_no_registry_address_is_committed() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile"):
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
