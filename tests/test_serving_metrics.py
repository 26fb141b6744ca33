"""Request rows to metrics: closed forms, and null with a reason for what is not known."""

from typing import Any

import pytest

from pipeline.metrics.definitions import SERVED, SERVED_WHOLE, Definition
from pipeline.metrics.serving import Objective, level, memory, reuse, saturation_point

CONFIDENCE = 0.95


def row(submit: float, ttft: float, n: int, tpot: float, *, number: int | None = 0, **more: Any) -> Any:
    """A complete request of n tokens, one per event."""
    times = [submit + ttft + k * tpot for k in range(n)]
    return {
        "round": number, "warmup": number is None, "t_submit": submit, "t_first": times[0], "t_content": times[0],
        "t_tokens": times, "t_chunks": times, "t_last": times[-1], "t_done": times[-1], "t_end": times[-1], "output_tokens": n,
        "cached_tokens": 0, "forced": False, "counted_by": "usage", "ok": True, "fault": None, "error": None,
    } | more  # fmt: skip


def failed(submit: float, end: float, fault: str, **more: Any) -> Any:
    return row(submit, end - submit, 1, 0.0) | {
        "ok": False, "fault": fault, "error": fault, "t_tokens": None, "t_chunks": [], "t_first": None, "t_content": None,
        "t_last": None, "output_tokens": None, "cached_tokens": None, "t_end": end,
    } | more  # fmt: skip


def test_one_round_by_hand() -> None:
    """Two at once, 5 tokens each: 0.2 + 4 x 0.1 and 0.3 + 4 x 0.2 seconds; a failed one ends at 2 s."""
    found = level([row(0, 0.2, 5, 0.1), row(0, 0.3, 5, 0.2), failed(0, 2.0, "timeout")], CONFIDENCE)
    assert found["ttft_p50_ms"]["value"] == pytest.approx(200) and found["ttft_p95_ms"]["value"] == pytest.approx(300)
    assert found["tpot_p99_ms"]["value"] == pytest.approx(200) and found["e2e_p99_ms"]["value"] == pytest.approx(1100)
    assert found["itl_p50_ms"]["n"] == 8 and found["itl_p95_ms"]["value"] == pytest.approx(200)
    assert found["failure_rate"]["value"] == found["timeout_rate"]["value"] == pytest.approx(1 / 3)
    assert found["throughput_req_s"]["value"] == pytest.approx(2 / 2.0), "a failed request's time is in the wall time"
    assert found["throughput_tok_s"]["value"] == pytest.approx(10 / 2.0), "its tokens are not in the throughput"
    assert "1 failed requests are left out" in found["ttft_p50_ms"]["warnings"]


def test_replies_without_any_token_are_no_success() -> None:
    empty = {"t_first": None, "t_content": None, "t_last": None, "t_tokens": [], "t_chunks": [], "output_tokens": 0}
    rows = [row(k, 0.2, 1, 0.0, number=k) | empty for k in range(30)]
    found = level(rows, CONFIDENCE, Objective(e2e_ms=1000))
    for name in ("failure_rate", "attainment", "throughput_req_s"):
        assert found[name]["low"] is None and "nothing was served" in found[name]["warnings"][-1], name


def test_rates_are_means_over_rounds_with_an_interval() -> None:
    rows = [row(10 * k, 0.5, 6, 0.1 + 0.1 * k, number=k) for k in range(3)]  # 6 tokens in 1.0, 1.5, 2.0 s
    rate = level(rows, CONFIDENCE)["throughput_tok_s"]
    assert rate["value"] == pytest.approx((6 + 4 + 3) / 3) and rate["n"] == 3 and rate["low"] < rate["value"] < rate["high"]
    single = level(rows[:1], CONFIDENCE)["throughput_tok_s"]
    assert single["low"] is None and "no interval can be made" in single["warnings"][0]
    rate = level([row(0, 0.1, 2, 0.1, number=0), row(9, 1.0, 2, 3.0, number=1)], CONFIDENCE)["throughput_req_s"]
    assert rate["low"] == 0 < rate["value"] and "2 rounds are few" in rate["warnings"][0], "and none below 0"


