"""What the scripts of this folder share: projects to work in, work in turns, and how its times are put together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this tree's pipeline and the tests' helpers

T = TypeVar("T")
Settings = dict[str, Any]  # params.yaml as it is written


# --- projects ----------------------------------------------------------------------------------------------------


def environment(project: Path = ROOT, /, **more: str) -> dict[str, str]:
    """Of a command that runs the code of `project`, with this interpreter and its `dvc`."""
    return os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(project)} | more


def stage(work: Path, name: str, *arguments: str, **more: str) -> None:
    """Run a stage of this tree in a project's folder. more: of its environment."""
    subprocess.run([sys.executable, "-m", f"pipeline.{name}", *arguments], cwd=work, env=environment(**more), check=True)


def settings() -> Settings:
    data: Settings = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    return data


def write_params(work: Path, data: Settings) -> None:
    (work / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def project(work: Path, data: Settings, *linked: Path) -> None:
    """Write params into a folder, in which the evalsets and the `linked` folders are this project's."""
    work.mkdir(parents=True, exist_ok=True)
    write_params(work, data)
    for folder in (Path("evalsets"), *linked):
        (work / folder).parent.mkdir(parents=True, exist_ok=True)
        if not (work / folder).exists():
            (work / folder).symlink_to((ROOT / folder).resolve())


def clone(folder: Path) -> Path:
    """This commit in a folder; one that is there already is used again."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


# --- times -------------------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """cpu: of this process and of the children that ended meanwhile; other work on the machine moves it less than wall time."""

    wall: float
    cpu: float


def seconds(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    return Seconds(time.perf_counter() - wall, sum(os.times()[:4]) - cpu)


def in_turns(work: Mapping[str, Callable[[int], T]], rounds: int, *, warmups: int = 1) -> dict[str, list[T]]:
    """{name: what it gave in each round}, called with the round's number, in an order that turns round by round."""
    results: dict[str, list[T]] = {name: [] for name in work}
    for k in range(warmups + rounds):
        for name in list(work)[:: -1 if k % 2 else 1]:
            result = work[name](k)
            if k >= warmups:
                results[name].append(result)
    return results


def median(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(median, low, high) over rounds, the interval by order statistics: a round that a neighbour spoilt moves it little.

    Fewer than six rounds have no interval.
    """
    test: Any = stats.quantile_test(ratios, q=1.0, p=0.5)
    low, high = (float(v) if np.isfinite(v) else None for v in test.confidence_interval(0.95))
    return float(np.median(ratios)), low, high


def head(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"{row(*columns)}\n{'|---' * len(columns)}|"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
