"""Metrics of free-running replies, paired with the reference's by prompt; garbled text is detected in any language."""

from typing import Any

import numpy as np
import pytest
from gate_house import builder
from scipy.stats import binom

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Metrics
from pipeline.metrics import generation

MOST = 24


def reply(k: int, tokens: list[int], **more: Any) -> Any:
    text = " ".join(f"word{t}" for t in tokens)
    return {"id": f"p{k}", "prompt": "Go on.", "token_ids": tokens, "text": text, "cut": len(tokens) >= MOST, **more}


REFERENCE = [reply(k, list(range(100 * k, 100 * k + MOST)), again=list(range(100 * k, 100 * k + MOST))) for k in range(16)]


def metrics(rows: list[Any], is_reference: bool = False, reference: list[Any] = REFERENCE) -> Metrics:
    b = builder()
    assert generation.free_metrics(b, generation.pair(rows, reference), MOST, is_reference) is None
    return b.metrics


def test_the_reference_beside_itself_is_the_same_everywhere() -> None:
    m = metrics(REFERENCE, is_reference=True)
    assert m["free_same"]["value"] == 1 and m["free_same"]["n"] == 16 and m["free_same_floor"]["value"] == 1
    assert m["free_departure"]["value"] is None and "never differ" in m["free_departure"]["warnings"][0]
    assert all(m[name]["value"] == 0 for name in m if name.endswith("_delta"))


def test_where_the_reference_and_the_variant_are_both_silent_no_interval_says_that_nothing_was_lost() -> None:
    silent = [reply(k, []) for k in range(16)]
    m = metrics(silent, reference=silent)
    for name in ("free_same", "free_empty_delta", "free_garbled_delta"):
        assert m[name]["low"] is None and "nothing could" in m[name]["warnings"][0], name


def test_a_reference_that_another_batch_size_moves_says_how_often() -> None:
    m = metrics([r if k else {**r, "again": [7]} for k, r in enumerate(REFERENCE)], is_reference=True)
    assert m["free_same_floor"]["value"] == pytest.approx(15 / 16) and m["free_same"]["value"] == 1


def test_a_degenerate_variant_that_loops_is_seen_unless_the_reference_loops_as_well() -> None:
    looping = [reply(k, [1, 2, 3] * 8) for k in range(16)]
    m = metrics(looping)
    assert m["free_loop"]["value"] == 1 and m["free_garbled"]["value"] == 1
    assert m["free_loop_delta"]["value"] == pytest.approx(100) and m["free_loop_delta"]["low"] > 50
    assert m["free_repetition"]["value"] == pytest.approx(18 / 21)
    assert m["free_repetition_delta"]["value"] == pytest.approx(1800 / 21)
    both = metrics(looping, reference=looping)
    assert both["free_loop"]["value"] == 1 and both["free_loop_delta"]["value"] == 0


def test_an_empty_reply_counts_once_as_garbled_and_has_no_repetition() -> None:
    m = metrics([reply(0, [5], text=""), *REFERENCE[1:]])
    assert m["free_empty"]["value"] == m["free_garbled"]["value"] == pytest.approx(1 / 16)
    assert m["free_repetition"]["n"] == 15


