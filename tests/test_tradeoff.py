"""The trade-off table: every value there is has its row, none is invented, and what a server lacks is said in words."""

from __future__ import annotations

import csv
import io
from typing import Any

from gate_house import alone

from pipeline.metrics.definitions import DEFINITIONS, definition
from pipeline.reporting import tradeoff
from pipeline.reporting.text import about, render, show
from pipeline.reporting.tradeoff import IN_PROCESS, SERVER, Point, View


def metric(value: float | None, low: float | None = None, high: float | None = None, n: int = 5, *warnings: str) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "unit": "ms", **alone(), "warnings": list(warnings)}


METRICS = {
    "bits_per_weight": metric(8.5, 8.5, 8.5, 1), "kld_mean": metric(0.006, 0.005, 0.007, 4914), "kld_mean/news": metric(0.1),
    "ttft_ms": metric(340.0, 330.0, 350.0), "tpot_ms": metric(8.4, 8.2, 8.6), "decode_tok_s": metric(119.0, 115.0, 123.0),
    "peak_memory_bytes": metric(7e8), "failure_rate": metric(0.0, 0.0, 0.4),
    "ttft_ms/context-1024": metric(1400.0, 1300.0, 1500.0, 2), "tpot_ms/context-1024": metric(9.0),
    "decode_tok_s/batch-4": metric(260.0, n=2), "peak_memory_bytes/context-1024": metric(8e8), "ttft_ms/prefix-warm": metric(20.0),
    "failure_rate/context-4096": metric(1.0),
}  # fmt: skip
for _name, _metric in METRICS.items():
    _metric["unit"] = DEFINITIONS[_name.split("/")[0]].unit


