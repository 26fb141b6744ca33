"""Pack the results into one zip for others to check on their hardware, or compare with such a zip.

    quantgate bundle out.zip
    quantgate compare out.zip

A bundle holds the environment (packages, params, locks), conditions (digests of all sets and of the code), rows, metrics, verdict,
report and logs; no weights and no secrets. `bundle.json` lists each file with its sha256, and what was left out and why. A bundle
from elsewhere is not trusted: nothing is unpacked to disk or run, and sizes and digests are checked first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import zipfile
import zlib
from collections import Counter
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import typer
from typing_extensions import TypedDict

from pipeline import report
from pipeline.core import artifacts, cli, params, records, secrets
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.core.records import File, Json, VariantResult, Verdict
from tools import machines
from tools.machines import Conditions, Side

T = TypeVar("T")
FORMAT = 1
INDEX = "bundle.json"
STAMP = (2020, 1, 1, 0, 0, 0)  # a fixed date, so that equal content gives equal bytes
MAX_MEMBER_BYTES = 200_000_000
MAX_TOTAL_BYTES = 2_000_000_000
MAX_MEMBERS = 10_000
MAX_LOG_BYTES = 1_000_000  # longer logs are cut to their end
ENVIRONMENT = ("params.yaml", "dvc.yaml", "dvc.lock", "constraints.txt")
APART = {"variants", "tiers", "track", "gate", "threads", "model", "calibration", "tier"}  # compared separately, or by digest
SPEED = ("benchmark", "serving")  # sections that no quality metric depends on
OPTIONAL = (  # included if they exist
    ("reports", "*.csv"), ("reports", "*.yaml"), ("reports/figures", "*.svg"), ("reports/serving", "*.json"), ("envs", "*"),
    ("artifacts/serving", "*.json*"), ("artifacts/runs", "*.json"), ("artifacts/logs", "*.log"),
)  # fmt: skip
ROWS = (artifacts.answers, artifacts.tokens, artifacts.timings, artifacts.generations)


class Format(TypedDict):
    format: int


class Index(Format):
    """bundle.json. absent, hidden, left_out: {file: why}."""

    verdict: str
    conditions: Conditions
    files: dict[str, File]
    absent: dict[str, str]
    hidden: dict[str, str]
    left_out: dict[str, str]


# --- making one --------------------------------------------------------------------------------------------------


def pack(settings: Params, path: Path) -> Index:
    """Bundle the results into `path`; returns the index. Raises `ArtifactError` if `path` cannot be written, metrics or the verdict
    are missing, or the metrics were computed from other rows."""
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder; name a file, such as {path / 'out.zip'}")
    if not path.absolute().parent.is_dir():
        raise ArtifactError(f"{path.absolute().parent} does not exist; create it or choose another folder")
    results, verdict = report.load_results(settings)
    rows = {(Path(file), sha256): name for name, result in results.items() for file, sha256 in result["inputs"].items()}
    for (row_file, sha256), name in rows.items():
        if row_file.exists() and artifacts.sha256_file(row_file) != sha256:
            raise ArtifactError(f"{row_file} is not what the metrics of {name} were computed from; run `dvc repro`, then bundle")
    required = _required(settings)
    optional = [artifacts.SUMMARY, *(file for folder, pattern in OPTIONAL for file in data_files(Path(folder), pattern))]
    absent = {str(f): "not on this machine; `dvc pull` or `dvc repro` restores it" for f in required if not f.exists()}
    files: dict[str, bytes] = {}
    hidden: dict[str, str] = {}
    for file in sorted({*required, *optional}):
        if file.exists() and file.stat().st_size > MAX_MEMBER_BYTES:
            absent[file.as_posix()] = f"{file.stat().st_size} bytes, over {MAX_MEMBER_BYTES}"
        elif file.exists():
            data = file.read_bytes()
            clean = secrets.hide_bytes(data, file.suffix)
            files[file.as_posix()] = clean[-MAX_LOG_BYTES:] if file.suffix == ".log" else clean
            if clean is not data:
                hidden[file.as_posix()] = "a password or key in it was replaced"
    files["environment.json"] = _json(secrets.hide_in(environment()))
    index: Index = {
        "format": FORMAT, "verdict": verdict["verdict"], "conditions": conditions(settings, results, verdict),
        "files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()},
        "absent": absent, "hidden": hidden,
        "left_out": dict.fromkeys(("artifacts/models", "artifacts/base", "artifacts/reference"), "weights, or made from them"),
    }  # fmt: skip
    with artifacts.atomic_file(path) as tmp, zipfile.ZipFile(tmp, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in {INDEX: _json(index), **files}.items():
            out.writestr(zipfile.ZipInfo(name, STAMP), data, zipfile.ZIP_DEFLATED)
    return index


def conditions(settings: Params, results: dict[str, VariantResult], verdict: Verdict) -> Conditions:
    """What must agree for quality to be comparable, and what explains differences in speed; no secrets."""
    asked = settings.model_dump(exclude=APART) | {"amount": settings.amount.model_dump()}
    speed = {k: asked.pop(k) | {"amount": asked["amount"].pop(k)} for k in SPEED}
    first = results[settings.reference]
    facts = ("quantizer", "options", "engine", "engine_options", "model")
    plain: Conditions = secrets.hide_in(artifacts.jsonable({
        "base": first["base"], "quality": asked, "sets": evalsets(settings), "speed": speed, "gate": settings.gate.model_dump(),
        "versions": first["versions"], "machine": first["machine"], "code": verdict["inputs"],
        "variants": {n: {k: v for k, v in r.items() if k in facts} for n, r in results.items()},
    }))  # fmt: skip
    return plain


def evalsets(settings: Params) -> dict[str, str]:
    """{file: sha256} of task sets, texts of divergence and prompts."""
    meta = artifacts.meta_of(artifacts.answers(settings.reference))
    tasks: dict[str, str] = artifacts.read_json(meta)["sets"] if meta.exists() else {}
    folders = [Path(settings.diverge.corpus), Path(settings.benchmark.prompts)]
    files = {f for folder in folders for f in data_files(folder, "**/*.jsonl")}
    files |= {Path(settings.diverge.trajectories.prompts)}
    return tasks | {f.as_posix(): artifacts.sha256_file(f) for f in sorted(files) if f.exists()}


@functools.cache
def environment() -> Json:
    """Installed packages, interpreter and system; no user name and no address."""
    packages = {m["Name"]: m["Version"] for d in metadata.distributions() if (m := d.metadata)["Name"]}
    system = {k: getattr(platform, k)() for k in ("system", "release", "machine", "python_version", "python_implementation")}
    return {"packages": dict(sorted(packages.items())), **system}


def _required(settings: Params) -> list[Path]:
    rows = [f for make in ROWS for v in settings.variants for f in (make(v), artifacts.meta_of(make(v)))]
    results = [make(v) for make in (artifacts.failures, artifacts.metrics) for v in settings.variants]
    models = [artifacts.BASE, artifacts.CALIBRATION, artifacts.REFERENCE, *map(artifacts.model_dir, settings.variants)]
    pages = [artifacts.REFERENCE / "windows.jsonl", artifacts.GATE, artifacts.FLOOR]
    pages += [artifacts.REPORTS / "report.md", artifacts.REPORTS / "report.html"]
    return [*map(Path, ENVIRONMENT), *rows, *results, *(folder / artifacts.MANIFEST for folder in models), *pages]


def _json(value: Any) -> bytes:
    return (json.dumps(artifacts.jsonable(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# --- reading one from elsewhere ----------------------------------------------------------------------------------


def read(path: Path) -> tuple[Index, Side]:
    """A bundle's index and results. Raises a one-line `ArtifactError` for anything wrong with it."""
    try:
        with zipfile.ZipFile(path) as bundle:
            _check_members(bundle)
            index = _index(bundle)
            names = [n for n in bundle.namelist() if re.fullmatch(r"reports/metrics/[A-Za-z0-9][A-Za-z0-9_-]*\.json", n)]
            results = {Path(n).stem: _parsed(bundle, n, VariantResult) for n in names}
            _check_rows(index, results)
            return index, Side(index["conditions"], results, _parsed(bundle, artifacts.GATE.as_posix(), Verdict))
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist; `quantgate bundle out.zip` makes a bundle") from None
    except ArtifactError as e:
        raise ArtifactError(f"{path}: {machines.plain(e)}") from None  # it repeats names from elsewhere
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, zlib.error) as e:
        raise ArtifactError(f"{path} cannot be read as a bundle ({machines.plain(e)}); ask for a new one") from None


