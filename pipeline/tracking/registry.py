"""Register variants as versions of one model, without their weights. The alias `champion` marks the one to serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.core import secrets
from pipeline.tracking.connection import pages

ALIAS = "champion"
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNSUPPORTED", "REFERENCE")
EXTERNAL = "mlflow.model.isExternal"  # MLflow's mark for a model whose files are elsewhere


class Registry:
    """One registered model, named after the experiment."""

    def __init__(self, client: Any, experiment: str) -> None:
        self.client = client
        self.name = experiment.replace("/", "-").replace(":", "-")
        quote = '"' if "'" in self.name else "'"  # MLflow's filters have no escapes; `check` allows one kind of quote
        self.query = f"name = {quote}{self.name}{quote}"

    def model(self) -> Any:
        return next(iter(self.client.search_registered_models(self.query)), None)

    def versions(self) -> Iterator[Any]:
        return pages(lambda token: self.client.search_model_versions(self.query, page_token=token))

    def register(self, experiment_id: str, current: dict[str, dict[str, str]]) -> dict[str, str]:
        """Make a version for each run and update its tags; mark other versions as not current. Returns {run id: version}. current:
        {run id: tags, `variant` among them}."""
        model = self.model()
        if model is None:
            about = f"Variants of the MLflow experiment, by reference. `{ALIAS}` is the one to serve; its moves are tags."
            model = self.client.create_registered_model(self.name, description=about)
        versions, current = {v.run_id: v for v in self.versions()}, secrets.hide_in(current)
        for run_id, tags in current.items():
            if run_id not in versions:
                versions[run_id] = self._add(experiment_id, run_id, tags)
        for run_id, version in versions.items():
            for key, value in {**current.get(run_id, {}), "current": str(run_id in current).lower()}.items():
                if version.tags.get(key) != value:
                    self.client.set_model_version_tag(self.name, version.version, key, value)
        made = {run_id: str(versions[run_id].version) for run_id in current}
        verdicts = {f"{tags['variant']}-{tags['verdict']}".lower(): made[run_id] for run_id, tags in current.items()}
        self._name_verdicts(dict(model.aliases), verdicts)
        return made

    def _name_verdicts(self, aliases: dict[str, str], wanted: dict[str, str]) -> None:
        """Give each variant's version its verdict as an alias (`int8-pass`) and delete those of past verdicts."""
        for alias in aliases.keys() - wanted.keys() - {ALIAS}:
            if alias.rpartition("-")[2].upper() in VERDICTS:
                self.client.delete_registered_model_alias(self.name, alias)
        for alias, version in wanted.items():
            if str(aliases.get(alias)) != version:
                self.client.set_registered_model_alias(self.name, alias, version)

    def _add(self, experiment_id: str, run_id: str, tags: dict[str, str]) -> Any:
        """Create a version that points at a run, or finish an interrupted one."""
        logged = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
        model = next(iter(logged), None) or self.client.create_logged_model(
            experiment_id, name=tags["variant"], source_run_id=run_id, tags={EXTERNAL: "true", **tags}
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        about = f"{tags['variant']}; its files are not in MLflow: {tags['location']}, digest {tags['model']}"
        return self.client.create_model_version(
            self.name, f"models:/{model.model_id}", run_id=run_id, tags=tags, description=about, model_id=model.model_id
        )
