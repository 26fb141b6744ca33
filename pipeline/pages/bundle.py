"""A bundle: one zip with all that another person needs to check a claim on other hardware, and no weights and no secrets.

environment (packages, params, locks) · conditions (digests of every set and of the code) · rows · metrics, verdict, report · logs
and what failed. `bundle.json` lists each file with its sha256, and what was left out and why. A bundle from elsewhere is only
read, member by member, never unpacked to disk and never run; its sizes are bounded and its digests checked first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import zipfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core import artifacts, secrets
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params

Row = dict[str, Any]
FORMAT = 1
INDEX = "bundle.json"
STAMP = (2020, 1, 1, 0, 0, 0)  # equal content gives equal bytes
MOST_BYTES = 200_000_000  # of one member
MOST_TOTAL = 2_000_000_000
MOST_MEMBERS = 10_000
MOST_LOG = 1_000_000  # bytes of a log: its end
ENVIRONMENT = ("params.yaml", "dvc.yaml", "dvc.lock", "constraints.txt")
APART = {"variants", "tiers", "track", "gate", "threads", "model", "calibration", "tier"}  # compared by themselves, or by digest
SPEED = ("benchmark", "serving")  # sections that no quality figure depends on
FOUND = (
    ("reports", "*.csv"), ("reports", "*.yaml"), ("reports/figures", "*.svg"), ("reports/serving", "*.json"), ("envs", "*"),
    ("artifacts/serving", "*.json*"), ("artifacts/runs", "*.json"), ("artifacts/logs", "*.log"),
)  # fmt: skip
ROWS = (artifacts.answers, artifacts.tokens, artifacts.timings, artifacts.generations)


# --- making one --------------------------------------------------------------------------------------------------


def pack(settings: Params, path: Path) -> Row:
    """Write the bundle of the results on file; returns its index.

    Raises `ArtifactError` if `path` is a folder, if a metrics file or the verdict is missing, or if rows are not those that
    the metrics were made from.
    """
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder; name a file, such as {path / 'out.zip'}")
    if not path.absolute().parent.is_dir():
        raise ArtifactError(f"{path.absolute().parent} is not there; make it, or name a file in a folder that is")
    results = {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}
    verdict = artifacts.read_json(artifacts.GATE)
    _refuse_stale(results)
    absent = {str(f): "not on this machine; `dvc pull` or `dvc repro` brings it" for f in _wanted(settings) if not f.exists()}
    files: dict[str, bytes] = {}
    hidden = []
    for file in sorted({*_wanted(settings), *_found()}):
        if file.exists() and file.stat().st_size > MOST_BYTES:
            absent[file.as_posix()] = f"{file.stat().st_size} bytes, over {MOST_BYTES}"
        elif file.exists():
            files[file.as_posix()], changed = _content(file)
            hidden += [file.as_posix()] if changed else []
    files["environment.json"] = _json(secrets.hide_in(environment()))
    index = {
        "format": FORMAT, "verdict": verdict["verdict"], "conditions": conditions(settings, results, verdict),
        "files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()},
        "absent": absent, "hidden": dict.fromkeys(hidden, "a password or key in it was replaced"),
        "left_out": dict.fromkeys(("artifacts/models", "artifacts/base", "artifacts/reference"), "weights, or made from them"),
    }  # fmt: skip
    _write(path, {INDEX: _json(index), **files})
    return index


def conditions(settings: Params, results: dict[str, Row], verdict: Row) -> Row:
    """What must agree for quality figures of two machines to be comparable, and what explains differences of speed; no secrets."""
    asked = settings.model_dump(exclude=APART) | {"amount": settings.amount.model_dump()}
    speed = {k: asked.pop(k) | {"amount": asked["amount"].pop(k)} for k in SPEED}
    first = results[settings.reference]
    facts = ("quantizer", "options", "engine", "engine_options", "model")
    return dict(secrets.hide_in(artifacts.jsonable({
        "base": first["base"], "quality": asked, "sets": evalsets(settings), "speed": speed, "gate": settings.gate.model_dump(),
        "versions": first["versions"], "machine": first["machine"],
        "code": verdict["inputs"],
        "variants": {n: {k: r[k] for k in facts} for n, r in results.items()},
    })))  # fmt: skip


def evalsets(settings: Params) -> dict[str, str]:
    """{file: sha256} of the sets that answers were given to and texts that divergence was measured on."""
    asked = artifacts.meta_of(artifacts.answers(settings.reference))
    tasks = dict(artifacts.read_json(asked).get("sets") or {}) if asked.exists() else {}
    folders = [Path(settings.diverge.corpus), Path(settings.benchmark.prompts)]
    files = {f for folder in folders for f in data_files(folder, "**/*.jsonl")}
    files |= {Path(settings.diverge.trajectories.prompts)}
    return tasks | {f.as_posix(): artifacts.sha256_file(f) for f in sorted(files) if f.exists()}


@functools.cache  # they do not change while a process runs
def environment() -> Row:
    """Every installed package and its version, the interpreter and the system; nothing that names a user or an address."""
    packages = {m["Name"]: m["Version"] for d in metadata.distributions() if (m := d.metadata)["Name"]}
    system = {k: getattr(platform, k)() for k in ("system", "release", "machine", "python_version", "python_implementation")}
    return {"packages": dict(sorted(packages.items())), **system}


def _wanted(settings: Params) -> list[Path]:
    """What a whole bundle has."""
    rows = [f for make in ROWS for v in settings.variants for f in (make(v), artifacts.meta_of(make(v)))]
    models = [artifacts.model_dir(v) / artifacts.MANIFEST for v in settings.variants]
    more = [artifacts.broke(v) for v in settings.variants] + [artifacts.metrics(v) for v in settings.variants]
    store = [artifacts.BASE / artifacts.MANIFEST, artifacts.CALIBRATION / artifacts.MANIFEST]
    store += [artifacts.REFERENCE / artifacts.MANIFEST, artifacts.REFERENCE / "windows.jsonl"]
    pages = [artifacts.GATE, artifacts.FLOOR, artifacts.REPORTS / "report.md", artifacts.REPORTS / "report.html"]
    return [Path(name) for name in ENVIRONMENT] + rows + models + more + store + pages


def _found() -> Iterator[Path]:
    """What goes in where it is there: other figures, environments, how long stages took, logs."""
    yield artifacts.SUMMARY
    for folder, pattern in FOUND:
        yield from data_files(Path(folder), pattern)


def _refuse_stale(results: dict[str, Row]) -> None:
    behind = {(Path(file), sha256): name for name, result in results.items() for file, sha256 in result["inputs"].items()}
    for (file, sha256), name in behind.items():
        if file.exists() and artifacts.sha256_file(file) != sha256:
            raise ArtifactError(f"{file} is not what the metrics of {name} were made from; run `dvc repro`, then bundle")


def _content(file: Path) -> tuple[bytes, bool]:
    """A file's bytes, and whether a secret in them was replaced; of a log only its end."""
    data = file.read_bytes()
    clean = secrets.hide_bytes(data, file.suffix)
    return clean[-MOST_LOG:] if file.suffix == ".log" else clean, clean is not data