def test_warm_ups_count_as_warm_ups_only() -> None:
    rows = [row(0, 9.0, 5, 1.0, number=None), row(20, 0.2, 5, 0.1), row(21, 0.2, 5, 0.1)]
    found = level(rows, CONFIDENCE)
    assert found["ttft_p99_ms"]["value"] == pytest.approx(200) and found["warmups"]["value"] == 1
    assert "no warm-up" in level(rows[1:], CONFIDENCE)["warmups"]["warnings"][0]


@pytest.mark.parametrize("n, is_warned", [(99, True), (100, False)])
def test_p99_of_fewer_than_100_values_carries_a_warning(n: int, is_warned: bool) -> None:
    warnings = level([row(k, 0.2, 2, 0.1) for k in range(n)], CONFIDENCE)["ttft_p99_ms"]["warnings"]
    assert any("little more than their maximum" in w for w in warnings) is is_warned


def test_one_token_replies_are_counted_and_have_no_tpot() -> None:
    found = level([row(0, 0.2, 1, 0.0), row(1, 0.2, 1, 0.0)], CONFIDENCE)
    assert found["one_token_replies"]["value"] == 2 and found["tpot_p50_ms"]["value"] is None
    assert "2 of 2 complete replies are left out" in found["tpot_p50_ms"]["warnings"][0]
    mixed = level([row(0, 0.2, 1, 0.0), row(1, 0.2, 3, 0.1)], CONFIDENCE)
    assert mixed["tpot_p50_ms"]["n"] == 1 and any("1 of 2" in w for w in mixed["tpot_p50_ms"]["warnings"])


def test_tokens_that_came_without_an_event_of_their_own_are_said_where_they_matter() -> None:
    held = row(0, 0.2, 5, 0.1, output_tokens=7, t_tokens=None, t_last=0.8)
    found = level([held, row(1, 0.2, 5, 0.1), row(2, 0.2, 5, 0.1, output_tokens=3, t_tokens=None)], CONFIDENCE)
    assert found["tpot_p99_ms"]["value"] == pytest.approx(200) and found["e2e_p99_ms"]["value"] == pytest.approx(800)
    for name in ("ttft_p50_ms", "tpot_p50_ms", "e2e_p99_ms"):
        words = " ".join(found[name]["warnings"])
        assert "1 of 3 complete replies came in fewer events" in words and "1 of 3 complete replies came in more events" in words
    assert "2 of 3 complete replies are left out" in " ".join(found["itl_p50_ms"]["warnings"])
    assert "events" not in " ".join(level([row(0, 0.2, 5, 0.1)], CONFIDENCE)["tpot_p50_ms"]["warnings"])


def test_a_forced_length_that_nothing_verifies_is_said() -> None:
    sure, unsure = {"forced": True, "counted_by": "usage"}, {"forced": True, "counted_by": "tokenizer, joined text"}
    found = level([row(0, 0.2, 5, 0.1, **sure), row(1, 0.2, 5, 0.1, **unsure)], CONFIDENCE)
    assert "length unverified: 1 of 2" in found["output_tokens_min"]["warnings"][0]
    unknown = level([row(0, 0.2, 5, 0.1, **unsure, output_tokens=None)], CONFIDENCE)
    assert "length unverified: 1 of 1" in unknown["output_tokens_min"]["warnings"][0]
    for free in (sure, unsure | {"forced": False}):
        assert not level([row(0, 0.2, 5, 0.1, **free)], CONFIDENCE)["output_tokens_min"]["warnings"]


def test_replies_of_different_lengths_and_cached_prompts_are_said_to_be_incomparable() -> None:
    found = level([row(0, 0.2, 5, 0.1), row(1, 0.2, 9, 0.1, cached_tokens=64)], CONFIDENCE)
    assert (found["output_tokens_min"]["value"], found["output_tokens_max"]["value"]) == (5, 9)
    assert "not comparable" in found["output_tokens_min"]["warnings"][0] and "prefix cache" in found["cached_tokens"]["warnings"][0]
    same = level([row(0, 0.2, 5, 0.1)], CONFIDENCE)
    assert not same["output_tokens_min"]["warnings"] and not same["cached_tokens"]["warnings"]


