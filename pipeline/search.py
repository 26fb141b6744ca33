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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import engines, quantizers
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, Candidates, GroupSensitivity, Proposal, Sensitivity, WholeEstimate
from pipeline.divergence.distributions import compare_parts
from pipeline.evalset.calibration import Calibration
from pipeline.gating.rules import bound_of
from pipeline.layers import mixes, values
from pipeline.layers.choosing import digest_of, estimate, setup_of, texts_of
from pipeline.layers.groups import Group, groups_of
from pipeline.layers.probe import Probe, add

BINS = 8192  # steps of divergence that the knapsack tells apart
ALIKE = 0.01  # models whose bytes differ by less are of one size
SPREAD = (0.01, 1.0)  # of the gate's limit: where the first half of the proposals is looked for
NEAR = (0.1, 1.0)  # of what the engine leaves of it, by the first half: the second
REFERENCE = "reference.f32"  # the 16-bit model's logits in float32, for the process that runs a built one


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
    engine: ByDocument | None = None

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


def bounds_of(settings: Params) -> dict[str, float]:
    """{metric: bound} of the required rules that the texts can say something about, against the reference."""
    told = ("kld_mean", "top1_agreement", "ppl_ratio")
    return {
        r.metric: bound_of(r).threshold for r in settings.gate.rules if r.required and r.against == "reference" and r.metric in told
    }


def over(rows: ByDocument, bounds: dict[str, float]) -> str:
    """Which bound a built model is past; empty if it is past none."""
    at = {
        "kld_mean": np.mean(rows["kld"]),
        "top1_agreement": np.mean(rows["agreement"]),
        "ppl_ratio": np.exp(np.mean(rows["loss"])),
    }
    past = [n for n, bound in bounds.items() if (at[n] < bound if n == "top1_agreement" else at[n] > bound)]
    return ", ".join(f"built and run, {n} is {at[n]:.4g}, past {bounds[n]:g}" for n in past)


def left_to_weights(safest: Tried, bounds: dict[str, float], limit: float) -> float:
    """The divergence that weights may have, by what a built model's engine adds to them.

    Other likeliest tokens grow with the square root of divergence (both are small), so that a bound on agreement is one on KLD.
    """
    assert safest.engine is not None
    built, differ = float(np.mean(safest.engine["kld"])), 1 - float(np.mean(safest.engine["agreement"]))
    allowed = 1 - bounds.get("top1_agreement", 0.0)
    most = min(limit, built * (allowed / differ) ** 2) if differ else limit
    return most - max(built - safest.kld, 0.0)


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
    tried, start = [], f"{setup.quantizer}-all"
    for level, u in table["uniform"].items():
        mix = {g.name: level for g in groups}
        tried.append(Tried(mix, u["bytes"], None, u["rows"], f"{start}-{level.lower()}", u["exact"] < len(groups)))
    for t in [_plain(t, table, probe, groups, held) for t in tried]:
        if t.mix not in [u.mix for u in tried]:
            tried.append(t)
    uniform = {t.name: t for t in tried}
    bounds = bounds_of(settings)
    limit = bounds.get("kld_mean", max(t.kld for t in tried))

    def propose(span: tuple[float, float], count: int) -> None:
        mine = [t.kld / t.predicted for t in tried if t.predicted]
        targets = limit * np.geomspace(*span, count) / (float(np.median(mine)) if mine else 1.0)
        for step in knapsack(table["groups"], table["levels"][0], table["other_bytes"], targets.tolist()):
            if step.bytes <= most and step.mix not in [t.mix for t in tried]:
                tried.append(_measure(probe, step, groups, held))
            bar.update()

    def judged() -> list[Tried]:
        """The front of what is left; `kept` says why the others are not in it."""
        gains.update({t.name: _gain(t, uniform, settings) for t in tried if t.name not in uniform})
        kept.update({t.name: _why(t, uniform, gains, most, limit) for t in tried})
        return _front([t for t in tried if not kept[t.name]])

    def run(t: Tried) -> ByDocument:
        with tempfile.TemporaryDirectory(dir=artifacts.ARTIFACTS) as tmp:
            probe.save_reference(Path(tmp) / REFERENCE)
            options = mixes.options_of(setup, groups, t.mix)
            return isolate.isolated(run_built, setup, options, ids, Path(tmp), settings, what=f"build {t.name}")

    gains: dict[str, WholeEstimate | None] = {}
    kept: dict[str, str] = {}
    half = setup.proposals // 2
    with cli.progress(setup.proposals, "search", "proposal") as bar:
        if limit > 0:
            propose(SPREAD, half)
        _name(tried, setup)
        if front := judged():
            front[0].engine = run(front[0])
            limit = left_to_weights(front[0], bounds, limit)
        if limit > 0:
            propose(NEAR, setup.proposals - half)
    _name(tried, setup)
    finalists = _evenly(judged(), setup.candidates)
    for t in finalists:
        t.engine = t.engine or run(t)
        kept[t.name] = over(t.engine, bounds)
    order = [t.name for t in sorted(finalists, key=lambda t: -t.bytes) if not kept[t.name]]
    proposals = [_record(t, setup, groups, uniform, gains.get(t.name), kept[t.name], t.name in order, settings) for t in tried]
    return {
        "quantizer": setup.quantizer, "engine": setup.engine, "seed": settings.seed,
        "sensitivity": artifacts.sha256_file(artifacts.SENSITIVITY),
        "proposals": sorted(proposals, key=lambda p: -p["bytes"]), "order": order,
        "digest": digest_of(order, proposals),
        "words": words(proposals, order, uniform), "wall_s": 0.0, "load": os.getloadavg()[0],
    }  # fmt: skip


