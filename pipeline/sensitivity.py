"""sensitivity: what each group of layers costs in bits and in divergence -> reports/smallest/sensitivity.json, artifacts/levels/

In both directions: each group alone at the lowest level in the 16-bit model, and each alone put back in the low-bit model. Values
are dequantized once and swapped in memory. What bounds it: two passes over some thousand tokens per group, from its layer on.
Every measurement is kept in artifacts/partial/, from where a killed run continues."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import quantizers
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ParamsError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, GroupSensitivity, ModelManifest, Sensitivity, WholeEstimate
from pipeline.divergence.store import Checkpoints
from pipeline.evalset import sets_digest
from pipeline.evalset.calibration import Calibration
from pipeline.layers import mixes, values
from pipeline.layers.choosing import estimate, setup_of, texts_of
from pipeline.layers.groups import Group, groups_of
from pipeline.layers.probe import Probe
from pipeline.model.attestation import measure as size_of
from pipeline.reporting import charts, smallest

if TYPE_CHECKING:
    from torch import Tensor

NAMED = 6  # groups that `words` lists
ROUNDED = 2.0**-18  # squared error over squared values: three times that of rounding to bfloat16


def ready_made(setup: Smallest, level: str, settings: Params) -> Path | None:
    """A listed variant that was built with the same options."""
    for name, v in settings.variants.items() if level == mixes.LOW else ():
        manifest = artifacts.model_dir(name) / artifacts.MANIFEST
        if (v.quantizer, v.options) == (setup.quantizer, setup.options) and manifest.exists():
            return artifacts.model_dir(name) if records.read(manifest, ModelManifest)["status"] == "ok" else None
    return None


def build(setup: Smallest, level: str, groups: Sequence[Group], out: Path, settings: Params) -> int:
    """Write the values of all groups that a level can store; returns the bytes of tensors in no group."""
    threads = settings.thread_count
    if level == mixes.KEPT:
        values.write(artifacts.model_dir(settings.reference), "hf", groups, out, threads)
        return 0
    if (ready := ready_made(setup, level, settings)) is not None:
        values.write(ready, setup.engine, groups, out, threads)
        return int(size_of(artifacts.BASE, ready)["weight_bytes"]) - sum(values.Values(out).bytes.values())
    held = mixes.held_by(setup, level, groups, artifacts.BASE)
    with tempfile.TemporaryDirectory(dir=out.parent) as tmp:
        folder = Path(tmp)
        options = mixes.options_of(setup, groups, {g.name: level for g in held})
        quantizers.make(setup.quantizer, options, artifacts.BASE, folder, calibration=Calibration(), seed=settings.seed)
        values.write(folder, setup.engine, held, out, threads)
        whole_bytes = size_of(artifacts.BASE, folder)["weight_bytes"]
    return whole_bytes - sum(values.Values(out).bytes.values())


def write_levels(setup: Smallest, levels: list[str], groups: Sequence[Group], pieces: Checkpoints, settings: Params) -> int:
    """Write the values of every level to artifacts/levels/ where they are missing; returns the bytes of tensors in no group at the
    lowest level. Removes other files: DVC keeps the folder, also from other params."""
    artifacts.LEVELS.mkdir(parents=True, exist_ok=True)
    for file in artifacts.LEVELS.iterdir():
        if file.stem not in levels:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    made = []
    for level in levels:
        name, file = f"level-{level}.json", artifacts.LEVELS / f"{level}.safetensors"

        def make(level: str = level, file: Path = file) -> dict[str, Any]:
            with artifacts.atomic_file(file) as out:
                left = isolate.isolated(build, setup, level, groups, out, settings, what=f"level {level}")
            return {"other_bytes": left, "sha256": artifacts.sha256_file(file)}

        if not file.exists() or pieces.json(name, make)["sha256"] != artifacts.sha256_file(file):
            pieces.drop(name)
        made.append(pieces.json(name, make))
    return int(made[0]["other_bytes"])


def sensitivity(settings: Params) -> Sensitivity:
    """The whole table."""
    setup, folder = setup_of(settings), artifacts.model_dir(settings.reference)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    groups, levels = groups_of(artifacts.BASE), mixes.levels(setup)
    if not mixes.uniform(setup, levels[0], groups, artifacts.BASE):
        raise ParamsError(f"smallest.options.type: {levels[0]} cannot store every group of this model (rows of 256); take another")
    rows, ids = texts_of(setup, folder, settings.seed)
    inputs = {
        "model": manifest["digest"], "setup": setup.model_dump(include={"quantizer", "engine", "options", "documents", "tokens"}),
        "texts": ids, "seed": settings.seed, "versions": artifacts.versions(), "reference": settings.reference,
    }  # fmt: skip
    pieces = Checkpoints.of("sensitivity", inputs)
    other_bytes = write_levels(setup, levels, groups, pieces, settings)
    held = {level: values.Values(artifacts.LEVELS / f"{level}.safetensors") for level in levels}
    probe, low = Probe(folder, ids, settings.thread_count), held[levels[0]]
    with cli.progress(2 * len(groups) + len(levels), "sensitivity", "pass") as bar:

        def swapped(name: str, value: Callable[[str], Tensor], modules: Iterable[str], start: int = 0) -> ByDocument:
            """Divergence, from a layer on, with other values of modules."""

            def measure() -> ByDocument:
                with probe.swapped({m: value(m) for m in modules}):
                    return probe.measure(start)

            found: ByDocument = pieces.json(f"{name}.json", measure)
            bar.update()
            return found

        every = [m for g in groups for m in g.modules]
        able = [level for level in levels if mixes.uniform(setup, level, groups, artifacts.BASE)]
        uniform = {level: swapped(f"uniform-{level}", held[level].of, every) for level in able}
        probe.keep()
        stored = {g: [m for m in g.modules if m in low.bytes] for g in groups}
        alone = [swapped(f"alone-{g.name}", low.of, stored[g], g.layer or 0)["kld"] for g in groups]
        high = {m: values.tensor_of(probe.model, m).data for m in every}
        with probe.swapped({m: low.of(m) for g in groups for m in stored[g]}):
            probe.keep()
            back = [swapped(f"returned-{g.name}", high.__getitem__, g.modules, g.layer or 0)["kld"] for g in groups]
    lowest, table = uniform[levels[0]]["kld"], list[GroupSensitivity]()
    for g, cost, left in zip(groups, alone, back):
        gained = estimate((np.asarray(lowest) - np.asarray(left)).tolist(), settings, f"returned {g.name}")
        table.append(_row(g, held, probe, estimate(cost, settings, f"alone {g.name}"), gained))
    result: Sensitivity = {
        "quantizer": setup.quantizer, "options": setup.options, "levels": levels, "model": manifest["digest"],
        "texts": {"files": sets_digest(Path(setup.texts)), "documents": [r["id"] for r in rows], "tokens": setup.tokens},
        "uniform": {level: {
            "bytes": other_bytes + sum(row["bytes"][level] for row in table),
            "kld": estimate(by["kld"], settings, f"uniform {level}"), "rows": by,
            "exact": sum(row["error"][level] < ROUNDED for row in table),
        } for level, by in uniform.items()},
        "groups": table, "other_bytes": other_bytes, "predicted": sum(row["alone"]["value"] or 0.0 for row in table),
        "measured": float(np.mean(lowest)), "words": [], "wall_s": 0.0, "load": os.getloadavg()[0],
        "versions": artifacts.versions(),
    }  # fmt: skip
    result["words"] = words(result)
    return result


def _row(
    group: Group, held: dict[str, values.Values], probe: Probe, alone: WholeEstimate, returned: WholeEstimate
) -> GroupSensitivity:
    """A group's bytes and errors at every level that stores it, and its costs."""
    plain = {m: values.tensor_of(probe.model, m).data for m in group.modules}
    size = sum(float(w.square().sum()) for w in plain.values())
    sizes = {level: n for level, v in held.items() if (n := v.bytes_of(group)) is not None}
    errors = {level: sum(float((held[level].of(m) - w).square().sum()) for m, w in plain.items()) / size for level in sizes}
    return {
        "name": group.name, "layer": group.layer, "kind": group.kind, "bytes": sizes, "error": errors, "alone": alone,
        "returned": returned, "unchanged": errors.get(next(iter(held)), 0.0) < ROUNDED,
    }  # fmt: skip


def words(table: Sensitivity) -> list[str]:
    """Which groups cost most, with their shares, and how far costs add up."""
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
