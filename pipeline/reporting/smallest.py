"""The page of `make smallest`: which groups hurt, what was tried, what passed."""

from __future__ import annotations

from pipeline.core import cli
from pipeline.core.records import Answer, Candidates, Certified, Interval, Proposal, Sensitivity, WholeEstimate

FIRST = 12  # groups in the table


def page(table: Sensitivity, found: Candidates, answer: Answer) -> str:
    """reports/smallest/smallest.md."""
    tested = {c["name"]: c for c in answer["tested"]}
    ranked = sorted(table["groups"], key=lambda row: -(row["alone"]["value"] or 0.0))[:FIRST]
    lowest, n = table["levels"][0], len(table["texts"]["documents"])
    groups = [
        {"group": row["name"], f"alone at {lowest} (nats)": _shown(row["alone"]), "put back (nats less)": _shown(row["returned"]),
         **{level: f"{row['bytes'][level] / 1e6:.2f} MB" if level in row["bytes"] else "–" for level in table["levels"]}}
        for row in ranked
    ]  # fmt: skip
    seconds = [(stage["wall_s"], stage["load"]) for stage in (table, found, answer)]
    took = ", ".join(
        f"{name} {s:.0f} s (load {load:.1f})" for name, (s, load) in zip(("sensitivity", "search", "certify"), seconds)
    )
    parts = [
        "# The smallest that passes",
        "\n".join(f"- {line}" for line in answer["words"]),
        "## Candidates, safest first",
        cli.markdown_table([_row(p, tested.get(p["name"])) for p in found["proposals"]]),
        f"Predicted: the sum of the groups' costs. Measured: in memory, {n} documents of {table['texts']['tokens']} tokens that "
        f"choose. Built: stored and run in {found['engine']}, which rounds activations too. Certified: on the texts that the gate "
        "judges on, in the frozen order, up to the first that does not pass. Brackets: 95 % intervals, whole documents resampled.",
        "## Which groups hurt",
        "![Mean KLD of each group alone at the lowest level, by layer and kind](sensitivity.svg)",
        "\n".join(f"- {line}" for line in table["words"]),
        cli.markdown_table(groups),
        f"Frozen list {found['digest'][:12]}, seed {found['seed']}. Time: {took}.",
    ]
    return "\n\n".join(parts) + "\n"


def _row(p: Proposal, c: Certified | None) -> dict[str, str]:
    return {
        "model": p["name"], "MB": f"{p['bytes'] / 1e6:.1f}",
        "predicted": "–" if p["predicted"] is None else f"{p['predicted']:.4f}", "measured": _shown(p["measured"]),
        "built": _shown(p["engine"]), "certified": _shown(c["kld"] if c else None), "verdict": c["judged"]["verdict"] if c else "–",
        "why": p["kept"],
    }  # fmt: skip


def _shown(e: WholeEstimate | Interval | None) -> str:
    if e is None or e["value"] is None:
        return "–"
    return f"{e['value']:.4f}" + (f" [{e['low']:.4f}, {e['high']:.4f}]" if e["low"] is not None and e["high"] is not None else "")


def family_note(k: int) -> str | None:
    """What to say where the best of k variants that passed is recommended; None for one."""
    if k < 2:
        return None
    return (
        f"chosen from {k} variants judged on the same texts: one exactly at its margin passes by chance in up to 2.5 % of runs, "
        f"and one of {k} in up to {min(100.0, 2.5 * k):.3g} %; `make smallest` certifies in a fixed order, which keeps 2.5 %"
    )
