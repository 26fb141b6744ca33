"""Garbled text is found in any language, and good text in any language is left alone."""

from typing import Any

import pytest

from pipeline.metrics import generation

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
