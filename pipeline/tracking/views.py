"""What MLflow's UI shows: a saved view of the trade-off, the experiment's description and each variant's.

A saved view is a tag of the experiment (`mlflow.sharedViewState.<id>`, MLflow 3.17's format); other versions ignore it.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.core.records import VariantVerdict
from pipeline.reporting.text import with_unit
from pipeline.tracking.connection import CURRENT

VIEW = "tradeoff"
NAME = "quantgate: trade-off"
SIGNED = "Written by quantgate."
SECTION = "quantgate"
# MLflow always shows attributes, metrics, params and tags in that order. On a screen of 1440 points the tag `verdict` is out of
# sight, so the description, which begins with the verdict, comes first.
COLUMNS = (
    "attributes.`Description`", "tags.`verdict`", "metrics.`kld_mean`", "metrics.`top1_agreement`", "metrics.`acc_delta/all`",
    "metrics.`ttft_ms`", "metrics.`decode_tok_s`", "metrics.`weight_bytes`", "params.`quantizer`", "params.`engine`",
)  # fmt: skip
SCATTER = (("decode_tok_s", "kld_mean"), ("weight_bytes", "kld_mean"), ("ttft_ms", "decode_tok_s"))
BARS = ("kld_mean", "top1_agreement", "acc_delta/all", "decode_tok_s", "ttft_ms", "weight_bytes")
LINES = (
    "kld_by_position/corpus", "kld_by_position/trajectory", "tpot_ms_by_context", "ttft_ms_by_context",
    "throughput_tok_s_by_concurrency",
)  # fmt: skip


def _card(kind: str, key: str, **fields: object) -> dict[str, object]:
    return {"uuid": f"qg-{kind}-{key}", "type": kind, "runsCountToCompare": 20, "metricSectionId": SECTION, "deleted": False,
            "isGenerated": False, **fields}  # fmt: skip


def saved_view(made_ms: int) -> str:
    """The saved view's tag: the current variants; quality against speed and size as scatter plots, deciding metrics as bars, curves
    as lines."""
    charts = []
    for x, y in SCATTER:
        axes = {f"{axis}axis": {"type": "METRIC", "key": key} for axis, key in (("x", x), ("y", y))}
        charts.append(_card("SCATTER", f"{x}-{y}", displayName=f"{y} over {x}", **axes))
    charts += [_card("BAR", m, metricKey=m, displayName=m) for m in BARS]
    charts += [
        _card("LINE", m, metricKey=m, selectedMetricKeys=[m], displayName=m, xAxisKey="step", useGlobalXaxisKey=False,
              xAxisScaleType="log", scaleType="linear", range={}, yAxisKey="metric", yAxisExpressions=[], lineSmoothness=0,
              useGlobalLineSmoothing=True)
        for m in LINES
    ]  # fmt: skip
    state = {
        "searchFilter": f"tags.`{CURRENT}` = 'true' and tags.`variant` != ''",
        "orderByKey": "metrics.`kld_mean`", "orderByAsc": True, "selectedColumns": list(COLUMNS),
        "compareRunCharts": charts,
        "compareRunSections": [{"uuid": SECTION, "name": "Trade-off", "display": True, "isReordered": True, "deleted": False,
                                "isGenerated": False}],
        "isAccordionReordered": True, "hideEmptyCharts": True,
    }  # fmt: skip
    return json.dumps({"name": NAME, "createdAt": made_ms, "updatedAt": made_ms, "state": json.dumps(state)})


def describe_experiment(client: Any, experiment_id: str) -> None:
    """Set an experiment's saved view, kind and description; keep a person's own description."""
    experiment = client.get_experiment(experiment_id)
    tags = {
        f"mlflow.sharedViewState.{VIEW}": saved_view(int(experiment.creation_time or 0)),
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": (
            f"{SIGNED} Quality against speed: menu `Views` (top right), `{NAME}`, then the button `Chart view` (left of the "
            f"search field); or add `?viewStateShareKey={VIEW}&compareRunsMode=CHART` to this page's address. Each parent run is "
            "one state of the pipeline, its children are the variants."
        ),
    }
    for key, value in tags.items():
        before = experiment.tags.get(key)
        is_ours = before is None or key.startswith("mlflow.sharedViewState") or before.startswith(SIGNED)
        if is_ours and before != value:
            client.set_experiment_tag(experiment_id, key, value)


def variant_note(judged: VariantVerdict | None) -> str:
    """The description of a variant's run: its verdict, then a line for each rule. judged: None for the reference."""
    if judged is None:
        return "REFERENCE: every other variant is compared with it."
    lines = [f"{judged['verdict']}: {judged['reason']}"]
    for rule in judged["rules"]:
        advisory = "" if rule["required"] else ", advisory"
        value = with_unit(rule, digits=4)
        lines.append(f"- {rule['metric']} {value}, n = {rule['n']}: {rule['verdict']}{advisory}, {rule['bound']}")
    return "\n".join(lines)
