"""What is logged: names that cannot collide, curves along their axes, datasets as they were recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gate_house import metric
from track_house import judged, rule

from pipeline.core.errors import ArtifactError
from pipeline.tracking import runs
from pipeline.tracking.runs import curves, flat_metrics


def drawn(metrics: dict[str, Any], served: dict[str, Any] | None = None, **by: Any) -> dict[str, list[tuple[int, float]]]:
    result: Any = {"metrics": metrics, "curves": by}
    return curves(result, served and {"levels": served})


def test_names_that_would_collide_are_an_error() -> None:
    one = metric(1.0, 1.0, 1.0)
    with pytest.raises(ArtifactError, match="two metrics would both be called 'kld_mean_low'"):
        flat_metrics({"kld_mean": one, "kld_mean_low": one})
    with pytest.raises(ArtifactError, match="a metric and a curve would both be called 'tpot_ms_by_context'"):
        drawn({"tpot_ms/context-8": one, "tpot_ms_by_context": one})


def test_a_curve_is_sorted_has_its_limits_beside_and_leaves_out_what_is_unknown() -> None:
    contexts = {1024: metric(3.0, 2.0, 4.0), 256: metric(1.0, None, None), 64: metric(None, None, None)}
    metrics = {f"tpot_ms/context-{n}": m for n, m in contexts.items()} | {"tpot_ms": metric(9.0, None, None)}
    name = "tpot_ms_by_context"
    assert drawn(metrics) == {name: [(256, 1.0), (1024, 3.0)], f"{name}_low": [(1024, 2.0)], f"{name}_high": [(1024, 4.0)]}


def test_curves_lie_over_positions_and_a_server_s_over_concurrency() -> None:
    def point(value: float, **more: Any) -> dict[str, Any]:
        return metric(value, None, None) | more

    kld = {"corpus": [point(0.2) | {"from": 4, "to": 7}, point(0.3) | {"from": 1, "to": 3}]}
    agreement = [{"position": 2, "free": point(0.5), "forced": point(0.9)}]
    levels = {name: {"throughput_tok_s": point(v)} for name, v in (("closed-4", 40.0), ("closed-1", 10.0), ("open-2.5", 7.0))}
    assert drawn({}, levels, kld_by_position=kld, agreement_by_position=agreement) == {
        "kld_by_position/corpus": [(1, 0.3), (4, 0.2)], "throughput_tok_s_by_concurrency": [(1, 10.0), (4, 40.0)],
        "agreement_by_position/free": [(2, 0.5)], "agreement_by_position/forced": [(2, 0.9)],
    }  # fmt: skip


def test_a_description_begins_with_the_verdict_and_has_a_line_a_rule_with_its_unit() -> None:
    top1 = {"metric": "top1_agreement", "unit": "fraction", "low": 0.942, "high": 0.96, "n": 9, "bound": "margin 7 pp"}
    note = runs.variant_note(judged("FAIL", rule(0.951, "FAIL", required=False, **top1), rule(0.951, "PASS", **top1)))
    assert note.startswith("FAIL: r\n") and runs.COLUMNS[0] == "attributes.`Description`"
    assert "- top1_agreement 95.1 [94.2, 96] %, n = 9: FAIL, advisory, margin 7 pp" in note and ": PASS, margin 7 pp" in note
    assert runs.variant_note(None).startswith("REFERENCE: ")


def test_the_experiment_s_description_says_where_the_charts_are_in_its_first_words() -> None:
    tags: dict[str, str] = {}
    client = SimpleNamespace(
        get_experiment=lambda _: SimpleNamespace(creation_time=1, tags={}),
        set_experiment_tag=lambda _, key, value: tags.update({key: value}),
    )
    runs.describe_experiment(client, "1")
    first = tags["mlflow.note.content"][:130]
    assert all(word in first for word in ("menu `Views`", runs.NAME, "`Chart view`")), "what a closed description shows"
    assert len(tags[f"mlflow.sharedViewState.{runs.VIEW}"]) < 20_000, "more does not fit a tag of MLflow's"
