"""sensitivity: what each group of layers costs in bits and in divergence -> reports/smallest/sensitivity.json, artifacts/levels/

In both directions: each group alone at the lowest level in the 16-bit model, and each alone put back in the low-bit model. Values
are dequantized once and swapped in memory. What bounds it: two forward passes a group from its layer on, of some thousand tokens.
Every measurement is kept in artifacts/partial/: a run that was killed goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline import quantizers
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ParamsError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, GroupSensitivity, ModelManifest, Sensitivity, Uniform
from pipeline.divergence.store import Checkpoints
from pipeline.evalset import sets_digest
from pipeline.evalset.calibration import Calibration
from pipeline.layers import mixes, values
from pipeline.layers.choosing import estimate, setup_of, texts_of
from pipeline.layers.groups import Group, groups_of
from pipeline.layers.probe import Probe
from pipeline.metrics.builder import whole
from pipeline.model.attestation import measure as size_of
from pipeline.reporting import charts, smallest
from pipeline.stats.intervals import Estimate

if TYPE_CHECKING:
    from torch import Tensor

NAMED = 6  # groups that words name
ROUNDED = 2.0**-18  # squared error over squares: three times what rounding to bfloat16 leaves


def ready_made(setup: Smallest, level: str, settings: Params) -> Path | None:
    """A listed variant that was built with the same options."""
    for name, v in settings.variants.items() if level == mixes.LOW else ():
        manifest = artifacts.model_dir(name) / artifacts.MANIFEST
        if (v.quantizer, v.options) == (setup.quantizer, setup.options) and manifest.exists():
            return artifacts.model_dir(name) if records.read(manifest, ModelManifest)["status"] == "ok" else None
    return None


def build(
    setup: Smallest, level: str, groups: Sequence[Group], out: Path, seed: int, threads: int, reference: str, ready: Path | None
) -> int:
    """Write the values of all groups that a level can store; returns the bytes of tensors in no group. ready: built already."""
    if level == mixes.KEPT:
        values.write(artifacts.model_dir(reference), "hf", groups, out, threads)
        return 0
    if ready is not None:
        values.write(ready, setup.engine, groups, out, threads)
        return int(size_of(artifacts.BASE, ready)["weight_bytes"]) - sum(values.Values(out).bytes.values())
    held = mixes.held_by(setup, level, groups, artifacts.BASE)
    with tempfile.TemporaryDirectory(dir=out.parent) as tmp:
        folder = Path(tmp)
        options = mixes.options_of(setup, groups, {g.name: level for g in held})
        quantizers.make(setup.quantizer, options, artifacts.BASE, folder, calibration=Calibration(), seed=seed)
        values.write(folder, setup.engine, held, out, threads)
        whole_bytes = size_of(artifacts.BASE, folder)["weight_bytes"]
    return whole_bytes - sum(values.Values(out).bytes.values())


def sensitivity(settings: Params) -> Sensitivity:
    """The whole table."""
    setup, seed, threads = setup_of(settings), settings.seed, settings.thread_count
    folder = artifacts.model_dir(settings.reference)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    groups, levels = groups_of(artifacts.BASE), mixes.levels(setup)
    if not mixes.uniform(setup, levels[0], groups, artifacts.BASE):
        raise ParamsError(f"smallest.options.type: {levels[0]} cannot store every group of this model (rows of 256); take another")
    rows, ids = texts_of(setup, folder, seed)
    inputs = {
        "model": manifest["digest"], "setup": setup.model_dump(include={"quantizer", "engine", "options", "documents", "tokens"}),
        "texts": ids, "seed": seed, "versions": artifacts.versions(), "reference": settings.reference,
    }  # fmt: skip
    pieces = Checkpoints.of("sensitivity", inputs)
    artifacts.LEVELS.mkdir(parents=True, exist_ok=True)
    other_bytes = 0
    for level in levels:
        name, file = f"level-{level}.json", artifacts.LEVELS / f"{level}.safetensors"
        made = json.loads((pieces.folder / name).read_text(encoding="utf-8")) if pieces.has(name) else {"sha256": ""}
        if not file.exists() or made["sha256"] != artifacts.sha256_file(file):  # DVC keeps the folder, also from other params
            with artifacts.atomic_file(file) as out:
                given = (seed, threads, settings.reference, ready_made(setup, level, settings))
                left = isolate.isolated(build, setup, level, groups, out, *given, what=f"level {level}")
            made = {"other_bytes": left, "sha256": artifacts.sha256_file(file)}
            with pieces.write(name) as tmp:
                tmp.write_text(json.dumps(made), encoding="utf-8")
        if level == levels[0]:
            other_bytes = int(made["other_bytes"])
    for file in artifacts.LEVELS.iterdir():
        if file.stem not in levels:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    held = {level: values.Values(artifacts.LEVELS / f"{level}.safetensors") for level in levels}
    probe = Probe(folder, ids, threads)
    total = 2 * len(groups) + len(levels)
    with cli.progress(total, "sensitivity", "pass") as bar:

        def kept(name: str, make: Callable[[], ByDocument]) -> ByDocument:
            if not pieces.has(name):
                with pieces.write(name) as tmp:
                    tmp.write_text(json.dumps(make()), encoding="utf-8")
            bar.update()
            return json.loads((pieces.folder / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]

        uniforms = {level: kept(f"uniform-{level}.json", lambda level=level: _uniform(probe, held[level], groups))  # type: ignore[misc]
                    for level in levels if mixes.uniform(setup, level, groups, artifacts.BASE)}  # fmt: skip
        low = held[levels[0]]
        table = [_row(g, held, probe, low) for g in groups]
        probe.keep()
        alone = {g.name: kept(f"alone-{g.name}.json", lambda g=g: _swap(probe, g, low)) for g in groups}  # type: ignore[misc]
        high = {m: values.tensor_of(probe.model, m).data for g in groups for m in g.modules}
        with probe.swapped({m: low.of(m) for g in groups for m in g.modules if m in low.bytes}):
            probe.keep()
            back = {g.name: kept(f"returned-{g.name}.json", lambda g=g: _put_back(probe, g, high)) for g in groups}  # type: ignore[misc]
    lowest = uniforms[levels[0]]
    for row in table:
        name = row["name"]
        row["alone"] = estimate(alone[name]["kld"], settings, f"alone {name}")
        gained = np.asarray(lowest["kld"]) - np.asarray(back[name]["kld"])
        row["returned"] = estimate(gained.tolist(), settings, f"returned {name}")
    result: Sensitivity = {
        "quantizer": setup.quantizer, "options": setup.options, "levels": levels, "model": manifest["digest"],
        "texts": {"files": sets_digest(Path(setup.texts)), "documents": [r["id"] for r in rows], "tokens": setup.tokens},
        "uniform": {level: _of_uniform(by, level, table, other_bytes, settings) for level, by in uniforms.items()},
        "groups": table, "other_bytes": other_bytes, "predicted": sum(row["alone"]["value"] or 0.0 for row in table),
        "measured": float(np.mean(lowest["kld"])), "words": [], "wall_s": 0.0, "load": os.getloadavg()[0],
        "versions": artifacts.versions(),
    }  # fmt: skip
    result["words"] = words(result)
    return result


def _uniform(probe: Probe, level: values.Values, groups: Sequence[Group]) -> ByDocument:
    with probe.swapped({m: level.of(m) for g in groups for m in g.modules}):
        return probe.measure()


def _swap(probe: Probe, group: Group, low: values.Values) -> ByDocument:
    with probe.swapped({m: low.of(m) for m in group.modules if m in low.bytes}):
        return probe.measure(group.layer or 0)


def _put_back(probe: Probe, group: Group, high: dict[str, Tensor]) -> ByDocument:
    with probe.swapped({m: high[m] for m in group.modules}):
        return probe.measure(group.layer or 0)


def _row(group: Group, held: dict[str, values.Values], probe: Probe, low: values.Values) -> GroupSensitivity:
    """A group's bytes and errors at every level; its costs come later."""
    plain = {m: values.tensor_of(probe.model, m).data for m in group.modules}
    size = sum(float(w.square().sum()) for w in plain.values())
    sizes = {level: n for level, v in held.items() if (n := v.bytes_of(group)) is not None}
    errors = {level: sum(float((held[level].of(m) - w).square().sum()) for m, w in plain.items()) / size for level in sizes}
    none = whole(Estimate(None, None, None, 0, "not measured"))
    return {
        "name": group.name, "layer": group.layer, "kind": group.kind, "bytes": sizes, "error": errors, "alone": none,
        "returned": none, "unchanged": errors.get(next(iter(held)), 0.0) < ROUNDED,
    }  # fmt: skip