def _check_members(bundle: zipfile.ZipFile) -> None:
    """Raise for names outside the folder, duplicates, links, and sizes that could fill the memory."""
    members = bundle.infolist()
    if len(members) > MAX_MEMBERS:
        raise ArtifactError(f"{len(members)} members, over {MAX_MEMBERS}: not a bundle")
    if sum(info.file_size for info in members) > MAX_TOTAL_BYTES:
        raise ArtifactError(f"would unpack to over {MAX_TOTAL_BYTES} bytes: not a bundle")
    if twice := [name for name, times in Counter(bundle.namelist()).items() if times > 1]:
        raise ArtifactError(f"holds {twice[0]!r} twice: refused")
    for info in members:
        name, pure = info.filename, PurePosixPath(info.filename)
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or is_link or pure.as_posix() != name:
            raise ArtifactError(f"{name!r} is not a plain name inside the bundle: refused")
        if info.file_size > MAX_MEMBER_BYTES:
            raise ArtifactError(f"{name} would take {info.file_size} bytes, over {MAX_MEMBER_BYTES}: refused")


def _index(bundle: zipfile.ZipFile) -> Index:
    """The index. Raises unless it has a known format and lists exactly the members, each with its digest."""
    number = _parsed(bundle, INDEX, Format)["format"]
    if number != FORMAT:
        raise ArtifactError(f"format {number}, not {FORMAT}: another version of quantgate made it")
    index = _parsed(bundle, INDEX, Index)
    if index["files"].keys() != set(bundle.namelist()) - {INDEX}:
        raise ArtifactError(f"{INDEX} does not list what the bundle holds; ask for a new one")
    for name, facts in index["files"].items():
        if hashlib.sha256(_bytes(bundle, name)).hexdigest() != facts["sha256"]:
            raise ArtifactError(f"{name} was changed after the bundle was made; ask for a new one")
    return index


