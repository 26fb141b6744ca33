"""What earlier runs left on disk that tells how sure the next one will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.errors import QuantgateError
from pipeline.core.params import Params

RECORD = artifacts.REPORTS / "evalsets.json"
IDENTITY = ("source", "package", "file", "sha256", "path", "id")  # what params and a base's manifest both say of a model


def is_of(manifest: dict[str, Any], settings: Params) -> bool:
    """Whether a base's manifest is of the model that params name."""
    asked = {k: v for k, v in settings.model.model_dump().items() if k in IDENTITY}
    return all(manifest.get(k, v) == v for k, v in asked.items())


class Sources:
    """What is known of earlier runs: the probe's metrics if they are of this base model, the record of the sets, the
    reference's answers. Whatever cannot be read is as good as not there, and says so in `notes`."""

    def __init__(self, settings: Params) -> None:
        self.settings, self.notes = settings, []  # type: tuple[Params, list[str]]
        self.probe, self.reference = settings.gate.required[0], settings.reference
        base = self._read(artifacts.BASE / artifacts.MANIFEST) or {}
        self.base = base.get("digest") if is_of(base, settings) else None  # not yet downloaded
        found = self._read(artifacts.metrics(self.probe)) or {}
        fresh = self.base is not None and found.get("base") == self.base and found.get("reference") == self.reference
        self.metrics: dict[str, Any] = found.get("metrics") or {} if fresh and found.get("status") == "ok" else {}
        self.record: dict[str, Any] = self._read(RECORD) or {}
        self.answers = self._answers()

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            found = artifacts.read_json(path) if path.exists() else None
        except QuantgateError as e:
            self.notes.append(str(e))
            return None
        return found if isinstance(found, dict) else None

    def _answers(self) -> dict[str, float]:
        """{task: accuracy} of the reference's own rows, if they were made with the model that is here."""
        path = artifacts.answers(self.reference)
        made, model = self._read(artifacts.meta_of(path)), self._read(artifacts.model_dir(self.reference) / artifacts.MANIFEST)
        if not path.exists() or not made or not model or made.get("model") != model.get("digest") or model.get("base") != self.base:
            return {}
        scores: dict[str, list[float]] = {}
        try:
            for row in artifacts.read_jsonl(path):
                if row.get("acc") is not None:
                    scores.setdefault(row["task"], []).append(row["acc"])
        except (QuantgateError, KeyError) as e:
            self.notes.append(f"{path}: {e}")
        return {task: sum(own) / len(own) for task, own in scores.items()}

    def recorded(self, name: str) -> dict[str, Any] | None:
        """The record's figures of a set, if its files are still those they were taken on."""
        found = self.record.get("sets", {}).get(name, {"files": {"": None}})
        same = all(Path(f).is_file() and artifacts.sha256_file(Path(f)) == sha for f, sha in found["files"].items())
        return found if same else None

    def about(self) -> str:
        """What the record is of."""
        own = str(self.record.get("base"))
        whose = "this model" if self.base == own else f"another base ({own[:8]})" if self.base else "the default model"
        return f"{RECORD}: {self.record.get('probe')} against {self.record.get('reference')} of {whose}, tier full"
