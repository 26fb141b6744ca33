"""The results of `make smallest` for the pages: the answer, the candidates, the groups of layers."""

from __future__ import annotations

import json
from typing import NamedTuple

from pipeline.core import artifacts, cli, records
from pipeline.core.records import Answer, Candidates, Certified, Interval, Proposal, Results, Sensitivity, Verdict
from pipeline.reporting import text

FIRST = 12  # groups in the table
PAGE = artifacts.SMALLEST / "README.md"  # no stage's output, so that `report`, which depends on it, is not out of date
PENDING = "# The smallest that passes\n\nNothing was certified yet: `make smallest`, after `make repro`.\n"
COSTS = ("kld_mean", "top1_agreement", "acc_delta/all", "speed_ratio")


class Found(NamedTuple):
    table: Sensitivity
    candidates: Candidates
    answer: Answer

    @property
    def best(self) -> Certified | None:
        return best_of(self.answer)


def best_of(answer: Answer) -> Certified | None:
    """The smallest that was certified; None if no candidate passes."""
    return next((c for c in answer["tested"] if c["name"] == answer["answer"]), None)


def load(results: Results, verdict: Verdict) -> Found | None:
    """reports/smallest/, unless it was made with another reference or other texts, or judged by other rules than this verdict."""
    if not all(file.exists() for file in (artifacts.SENSITIVITY, artifacts.CANDIDATES, artifacts.ANSWER)):
        return None  # DVC removes a stage's outputs before it runs it again
    table, found = records.read(artifacts.SENSITIVITY, Sensitivity), records.read(artifacts.CANDIDATES, Candidates)
    answer = records.read(artifacts.ANSWER, Answer)
    model, store = results[verdict["reference"]]["model"], records.read(artifacts.FLOOR, records.Floor)["store"]
    here = (model, store, artifacts.sha256_file(artifacts.SENSITIVITY), found["digest"])
    made_from = (table["model"], answer["store"], found["sensitivity"], answer["candidates"])
    theirs, ours = [c["judged"] for c in answer["tested"]], verdict["variants"].values()
    tested, now = ([[(r["metric"], r["bound"], r["required"]) for r in v["rules"]] for v in judged] for judged in (theirs, ours))
    return Found(table, found, answer) if made_from == here and all(rules in now for rules in tested) else None


def advice(found: Found, results: Results, verdict: Verdict) -> tuple[list[str], str | None]:
    """(sentences on the smallest that was certified: size, costs, what is not settled; the line for params.yaml)."""
    if (best := found.best) is None or not best["weight_bytes"]:
        return [], None
    sizes = {n: text.value_of(results[n], "weight_bytes") for n, v in verdict["variants"].items() if v["verdict"] == "PASS"}
    smaller = ", ".join(f"{100 * (1 - best['weight_bytes'] / size):.0f} % smaller than {n}" for n, size in sizes.items() if size)
    rules = {r["metric"]: r for r in best["judged"]["rules"]}
    costs = ", ".join(f"{text.NAMES[k]} {text.judged_value(rules[k])}" for k in COSTS if k in rules)
    unsure = [(c["name"], r) for c in found.answer["tested"] for r in c["judged"]["rules"] if r["verdict"] == "INCONCLUSIVE"]
    left = [f"{name}: {r['metric']} {text.judged_value(r)} ({text.bound(r)}){text.settled_by(r)}" for name, r in unsure]
    size = f"{best['weight_bytes'] / 1e6:.1f} MB" + f" ({smaller})" * bool(smaller)
    uniform = found.table["uniform"].items()
    exact = [level for level, u in uniform if level != "kept" and u["exact"] > len(found.table["groups"]) / 2]
    published = (
        f"{' and '.join(exact)} gives this base back exactly, as it was published so; other base models need more bits. "
        * bool(exact)
    )
    lines = [f"Smallest that was certified, on texts that chose nothing: {best['name']}, {size}.",
             f"{published}It is not in the table until params.yaml lists it.",
             f"Against {verdict['reference']}: {costs}.", *[f"Not settled: {'; '.join(left)}."] * bool(left)]  # fmt: skip
    return lines, setting(found.candidates, best)


