"""What earlier runs left on disk that tells how precise the next one will be."""

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
    """Earlier results: the probe's metrics if they are of this base model, and the record of the sets. What cannot be read counts
    as absent and is named in `notes`."""

    def __init__(self, settings: Params) -> None:
        self.settings, self.notes = settings, []  # type: tuple[Params, list[str]]
        self.probe = settings.gate.required[0]
        base = self._read(artifacts.BASE / artifacts.MANIFEST) or {}
        self.base = base.get("digest") if is_of(base, settings) else None  # not yet downloaded
        last = self._read(artifacts.metrics(self.probe)) or {}
        fresh = self.base is not None and last.get("base") == self.base and last.get("reference") == settings.reference
        self.metrics: dict[str, Any] = last.get("metrics") or {} if fresh and last.get("status") == "ok" else {}
        self.record: dict[str, Any] = self._read(RECORD) or {}

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = artifacts.read_json(path) if path.exists() else None
        except QuantgateError as e:
            self.notes.append(str(e))
            return None
        return content if isinstance(content, dict) else None

    def recorded(self, name: str) -> dict[str, Any] | None:
        """The record of a set, if its files are still those it was taken on."""
        entry = self.record.get("sets", {}).get(name, {"files": {"": None}})
        same = all(Path(f).is_file() and artifacts.sha256_file(Path(f)) == sha for f, sha in entry["files"].items())
        return entry if same else None

    def about(self) -> str:
        """The line that names the record's models."""
        digest = str(self.record.get("base"))
        whose = "this model" if self.base == digest else f"another base ({digest[:8]})" if self.base else "the default model"
        return f"{RECORD}: {self.record.get('probe')} against {self.record.get('reference')} of {whose}, tier full"