def _of_uniform(rows: ByDocument, level: str, table: Sequence[GroupSensitivity], other: int, settings: Params) -> Uniform:
    return {
        "bytes": other + sum(row["bytes"][level] for row in table), "kld": estimate(rows["kld"], settings, f"uniform {level}"),
        "rows": rows, "exact": sum(row["error"][level] < ROUNDED for row in table),
    }  # fmt: skip


def words(table: Sensitivity) -> list[str]:
    """Which groups hurt, by how much of the whole, and how far costs add up."""
    lowest = table["levels"][0]
    cost = {row["name"]: row["alone"]["value"] or 0.0 for row in table["groups"]}
    ranked = sorted(table["groups"], key=lambda row: -cost[row["name"]])
    total, n = table["predicted"] or 1.0, len(table["texts"]["documents"])
    lines = [
        f"{row['name']}: {cost[row['name']]:.4f} nats alone at {lowest} ({100 * cost[row['name']] / total:.0f} % of all), "
        f"{row['returned']['value'] or 0:.4f} nats less where it alone is put back"
        for row in ranked[:NAMED]
    ]
    sums = np.cumsum([cost[row["name"]] for row in ranked])
    half = int((sums < total / 2).sum()) + 1
    lines.append(f"{half} of {len(ranked)} groups cost half of the divergence; {n} documents of {table['texts']['tokens']} tokens")
    lines.append(f"all groups at {lowest}: {table['predicted']:.3f} nats if costs added up, {table['measured']:.3f} measured")
    given = records.read(artifacts.BASE / artifacts.MANIFEST, records.BaseManifest)
    why = (
        f": this base was dequantized from {given['dequantized_from']}; others need more bits"
        if "dequantized_from" in given
        else ""
    )
    return lines + [
        f"{level} gives {exact} of {len(ranked)} groups back as exactly as 16 bits can{why}"
        for level, u in table["uniform"].items()
        if (exact := u["exact"]) and level != mixes.KEPT
    ]


def main() -> None:
    """Measure what each group of layers costs."""
    watch = artifacts.Stopwatch("sensitivity")
    settings = params.load()
    table = isolate.isolated(sensitivity, settings, what="sensitivity")
    shutil.rmtree(artifacts.SMALLEST, ignore_errors=True)
    artifacts.write_text(smallest.PAGE, smallest.PENDING)
    table["wall_s"] = watch.done()
    artifacts.write_json(artifacts.SENSITIVITY, table)
    artifacts.write_text(artifacts.SMALLEST / "sensitivity.svg", charts.svg(charts.sensitivity(table), "sensitivity"))
    for line in table["words"]:
        cli.say("sensitivity", line)
    cli.say("sensitivity", f"{len(table['groups'])} groups in two directions, {table['wall_s']:.1f} s at load {table['load']:.1f}")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