def level(ttft: float, tok_s: float, n: int) -> dict[str, Any]:
    keys = ("ttft_p95_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "e2e_p50_ms", "e2e_p99_ms")
    metrics = {
        "ttft_p50_ms": metric(ttft, ttft - 10, ttft + 10, n), "throughput_tok_s": metric(tok_s, tok_s - 5, tok_s + 5, 2),
        "throughput_req_s": metric(1.5, 1.4, 1.6, 2), "goodput_req_s": metric(1.0, 0.5, 1.5, 2),
        "attainment": metric(0.75, 0.6, 0.9, n), "failure_rate": metric(0.25, 0.1, 0.4, n), **{k: metric(ttft) for k in keys},
    }  # fmt: skip
    return {name: m | {"unit": DEFINITIONS[name].unit} for name, m in metrics.items()}


def finding(value: bool | None, reason: str | None = None) -> dict[str, Any]:
    return {"value": value, "reason": reason}


PROBE: dict[str, Any] = {
    "url": "http://h/v1", "model": "m", "api": "completions", "stream_usage": finding(True), "one_token_an_event": finding(True),
    "ignore_eos": finding(None, "the reply does not end"),
}  # fmt: skip
SERVED: dict[str, Any] = {
    "status": "ok", "reason": None, "probe": PROBE,
    "asked": {"load": {"prompt_tokens": 256}, "objective": {"ttft_ms": 500.0, "tpot_ms": None}},
    "launch": {"kind": "llamacpp", "build": "b42 (x) {}", "threads": 2, "parallel": 4, "engine_options": {"kv": "q8_0"}},
    "levels": {"closed-1": level(400.0, 50.0, 16), "closed-4": level(900.0, 90.0, 32), "open-0.5": level(410.0, 16.0, 8)},
    "knee": metric(2, 1, 2, 2), "server_memory_bytes": metric(3e8, n=1) | {"unit": "bytes"},
}  # fmt: skip
RESULTS = {"bf16": {"metrics": METRICS}, "q8": {"metrics": METRICS}}


def view(served: dict[str, Any], faults: dict[str, str] | None = None, results: dict[str, Any] = RESULTS) -> View:
    return tradeoff.view(results, served, faults or {}, (256, 64), 0.95)


def row(source: str, context: int, load: str) -> Point:
    found = tradeoff.points(RESULTS, {"q8": SERVED}, (256, 64))
    (one,) = [p for p in found if (p.variant, p.source, p.context, p.load) == ("q8", source, context, load)]
    return one


def test_every_part_of_a_speed_figure_is_a_row_and_nothing_else_is() -> None:
    found = [(p.context, p.load) for p in tradeoff.points(RESULTS, {}, (256, 64)) if p.variant == "bf16"]
    assert found == [(256, "1"), (64, "4"), (1024, "1")], "a batch's prompts are not those of the requests without part"


def test_a_context_that_the_rounds_have_too_is_one_row_and_theirs() -> None:
    swept = {f"{name}/context-256": metric(77.0, 1.0, 153.0, 2) for name in ("ttft_ms", "tpot_ms", "decode_tok_s")}
    swept |= {"tpot_ms/batch-1": metric(78.0), "tpot_ms/context-64": metric(79.0)}
    found = tradeoff.points({"a": {"metrics": METRICS | swept}, "b": {"metrics": swept}}, {}, (256, 64))
    assert [(p.variant, p.context, p.load, p.metrics["tpot_ms"]) for p in found] == [
        ("a", 256, "1", METRICS["tpot_ms"]), ("a", 64, "1", swept["tpot_ms/batch-1"]), ("a", 64, "4", None),
        ("a", 1024, "1", METRICS["tpot_ms/context-1024"]), ("b", 64, "1", swept["tpot_ms/batch-1"]),
        ("b", 256, "1", swept["tpot_ms/context-256"]),
    ]  # fmt: skip
    assert found[0].metrics["ttft_ms"] == METRICS["ttft_ms"]


def test_a_row_holds_what_was_measured_there_and_the_rest_is_not_known() -> None:
    long, batch = row(IN_PROCESS, 1024, "1").metrics, row(IN_PROCESS, 64, "4").metrics
    assert long["ttft_ms"] == METRICS["ttft_ms/context-1024"] and long["memory_bytes"] == METRICS["peak_memory_bytes/context-1024"]
    assert long["decode_tok_s"] is None and batch["ttft_ms"] is None and batch["decode_tok_s"] == METRICS["decode_tok_s/batch-4"]
    assert long["kld_mean"] == batch["kld_mean"] == METRICS["kld_mean"]


def test_what_an_engine_cannot_do_is_no_row_of_dashes_but_a_reason() -> None:
    why = metric(None, None, None, 0, "one request at a time")
    cannot = {f"{name}/batch-{b}": why for name in ("tpot_ms", "ttft_ms") for b in (4, 8)}
    shown = view({}, results={"a": {"metrics": METRICS | cannot}, "b": {"metrics": METRICS | cannot}})
    assert [r["at once"] for r in shown.rows if r["variant"] == "a"] == ["1", "4", "1"], "batch-4 has a rate in METRICS"
    assert shown.unknown == ["batch-8 of a, b: one request at a time"]
    assert "batch-8 of a, b" in render("tradeoff.md.j2", {"tradeoff": shown})


def test_each_level_of_a_server_is_a_row_of_its_own() -> None:
    served = row(SERVER, 256, "4").metrics
    assert served["ttft_ms"] == metric(900.0, 890.0, 910.0, 32) and served["memory_bytes"] == SERVED["server_memory_bytes"]
    assert served["decode_tok_s"] is None and served["throughput_tok_s"] == metric(90.0, 85.0, 95.0, 2) | {"unit": "tok/s"}
    assert row(SERVER, 256, "0.5 req/s").metrics["ttft_p99_ms"] == metric(410.0)
    assert not [p for p in tradeoff.points(RESULTS, {"q8": SERVED}, (256, 64)) if p.variant == "bf16" and p.source == SERVER]


def test_the_csv_has_every_bound_and_n_and_unknown_is_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(tradeoff.as_csv(tradeoff.points(RESULTS, {"q8": SERVED}, (256, 64))))))
    assert len(rows) == 3 + 3 + 3
    last = rows[-2]
    assert (last["variant"], last["measured"], last["context_tokens"], last["at_once"]) == ("q8", "server", "256", "4")
    assert [last[f"throughput_tok_s{e}"] for e in ("", "_low", "_high", "_n")] == ["90.0", "85.0", "95.0", "2"]
    assert last["decode_tok_s"] == last["decode_tok_s_n"] == last["memory_bytes_low"] == ""
    assert last["memory_bytes"] == "300000000.0"