def test_tokens_that_are_not_known_leave_null_and_a_reason_and_never_a_number() -> None:
    found = level([row(0, 0.2, 5, 0.1, output_tokens=None, t_tokens=None), row(1, 0.2, 5, 0.1)], CONFIDENCE)
    assert found["throughput_tok_s"]["value"] is None and "1 of 2 replies" in found["throughput_tok_s"]["warnings"][0]
    assert found["throughput_req_s"]["value"] is not None and found["itl_p50_ms"]["n"] == 4


def test_when_everything_failed_only_the_rates_of_failure_remain() -> None:
    found = level([failed(0, 1, "reset"), failed(1, 2, "cut")], CONFIDENCE, Objective(ttft_ms=100))
    assert found["failure_rate"]["value"] == 1 and found["timeout_rate"]["value"] == 0
    assert found["throughput_req_s"]["value"] == 0 and found["attainment"]["value"] == 0
    for name in ("ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "e2e_p50_ms", "output_tokens_min", "cached_tokens"):
        assert found[name]["value"] is None and found[name]["warnings"], name


def test_every_share_of_requests_is_as_sure_as_its_rounds() -> None:
    """Ten requests a round, of which 0, 1, 2 time out: by hand, mean 0.1, standard error 0.1 / sqrt(3), t(2) 4.303."""
    rows = []
    for number in range(3):
        rows += [row(20 * number, 0.2, 5, 0.1, number=number) for _ in range(10 - number)]
        rows += [failed(20 * number, 20 * number + 9, "timeout", round=number) for _ in range(number)]
    found, half = level(rows, CONFIDENCE, Objective(ttft_ms=500)), 4.302653 * 0.1 / 3**0.5
    for name, share in (("failure_rate", 0.1), ("timeout_rate", 0.1), ("attainment", 0.9)):
        assert found[name]["value"] == pytest.approx(share) and found[name]["n"] == 30
        assert found[name]["low"] == pytest.approx(max(share - half, 0)), name
        assert found[name]["high"] == pytest.approx(min(share + half, 1)), name
    alone = level([r for r in rows if r["round"] == 2], CONFIDENCE, Objective(ttft_ms=500))
    for name in ("failure_rate", "timeout_rate", "attainment"):
        assert alone[name]["low"] is alone[name]["high"] is None and "one round" in alone[name]["warnings"][0], name


def test_goodput_counts_what_meets_every_limit() -> None:
    rows = [row(0, 0.2, 5, 0.1), row(0, 0.6, 5, 0.1), row(0, 0.2, 5, 0.5), row(0, 0.2, 1, 0.0), failed(0, 4, "http")]
    found = level(rows, CONFIDENCE, Objective(ttft_ms=500, tpot_ms=200))
    assert found["goodput_req_s"]["value"] == pytest.approx(2 / 4) and found["attainment"]["value"] == pytest.approx(2 / 5)
    assert level(rows, CONFIDENCE, Objective(e2e_ms=1001))["attainment"]["value"] == pytest.approx(3 / 5)
    unstated = level(rows, CONFIDENCE)
    assert unstated["goodput_req_s"]["value"] is None and "no objective" in unstated["goodput_req_s"]["warnings"][0]
    unknown = row(0, 0.2, 5, 0.1, output_tokens=None)  # a limit that cannot be checked is not met
    assert not Objective(tpot_ms=1e9).met(unknown) and Objective(ttft_ms=1e9).met(unknown)
    assert not Objective().met(failed(0, 1, "cut"))


def test_an_open_loop_s_client_says_how_late_it_was() -> None:
    calm = [row(k + 0.001, 0.2, 5, 0.1, t_due=float(k)) for k in range(10)]
    late = [row(k + 0.1, 0.2, 5, 0.1, t_due=float(k)) for k in range(10)]
    found = level(calm, CONFIDENCE)["client_lag_p99_ms"], level(late, CONFIDENCE)["client_lag_p99_ms"]
    assert [f["value"] for f in found] == pytest.approx([1, 100])
    assert "sent late" not in found[0]["warnings"][0] and "sent late" in found[1]["warnings"][0]


def closed(latency: dict[int, float], rounds: int = 2) -> dict[int, list[Any]]:
    """{concurrency: rows} of a server that answers c at once in latency[c] seconds, so c / latency a second."""
    return {
        c: [row(100 * k, seconds / 2, 2, seconds / 2, number=k) for k in range(rounds) for _ in range(c)]
        for c, seconds in latency.items()
    }


@pytest.mark.parametrize("latency, point", [
    ({1: 1.0, 2: 1.0, 4: 1.1, 8: 4.0, 16: 9.0}, 4), ({1: 1.0, 2: 2.0, 4: 4.0}, 1),
    ({1: 1.0, 2: 1.0, 4: 1.0}, "still pays for latency at 4"), ({2: 1.0, 4: 2.0, 8: 4.0}, "best at 2 at once, and nothing lower"),
    ({}, "0 levels"), ({1: 1.0, 2: 1.0}, "2 levels"),
])  # fmt: skip
def test_saturation_is_where_throughput_stops_paying_for_latency_and_unknown_where_it_was_not_reached(
    latency: dict[int, float], point: int | str
) -> None:
    """Throughput over latency is c / latency², in the first case 1, 2, 4 / 1.21, 8 / 16 and so on: greatest at 4."""
    found = saturation_point(closed(latency), 0.95)
    if isinstance(point, int):
        assert found["value"] == found["low"] == found["high"] == point and found["n"] == 2 and not found["warnings"]
    else:
        assert found["value"] is None and point in found["warnings"][0]


def test_a_level_without_a_complete_request_is_not_compared() -> None:
    broken = closed({1: 1.0, 2: 1.0, 4: 3.0}) | {2: [failed(0, 1, "reset")]}
    assert "2 levels" in saturation_point(broken, 0.95)["warnings"][0]


def test_rounds_that_disagree_about_the_saturation_point_say_so() -> None:
    levels = closed({1: 1.0, 2: 1.0, 4: 3.0, 8: 9.0}, rounds=1)
    levels[1] += [row(100, 0.1, 2, 0.1, number=1)]
    for c in (2, 4, 8):
        levels[c] += [row(100, 2.0, 2, 2.0, number=1)] * c
    found = saturation_point(levels, 0.95)
    assert (found["low"], found["high"]) == (1, 2) and "disagree" in found["warnings"][0]


def test_every_metric_is_defined_with_its_direction_and_says_how_sure_it_is() -> None:
    found = level([row(0, 0.2, 5, 0.1, t_due=0.0), failed(0, 1, "cut", t_due=0.5)], CONFIDENCE, Objective(ttft_ms=1))
    found |= reuse([], CONFIDENCE)
    assert found.keys() | set(SERVED_WHOLE) == SERVED.keys() and all(isinstance(d, Definition) for d in SERVED.values())
    for name, metric in found.items():
        assert metric["unit"] == SERVED[name].unit and metric["method"]
        assert metric["low"] is not None or metric["warnings"], name


def test_memory_that_is_not_seen_is_null_with_the_reason() -> None:
    assert memory(3_000, "", CONFIDENCE)["value"] == 3_000 and memory(3_000, "", CONFIDENCE)["low"] is None
    unknown = memory(None, "it runs elsewhere", CONFIDENCE)
    assert unknown["value"] is None and unknown["warnings"] == ["it runs elsewhere"] and unknown["unit"] == "bytes"


def test_what_a_known_beginning_saves_is_paired_and_what_a_server_does_not_say_is_null() -> None:
    made = [(k, name, first, n) for k in range(4) for name, first, n in (("cold", 1.0 + k, 0), ("warm", (1.0 + k) / 5, 80))]
    known = {"prompt_tokens": 100}
    rows = [row(k, first, 4, 0.1, number=k, scenario=f"prefix-{name}", cached_tokens=n, **known) for k, name, first, n in made]
    found = reuse(rows, CONFIDENCE)
    assert found["prefix_gain"]["value"] == pytest.approx(5) and found["prefix_gain"]["n"] == 4
    assert found["prefix_hit_rate"]["value"] == pytest.approx(0.8) and found["prefix_same"]["value"] is None
    silent = reuse([r | {"cached_tokens": None} for r in rows], CONFIDENCE)["prefix_hit_rate"]
    assert silent["value"] is None and "does not say" in silent["warnings"][0]