def _measure(probe: Probe, step: Step, groups: Sequence[Group], held: dict[str, values.Values]) -> Tried:
    with probe.swapped({m: held[step.mix[g.name]].of(m) for g in groups for m in g.modules}) as changed:
        return Tried(step.mix, step.bytes, step.predicted, probe.measure(), changed=changed)


def _plain(of: Tried, table: Sensitivity, probe: Probe, groups: Sequence[Group], held: dict[str, values.Values]) -> Tried:
    """A uniform model as quantizers make it: what is outside the layers stays at the nearest level there is."""
    nearest = {row["name"]: min(row["error"], key=row["error"].__getitem__) for row in table["groups"] if row["layer"] is None}
    mix = of.mix | nearest
    size = table["other_bytes"] + sum(row["bytes"][mix[row["name"]]] for row in table["groups"])
    if mix == of.mix:
        return of
    made = _measure(probe, Step(mix, size, 0.0), groups, held)
    return replace(made, predicted=None, name=of.name.replace("-all-", "-layers-"))


def _name(tried: Sequence[Tried], setup: Smallest) -> None:
    """Number the mixes, the largest first."""
    for k, t in enumerate(sorted((t for t in tried if t.predicted is not None), key=lambda t: -t.bytes), 1):
        t.name = f"{setup.quantizer}-mix-{k}"


def _rival(t: Tried, uniform: dict[str, Tried]) -> Tried | None:
    """The best uniform model of its size."""
    return min((u for u in uniform.values() if u.bytes <= t.bytes * (1 + ALIKE)), key=lambda u: u.kld, default=None)


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
    return f"not judged: over the {limit:.4f} nats that rules, by an estimate here, and the engine leave" if t.kld > limit else ""


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


def run_built(setup: Smallest, options: records.Options, ids: list[list[int]], folder: Path, settings: Params) -> ByDocument:
    """A model that is built, in a folder that holds REFERENCE, and run in its own engine, against those logits."""
    found: dict[str, list[float]] = {"kld": [], "agreement": [], "loss": []}
    out = folder / "model"
    out.mkdir()
    quantizers.make(setup.quantizer, options, artifacts.BASE, out, calibration=Calibration(), seed=settings.seed)
    engine: Any = engines.load(setup.engine, out, threads=settings.thread_count)
    reference = np.memmap(folder / REFERENCE, np.float32, "r").reshape(len(ids), len(ids[0]) - 1, -1)
    with ThreadPoolExecutor(settings.thread_count) as pool:
        for window, expected in zip(ids, reference):
            logits = np.concatenate([block for _, _, block in engine.logit_blocks([window], [0], engines.ROWS)])
            add(found, compare_parts(pool, expected, logits, np.asarray(window[1:])), 1)
    engine.close()
    return {"kld": found["kld"], "agreement": found["agreement"], "loss": found["loss"], "tokens": len(ids[0]) - 1}


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
    built = estimate(t.engine["kld"], settings, f"engine {t.name}") if t.engine else None
    kept = "candidate" if chosen else why or "another is smaller and nearer, or a candidate is near it"
    return {
        "name": t.name, "mix": t.mix, "options": mixes.options_of(setup, groups, t.mix), "bytes": t.bytes, "predicted": t.predicted,
        "measured": estimate(t.rows["kld"], settings, f"measured {t.name}"), "agreement": float(np.mean(t.rows["agreement"])),
        "loss": float(np.mean(t.rows["loss"])), "engine": built,
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