def test_values_stand_with_their_interval_unit_and_n() -> None:
    page = html({"q8": SERVED}, "servers")
    cells = {"ttft_p50_ms": "900 <small>[890, 910]", "throughput_tok_s": "90 <small>[85, 95]", "failure_rate": "25 <small>[10, 40]"}
    for metric, shown in cells.items():
        assert f'title="{about(SERVED["levels"]["closed-4"][metric])}"' in page and shown in page
    assert "n = 32" in page and f'title="{about(METRICS["ttft_ms"])}"' in html({}, "tradeoff")


def test_a_value_with_a_warning_is_marked_and_the_warning_stands_below() -> None:
    few = level(400.0, 50.0, 16) | {"ttft_p99_ms": metric(500.0, 400.0, 600.0, 12, "p99 of 12 values is their maximum")}
    once = METRICS | {"peak_memory_bytes": metric(7e8, None, None, 1, "measured once: no interval")}
    shown = view({"q8": SERVED | {"levels": {"closed-1": few}}}, results={"bf16": {"metrics": once}, "q8": {"metrics": METRICS}})
    assert shown.notes == ["p99 of 12 values is their maximum: q8 (server)/(ttft_p99_ms)"]
    page = html({"q8": SERVED | {"levels": {"closed-1": few}}}, "servers")
    assert "500<sup>†</sup> <small>[400, 600]" in page and page.count("†") == 1


def test_what_a_server_lacks_is_said_in_words_and_what_is_not_known_apart() -> None:
    assert tradeoff.lacks(PROBE) == ["whether it has replies of forced length is not known: the reply does not end"]


def test_a_server_is_described_with_its_saturation_point_and_its_memory() -> None:
    (server,) = view({"q8": SERVED}).servers
    assert "llamacpp started here (2 threads, 4 at once at most, kv q8_0)" in server.about and server.build == "b42 (x) {}"
    assert "peak memory 300 MB" in server.about and server.about.endswith("objective: TTFT at most 500 ms")
    assert "saturation point: 2 requests at once (single rounds: 1 to 2; 2 rounds)" in server.about
    assert server.levels[0]["load"] == "1 at once" and server.levels[2]["load"] == "0.5 req/s"
    assert show(server.levels[1]["within objective, %"]) == "75 [60, 90]" and server.levels[1]["TTFT p50, ms"]["n"] == 32
    elsewhere = SERVED | {"launch": None, "knee": metric(None, n=0), "server_memory_bytes": metric(None, None, None, 0, "not seen")}
    (server,) = view({"q8": elsewhere}).servers
    assert server.about.startswith("m at http://h/v1 (completions)") and "memory not known: not seen" in server.about


def html(served: dict[str, Any], page: str, faults: dict[str, str] | None = None, results: dict[str, Any] = RESULTS) -> str:
    context = {"tradeoff": view(served, faults, results), "bounds": {}, "detail_rows": [], "dominated": ("", [])}
    no = dict.fromkeys(("svg", "why"))
    return render(f"{page}.html.j2", context | {"pictures": {"memory": no, "latency": no}})


def test_pages_hold_every_row_and_what_was_not_measured_with_its_reason() -> None:
    faults = {"q4": "unsupported: <no wheel>"}
    servers, inside = html({"q8": SERVED}, "servers", faults), html({"q8": SERVED}, "tradeoff", faults)
    assert servers.count('<th scope="row">') == 3 and inside.count('<th scope="row">') == 6
    assert "unsupported: &lt;no wheel&gt;" in servers and "replies of forced length is not known" in servers and "b42" in servers
    assert "95 % intervals" in inside
    wording = render("tradeoff.md.j2", {"tradeoff": view({"q8": SERVED}, faults)})
    assert "unsupported: <no wheel>" in wording and "replies of forced length is not known" in wording and "b42" not in wording
    assert "<table>" not in html({}, "tradeoff", results={"a": {"metrics": {}}})


def test_the_speed_table_has_a_cell_for_each_variant_no_row_that_nobody_has_and_metrics_only() -> None:
    results = {"a": {"metrics": {"ttft_cold_ms": metric(12.5, 12.0, 13.0)}}, "b": {"metrics": {"load_s": metric(None)}}}
    cold = results["a"]["metrics"]["ttft_cold_ms"]
    assert tradeoff.details(results) == {"TTFT of the first request after loading, ms": [cold, None]}
    assert all(map(definition, tradeoff.DETAILS.values()))
