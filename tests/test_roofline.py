"""What bounds a phase: closed forms at and around the stated share, and never a claim from what is not known."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.speed.roofline import SHARE, Phase, cache_bytes, compare_phases, products, shape_of

# 100 bytes and 1000 operations in a second, on a machine that does so many a second
PHASE = Phase("decode", "a token", seconds=1.0, bytes=100.0, operations=1000.0, bandwidth=400.0, rate=9000.0, rate_of="float32")


@pytest.mark.parametrize("bandwidth, rate, bound", [
    (100 / SHARE, 9000, "bandwidth"),
    (101 / SHARE, 90000, "bandwidth"),  # half of it, with the products
    (110 / SHARE, 90000, "overhead"), (400, 1000 / SHARE, "compute"), (10000, 1010 / SHARE, "compute"),
    (10000, 1100 / SHARE, "overhead"),
    (250, 9000, "bandwidth"),  # 40 and 11 percent
    (400, 4100, "overhead"),
    (400, 3990, "compute"),  # 25 percent and a little more
    (110, 1050, "compute"), (105, 1100, "bandwidth"), (None, 9000, None), (400, None, None), (None, 1000, "compute"),
    (100, None, "bandwidth"), (None, None, None),
])  # fmt: skip
def test_a_phase_is_bound_by_the_larger_share_where_both_are_half_of_its_time(bandwidth: Any, rate: Any, bound: str | None) -> None:
    phase = replace(PHASE, bandwidth=bandwidth, rate=rate)
    assert phase.bound == bound
    assert phase.sentence().startswith(f"decode is {bound}-bound" if bound else "what bounds decode is not known (not measured)")


def test_the_sentence_holds_the_figures_behind_it() -> None:
    phase = replace(PHASE, seconds=0.027, bytes=115e6, operations=269e6, bandwidth=38e9, rate=250e9)
    assert phase.sentence() == (
        "decode is overhead-bound: it takes 27 ms a token, reads 115 MB, 11 % of the 38 GB/s measured, and multiplies at "
        "9.96 GFLOP/s, 4 % of the 250 measured (float32); together less than 50 % of its time"
    )
    assert replace(phase, rate=None).sentence().endswith("reads 115 MB, 11 % of the 38 GB/s measured")


def test_what_the_interval_of_the_time_leaves_open_is_said() -> None:
    phase = replace(PHASE, bandwidth=190.0, span=(0.9, 1.3))
    assert phase.bound is None and phase.bounds() == ["bandwidth", "overhead"]
    assert phase.sentence().startswith(
        "decode is bandwidth or overhead-bound (the interval of its time, 900 to 1300 ms, leaves that open)"
    )
    assert replace(phase, span=(0.95, 1.02)).bound == "bandwidth"


def test_more_than_all_of_a_rate_is_a_yardstick_of_something_else() -> None:
    phase = replace(PHASE, rate=900.0)
    assert phase.bound is None and "its own products are faster than the one that was timed" in phase.sentence()
    assert replace(phase, bandwidth=150.0).bound == "bandwidth", "what is known may decide"


@pytest.mark.parametrize("ratio, how", [
    ((1.4, 1.3, 1.5), "is faster than"), ((0.7, 0.6, 0.8), "is slower than"),
    ((1.1, 0.9, 1.3), "is not surely faster or slower than"), ((1.1, None, None), "is not surely faster or slower than"),
])  # fmt: skip
def test_faster_and_slower_are_claimed_with_the_whole_interval_only(ratio: Any, how: str) -> None:
    assert f"int4 {how} bf16 here" in compare_phases("int4", PHASE, "bf16", replace(PHASE, seconds=2.0), *ratio)


def test_why_depends_on_what_binds_the_variant() -> None:
    ratio = (1.4, 1.3, 1.5)
    sentences = [
        compare_phases("int4", replace(PHASE, bandwidth=b, rate=r), "bf16", PHASE, *ratio).rpartition("; ")[2]
        for b, r in ((100, 9000), (400, 1000), (400, 10000), (None, None))
    ]
    assert "memory holds it" in sentences[0] and "products hold it" in sentences[1]
    assert sentences[2].startswith("at the rates measured reading and multiplying need 35 % of its time at most (bf16: 36 %)")
    assert "reads 0.0001 MB" in sentences[3], "nothing is claimed of what is not known"


LLAMA = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "vocab_size": 49152,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_cache_bytes_follow_the_config() -> None:
    assert cache_bytes(shape_of(LLAMA), 2.0) == 2 * 30 * 3 * 64 * 2 == 23040
    assert cache_bytes(shape_of({**LLAMA, "head_dim": 128}), 2.0) == 46080
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert cache_bytes(shape_of(without), 2.0) == 3 * 23040, "every head has keys and values of its own"
    assert cache_bytes(shape_of({"model_type": "mixed", "text_config": LLAMA}), 2.0) == 23040
    assert cache_bytes(shape_of({}), 2.0) is None and cache_bytes(shape_of(LLAMA), None) is None


def test_an_embedding_multiplies_nothing_and_a_tied_one_is_the_head() -> None:
    table = 576 * 49152
    assert products(shape_of({**LLAMA, "tie_word_embeddings": True}), 134_515_008) == (134_515_008 - table, table)
    assert products(shape_of(LLAMA), 134_515_008) == (134_515_008 - 2 * table, table)
    assert products(shape_of({**LLAMA, "tie_word_embeddings": None}), 134_515_008) is None, "not known is not untied"
    assert products(shape_of({**LLAMA, "num_local_experts": 8}), 1e9) is None and products(shape_of({}), 1e9) is None
