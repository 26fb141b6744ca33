"""search: mixes of formats by the table of `sensitivity`, measured on the same texts -> reports/smallest/candidates.json

A mix costs the sum of its groups' costs. A group's cost at a level is that of the lowest level times the ratio of squared errors
(second order, with independent errors). For each divergence a knapsack over real bytes gives the smallest mix. Proposals are
measured, since costs do not add up exactly; the record holds both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import engines, quantizers
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Smallest
from pipeline.core.records import ByDocument, Candidates, GroupSensitivity, Proposal, Sensitivity, WholeEstimate
from pipeline.evalset.calibration import Calibration
from pipeline.gating.rules import bound_of
from pipeline.layers import mixes, values
from pipeline.layers.choosing import digest_of, estimate, setup_of, texts_of
from pipeline.layers.groups import groups_of
from pipeline.layers.probe import Probe, by_document

BINS = 8192  # steps of divergence that the knapsack distinguishes
ALIKE = 0.01  # models whose sizes differ by less count as equally large
SPREAD = (0.01, 1.0)  # range of the first half of the proposals, as parts of the gate's limit
NEAR = (0.1, 1.0)  # range of the second half, as parts of what the engine leaves of the limit
REFERENCE = "reference.f32"  # the 16-bit model's logits in float32, for the processes that run built models


@dataclass
class Step:
    """A mix with its bytes and its predicted divergence; a uniform model has no prediction."""

    mix: mixes.Mix
    bytes: int
    predicted: float | None


@dataclass
class Tried(Step):
    """A model that was measured with swapped weights; `engine`: built, and run in its own engine."""

    rows: ByDocument
    name: str = ""
    changed: bool = True
    engine: ByDocument | None = None
    rival: Tried | None = None  # the best uniform model of its size
    gain: WholeEstimate | None = None  # over the rival
    kept: str = ""  # why it is no candidate

    @property
    def kld(self) -> float:
        return float(np.mean(self.rows["kld"]))


def cost(row: GroupSensitivity, level: str, lowest: str) -> float:
    """Predicted divergence of one group at a level."""
    least = row["error"].get(lowest, 0.0)
    return max(row["alone"]["value"] or 0.0, 0.0) * row["error"][level] / least if least else 0.0


def knapsack(groups: Sequence[GroupSensitivity], lowest: str, other_bytes: int, targets: Sequence[float]) -> list[Step]:
    """For each target the smallest mix that is predicted to cost no more: one level per group, by dynamic programming. Costs are
    rounded up to BINS steps of the largest target, so that no mix exceeds its target. A target below the cost of every mix gives
    none."""
    step = max(targets) / BINS
    least = np.full(BINS + 1, float(other_bytes))  # bytes of the smallest mix that costs at most so many steps
    taken: list[tuple[list[str], NDArray[np.int64], NDArray[np.int64]]] = []
    for row in groups:
        names = sorted(row["bytes"])
        costs = np.array([np.ceil(cost(row, level, lowest) / step - 1e-9) for level in names])
        options = np.full((len(names), BINS + 1), np.inf)
        for k in np.flatnonzero(costs <= BINS):
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
    """{metric: bound} of the required rules against the reference that the texts can judge."""
    judged = ("kld_mean", "top1_agreement", "ppl_ratio")
    rules = [r for r in settings.gate.rules if r.required and r.against == "reference" and r.metric in judged]
    return {r.metric: bound_of(r).threshold for r in rules}


def over(rows: ByDocument, bounds: dict[str, float]) -> str:
    """Which bounds a built model exceeds; empty if none."""
    at = {
        "kld_mean": np.mean(rows["kld"]),
        "top1_agreement": np.mean(rows["agreement"]),
        "ppl_ratio": np.exp(np.mean(rows["loss"])),
    }
    past = [n for n, bound in bounds.items() if (at[n] < bound if n == "top1_agreement" else at[n] > bound)]
    return ", ".join(f"built and run, {n} is {at[n]:.4g}, past {bounds[n]:g}" for n in past)


def left_to_weights(safest: Tried, bounds: dict[str, float], limit: float) -> float:
    """The divergence left to the weights, after what the engine adds to a built model's. The share of other likeliest tokens grows
    with the square root of a small divergence: a bound on agreement is one on KLD."""
    assert safest.engine is not None
    built, differ = float(np.mean(safest.engine["kld"])), 1 - float(np.mean(safest.engine["agreement"]))
    allowed = 1 - bounds.get("top1_agreement", 0.0)
    most = min(limit, built * (allowed / differ) ** 2) if differ else limit
    return most - max(built - safest.kld, 0.0)


class Search:
    """The models tried on the texts: uniform ones, and mixes that the table proposes. folder: for REFERENCE and built models."""

    def __init__(self, settings: Params, folder: Path) -> None:
        self.settings, self.setup, self.folder = settings, setup_of(settings), folder
        self.table, self.groups = records.read(artifacts.SENSITIVITY, Sensitivity), groups_of(artifacts.BASE)
        model, levels = artifacts.model_dir(settings.reference), self.table["levels"]
        rows, self.ids = texts_of(self.setup, model, settings.seed)
        if self.table["texts"]["documents"] != [row["id"] for row in rows] or levels != mixes.levels(self.setup):
            raise ArtifactError(f"{artifacts.SENSITIVITY} was measured with other settings; run `make smallest`")
        self.probe = Probe(model, self.ids, settings.thread_count)
        self.held = {level: values.Values(artifacts.LEVELS / f"{level}.safetensors") for level in levels}
        self.most = self.setup.budget_mb * 1e6 if self.setup.budget_mb else np.inf
        self.tried = self._uniform()
        self.uniform = {t.name: t for t in self.tried}
        self.bounds = bounds_of(settings)
        self.limit = self.bounds.get("kld_mean", max(t.kld for t in self.tried))

    def _uniform(self) -> list[Tried]:
        """Models with one level for all groups; and as quantizers make them, with the nearest level there is outside the layers."""
        table, tried = self.table, list[Tried]()
        for level, u in table["uniform"].items():
            name, changed = f"{self.setup.quantizer}-all-{level.lower()}", u["exact"] < len(self.groups)
            tried.append(Tried({g.name: level for g in self.groups}, u["bytes"], None, u["rows"], name, changed))
        nearest = {row["name"]: min(row["error"], key=row["error"].__getitem__) for row in table["groups"] if row["layer"] is None}
        for t in list(tried):
            mix = t.mix | nearest
            if mix not in [u.mix for u in tried]:
                size = table["other_bytes"] + sum(row["bytes"][mix[row["name"]]] for row in table["groups"])
                tried.append(self._measure(Step(mix, size, None), t.name.replace("-all-", "-layers-")))
        return tried

    def _measure(self, step: Step, name: str = "") -> Tried:
        with self.probe.swapped({m: self.held[step.mix[g.name]].of(m) for g in self.groups for m in g.modules}) as changed:
            return Tried(step.mix, step.bytes, step.predicted, self.probe.measure(), name, changed)

    def propose(self, span: tuple[float, float], count: int, bar: Any) -> None:
        """Measure the mixes proposed for `count` divergences within `span`, and number all mixes, the largest first."""
        ratios = [t.kld / t.predicted for t in self.tried if t.predicted]
        targets = self.limit * np.geomspace(*span, count) / (float(np.median(ratios)) if ratios else 1.0)
        for step in knapsack(self.table["groups"], self.table["levels"][0], self.table["other_bytes"], targets.tolist()):
            if step.bytes <= self.most and step.mix not in [t.mix for t in self.tried]:
                self.tried.append(self._measure(step))
            bar.update()
        for k, t in enumerate(sorted((t for t in self.tried if t.predicted is not None), key=lambda t: -t.bytes), 1):
            t.name = f"{self.setup.quantizer}-mix-{k}"

    def front(self) -> list[Tried]:
        """Possible candidates that none beats in both bytes and divergence, the largest first; `kept` says why others are not."""
        for t in self.tried:
            if t.name not in self.uniform:
                alike = [u for u in self.uniform.values() if u.bytes <= t.bytes * (1 + ALIKE)]
                t.rival = min(alike, key=lambda u: u.kld, default=None)
                if t.rival:
                    gained = np.asarray(t.rival.rows["kld"]) - np.asarray(t.rows["kld"])
                    t.gain = estimate(gained.tolist(), self.settings, f"gain {t.name}")
            t.kept = self._why(t)
        able = [t for t in self.tried if not t.kept]
        front = [t for t in able if not any(o.bytes <= t.bytes and o.kld <= t.kld and o is not t for o in able)]
        return sorted(front, key=lambda t: -t.bytes)

    def _why(self, t: Tried) -> str:
        """Why a model is no candidate; empty if it may be one."""
        if t.bytes > self.most:
            return f"larger than budget_mb ({t.bytes / 1e6:.1f} MB)"
        if not t.changed:
            return "changes nothing: its values are those of the 16-bit model"
        if t.gain is not None and (t.gain["low"] is None or t.gain["low"] <= 0):
            return "not better than the best uniform model of its size beyond noise"
        if t.kld > self.limit:
            return f"not judged: over the {self.limit:.4f} nats that rules, by an estimate here, and the engine leave"
        return ""

    def run(self, t: Tried) -> ByDocument:
        """Build a model, run it in its own engine, and compare it with the 16-bit model."""
        if not (self.folder / REFERENCE).exists():
            self.probe.save_reference(self.folder / REFERENCE)
        options = mixes.options_of(self.setup, self.groups, t.mix)
        return isolate.isolated(run_built, self.setup, options, self.ids, self.folder, self.settings, what=f"build {t.name}")

    def finalists(self) -> list[Tried]:
        """Measure proposals in two halves, the second within what the engine leaves; run models of the front, evenly spread."""
        half = self.setup.proposals // 2
        with cli.progress(self.setup.proposals, "search", "proposal") as bar:
            if self.limit > 0:
                self.propose(SPREAD, half, bar)
            if front := self.front():
                front[0].engine = self.run(front[0])
                self.limit = left_to_weights(front[0], self.bounds, self.limit)
            if self.limit > 0:
                self.propose(NEAR, self.setup.proposals - half, bar)
        finalists = _evenly(self.front(), self.setup.candidates)
        for t in finalists:
            t.engine = t.engine or self.run(t)
            t.kept = over(t.engine, self.bounds)
        return finalists

    def record(self, t: Tried, chosen: bool) -> Proposal:
        return {
            "name": t.name, "mix": t.mix, "options": mixes.options_of(self.setup, self.groups, t.mix), "bytes": t.bytes,
            "predicted": t.predicted, "measured": estimate(t.rows["kld"], self.settings, f"measured {t.name}"),
            "agreement": float(np.mean(t.rows["agreement"])), "loss": float(np.mean(t.rows["loss"])),
            "engine": estimate(t.engine["kld"], self.settings, f"engine {t.name}") if t.engine else None,
            "against": t.rival.name if t.rival else None, "gain": t.gain, "candidate": chosen,
            "kept": "candidate" if chosen else t.kept or "another is smaller and nearer, or a candidate is near it",
        }  # fmt: skip


def search(settings: Params) -> Candidates:
    """Measure proposals and uniform models, and freeze an ordered list of candidates."""
    with tempfile.TemporaryDirectory(dir=artifacts.ARTIFACTS) as tmp:
        found = Search(settings, Path(tmp))
        finalists = found.finalists()
    order = [t.name for t in sorted(finalists, key=lambda t: -t.bytes) if not t.kept]
    proposals = [found.record(t, t.name in order) for t in found.tried]
    return {
        "quantizer": found.setup.quantizer, "engine": found.setup.engine, "seed": settings.seed,
        "sensitivity": artifacts.sha256_file(artifacts.SENSITIVITY),
        "proposals": sorted(proposals, key=lambda p: -p["bytes"]), "order": order,
        "digest": digest_of(order, proposals),
        "words": words(proposals, order, found.uniform), "wall_s": 0.0, "load": os.getloadavg()[0],
    }  # fmt: skip


def _evenly(front: Sequence[Tried], count: int) -> list[Tried]:
    """At most `count`, evenly from the safest to the smallest."""
    places = np.linspace(0, len(front) - 1, min(count, len(front))).round().astype(int)
    return [front[k] for k in np.unique(places)]


def run_built(setup: Smallest, options: records.Options, ids: list[list[int]], folder: Path, settings: Params) -> ByDocument:
    """Build a model in a folder that holds REFERENCE, run it in its own engine, and compare it with those logits."""
    reference = np.memmap(folder / REFERENCE, np.float32, "r").reshape(len(ids), len(ids[0]) - 1, -1)
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        out = Path(tmp)
        quantizers.make(setup.quantizer, options, artifacts.BASE, out, calibration=Calibration(), seed=settings.seed)
        engine: Any = engines.load(setup.engine, out, threads=settings.thread_count)
        logits = (np.concatenate([x for *_, x in engine.logit_blocks([window], [0], engines.ROWS)]) for window in ids)
        found = by_document(settings.thread_count, zip(reference, logits, (np.asarray([window]) for window in ids)))
        engine.close()
    return found


def words(proposals: Sequence[Proposal], order: Sequence[str], uniform: dict[str, Tried]) -> list[str]:
    """The candidates, predicted beside measured; and whether mixing gains anything here."""
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