def _check_rows(index: Index, results: dict[str, VariantResult]) -> None:
    """Raise if the metrics were computed from other rows than the bundle's."""
    for name, result in results.items():
        for file, sha256 in result["inputs"].items():
            if file in index["files"] and index["files"][file]["sha256"] != sha256 and file not in index["hidden"]:
                raise ArtifactError(f"{file} is not what the metrics of {name} were computed from")


def _bytes(bundle: zipfile.ZipFile, name: str) -> bytes:
    """A member's bytes, at most as many as it declares."""
    info = bundle.getinfo(name)
    with bundle.open(info) as f:
        data = f.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise ArtifactError(f"{name} does not have its declared size: refused")
    return data


def _parsed(bundle: zipfile.ZipFile, name: str, kind: type[T]) -> T:
    if name not in bundle.namelist():
        raise ArtifactError(f"holds no {name}: not a bundle of quantgate")
    try:
        value = json.loads(_bytes(bundle, name), parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{name} is not JSON ({str(e)[:80]})") from None
    return records.checked(value, kind, name, "ask for a new one")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


# --- the command -------------------------------------------------------------------------------------------------


def compared(settings: Params, path: Path) -> str:
    """These results beside a bundle's, as Markdown."""
    _, there = read(path)
    results, verdict = report.load_results(settings)
    return machines.side_by_side(Side(conditions(settings, results, verdict), results, verdict), there)


def main(path: Annotated[Path, typer.Argument(help="the bundle, out.zip")]) -> None:
    """Pack environment, conditions, rows and results into a zip file, without weights and secrets."""
    index = pack(params.load(), path)
    counts = f"{len(index['files'])} files, {len(index['absent'])} absent, {len(index['hidden'])} hidden"
    cli.say("bundle", f"{path}: {counts}, {path.stat().st_size / 1e6:.1f} MB")


def compare(path: Annotated[Path, typer.Argument(help="the bundle, out.zip")]) -> None:
    """Compare these results with a bundle: quality by its intervals, timings side by side."""
    print(compared(params.load(), path))
