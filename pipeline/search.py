"""search: mixes of formats by the table of `sensitivity`, measured on the same texts -> reports/smallest/candidates.json

A mix costs the sum of its groups' costs. A group's cost at a level is that of the lowest level times the ratio of squared errors
(second order; errors of groups are taken as independent). A knapsack over real bytes gives the smallest
mix for each divergence. What is proposed is measured: costs do not add up exactly, and the record holds both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, Candidates, GroupSensitivity, Proposal, Sensitivity, WholeEstimate
from pipeline.divergence.distributions import compare_parts
from pipeline.gating.rules import bound_of
from pipeline.layers import mixes, values
from pipeline.layers.choosing import estimate, setup_of, texts_of
from pipeline.layers.groups import Group, groups_of
from pipeline.layers.probe import Probe, add

BINS = 8192  # steps of divergence that the knapsack tells apart
SPREAD = (0.2, 1.5)  # of the limit: where the first half of the proposals is looked for
NEAR = (0.3, 1.0)  # the second half, with what the first has shown of measured over predicted


@dataclass(frozen=True)
class Step:
    """A mix with its bytes and its predicted divergence."""

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


def knapsack(groups: Sequence[GroupSensitivity], lowest: str, other_bytes: int, targets: Sequence[float]) -> list[Step]:
    """For each target the smallest mix that is predicted to cost no more: one level of every group, by dynamic programming.

    Costs are rounded up to BINS steps of the largest target: what is found is never over its target. One below what every mix costs
    gets none.
    """
    step = max(targets) / BINS
    least = np.full(BINS + 1, np.inf)  # bytes of the smallest mix that costs at most so many steps
    least[:] = other_bytes
    taken: list[tuple[list[str], NDArray[np.int64], NDArray[np.int64]]] = []
    for row in groups:
        names = sorted(row["bytes"])
        costs = np.array([np.ceil(cost(row, level, lowest) / step - 1e-9) for level in names])
        able = np.flatnonzero(costs <= BINS)
        options = np.full((len(names), BINS + 1), np.inf)
        for k in able:
            c = int(costs[k])
            options[k, c:] = least[: BINS + 1 - c] + row["bytes"][names[k]]
        best = options.argmin(axis=0)
        taken.append((names, best, costs.clip(max=BINS).astype(np.int64)))
        least = options[best, np.arange(BINS + 1)]
    found = []
    for target in targets:
        at = int(target / step + 1e-9)
        if not np.isfinite(least[at]):
            continue
        size, mix = int(least[at]), {}
        for row, (names, best, costs) in zip(reversed(groups), reversed(taken)):
            k = int(best[at])
            mix[row["name"]], at = names[k], at - int(costs[k])
        found.append(Step(mix, size, sum(cost(row, mix[row["name"]], lowest) for row in groups)))
    return found


def limit_of(settings: Params) -> float | None:
    """The largest mean KLD that the gate allows; None without such a rule."""
    bounds = [
        bound_of(r).threshold for r in settings.gate.rules if r.metric == "kld_mean" and r.required and r.against == "reference"
    ]
    return min(bounds, default=None)


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
    tried = [
        Tried(
            {g.name: level for g in groups},
            u["bytes"],
            None,
            u["rows"],
            f"{setup.quantizer}-all-{level.lower()}",
            u["exact"] < len(groups),
        )
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
            for step in knapsack(table["groups"], table["levels"][0], table["other_bytes"], targets.tolist()):
                if step.bytes <= most and step.mix not in [t.mix for t in tried]:
                    tried.append(_measure(probe, step, groups, held))
                bar.update()
    _name([t for t in tried if not t.name], setup)
    gains = {t.name: _gain(t, uniform, settings) for t in tried if t.name not in uniform}
    kept = {t.name: _why(t, uniform, gains, most, limit) for t in tried}
    front = _front([t for t in tried if not kept[t.name]])

    def run(t: Tried) -> float:
        options = mixes.options_of(setup, groups, t.mix)
        t.engine = isolate.isolated(run_built, setup, options, ids, folder, settings, what=f"build {t.name}")
        return float(np.mean(t.engine))

    more = run(front[0]) - front[0].kld if front else 0.0  # what the engine's own arithmetic adds, by the safest of them
    finalists = _evenly([t for t in front if t.kld + more <= limit], setup.candidates)
    for t in finalists:
        if not t.engine and (built := run(t)) > limit:
            kept[t.name] = f"built and run in {setup.engine} it has {built:.4f} nats, over {limit:g}"
    for t in front:
        if t.kld + more > limit:
            kept[t.name] = f"with the {more:.4f} nats that {setup.engine} adds it is over {limit:g}"
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


def _front(able: Sequence[Tried]) -> list[Tried]:
    """Models that no other beats in both bytes and divergence, the largest first."""
    front = [t for t in able if not any(o.bytes <= t.bytes and o.kld <= t.kld and o is not t for o in able)]
    return sorted(front, key=lambda t: -t.bytes)


def _evenly(front: Sequence[Tried], count: int) -> list[Tried]:
    """At most `count`, evenly from the safest to the smallest."""
    if not front:
        return []
    places = np.unique(np.linspace(0, len(front) - 1, min(count, len(front))).round().astype(int))
    return [front[k] for k in places]


def run_built(setup: Smallest, options: records.Options, ids: list[list[int]], folder: Path, settings: Params) -> list[float]:
    """KLD by document of a model that is built and run in its own engine, against the 16-bit model in float32."""
    probe = Probe(folder, ids, settings.thread_count)
    found: dict[str, list[float]] = {"kld": [], "agreement": [], "loss": []}
    with tempfile.TemporaryDirectory(dir=artifacts.ARTIFACTS) as tmp:
        out = Path(tmp)
        values.build(setup.quantizer, options, out, settings.seed)
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
