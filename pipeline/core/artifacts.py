"""All paths and all writes: to a temporary name, flushed and renamed, so that a killed stage leaves the old file or none."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError, NoResult

if TYPE_CHECKING:
    from pipeline.core.records import File, Json, ModelManifest, Outcome, RunFacts

ARTIFACTS = Path("artifacts")
REPORTS = Path("reports")

BASE = ARTIFACTS / "base"
CALIBRATION = ARTIFACTS / "calibration"
REFERENCE = ARTIFACTS / "reference"
RUNS = ARTIFACTS / "runs"
LOGS = ARTIFACTS / "logs"
GATE = REPORTS / "gate.json"
FLOOR = REPORTS / "floor.json"
SUMMARY = REPORTS / "summary.json"
TRADEOFF = REPORTS / "tradeoff.csv"
TRADEOFF_TABLE = REPORTS / "tradeoff_table.csv"
SERVING_ASKED = REPORTS / "serving" / "asked.yaml"
MLFLOW = REPORTS / "mlflow.json"
LEVELS = ARTIFACTS / "levels"  # weights in each format that `make smallest` tries
SMALLEST = REPORTS / "smallest"
SENSITIVITY, CANDIDATES, ANSWER = (SMALLEST / f"{name}.json" for name in ("sensitivity", "candidates", "answer"))
MANIFEST = "manifest.json"

# Packages whose version can change a number; recorded with every artifact.
VERSIONED = (
    "torch", "transformers", "datasets", "lm_eval", "torchao", "gptqmodel", "optimum", "numpy", "scipy", "tokenizers",
)  # fmt: skip


def from_project(path: str | Path) -> Path:
    """A path in params.yaml outside git, relative to the project's folder; `dvc exp run` works in a copy under .dvc/tmp."""
    here = Path.cwd()
    copy = next((p for p in (here, *here.parents) if (p / ".dvc").is_dir()), here)
    root = Path(os.environ.get("DVC_ROOT", copy))
    inside = copy.is_relative_to(root / ".dvc" / "tmp")
    return (root / here.relative_to(copy) if inside else Path()) / Path(path).expanduser()


def _by_variant(folder: Path, suffix: str = "") -> Callable[[str], Path]:
    return lambda variant: folder / f"{variant}{suffix}"


model_dir = _by_variant(ARTIFACTS / "models")
answers = _by_variant(ARTIFACTS / "answers", ".jsonl")
tokens = _by_variant(ARTIFACTS / "tokens", ".parquet")
timings = _by_variant(ARTIFACTS / "timings", ".jsonl")
generations = _by_variant(ARTIFACTS / "generations", ".jsonl")
serving = _by_variant(ARTIFACTS / "serving", ".jsonl")
served = _by_variant(REPORTS / "serving", ".json")
failures = _by_variant(ARTIFACTS / "broke", ".json")
metrics = _by_variant(REPORTS / "metrics", ".json")


def meta_of(rows: Path) -> Path:
    return rows.with_suffix(".meta.json")


