"""What is logged: names that cannot collide, curves along their axes, datasets as they were recorded."""

from pathlib import Path
from typing import Any

import pytest
from gate_house import metric

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.tracking.runs import costs, curves, datasets, flat_metrics


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


def test_a_dataset_is_a_task_s_definition_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {"evalsets/tasks/facts.yaml": "a", "evalsets/tasks/facts.jsonl": "b"}
    meta = {"variant": "x", "model": "m", "status": "ok", "reason": None, "batch_size": 1, "seed": 0, "versions": {}, "once": None}
    artifacts.write_json(artifacts.meta_of(artifacts.answers("x")), meta | {"sets": sets})
    calibration: Any = {"calibration": {"set_files": {"evalsets/calibration/own.jsonl": "d"}}}
    assert datasets("x", calibration) == [
        ("tasks/facts", "evaluation", sets), ("calibration/own", "calibration", {"evalsets/calibration/own.jsonl": "d"}),
    ]  # fmt: skip


def test_what_a_stage_took_is_a_metric_of_its_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert costs("int8") == {}
    artifacts.write_json(artifacts.RUNS / "diverge@int8.json", {"wall_s": 20.5, "peak_memory_bytes": 7, "finished": "t"})
    assert costs("int8") == {"stage_s/diverge": 20.5, "stage_peak_memory_bytes/diverge": 7.0}
