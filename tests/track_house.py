"""A folder with results of three variants and a verdict, as `track` finds them; a sqlite store that is copied, not made."""

import contextlib
import functools
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import reported
import yaml
from gate_house import MACHINE, metric, write_metrics
from mlflow import MlflowClient
from mlflow.store.db import utils
from sqlalchemy import Engine, event

from pipeline.core import artifacts, params

ROOT = Path(__file__).resolve().parent.parent
House = tuple[params.Params, str, MlflowClient]  # with the address of its store
VARIANTS = ("bf16", "int8", "nf4")
WHERE_FILES_LIE = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location"))

utils._get_latest_schema_revision = functools.cache(utils._get_latest_schema_revision)  # reads 70 files for every store opened


@event.listens_for(Engine, "connect")
def write_without_waiting(connection: Any, _: Any) -> None:
    """A test makes hundreds of commits, and no power cut."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def empty_database(folder: Path) -> Path:
    """A fresh sqlite store takes seconds to make; make it once and copy it."""
    path = folder / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


def copy_tracked(there: Path, here: Path) -> House:
    """Copy a house whose results are tracked into the working directory; its store's files lie in the copy."""
    shutil.copytree(there, here, dirs_exist_ok=True)
    with contextlib.closing(sqlite3.connect(here / "mlflow.db")) as store, store:
        for table, column in WHERE_FILES_LIE:
            store.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(there), str(here)))  # noqa: S608
    uri = f"sqlite:///{here / 'mlflow.db'}"
    return params.load(), uri, MlflowClient(tracking_uri=uri)


def rule(value: float | None, word: str, **more: Any) -> Any:
    """A rule's verdict as gate.json has it."""
    ends = {"value": value, "low": value and value / 2, "high": value and value * 2}
    return reported.rule("kld_mean", word, reason="r", n=100) | ends | more


def judged(word: str, *rules: Any) -> Any:
    """A variant's verdict as gate.json has it."""
    return reported.judged(word, *rules, reason="r")


def write_results() -> params.Params:
    """Params, results and verdict in the working directory: int8 passes, nf4 fails."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["variants"] = {name: data["variants"][name] for name in VARIANTS}
    data["serving"] = {"variants": {}}
    Path("params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    settings = params.load()
    for k, name in enumerate(settings.variants):
        metrics = {"kld_mean": metric(0.01 * k, 0.005 * k, None), "kld_mean/news": metric(None, None, None, n=0)}
        write_metrics(settings, name, metrics, quantizer="cast", versions={"torch": "2"}, machine=MACHINE)
    variants = {"int8": judged("PASS", rule(0.01, "PASS")), "nf4": judged("FAIL", rule(0.02, "FAIL"))}
    floor = dict.fromkeys(("kld_floor", "kld_rounding", "flip_floor", "flip_rounding"))
    top = {"verdict": "PASS", "reference": "bf16", "inconclusive": "blocks", "floor": floor}
    artifacts.write_json(artifacts.GATE, top | {"variants": variants})
    return settings


def sqlite_house(folder: Path, database: Path) -> House:
    """(params, address, client) of a house in the working directory with a store of its own."""
    shutil.copy(database, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return write_results(), uri, MlflowClient(tracking_uri=uri)


def change(variant: str, value: float | None = None, **fields: Any) -> None:
    """Another result for a variant. value: of its KLD."""
    results = artifacts.read_json(artifacts.metrics(variant)) | fields
    if value is not None:
        results["metrics"]["kld_mean"]["value"] = value
    artifacts.write_json(artifacts.metrics(variant), results)


def rejudge(variant: str, overall: str = "PASS", **fields: Any) -> None:
    """Another verdict for a variant."""
    verdict = artifacts.read_json(artifacts.GATE)
    verdict["variants"][variant] |= fields
    artifacts.write_json(artifacts.GATE, verdict | {"verdict": overall})
