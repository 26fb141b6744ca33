"""The picture of one variant's run: each rule's figure with its interval, beside the bound it is judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts

MARKS = {"PASS": "o", "FAIL": "X", "INCONCLUSIVE": "D"}


def draw_rules(variant: str, judged: dict[str, Any], confidence: float, path: Path) -> bool:
    """One panel a rule, in its own unit; False, and no file, if there is no rule with a figure."""
    rules = [r for r in judged.get("rules", []) if r["value"] is not None and r["threshold"] is not None]
    if not rules:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 9}):
        figure, panels = plt.subplots(len(rules), 1, figsize=(7.2, 0.6 + 0.95 * len(rules)), squeeze=False, layout="constrained")
        for rule, axes in zip(rules, panels[:, 0]):
            _panel(axes, rule)
        title = f"{variant}: {judged['verdict']} (bars: {100 * confidence:.3g} % intervals; shaded: where a rule fails)"
        figure.suptitle(title, fontsize=10)
        with artifacts.atomic_file(path) as tmp:
            figure.savefig(tmp, format="png", dpi=110, metadata={"Software": None})
        plt.close(figure)
    return True


def _panel(axes: Any, rule: dict[str, Any]) -> None:
    value, bound = rule["value"], rule["threshold"]
    low, high = (value if rule[k] is None else rule[k] for k in ("low", "high"))
    axes.errorbar(value, 0, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="none", ecolor="#444444", capsize=4)
    axes.plot(value, 0, MARKS.get(rule["verdict"], "s"), color="#0b57a4")
    axes.axvline(bound, color="#b42318", linestyle="--")
    span = max(high, bound) - min(low, bound) or abs(bound) or 1.0
    left, right = min(low, bound) - 0.15 * span, max(high, bound) + 0.15 * span
    axes.axvspan(*((bound, right) if rule["better"] == "lower" else (left, bound)), color="#b42318", alpha=0.1)
    axes.set_xlim(left, right)
    axes.set_yticks([])
    advisory = "" if rule["required"] else ", advisory"
    axes.set_title(f"{rule['metric']} ({rule['unit']}, n = {rule['n']}): {rule['verdict']}, {rule['bound']}{advisory}",
                   fontsize=8, loc="left")  # fmt: skip
