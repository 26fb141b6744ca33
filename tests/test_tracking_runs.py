"""What is logged: names that cannot collide, curves along their axes, datasets as they were recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core import artifacts
from pipeline.core.cli import markdown_table
from pipeline.core.errors import ArtifactError
from pipeline.tracking import views
from pipeline.tracking.runs import comparison, curves, datasets, flat_metrics, variant_note


def figure(value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "unit": "nats"}


def test_names_that_would_collide_are_an_error() -> None:
    metric = figure(1.0, 1.0, 1.0)
    with pytest.raises(ArtifactError, match="two metrics would both be called 'kld_mean_low'"):
        flat_metrics({"kld_mean": metric, "kld_mean_low": metric})
    with pytest.raises(ArtifactError, match="a metric and a curve would both be called 'tpot_ms_by_context'"):
        curves({"metrics": {"tpot_ms/context-8": metric, "tpot_ms_by_context": metric}})


def test_a_curve_is_sorted_has_its_bounds_beside_and_leaves_out_what_is_unknown() -> None:
    contexts = {1024: figure(3.0, 2.0, 4.0), 256: figure(1.0), 64: figure(None)}
    metrics = {f"tpot_ms/context-{n}": m for n, m in contexts.items()} | {"tpot_ms": figure(9.0), "kld_mean/news": figure(1.0)}
    name = "tpot_ms_by_context"
    expected = {name: [(256, 1.0), (1024, 3.0)], f"{name}_low": [(1024, 2.0)], f"{name}_high": [(1024, 4.0)]}
    assert curves({"metrics": metrics}) == expected


def test_curves_lie_over_positions_and_a_server_s_over_concurrency() -> None:
    drawn = {
        "kld_by_position": {"corpus": [{"from": 4, "to": 7, **figure(0.2)}, {"from": 1, "to": 3, **figure(0.3)}]},
        "agreement_by_position": [{"position": 2, "free": figure(0.5), "forced": figure(0.9)}],
    }
    levels = {f"closed-{n}": {"throughput_tok_s": figure(10.0 * n)} for n in (4, 1)}
    assert curves({"metrics": {}, "curves": drawn}, {"levels": levels | {"open-2.5": {"throughput_tok_s": figure(7.0)}}}) == {
        "kld_by_position/corpus": [(1, 0.3), (4, 0.2)], "throughput_tok_s_by_concurrency": [(1, 10.0), (4, 40.0)],
        "agreement_by_position/free": [(2, 0.5)], "agreement_by_position/forced": [(2, 0.9)],
    }  # fmt: skip
    assert curves({"metrics": {}}, {"status": "unsupported"}) == {}


def test_a_dataset_is_a_task_s_definition_and_rows_with_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {"evalsets/tasks/facts.yaml": "a", "evalsets/tasks/facts.jsonl": "b"}
    artifacts.write_json(artifacts.meta_of(artifacts.answers("x")), {"sets": sets})
    artifacts.write_json(artifacts.REFERENCE / artifacts.MANIFEST, {"sets": {"evalsets/corpus/news.jsonl": "c"}})
    artifacts.write_json(
        artifacts.model_dir("x") / artifacts.MANIFEST, {"calibration": {"set_files": {"evalsets/calibration/own.jsonl": "d"}}}
    )
    found = datasets("x")
    assert [(d["name"], d["context"]) for d in found] == [
        ("tasks/facts", "evaluation"), ("corpus/news", "divergence"), ("calibration/own", "calibration"),
    ]  # fmt: skip
    assert all(len(d["digest"]) <= 36 for d in found)
    before = found[0]["digest"]
    artifacts.write_json(artifacts.meta_of(artifacts.answers("x")), {"sets": sets | {"evalsets/tasks/facts.jsonl": "e"}})
    assert datasets("x")[0]["digest"] != before


def test_the_comparison_shows_intervals_and_a_dash_for_what_is_unknown() -> None:
    results = {"bf16": {"metrics": {"kld_mean": figure(0.0, 0.0, 0.0)}}, "int8": {"metrics": {"kld_mean": figure(0.5, 0.4, 0.6)}}}
    rows = comparison(results, {"variants": {"int8": {"verdict": "PASS"}}}, "bf16")
    assert [r["verdict"] for r in rows] == ["REFERENCE", "PASS"]
    assert [r["KLD (nats)"] for r in rows] == ["0", "0.5 [0.4, 0.6]"] and rows[0]["TTFT (ms)"] == "–"
    assert markdown_table(rows).split("\n")[3].startswith("| int8 | PASS |")


def test_a_variant_without_a_verdict_is_never_shown_as_passing() -> None:
    assert comparison({"x": {"metrics": {}}}, {"variants": {}}, "bf16")[0]["verdict"] == "MISSING"
    assert variant_note("x", {"variants": {}}, "bf16").startswith("MISSING: ")


def test_a_failed_advisory_rule_is_called_advisory_and_has_its_unit() -> None:
    of = {"metric": "top1_agreement", **figure(0.951, 0.942, 0.96), "unit": "fraction", "n": 9, "bound": "margin 7 pp"}
    rules = [of | {"verdict": "FAIL", "required": False}, of | {"verdict": "PASS", "required": True}]
    note = variant_note("int8", {"variants": {"int8": {"verdict": "PASS", "reason": "r", "rules": rules}}}, "bf16")
    assert "- top1_agreement 95.1 [94.2, 96] %, n = 9: FAIL, advisory, margin 7 pp" in note
    assert ": PASS, margin 7 pp" in note


def test_the_saved_view_s_first_column_begins_with_the_verdict() -> None:
    assert views.COLUMNS[0] == "attributes.`Description`"
    judged = {"variants": {"int8": {"verdict": "FAIL", "reason": "r", "rules": []}}}
    assert [variant_note(n, judged, "bf16").split(":")[0] for n in ("bf16", "int8", "nf4")] == ["REFERENCE", "FAIL", "MISSING"]


def test_the_experiment_s_description_says_where_the_charts_are_in_its_first_words() -> None:
    class Client:
        told: dict[str, str] = {}

        def get_experiment(self, _: str) -> Any:
            return SimpleNamespace(creation_time=1, tags={})

        def set_experiment_tag(self, _: str, key: str, value: str) -> None:
            self.told[key] = value

    views.dress(client := Client(), "1")
    first = client.told["mlflow.note.content"][:130]
    assert all(word in first for word in ("menu `Views`", views.NAME, "`Chart view`")), "what a closed description shows"


def test_the_saved_view_fits_mlflow_s_tag() -> None:
    assert len(views.saved_view(0)) < 20_000
