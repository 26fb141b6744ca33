"""The golden files, tests/golden/<stage>.json: a stage's number in pipeline/protocol.yaml, and what it writes by that number.

python tests/golden/renew.py    after raising a number, or adding a case to measure.py (more of an old case: delete its file first)

Rows change if and only if the stage's number rises, or that of a stage before it: what keeps a rerun from being forgotten also
keeps one from being asked for nothing. Ids, labels and fields are compared exactly, figures to a thousandth (llama.cpp's, which
pass through 16 bits, to a hundredth), those of packed weights roughly.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tests.golden import measure  # noqa: E402
from tests.serving_server import serving  # noqa: E402

PROTOCOL = ROOT / "pipeline/protocol.yaml"
RENEW = "python tests/golden/renew.py"
BEFORE = {  # {stage: those whose outputs it reads, or what they were made of}
    "download": (), "calibrate": ("download",), "quantize": ("download", "calibrate"),
    **dict.fromkeys(("reference", "evaluate", "benchmark", "serve"), ("download", "calibrate", "quantize")),
    **dict.fromkeys(("floor", "diverge"), ("download", "calibrate", "quantize", "reference")),
}  # fmt: skip
Cases = dict[str, Any]


def numbers() -> dict[str, int]:
    return dict(yaml.safe_load(PROTOCOL.read_text(encoding="utf-8")))


def on_file(stage: str) -> dict[str, Any]:
    """{protocol: number, cases: what was written}; of number 0 and without cases where there is no file yet."""
    file = Path(__file__).parent / f"{stage}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {"protocol": 0, "cases": {}}


def measured() -> dict[str, Cases]:
    """{stage: its cases}, measured now."""
    with tempfile.TemporaryDirectory() as folder, serving() as server:
        return measure.run(Path(folder), server)


def raised() -> set[str]:
    """Stages whose number is larger than that of their golden file."""
    return {stage for stage, number in numbers().items() if number > on_file(stage)["protocol"]}


def fault(stage: str, number: int, fresh: Cases, golden: dict[str, Any], others: set[str] | None = None) -> tuple[str, bool]:
    """(what is wrong between a stage's number, its rows and its golden file; whether renewing the file mends it).

    others: stages that were raised, too. An empty sentence where all agree.
    """
    changed = differing(golden["cases"], {k: v for k, v in fresh.items() if k in golden["cases"]})
    added = sorted(fresh.keys() - golden["cases"].keys())
    rose, above = number > golden["protocol"], sorted((others or set()) & set(BEFORE[stage]))
    if rose and (changed or added):
        return f"{stage} was raised to {number}: run `{RENEW}`", True
    if changed and above:
        return f"rows of {stage} changed with {', '.join(above)}, which rose: run `{RENEW}`", True
    if changed:
        message = f"rows of {stage} changed: raise {stage} in pipeline/protocol.yaml, then `{RENEW}`; or take the change back"
        return f"{message} ({len(changed)} differ: {'; '.join(changed[:3])})", False
    if number != golden["protocol"]:
        message = f"{stage} was raised to {number} in pipeline/protocol.yaml, but its rows are as before, by {golden['protocol']}"
        return f"{message}: take the number back, or add a case to tests/golden/measure.py that shows what changed", False
    return (f"{stage} has no golden rows of {', '.join(added)}: run `{RENEW}`", True) if added else ("", False)


def differing(golden: Any, fresh: Any, at: str = "") -> list[str]:
    """Where two values differ, by paths of keys and indices."""
    if isinstance(golden, dict) and isinstance(fresh, dict):
        keys = [*golden, *(k for k in fresh if k not in golden)]
        nothing = object()
        return [d for k in keys for d in differing(golden.get(k, nothing), fresh.get(k, nothing), f"{at}.{k}" if at else k)]
    if isinstance(golden, list) and isinstance(fresh, list) and len(golden) == len(fresh):
        return [d for k, (a, b) in enumerate(zip(golden, fresh)) for d in differing(a, b, f"{at}[{k}]")]
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (golden, fresh))
    if numeric and float in (type(golden), type(fresh)):
        share, least = (0.2, 0.05) if at.endswith(".about") else (1e-2, 1e-3) if at.startswith("llamacpp") else (1e-3, 1e-4)
        same = math.isclose(golden, fresh, rel_tol=share, abs_tol=least)
    else:
        same = golden == fresh
    return [] if same else [f"{at}: {_short(golden)} -> {_short(fresh)}"]


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (dict, list, str, int, float, type(None))) else "nothing"
    return text if len(text) < 60 else f"{text[:57]}..."


def written(value: Any, indent: str = "") -> str:
    """JSON with a line for each key of what is longer than one, lists on one, figures to six digits."""
    line = json.dumps(_rounded(value), ensure_ascii=False)
    if not isinstance(value, dict) or len(line) < 300:
        return line
    lines = [f"{indent} {json.dumps(k)}: {written(v, indent + ' ')}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> int:
    """Renew the golden files of stages that may change; say why of those that are left. Exit code."""
    left, others = 0, raised()
    for stage, fresh in measured().items():
        number = numbers()[stage]
        message, mends = fault(stage, number, fresh, on_file(stage), others)
        if mends:
            text = written({"protocol": number, "cases": fresh})
            (Path(__file__).parent / f"{stage}.json").write_text(f"{text}\n", encoding="utf-8")
        if message:
            left += not mends
            print(f"renewed {stage}, by {number}" if mends else f"error: {message}", file=sys.stderr)
    return min(left, 1)


if __name__ == "__main__":
    sys.exit(main())