def _write(path: Path, files: dict[str, bytes]) -> None:
    with artifacts.atomic_file(path) as tmp, zipfile.ZipFile(tmp, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files.items():
            out.writestr(zipfile.ZipInfo(name, STAMP), data, zipfile.ZIP_DEFLATED)


def _json(value: Any) -> bytes:
    return (json.dumps(artifacts.jsonable(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# --- reading another's -------------------------------------------------------------------------------------------


def read(path: Path) -> Row:
    """{index, results, verdict} of a bundle. Raises `ArtifactError` in one line for whatever is wrong with it."""
    try:
        with zipfile.ZipFile(path) as bundle:
            members = _members(path, bundle)
            index = _parsed(path, bundle, members, INDEX)
            _check(path, bundle, members, index)
            names = [n for n in members if re.fullmatch(r"reports/metrics/[A-Za-z0-9][A-Za-z0-9_-]*\.json", n)]
            results = {Path(n).stem: _parsed(path, bundle, members, n) for n in names}
            _check_rows(path, index, results)
            return {"index": index, "results": results, "verdict": _parsed(path, bundle, members, artifacts.GATE.as_posix())}
    except FileNotFoundError:
        raise ArtifactError(f"{path} is not there; `python -m pipeline.report --bundle out.zip` makes one") from None
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, zlib.error) as e:
        raise ArtifactError(f"{path} is not a bundle that can be read ({e}); have it made and sent again") from None


def _members(path: Path, bundle: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Members by name; anything that could land outside a folder, hide another, or fill the memory is refused."""
    found: dict[str, zipfile.ZipInfo] = {}
    if len(bundle.infolist()) > MOST_MEMBERS:
        raise ArtifactError(f"{path} holds {len(bundle.infolist())} members, over {MOST_MEMBERS}: that is no bundle")
    if sum(info.file_size for info in bundle.infolist()) > MOST_TOTAL:
        raise ArtifactError(f"{path} would take over {MOST_TOTAL} bytes: that is no bundle")
    for info in bundle.infolist():
        name = info.filename
        pure = PurePosixPath(name)
        link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or link or pure.as_posix() != name:
            raise ArtifactError(f"{path} holds {name!r}, which is no plain name inside a folder: refused")
        if name in found:
            raise ArtifactError(f"{path} holds {name!r} twice: refused")
        if info.file_size > MOST_BYTES:
            raise ArtifactError(f"{path}: {name} would take {info.file_size} bytes, over {MOST_BYTES}: refused")
        found[name] = info
    return found


def _check(path: Path, bundle: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], index: Row) -> None:
    """Raise unless the index is of a known format and names exactly the members, each with its own digest."""
    if index.get("format") != FORMAT:
        raise ArtifactError(f"{path} has format {index.get('format')!r}, not {FORMAT}: it was made by another version of quantgate")
    listed = index.get("files")
    if (
        not isinstance(listed, dict)
        or listed.keys() != members.keys() - {INDEX}
        or not all(isinstance(index.get(key), dict) for key in ("conditions", "hidden"))
    ):
        raise ArtifactError(f"{path}: {INDEX} does not list what the bundle holds; have it made and sent again")
    for name, facts in listed.items():
        if hashlib.sha256(_bytes(path, bundle, members[name])).hexdigest() != (facts or {}).get("sha256"):
            raise ArtifactError(f"{path}: {name} was changed after the bundle was made; have it made and sent again")


def _check_rows(path: Path, index: Row, results: dict[str, Row]) -> None:
    """Raise if rows in the bundle are not those its metrics say they were made from."""
    for name, result in results.items():
        inputs = result.get("inputs")
        for file, then in inputs.items() if isinstance(inputs, dict) else []:
            held = index["files"].get(file, {"sha256": then})
            if held["sha256"] != then and file not in index.get("hidden", {}):
                raise ArtifactError(f"{path}: {file} is not what the metrics of {name} were made from")


def _bytes(path: Path, bundle: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member's bytes, never more than it says it has."""
    with bundle.open(info) as f:
        data = f.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise ArtifactError(f"{path}: {info.filename} is longer or shorter than it says: refused")
    return data


def _parsed(path: Path, bundle: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str) -> Row:
    if name not in members:
        raise ArtifactError(f"{path} holds no {name}: it is no bundle of `python -m pipeline.report --bundle`")
    try:
        value = json.loads(_bytes(path, bundle, members[name]))
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{path}: {name} is not JSON ({str(e)[:80]})") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {name} is not a JSON object")
    return value