@pytest.mark.parametrize("n, ranks", [(6, (1, 6)), (16, (4, 13)), (25, (8, 18))])
def test_the_median_s_interval_is_that_of_the_tables(n: int, ranks: tuple[int, int]) -> None:
    """Ranks of the 95 % interval as printed in tables of the sign test, and the coverage they promise."""
    found = generation.median_position(list(range(1, n + 1)), 1000, confidence=0.95)
    assert (found.low, found.high) == ranks
    assert 1 - 2 * binom.cdf(ranks[0] - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(ranks[0], n, 0.5)


def test_a_reply_that_never_differs_ranks_behind_every_number() -> None:
    found = generation.median_position([1, 2, 3, 4, 5, 6, 7, 8, 9, *[None] * 7], 48, confidence=0.95)
    assert found.value == 8 and found.low == 4 and found.high == 48 and "upper bound lies beyond" in found.warnings[0]
    few = generation.median_position([3, 4, 5], 48, confidence=0.95)
    assert few.value == 4 and few.low is None and "too few" in few.warnings[0]


def test_other_prompts_are_not_paired() -> None:
    with pytest.raises(ArtifactError, match="not the same prompts"):
        generation.pair(REFERENCE[1:], REFERENCE)


def test_no_reply_at_all_is_a_reason_and_no_metric() -> None:
    b = builder()
    assert "no trajectory prompt" in str(generation.free_metrics(b, [], MOST, False)) and not b.metrics


def test_agreement_by_position_decays_as_the_replies_do() -> None:
    rows = []
    for k, r in enumerate(REFERENCE):  # the first four differ at token 3, the next four at token 10
        at = 3 if k < 4 else 10 if k < 8 else None
        ids = list(r["token_ids"])
        rows.append(reply(k, ids if at is None else [*ids[: at - 1], -1, *ids[at:]]))
    tokens = {
        "set": ["news"] + ["trajectory"] * 8, "window": ["d", *["w0"] * 4, *["w1"] * 4],
        "position": [1, 10, 11, 12, 13, 7, 8, 9, 10],
        "top1": [0, 1, 1, 1, 1, 1, 1, 1, 2], "top1_ref": [1] * 9,
    }  # fmt: skip
    curve = generation.by_position(builder(), generation.pair(rows, REFERENCE), tokens, MOST)
    free = {c["position"]: c["free"]["value"] for c in curve}
    assert free == {1: 1, 2: 1, 4: 0.75, 8: 0.75, 16: 0.5, MOST: 0.5}
    forced = {c["position"]: c["forced"] and (c["forced"]["value"], c["forced"]["n"]) for c in curve}
    assert forced == {1: (1, 2), 2: (1, 2), 4: (0.75, 4), 8: None, 16: None, MOST: None}
    assert np.all(np.diff(list(free.values())) <= 0)
    alone = generation.by_position(builder(), generation.pair(REFERENCE, REFERENCE), None, MOST)
    assert all(c["free"]["value"] == 1 and c["forced"] is None for c in alone), "without token rows only the free curve is there"


# --- faults of one reply -----------------------------------------------------------------------------------------

GOOD = {
    "english": "The ferry had already left when Odile noticed that the suitcase was not hers.",
    "german": "Größere Äpfel kosten übrigens weniger, sagte der Müller; „ß“ bleibt ß.",
    "chinese": "冬天说话时嘴里会冒白气，因为热气遇冷变成小水滴。",
    "japanese": "駅までの道をカメラで撮りました。とてもきれいでした。",
    "arabic": "وصلت السفينة إلى الميناء قبل الفجر.",
    "hindi": "नाव सुबह होने से पहले पहुँच गई।",
    "korean": "배는 새벽 전에 항구에 도착했다.",
    "code": "for (let i = 0; i < n; i++) {\n    total += rows[i].cents;\n}\nreturn total;",
    "emoji": "Well done! 🎉👩‍👩‍👧 See you 🇩🇪 ☕️",
    "maths": "Let π ≈ 3.14 and 𝑥 ∈ ℝ; then Δ = b² − 4ac, about 5 µm.",
}


def found(text: str, prompt: str, reference: str = "", cut: bool = False) -> set[str]:
    row: Any = {"text": text, "token_ids": text.split(), "cut": cut, "prompt": prompt}
    return {k for k, bad in generation.faults_of(row, reference or text).items() if bad}


@pytest.mark.parametrize("name", GOOD)
def test_good_text_of_any_language_has_no_fault_and_signs_are_no_other_script_than_english(name: str) -> None:
    text = GOOD[name]
    assert not found(text, prompt=text[: len(text) // 2])
    if name in ("emoji", "maths", "code", "english"):
        assert not generation.foreign_scripts(text, "Say it in English.", "Certainly.")


@pytest.mark.parametrize("reply, prompt, reference, scripts", [
    ("The dog 的 barked.", "Tell a story.", "The dog barked.", ["CJK"]),
    ("The dog лаял all night.", "Tell a story.", "The dog barked.", ["CYRILLIC"]),
    ("The angle π is half a turn.", "Tell me of circles.", "The angle is half a turn.", []),
    ("The dog 的 barked.", "Tell a story about 狗.", "The dog barked.", []),
    ("The dog 的 barked.", "Tell a story.", "The dog (狗) barked.", []),
    ("我在 GitHub 上用 Python 写代码，它在我的电脑上运行。", "你做什么工作？", "我写代码。", []),
    ("I am a helpful assistant.", "你做什么工作？", "我写代码。", ["LATIN"]),
    ("カメラで", "駅の写真", "写真です", []), ("ひらがな", "你做什么工作？", "我写代码。", ["KANA"]),
    ("漢字", "ひらがなで", "ください", []),
    ("ＦＵＬＬ width", "plain", "plain", []), ("anything at all", "1 + 1 =", "2", []),
])  # fmt: skip
def test_another_script_is_one_that_neither_prompt_nor_reference_uses(
    reply: str, prompt: str, reference: str, scripts: list[str]
) -> None:
    assert generation.foreign_scripts(reply, prompt, reference) == scripts


@pytest.mark.parametrize("tokens, run", [
    ("a b c d " * 3, 12), ("so it went a b c d " + "a b c d " * 2, 12), ("a b c d " * 2, 0), ("x " * 12, 12), ("x " * 11, 0),
    ("a b c d " * 3 + "and then the end", 0), ("start a b c d e f g " + "a b c d e f g " * 2 + "a b c", 24),
    ("one two three four five six seven eight nine ten eleven twelve thirteen", 0), ("", 0),
])  # fmt: skip
def test_a_loop_is_a_block_three_times_over_twelve_tokens_at_the_end(tokens: str, run: int) -> None:
    assert generation.repeated_tail(tokens.split()) == run
    assert generation.repeated_tail("看到了它的" * 6) == 30, "in every language"


def test_repetition_is_the_share_of_four_grams_seen_before() -> None:
    assert generation.repetition("a b c d a b c d".split()) == pytest.approx(1 / 5)  # of five 4-grams only abcd returns
    assert generation.repetition(["x"] * 8) == pytest.approx(4 / 5)
    assert generation.repetition("a b c d e".split()) == 0
    assert generation.repetition(["a"] * 3) is None


@pytest.mark.parametrize("text, cut, count", [
    ("good 白\ufffd", True, 0), ("good 白\ufffd", False, 1), ("bad \ufffd in the middle", True, 1), ("\ufffd" * 5, True, 2),
    ("good", True, 0),
])  # fmt: skip
def test_a_character_that_the_limit_cut_is_not_broken(text: str, cut: bool, count: int) -> None:
    assert generation.broken_characters(text, "a prompt", cut) == count
    assert generation.broken_characters(text, "what is \ufffd ?", cut) == 0, "the prompt has broken characters itself"


def test_an_empty_reply_is_empty_and_nothing_else() -> None:
    assert found(" \n", "Say it.", "Something.") == {"empty"}


def test_a_reply_departs_at_the_first_token_that_differs() -> None:
    assert generation.departure([1, 2, 3], [1, 2, 3]) is None
    assert generation.departure([1, 9, 3], [1, 2, 3]) == 2
    assert generation.departure([1, 2], [1, 2, 3]) == 3
    assert generation.departure([], []) is None
