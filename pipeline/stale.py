"""What is no longer, byte for byte, what the pipeline measured: a verdict on top of it is stale."""

from __future__ import annotations

from pathlib import Path

from pipeline import artifacts, locked, served
from pipeline.params import Params, PathModel


def changed(settings: Params) -> list[str]:
    """Files in words: rows and a local model that changed since, and results that no stage wrote."""
    written = [artifacts.metrics(n) for n in settings.variants] + served.files(settings)
    written += [artifacts.FLOOR] if artifacts.FLOOR.exists() else []
    return served.changed(settings) + _changed_rows(settings) + _changed_model(settings) + locked.edited(written)


def _changed_rows(settings: Params) -> list[str]:
    """Row files that are here but are not those the metrics were made from."""
    changed = set()
    for name in settings.variants:
        path = artifacts.metrics(name)
        inputs = artifacts.read_json(path)["inputs"] if path.exists() else {}
        changed |= {f for f, then in inputs.items() if Path(f).exists() and artifacts.sha256_file(Path(f)) != then}
    return sorted(changed)


def _changed_model(settings: Params) -> list[str]:
    """A local model folder whose files are no longer those that were downloaded from it."""
    if not isinstance(settings.model, PathModel) or not (artifacts.BASE / artifacts.MANIFEST).exists():
        return []
    then = artifacts.read_manifest(artifacts.BASE)["files"]
    folder = Path(settings.model.path).expanduser()
    return [
        f"{folder / name} (after `dvc repro -f download`)"
        for name, facts in then.items()
        if not (folder / name).exists() or artifacts.sha256_file(folder / name) != facts["sha256"]
    ]
