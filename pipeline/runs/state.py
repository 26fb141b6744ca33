"""A state of the pipeline: every variant's results and the verdict, what names it, and what it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import served
from pipeline.core import artifacts, git
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.gating import dvc_lock
from pipeline.runs import run_content

WRITTEN = (str(dvc_lock.LOCK), str(artifacts.REPORTS), "README.md")  # by the pipeline


@dataclass(frozen=True)
class State:
    """What there is to log: each variant's results and its serving figures (empty if none), and the verdict."""

    results: dict[str, dict[str, Any]]
    serving: dict[str, dict[str, Any]]
    verdict: dict[str, Any]

    def key_of(self, name: str) -> str:
        """What a variant's run was made from."""
        broke = artifacts.broke(name)
        where = artifacts.sha256_file(broke) if broke.exists() else None
        return artifacts.digest([name, self.results[name], self.serving[name], where])

    def key(self) -> str:
        """What a state's run was made from: its variants', and how they were judged."""
        judged = {
            name: [v.get("verdict"), v.get("required"), [[r["metric"], r["bound"], r["verdict"]] for r in v.get("rules", [])]]
            for name, v in self.verdict["variants"].items()
        }
        return artifacts.digest([{n: self.key_of(n) for n in self.results}, self.verdict["verdict"], judged])

    def word(self, name: str, reference: str) -> str:
        """A variant's verdict as a word."""
        return run_content.verdict_of(self.verdict, name, reference)


def load_state(settings: Params) -> State:
    """The state on file. Raises `ArtifactError` if results or the verdict are missing."""
    results = {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}
    servers, _ = served.current(results, settings)  # what was measured for other params, or is no longer served, stays out
    return State(results, {name: servers.get(name, {}) for name in results}, artifacts.read_json(artifacts.GATE))


def compared_files(state: State, name: str) -> tuple[str, str]:
    """(whether a variant's files are those that were measured, in words; what of them is not, empty where all are or none is
    here)."""
    folder = artifacts.model_dir(name)
    if not (folder / artifacts.MANIFEST).exists():
        return f"{folder} is not here, and so not compared with what was measured", ""
    try:
        manifest = artifacts.read_manifest(folder)
        artifacts.verify_files(folder, manifest)
    except ArtifactError as e:
        changed = str(e).partition("; ")[0]
    else:
        changed = "" if manifest.get("digest") == state.results[name]["model"] else f"{folder} (another build than was measured)"
    return changed or "as measured", changed


def version_tags(state: State, name: str, settings: Params) -> dict[str, str]:
    """What the registry says of a variant; its files stay where they are."""
    result = state.results[name]
    return {
        "variant": name, "verdict": state.word(name, settings.reference),
        "status": result["status"], "base": result["base"], "model": str(result["model"]), "key": state.key_of(name),
        "location": str(artifacts.model_dir(name)),
    }  # fmt: skip


def model_name(settings: Params) -> str:
    """What people call the base model."""
    model = settings.model
    named = [str(getattr(model, key)) for key in ("file", "id", "path") if hasattr(model, key)]
    return Path(named[0]).name.removesuffix(".gguf") or "model"


def machine(state: State, settings: Params) -> str:
    """The machine of the reference's timings, in words."""
    facts = state.results[settings.reference]["machine"] or {}
    return ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None) or "no timings were taken"


def _changed() -> bool:
    """Whether the tree differs from its commit in what results are made from: not only in what the pipeline itself writes."""
    return bool(git.line("status", "--porcelain", "--", ":/", *(f":(exclude){path}" for path in WRITTEN)))


def provenance(state: State, settings: Params) -> dict[str, str]:
    """Machine, commit, whether the tree differs from it, and dvc.lock's hash; what is not there is left out."""
    tags = {"mlflow.source.name": "pipeline.track", "mlflow.source.type": "LOCAL", "machine": machine(state, settings)}
    if commit := git.line("rev-parse", "HEAD"):
        tags |= {"mlflow.source.git.commit": commit, "git.changed": str(_changed()).lower()}
    if dvc_lock.LOCK.exists():  # without this stage's own entry, which DVC writes after it
        stages = dvc_lock.stages(dvc_lock.LOCK.read_bytes())
        tags["dvc.lock"] = artifacts.digest({k: v for k, v in stages.items() if k != "track"})
    return tags
