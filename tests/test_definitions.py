"""What the table of metrics says: directions, parts, and what a value cannot pass."""

import numpy as np

from pipeline.metrics.definitions import IN_PROCESS, TOKEN_PARTS, bounds_of, definition, position_parts

BETTER_HIGH = (
    "top1_agreement top5_agreement first_departure never_departs delta_p_mean acc acc_depth acc_delta score_delta recovery "
    "acc_depth_delta flips_to_right p_mcnemar "
    "prefill_tok_s decode_tok_s speed_ratio prefill_ratio mbu mfu free_same free_same_floor "
    "free_departure draft_step draft_step_sampled draft_overlap spec_step spec_accepted spec_speed_ratio spec_e2e_ratio spec_same"
)


def test_direction_belongs_to_the_metric() -> None:
    assert {name for name, what in IN_PROCESS.items() if what.better == "higher"} == set(BETTER_HIGH.split())
    assert definition("acc/facts") is IN_PROCESS["acc"] and definition("kld_mean/news") is IN_PROCESS["kld_mean"]
    assert definition("kld_maen") is None
    assert all(definition(f"top1_agreement/{part}") is IN_PROCESS["top1_agreement"] for part in TOKEN_PARTS)


def test_a_position_belongs_to_the_part_that_names_it() -> None:
    assert list(position_parts([1, 31, 32, 127, 128, 511, 512, 9999])) == [
        "1-31", "1-31", "32-127", "32-127", "128-511", "128-511", "512-up", "512-up",
    ]  # fmt: skip


def test_what_a_figure_cannot_pass() -> None:
    assert bounds_of("top1_agreement/news") == (0, 1) and bounds_of("kld_mean") == (0, np.inf)
    assert bounds_of("delta_p_mean") == bounds_of("acc_delta/all") == (-1, 1), "a change has two sides"


def test_every_metric_says_its_unit_and_meaning() -> None:
    assert all(d.unit and d.about for d in IN_PROCESS.values())