def setting(found: Candidates, best: Certified) -> str:
    """The line for params.yaml; JSON is YAML, too."""
    options = json.dumps(best["options"])
    return f"{best['name']}: {{quantizer: {found['quantizer']}, engine: {found['engine']}, options: {options}}}"


def rows(found: Found) -> list[dict[str, str]]:
    """One row for each proposal, safest first."""
    tested = {c["name"]: c for c in found.answer["tested"]}
    return [_row(p, tested.get(p["name"])) for p in found.candidates["proposals"]]


def caption(found: Found) -> str:
    texts, n = found.table["texts"], text.counted(c["kld"]["n"] for c in found.answer["tested"] if c["kld"])
    return (
        f"Predicted: the sum of the groups' costs. Measured: in memory, {len(texts['documents'])} documents of {texts['tokens']} "
        f"tokens that choose. Built: stored and run in {found.candidates['engine']}, which rounds activations too. Certified: on "
        f"the {n} tokens that the gate judges on, in the frozen order, up to the first that does not pass. Values are mean KLD in "
        "nats; brackets: 95 % intervals, whole documents resampled."
    )


def page(found: Found) -> str:
    """reports/smallest/README.md."""
    table, candidates, answer = found
    ranked = sorted(table["groups"], key=lambda row: -(row["alone"]["value"] or 0.0))[:FIRST]
    lowest = table["levels"][0]
    groups = [
        {"group": row["name"], f"alone at {lowest} (nats)": _shown(row["alone"]), "put back (nats less)": _shown(row["returned"]),
         **{level: f"{row['bytes'][level] / 1e6:.2f} MB" if level in row["bytes"] else "–" for level in table["levels"]}}
        for row in ranked
    ]  # fmt: skip
    stages = zip(("sensitivity", "search", "certify"), found)
    took = ", ".join(f"{name} {stage['wall_s']:.0f} s (load {stage['load']:.1f})" for name, stage in stages)
    parts = [
        "# The smallest that passes",
        "\n".join(f"- {line}" for line in answer["words"]),
        *[f"To serve it, add to `variants` in params.yaml: `{setting(candidates, best)}`" for best in [found.best] if best],
        "## Candidates, safest first",
        cli.markdown_table(rows(found)),
        caption(found),
        "## Which groups hurt",
        "![Mean KLD of each group alone at the lowest level, by layer and kind](sensitivity.svg)",
        "\n".join(f"- {line}" for line in table["words"]),
        cli.markdown_table(groups),
        f"Frozen list {candidates['digest'][:12]}, seed {candidates['seed']}. Time: {took}.",
    ]
    return "\n\n".join(parts) + "\n"


def _row(p: Proposal, c: Certified | None) -> dict[str, str]:
    return {
        "model": p["name"], "MB": f"{p['bytes'] / 1e6:.1f}",
        "predicted": "–" if p["predicted"] is None else f"{p['predicted']:.4f}", "measured": _shown(p["measured"]),
        "built": _shown(p["engine"]), "certified": _shown(c["kld"] if c else None), "verdict": c["judged"]["verdict"] if c else "–",
        "why": p["kept"],
    }  # fmt: skip


def _shown(e: records.WholeEstimate | Interval | None) -> str:
    if e is None or e["value"] is None:
        return "–"
    return f"{e['value']:.4f}" + (f" [{e['low']:.4f}, {e['high']:.4f}]" if e["low"] is not None and e["high"] is not None else "")


def family_note(k: int, level: float) -> str | None:
    """The chance of a false PASS where the best of k variants is recommended; None for one. level: of one test."""
    if k < 2:
        return None
    one = 100 * level
    return (
        f"A variant exactly at its margin passes by chance in {one:.3g} % of runs; with {k} such variants one passes in up to "
        f"{min(100.0, one * k):.3g} % (make smallest: {one:.3g} %)."
    )
