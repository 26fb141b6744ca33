"""What is no longer, byte for byte, what the pipeline measured: a verdict on top of it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.model_config import wanted
from pipeline.core.params import Params, PathModel
from pipeline.judging import locked
from pipeline.serving import results as server_results

ONCE = ("download", "calibrate", "reference", "floor")  # stages of dvc.yaml that measure, and
PER_VARIANT = ("quantize", "diverge", "evaluate", "benchmark", "compare")
UNLIKE_SOURCE = "(not what was downloaded from there)"
SUFFIXES = (".py", ".yaml", ".jsonl", ".txt")
SOURCES = ("evalsets", "envs", "constraints.txt", "pipeline/protocol.yaml")
JUDGED_BY = {"compare", "gate", "reference", "seed", "tier", "variants"}  # of params; the others: `_other_stages`


def since(verdict: dict[str, Any], settings: Params) -> list[str]:
    """What is missing or was changed since a verdict (gate.json's content) was given, each once; empty where it still holds."""
    now, then = inputs(settings), verdict.get("inputs", {})
    others = sorted(k for k in now.keys() | then.keys() if now.get(k) is None or now.get(k) != then.get(k))
    in_words = list(dict.fromkeys(changed(settings)))
    return [k for k in others if not any(said.startswith(f"{k} ") for said in in_words)] + in_words


def sentence(found: list[str], most: int | None = None) -> str:
    """What `since` found (the first `most` of it) and what to do, in one sentence."""
    more = f" and {len(found) - most} more" if most and len(found) > most else ""
    way = (
        "run `dvc repro -f download`, then `dvc repro`"
        if any(said.endswith(UNLIKE_SOURCE) for said in found)
        else "run `dvc repro`"
    )
    return f"missing or changed since: {', '.join(found[:most])}{more}; {way}"


def inputs(settings: Params) -> dict[str, str | None]:
    """Hashes of what a verdict rests on; None where a file is missing."""
    files = [artifacts.metrics(name) for name in settings.variants] + [artifacts.LEDGER]
    files += server_results.files(settings)
    files += [artifacts.FLOOR] if any(rule.above for rule in settings.gate.rules) else []
    hashes: dict[str, str | None] = {str(f): artifacts.sha256_file(f) if f.exists() else None for f in files}
    for name in SOURCES:  # what was measured on, with which packages, and what the rows mean
        path = Path(name)
        found = [p for p in data_files(path, "**/*") if p.suffix in SUFFIXES] if path.is_dir() else [path]
        hashes[name] = artifacts.digest({p.as_posix(): artifacts.sha256_file(p) for p in found if p.exists()})
    return hashes | {"params": artifacts.digest(settings.model_dump(include=JUDGED_BY))}


def changed(settings: Params) -> list[str]:
    """Files in words: rows and a local model that changed since, and results that no stage wrote."""
    shown = [p for n in settings.serving.variants if (p := artifacts.served(n)).exists()]  # judged by no rule, and still told
    written = [artifacts.metrics(n) for n in settings.variants] + list(dict.fromkeys(server_results.files(settings) + shown))
    written += [artifacts.FLOOR] if artifacts.FLOOR.exists() else []
    results = _results(settings)
    servers = server_results.load(settings) if server_results.judged(settings) else {}
    found = sorted(changed_rows(servers)) + sorted(changed_rows(results)) + _changed_model(settings)
    found += _changed_base(results)
    return found + _changed_builds(results, settings) + locked.edited(written) + _other_stages(settings)


def _other_stages(settings: Params) -> list[str]:
    """What was measured with other params, protocol numbers, quantizers or engines than those of now: a verdict made by hand on
    top would not say so."""
    stages = {f"{stage}@{name}" for stage in PER_VARIANT for name in settings.variants} | set(ONCE)
    stages |= {f"serve@{name}" for name in settings.serving.variants}  # dvc.lock keeps what is no longer asked for
    return locked.other_params(stages) + locked.other_code(stages)


def absent(settings: Params) -> list[str]:
    """What the verdict rests on and is not in this folder, so that nobody compared it: a clone has no rows and no models."""
    rows = [f for result in _results(settings).values() for f in result["inputs"] if not Path(f).exists()]
    models = [n for n in settings.gate.required if not (artifacts.model_dir(n) / artifacts.MANIFEST).exists()]
    base = [] if (artifacts.BASE / artifacts.MANIFEST).exists() else ["the base model"]
    return [f"{len(rows)} files of rows"] * bool(rows) + [f"the model of {n}" for n in models] + base


def _changed_builds(results: dict[str, Any], settings: Params) -> list[str]:
    """Models of required variants that are here and are not, byte for byte, what was measured."""
    found = []
    for name in settings.gate.required:
        folder = artifacts.model_dir(name)
        if not (folder / artifacts.MANIFEST).exists() or name not in results:
            continue
        found += changed_build(folder, results[name]["model"]) or _other_options(folder, results[name])
    return found


def _other_options(folder: Path, result: dict[str, Any]) -> list[str]:
    """A build that is not what its results say was asked for. The digests were compared before."""
    manifest = artifacts.read_manifest(folder)
    other = [
        k for k in ("quantizer", "asked", "engine", "engine_options") if k in result and k in manifest and manifest[k] != result[k]
    ]
    return [f"{folder} (its {key} is not what its results say)" for key in other[:1]]


def changed_build(folder: Path, measured: str) -> list[str]:
    """What of a model that is here is not, byte for byte, what was measured, in words. measured: its metrics' `model`."""
    try:
        manifest = artifacts.read_manifest(folder)
        made_of, digest = artifacts.build_digest(manifest), manifest["digest"]
        found = _changed_files(folder, manifest)
    except ArtifactError as e:
        return [_fault(e)]
    except (AttributeError, KeyError, TypeError):
        return [f"{folder} (its manifest is damaged)"]
    if digest != measured:
        found.append(f"{folder} (another build than was measured)")
    elif made_of != digest:
        found.append(f"{folder} (its manifest was edited by hand)")
    return found


def _changed_base(results: dict[str, Any]) -> list[str]:
    """What of a base model that is here is not, byte for byte, what every measured variant was made from, in words.

    All of it is hashed: 0.7 s for 538 MB. A file of the same size and time may still be another, so nothing less would do.
    """
    folder = artifacts.BASE
    if not (folder / artifacts.MANIFEST).exists():
        return []
    try:
        manifest = artifacts.read_manifest(folder)
        found, digest = _changed_files(folder, manifest), manifest["digest"]
    except ArtifactError as e:
        return [_fault(e)]
    except (AttributeError, KeyError, TypeError):
        return [f"{folder} (its manifest is damaged)"]
    if any(result.get("base") not in (None, digest) for result in results.values()):
        found.append(f"{folder} (another model than the variants were made from)")
    elif artifacts.digest(manifest["files"]) != digest:
        found.append(f"{folder} (its manifest was edited by hand)")
    return found


def _changed_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """The first file of a folder that is not as its manifest says, in words."""
    try:
        artifacts.verify_files(folder, manifest)
    except ArtifactError as e:
        return [_fault(e)]
    return []


def _fault(e: ArtifactError) -> str:
    """An error without what to do about it: `sentence` says that once, for all that is found."""
    return str(e).partition("; ")[0]


def _results(settings: Params) -> dict[str, Any]:
    return {n: artifacts.read_json(artifacts.metrics(n)) for n in settings.variants if artifacts.metrics(n).exists()}


def changed_rows(results: dict[str, Any]) -> dict[str, str]:
    """{row file: variant} of those that are here and are not what that variant's metrics were made from."""
    now: dict[str, str | None] = {}  # the reference's rows are behind every variant's metrics: hashed once
    found: dict[str, str] = {}
    for name, result in results.items():
        for file, then in result["inputs"].items():
            if file not in now:
                now[file] = artifacts.sha256_file(Path(file)) if Path(file).exists() else None
            if now[file] not in (None, then):
                found.setdefault(file, name)
    return found


def _changed_model(settings: Params) -> list[str]:
    """A local model folder whose files are no longer those that were downloaded from it."""
    if not isinstance(settings.model, PathModel) or not (artifacts.BASE / artifacts.MANIFEST).exists():
        return []
    manifest = artifacts.read_manifest(artifacts.BASE)
    then = {name: facts["sha256"] for name, facts in manifest.get("files", {}).items()}  # none: `_changed_base` says what is wrong
    then |= manifest.get("repaired") or {}  # as they were given
    folder, code = settings.model.folder, settings.model.trust_remote_code
    given = manifest.get("given")
    if given is not None:  # the others were made by `download`
        then = {name: sha256 for name, sha256 in then.items() if name in given}
    added = {f.name for f in wanted(folder, code)} - set(given) if given is not None else set()
    folder = folder.parent if folder.suffix == ".gguf" else folder
    return [
        f"{folder / name} {UNLIKE_SOURCE}"
        for name, sha256 in (then | dict.fromkeys(added)).items()
        if not (folder / name).exists() or artifacts.sha256_file(folder / name) != sha256
    ]