def _temporary(path: Path) -> Path:
    """A temporary name beside `path`. Removes what killed runs left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        pid = left.name.removeprefix(f".{path.name}.").split(".")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.parent / f".{path.name}.{os.getpid()}.tmp"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success flush it to disk and rename it to `path`."""
    tmp = _temporary(path)
    try:
        yield tmp
        with tmp.open("rb") as f:
            os.fsync(f.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it replaces `path` as a whole."""
    tmp = _temporary(path)
    tmp.mkdir()
    try:
        yield tmp
        for file in tmp.rglob("*"):
            if file.is_file():
                with file.open("rb") as f:  # it may link to a read-only file
                    os.fsync(f.fileno())
        old = tmp.with_suffix(".old.tmp")
        if path.exists():
            path.replace(old)
        tmp.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def jsonable(value: Any) -> Any:
    """`value` as strict JSON: NumPy and torch values become plain, non-finite floats null, paths strings."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, torch tensors
        return jsonable(value.tolist())
    return str(value)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as tmp:
        tmp.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    write_text(path, "".join(json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def link_file(source: Path, to: Path) -> None:
    """Hard-link one of our own files, which are never changed in place; copy it if `to` is on another disk."""
    try:
        to.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, to)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `ArtifactError` with the remedy for a missing or damaged file."""
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; run `dvc repro` to make it") from None
    except (ValueError, OSError) as e:
        if getattr(e, "errno", None):  # an error of the disk; that of a damaged parquet file has no number
            raise
        kind = path.suffix[1:].upper()
        raise ArtifactError(f"{path} is not valid {kind} ({e}); delete it and run `dvc repro`") from None


def read_json(path: Path) -> Any:
    """A JSON file's content. Raises `ArtifactError` if it is missing, not JSON, or has a name twice."""
    with _readable(path):
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_names)


def unique_names(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object's content. Raises `ValueError` if it has a name twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is given twice")
    return content


def read_jsonl(path: Path) -> list[Json]:
    with _readable(path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_columns(path: Path) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    with _readable(path):
        return dict(pq.read_table(path).to_pydict())


def write_between(path: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between two marks of a file. Raises `ArtifactError` without them."""
    before, opened, rest = path.read_text(encoding="utf-8").partition(marks[0])
    _, closed, after = rest.partition(marks[1])
    if not (opened and closed):
        raise ArtifactError(f"{path} has no {marks[0]} ... {marks[1]} to write between")
    write_text(path, f"{before}{marks[0]}{text}{marks[1]}{after}")


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON, whatever the order of its keys."""
    text = json.dumps(jsonable(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def files_of(folder: Path) -> dict[str, File]:
    """{relative name: {bytes, sha256}} of a folder's data files without its manifest."""
    return {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)}
        for p in data_files(folder, "**/*")
        if p.name != MANIFEST
    }


@contextmanager
def recording(meta: Outcome | Json, path: Path | None = None) -> Iterator[list[Any]]:
    """Yield the list of rows to fill. A `NoResult` ends the block without rows; its status and reason go into `meta`.
    path: where to write the rows as JSONL, with `meta` beside them."""
    rows: list[Any] = []
    try:
        yield rows
    except NoResult as e:
        rows.clear()
        meta["status"], meta["reason"] = e.status, str(e)
    if path is not None:
        write_jsonl(path, rows)
        write_json(meta_of(path), meta)


def check_model(folder: Path, manifest: ModelManifest) -> None:
    """Raise the `NoResult` with which building the model ended, or `ArtifactError` if its files have changed."""
    if manifest["status"] != "ok":
        no_model = NoResult(manifest["reason"])
        no_model.status = manifest["status"]
        raise no_model
    verify_files(folder, manifest)


def read_manifest(folder: Path) -> Json:
    return dict(read_json(folder / MANIFEST))


def trusts_code(folder: Path) -> bool:
    """Whether params allow the model's own code to run; False without a manifest."""
    return (folder / MANIFEST).exists() and bool(read_manifest(folder).get("trust_remote_code"))


def verify_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `ArtifactError` if a file was changed, added or removed after the manifest was written."""
    now, then = files_of(folder), manifest["files"]
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            what = "is missing" if name not in now else "was added" if name not in then else "was changed"
            raise ArtifactError(f"{folder / name} {what} after its manifest was written; delete {folder} and `dvc repro`")


def versions() -> dict[str, str]:
    installed = {}
    for name in VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


class Stopwatch:
    """What a stage cost. It is kept outside the outputs, so that equal inputs give equal files."""

    def __init__(self, stage: str, variant: str | None = None) -> None:
        self.path = RUNS / (f"{stage}@{variant}.json" if variant else f"{stage}.json")
        self._start = time.monotonic()

    def done(self) -> float:
        """Write wall time and peak memory of the largest process; return the seconds."""
        seconds = round(time.monotonic() - self._start, 1)
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = 1024 * max(resource.getrusage(kind).ru_maxrss for kind in kinds)
        finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.path, {"wall_s": seconds, "peak_memory_bytes": peak, "finished": finished})
        return seconds


def run_facts(stage: str, variant: str | None = None) -> RunFacts | None:
    """What the last run of a stage on this machine cost; None if its output was restored."""
    path = Stopwatch(stage, variant).path
    return read_json(path) if path.exists() else None


def seconds_of(name: str) -> tuple[float | None, bool]:
    """Seconds of the last run of `stage` or `stage@variant`, and False; else the mean of its other variants and True, or None."""
    stage, _, variant = name.partition("@")
    if facts := run_facts(stage, variant or None):
        return facts["wall_s"], False
    others = [read_json(path)["wall_s"] for path in RUNS.glob(f"{stage}@*.json")]
    return (sum(others) / len(others), True) if others else (None, False)
