"""Register variants as versions of one model, without uploading weights. The alias `champion` marks the one to serve.

Every move of the alias is recorded as a tag of the registered model; `--rollback` reads these tags as a stack. A move that is not
recorded, by hand or by a process killed meanwhile, is recorded when it is noticed.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from typing import Any, TypedDict

from pipeline.core import secrets
from pipeline.core.errors import ArtifactError
from pipeline.tracking.connection import pages, user

ALIAS = "champion"
MOVE = "quantgate.move."
EXTERNAL = "mlflow.model.isExternal"  # MLflow's mark for a model whose files are elsewhere


class Move(TypedDict):
    """A move of the alias. before: the version that had it; how: promote, force, rollback or by hand."""

    number: str
    version: str
    variant: str
    before: str | None
    how: str
    at: str
    by: str
    reason: str


class Registry:
    """One registered model, named after the experiment."""

    def __init__(self, client: Any, experiment: str) -> None:
        self.client = client
        self.name = experiment.replace("/", "-").replace(":", "-")
        quote = '"' if "'" in self.name else "'"  # MLflow's filters have no escapes; params allow one kind of quote in a name
        self.query = f"name = {quote}{self.name}{quote}"

    def _model(self) -> Any:
        """The registered model, or None."""
        return next(iter(self.client.search_registered_models(self.query)), None)

    def _versions(self) -> Iterator[Any]:
        return pages(lambda token: self.client.search_model_versions(self.query, page_token=token))

    def register(self, experiment_id: str, current: dict[str, dict[str, str]]) -> dict[str, str]:
        """Make a version for each run and update its tags; other versions become not current. Returns {run id: version}. current:
        {run id: tags, with `variant` among them}."""
        if self._model() is None:
            about = f"Variants of the MLflow experiment, by reference. `{ALIAS}` is the one to serve; its moves are tags."
            self.client.create_registered_model(self.name, description=about)
        versions, current = {v.run_id: v for v in self._versions()}, secrets.hide_in(current)
        for run_id, tags in current.items():
            if run_id not in versions:
                versions[run_id] = self._add(experiment_id, run_id, tags)
        for run_id, version in versions.items():
            for key, value in {**current.get(run_id, {}), "current": str(run_id in current).lower()}.items():
                if version.tags.get(key) != value:
                    self.client.set_model_version_tag(self.name, version.version, key, value)
        return {run_id: str(versions[run_id].version) for run_id in current}

    def _add(self, experiment_id: str, run_id: str, tags: dict[str, str]) -> Any:
        """Create a version that points at a run, or finish one that was interrupted."""
        logged = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
        model = next(iter(logged), None) or self.client.create_logged_model(
            experiment_id, name=tags["variant"], source_run_id=run_id, tags={EXTERNAL: "true", **tags}
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        about = f"{tags['variant']}; its files are not in MLflow: {tags['location']}, digest {tags['model']}"
        return self.client.create_model_version(
            self.name, f"models:/{model.model_id}", run_id=run_id, tags=tags, description=about, model_id=model.model_id
        )

    def version_of(self, run_id: str) -> str | None:
        return next((str(v.version) for v in self._versions() if v.run_id == run_id), None)

    def champion(self) -> str | None:
        """The version that has the alias, or None."""
        model = self._model()
        return str(model.aliases[ALIAS]) if model is not None and ALIAS in model.aliases else None

    def moves(self) -> list[Move]:
        """All recorded moves, oldest first."""
        model = self._model()
        tags = model.tags if model is not None else {}
        return [json.loads(tags[k]) for k in sorted(tags) if k.startswith(MOVE)]

    def promote(self, version: str, *, reason: str, forced: bool) -> Move | None:
        """Move the alias to a version; None if it is there already."""
        self._settle()
        return None if self.champion() == version else self._move(version, "force" if forced else "promote", reason)

    def rollback(self, reason: str) -> Move:
        """Move the alias back to the previous champion. Raises `ArtifactError` if there was none."""
        self._settle()
        champions = succession(self.moves())
        if len(champions) < 2:
            now = f"version {champions[-1]} is the first champion" if champions else "there is no champion yet"
            raise ArtifactError(f"nothing to roll back to: {now} of {self.name!r}")
        return self._move(champions[-2], "rollback", reason)

    def _settle(self) -> None:
        """Record a move that has no record."""
        moves, now = self.moves(), self.champion()
        before = moves[-1]["version"] if moves else None
        if now and now != before:
            self._record(now, before, "by hand", "found so; not moved by quantgate")

    def _move(self, version: str, how: str, reason: str) -> Move:
        before = self.champion()
        self.client.set_registered_model_alias(self.name, ALIAS, version)
        return self._record(version, before, how, reason)

    def _record(self, version: str, before: str | None, how: str, reason: str) -> Move:
        move: Move = {
            "number": f"{len(self.moves()) + 1:04d}", "version": version,
            "variant": self.client.get_model_version(self.name, version).tags.get("variant", "?"), "before": before, "how": how,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "by": f"{user()}@{platform.node()}",
            "reason": secrets.hide(reason),
        }  # fmt: skip
        self.client.set_registered_model_tag(self.name, MOVE + move["number"], json.dumps(move))
        return move


def succession(moves: list[Move]) -> list[str]:
    """Champions that a rollback can return to, and the present one, last; a rollback removes the one it undid."""
    champions: list[str] = []
    for move in moves:
        champions = champions[:-1] if move["how"] == "rollback" else [*champions, move["version"]]
    return champions
