"""search: mixes of formats by the table of `sensitivity`, measured on the same texts -> reports/smallest/candidates.json

A mix costs the sum of its groups' costs. A group's cost at a level is that of the lowest level times the ratio of squared errors
(second order; errors of groups are taken as independent). Lowering the group that saves most bytes a nat, again and again, gives
the mixes on the convex hull. What is proposed is measured: costs do not add up exactly, and the record holds both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import engines, quantizers
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, Candidates, GroupSensitivity, Proposal, Sensitivity, WholeEstimate
from pipeline.divergence.distributions import compare_parts
from pipeline.evalset.calibration import Calibration
from pipeline.gating.rules import bound_of
from pipeline.layers import mixes, values
from pipeline.layers.choosing import estimate, setup_of, texts_of
from pipeline.layers.groups import Group, groups_of
from pipeline.layers.probe import Probe, add

SPREAD = (0.2, 1.5)  # of the limit: where the first half of the proposals is looked for
NEAR = (0.3, 1.0)  # the second half, with what the first has shown of measured over predicted


@dataclass(frozen=True)
class Step:
    """A mix of the hull with its bytes and its predicted divergence."""

    mix: mixes.Mix
    bytes: int
    predicted: float


@dataclass
class Tried:
    mix: mixes.Mix
    bytes: int
    predicted: float | None
    rows: ByDocument
    name: str = ""
    changed: bool = True
    engine: list[float] = field(default_factory=list)

    @property
    def kld(self) -> float:
        return float(np.mean(self.rows["kld"]))


def cost(row: GroupSensitivity, level: str, lowest: str) -> float:
    """Predicted divergence of one group at a level."""
    least = row["error"].get(lowest, 0.0)
    return max(row["alone"]["value"] or 0.0, 0.0) * row["error"][level] / least if least else 0.0


def hull(groups: Sequence[GroupSensitivity], lowest: str, other_bytes: int) -> Iterator[Step]:
    """Mixes from the one nearest to 16 bits down to the smallest, each with one group at fewer bytes than the one before."""
    chains = {row["name"]: _chain(row, lowest) for row in groups}
    moves = []
    for name, chain in chains.items():
        for (_, more, low_cost), (level, fewer, high_cost) in pairwise(chain):
            moves.append(((high_cost - low_cost) / (more - fewer), name, level, more - fewer, high_cost - low_cost))
    mix = {name: chain[0][0] for name, chain in chains.items()}
    size, predicted = other_bytes + sum(c[0][1] for c in chains.values()), sum(c[0][2] for c in chains.values())
    yield Step(dict(mix), size, predicted)
    for _, name, level, saved, lost in sorted(moves):
        mix[name] = level
        size, predicted = size - saved, predicted + lost
        yield Step(dict(mix), size, predicted)


def _chain(row: GroupSensitivity, lowest: str) -> list[tuple[str, int, float]]:
    """(level, bytes, cost) of a group on the lower convex hull, the largest first."""
    points = sorted((size, cost(row, level, lowest), level) for level, size in row["bytes"].items())
    best: list[tuple[int, float, str]] = []
    for point in points:  # fewer bytes and no more divergence: the others are never taken
        if not best or point[1] < best[-1][1]:
            while len(best) > 1 and _slope(best[-2], best[-1]) <= _slope(best[-1], point):
                best.pop()
            if best and best[-1][0] == point[0]:
                best.pop()
            best.append(point)
    return [(level, size, value) for size, value, level in reversed(best)]


def _slope(a: tuple[int, float, str], b: tuple[int, float, str]) -> float:
    """Divergence saved a byte."""
    return (a[1] - b[1]) / max(b[0] - a[0], 1)


def limit_of(settings: Params) -> float | None:
    """The largest mean KLD that the gate allows; None without such a rule."""
    bounds = [
        bound_of(r).threshold for r in settings.gate.rules if r.metric == "kld_mean" and r.required and r.against == "reference"
    ]
    return min(bounds, default=None)


def pick(steps: Sequence[Step], targets: Sequence[float], taken: Sequence[mixes.Mix]) -> list[Step]:
    """For each target the smallest mix predicted at or below it that was not taken; none twice."""
    chosen: list[Step] = []
    for target in targets:
        fits = [s for s in steps if s.predicted <= target and s.mix not in taken and s not in chosen]
        if fits:
            chosen.append(min(fits, key=lambda s: s.bytes))
    return chosen


def search(settings: Params) -> Candidates:
    """Measure proposals and uniform models, and freeze an ordered list of candidates."""
    setup, folder = setup_of(settings), artifacts.model_dir(settings.reference)
    table = records.read(artifacts.SENSITIVITY, Sensitivity)
    groups = groups_of(artifacts.BASE)
    rows, ids = texts_of(setup, folder, settings.seed)
    if table["texts"]["documents"] != [row["id"] for row in rows] or table["levels"] != mixes.levels(setup):
        raise ArtifactError(f"{artifacts.SENSITIVITY} was measured with other settings; run `make smallest`")
    probe = Probe(folder, ids, settings.thread_count)
    held = {level: values.Values(artifacts.LEVELS / f"{level}.safetensors") for level in table["levels"]}
    most = setup.budget_mb * 1e6 if setup.budget_mb else np.inf
    steps = [s for s in hull(table["groups"], table["levels"][0], table["other_bytes"]) if s.bytes <= most]
    tried = [
        Tried({g.name: level for g in groups}, u["bytes"], None, u["rows"], f"{setup.quantizer}-all-{level.lower()}")
        for level, u in table["uniform"].items()
    ]
    uniform = {t.name: t for t in tried}
    limit = limit_of(settings) or max(t.kld for t in tried)
    half = setup.proposals // 2
    with cli.progress(setup.proposals, "search", "proposal") as bar:
        for span, count in ((SPREAD, half), (NEAR, setup.proposals - half)):
            mine = [t for t in tried if t.predicted]
            ratio = float(np.median([t.kld / t.predicted for t in mine if t.predicted])) if mine else 1.0
            targets = limit * np.geomspace(*span, count) / ratio
            for step in pick(steps, targets.tolist(), [t.mix for t in tried]):
                tried.append(_measure(probe, step, groups, held))
                bar.update()
    _name([t for t in tried if not t.name], setup)
    gains = {t.name: _gain(t, uniform, settings) for t in tried if t.name not in uniform}
    kept = {t.name: _why(t, uniform, gains, most, limit) for t in tried}
    finalists = _finalists([t for t in tried if not kept[t.name]], limit, setup.candidates)
    for t in finalists:
        built = isolate.isolated(
            run_built, setup, mixes.options_of(setup, groups, t.mix), ids, folder, settings, what=f"build {t.name}"
        )
        t.engine = built
        if np.mean(built) > limit:
            kept[t.name] = f"built and run in {setup.engine} it has {np.mean(built):.4f} nats, over {limit:g}"
    order = [t.name for t in sorted(finalists, key=lambda t: -t.bytes) if not kept[t.name]]
    proposals = [_record(t, setup, groups, uniform, gains.get(t.name), kept[t.name], t.name in order, settings) for t in tried]
    return {
        "quantizer": setup.quantizer, "engine": setup.engine, "seed": settings.seed,
        "sensitivity": artifacts.sha256_file(artifacts.SENSITIVITY),
        "proposals": sorted(proposals, key=lambda p: -p["bytes"]), "order": order,
        "digest": artifacts.digest([order, [p["options"] for p in proposals if p["name"] in order]]),
        "words": words(proposals, order, uniform), "wall_s": 0.0, "load": os.getloadavg()[0],
    }  # fmt: skip


def _measure(probe: Probe, step: Step, groups: Sequence[Group], held: dict[str, values.Values]) -> Tried:
    with probe.swapped({m: held[step.mix[g.name]].of(m) for g in groups for m in g.modules}) as changed:
        return Tried(step.mix, step.bytes, step.predicted, probe.measure(), changed=changed)


def _name(mine: Sequence[Tried], setup: Smallest) -> None:
    for k, t in enumerate(sorted(mine, key=lambda t: -t.bytes), 1):
        t.name = f"{setup.quantizer}-mix-{k}"


def _rival(t: Tried, uniform: dict[str, Tried]) -> Tried | None:
    """The best uniform model that is no larger."""
    return min((u for u in uniform.values() if u.bytes <= t.bytes), key=lambda u: u.kld, default=None)


def _gain(t: Tried, uniform: dict[str, Tried], settings: Params) -> WholeEstimate | None:
    if (rival := _rival(t, uniform)) is None:
        return None
    return estimate((np.asarray(rival.rows["kld"]) - np.asarray(t.rows["kld"])).tolist(), settings, f"gain {t.name}")


def _why(t: Tried, uniform: dict[str, Tried], gains: dict[str, WholeEstimate | None], most: float, limit: float) -> str:
    """Why a model is no candidate; empty if it is one."""
    if t.bytes > most:
        return f"larger than budget_mb ({t.bytes / 1e6:.1f} MB)"
    if not t.changed:
        return "changes nothing: its values are those of the 16-bit model"
    gain = gains.get(t.name)
    if t.name not in uniform and gain is not None and (gain["low"] is None or gain["low"] <= 0):
        return "not better than the best uniform model of its size beyond noise"
    return f"over {limit:g} nats on the texts that choose" if t.kld > limit else ""


def _finalists(able: Sequence[Tried], limit: float, count: int) -> list[Tried]:
    """At most `count` models that no other beats in both bytes and divergence, evenly from the safest to the smallest."""
    front = [t for t in able if not any(o.bytes <= t.bytes and o.kld <= t.kld and o is not t for o in able)]
    front = sorted(front, key=lambda t: -t.bytes)
    places = np.unique(np.linspace(0, len(front) - 1, min(count, len(front))).round().astype(int)) if front else []
    return [front[k] for k in places]


def run_built(setup: Smallest, options: records.Options, ids: list[list[int]], folder: Path, settings: Params) -> list[float]:
    """KLD by document of a model that is built and run in its own engine, against the 16-bit model in float32."""
    probe = Probe(folder, ids, settings.thread_count)
    found: dict[str, list[float]] = {"kld": [], "agreement": [], "loss": []}
    with tempfile.TemporaryDirectory(dir=artifacts.ARTIFACTS) as tmp:
        out = Path(tmp)
        quantizers.find(setup.quantizer)(artifacts.BASE, out, calibration=Calibration(), seed=settings.seed, **options)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).exists():
                artifacts.copy_file(folder / name, out / name)
        engine: Any = engines.load(setup.engine, out, threads=settings.thread_count)
        with ThreadPoolExecutor(settings.thread_count) as pool:
            for k, window in enumerate(ids):
                logits = np.concatenate([block for _, _, block in engine.logit_blocks([window], [0], engines.ROWS)])
                add(found, compare_parts(pool, probe.reference_of(k), logits, np.asarray(window[1:])), 1)
        engine.close()
    return found["kld"]


def _record(
    t: Tried,
    setup: Smallest,
    groups: Sequence[Group],
    uniform: dict[str, Tried],
    gain: WholeEstimate | None,
    why: str,
    chosen: bool,
    settings: Params,
) -> Proposal:
    rival = _rival(t, uniform) if t.name not in uniform else None
    kept = "candidate" if chosen else why or "another candidate is near it"
    return {
        "name": t.name, "mix": t.mix, "options": mixes.options_of(setup, groups, t.mix), "bytes": t.bytes, "predicted": t.predicted,
        "measured": estimate(t.rows["kld"], settings, f"measured {t.name}"), "agreement": float(np.mean(t.rows["agreement"])),
        "loss": float(np.mean(t.rows["loss"])), "engine": estimate(t.engine, settings, f"engine {t.name}") if t.engine else None,
        "against": rival.name if rival else None, "gain": gain, "candidate": chosen, "kept": kept,
    }  # fmt: skip


def words(proposals: Sequence[Proposal], order: Sequence[str], uniform: dict[str, Tried]) -> list[str]:
    """The candidates, predicted beside measured; and whether mixing buys anything here."""
    by = {p["name"]: p for p in proposals}
    lines = []
    for name in order:
        p, built = by[name], by[name]["engine"]
        said = f"predicted {p['predicted']:.4f}, " if p["predicted"] is not None else ""
        run = f", {built['value']:.4f} built and run" if built else ""
        lines.append(f"{name}: {p['bytes'] / 1e6:.1f} MB, {said}measured {p['measured']['value']:.4f} nats{run}")
    if not order:
        lines.append(
            "no candidate: nothing here is near enough to the 16-bit model; a gate that nothing can pass, or too low a budget"
        )
    elif all(name in uniform for name in order):
        lines.append("mixing buys nothing here: no mix is better than the best uniform model of its size beyond noise")
    return lines


def main() -> None:
    """Propose and measure mixes, and freeze the candidates."""
    watch = artifacts.Stopwatch("search")
    settings = params.load()
    found = isolate.isolated(search, settings, what="search")
    found["wall_s"] = watch.done()
    artifacts.write_json(artifacts.CANDIDATES, found)
    for line in found["words"]:
        cli.say("search", line)
    cli.say(
        "search",
        f"{len(found['proposals'])} measured, {len(found['order'])} candidates, {found['digest'][:12]}, {found['wall_s']:.1f} s",
    )


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
