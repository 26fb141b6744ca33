"""What MLflow's UI shows without being asked: a saved view of the trade-off, and what the experiment is.

A saved view is a tag of the experiment (`mlflow.sharedViewState.<id>`; MLflow 3.17's own format, which its menu
"Views" lists); a version that knows it not shows its default instead.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.runs.tracking import CURRENT

VIEW = "tradeoff"
NAME = "quantgate: trade-off"
SIGNED = "Written by quantgate."
SECTION, OTHER = "quantgate", "rest"
# MLflow shows attributes, metrics, params and tags in that order, whatever is asked: on a screen of 1440 points the tag
# `verdict` is past its edge, so that the description, which begins with the verdict, comes first
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


# Twelve that differ also for most people who see colours otherwise (after Okabe and Ito 2008); MLflow's own repeat.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8c6d31",
    "#000000", "#7b4173", "#637939", "#b8b800", "#777777",
)  # fmt: skip


def colour(k: int) -> str:
    """The colour of the k-th variant's run in the UI."""
    return COLOURS[k % len(COLOURS)]


def _card(kind: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"uuid": f"qg-{kind}-{key}", "type": kind, "runsCountToCompare": 20, "metricSectionId": SECTION, "deleted": False,
            "isGenerated": False, **fields}  # fmt: skip


def charts() -> list[dict[str, Any]]:
    """Quality against speed and size, each figure that decides as bars, what goes along an axis as lines."""
    axis = {"type": "METRIC"}
    cards = [
        _card("SCATTER", f"{x}-{y}", displayName=f"{y} over {x}", xaxis=axis | {"key": x}, yaxis=axis | {"key": y})
        for x, y in SCATTER
    ]
    cards += [_card("BAR", m, metricKey=m, displayName=m) for m in BARS]
    return cards + [
        _card("LINE", m, metricKey=m, selectedMetricKeys=[m], displayName=m, xAxisKey="step", useGlobalXaxisKey=False,
              xAxisScaleType="log", scaleType="linear", range={}, yAxisKey="metric", yAxisExpressions=[], lineSmoothness=0,
              useGlobalLineSmoothing=True)
        for m in LINES
    ]  # fmt: skip


def saved_view(made_ms: int) -> str:
    """The saved view's tag: the present state's variants, and the charts."""
    state = {
        "searchFilter": f"tags.`{CURRENT}` = 'true' and tags.`variant` != ''",
        "orderByKey": "metrics.`kld_mean`", "orderByAsc": True, "selectedColumns": list(COLUMNS),
        "compareRunCharts": charts(),
        "compareRunSections": [{"uuid": SECTION, "name": "Trade-off", "display": True, "isReordered": True, "deleted": False,
                                "isGenerated": False}],
        "isAccordionReordered": True, "hideEmptyCharts": True,
    }  # fmt: skip
    return json.dumps({"name": NAME, "createdAt": made_ms, "updatedAt": made_ms, "state": json.dumps(state)})


def dress(client: Any, experiment_id: str) -> None:
    """Give an experiment its saved view, kind and description; whatever people wrote there stays."""
    experiment = client.get_experiment(experiment_id)
    wanted = {
        f"mlflow.sharedViewState.{VIEW}": saved_view(int(experiment.creation_time or 0)),
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": (
            f"{SIGNED} Quality against speed: menu `Views` (top right), `{NAME}`, then the button `Chart view` (left of the "
            f"search field); or add `?viewStateShareKey={VIEW}&compareRunsMode=CHART` to this page's address. Each parent run is "
            "one state of the pipeline, its children are the variants."
        ),
    }
    for key, value in wanted.items():
        there = experiment.tags.get(key)
        ours = there is None or key.startswith("mlflow.sharedViewState") or there.startswith(SIGNED)
        if ours and there != value:
            client.set_experiment_tag(experiment_id, key, value)
