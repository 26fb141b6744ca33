"""Every token has one class, whichever way its characters were cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from pipeline.evalset import load_texts
from pipeline.evalset.token_classes import class_of, classes
from pipeline.metrics.definitions import TOKEN_CLASSES

KINDS = {
    "words": (" council", "é", "3rd"), "digits": ("2026", " 7", "½", "３"), "punctuation": (",", ' ("', "+=", "。", "、"),
    "cjk": ("雨", "ひらがな", "ㄅ", "한국", " 3月"), "whitespace": ("\n\n", "\u3000"), "other": ("", "\x07", "\ufffd"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_of_the_class_of_its_text_and_in_a_program_all_but_the_marks_is_code(kind: str) -> None:
    assert {class_of(text, special=False, code=False) for text in KINDS[kind]} == {kind} and kind in TOKEN_CLASSES
    assert {class_of(text, special=False, code=True) for text in KINDS[kind]} == {"code"}
    assert {class_of(text, special=True, code=True) for text in KINDS[kind]} == {"special"}


def whole(text: str) -> list[str]:
    return [class_of(c, special=False, code=False) for c in text for _ in c.encode()]


@pytest.mark.parametrize("ids, expected", [
    *(([*text.encode()], whole(text)) for text in ("雨が降る", "a雨 7,\n", "雨", "é½한")),
    # bytes that are no character stay other and hide nothing after them; a mark ends a character that was cut off
    ([0x41, 0xFF, 0x42, 0x20, 0x37, 0xE9, 0xFF], ["words", "other", "words", "whitespace", "digits", "other", "other"]),
    ([*"雨".encode()[:2], 1, *b"x"], ["other", "other", "special", "words"]),
])  # fmt: skip
def test_characters_cut_into_bytes_are_classed_by_the_whole_character(ids: list[int], expected: list[str]) -> None:
    assert classes(ids, lambda some: bytes(some).decode(errors="replace"), {1}, "news") == expected


def test_every_token_of_the_corpora_has_a_class_and_the_marks_are_special(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = set(tokenizer.all_special_ids)
    seen = {}
    for row in load_texts(ROOT / "evalsets/corpus")[::6]:
        ids = [1, *tokenizer(row["text"]).input_ids]
        kinds = classes(ids, tokenizer.decode, special, row["domain"])
        assert len(kinds) == len(ids) and set(kinds) <= set(TOKEN_CLASSES) and kinds[0] == "special"
        seen[row["domain"]] = kinds
    assert seen["chinese"].count("cjk") > len(seen["chinese"]) / 2
    assert seen["news"].count("words") > len(seen["news"]) / 2
    assert set(seen["code-python"]) == {"special", "code"}
