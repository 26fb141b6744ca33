"""Every token has one class, whichever way its characters were cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from pipeline.evalset.token_classes import class_of, classes
from pipeline.metrics.definitions import TOKEN_CLASSES


@pytest.mark.parametrize(
    "text, kind",
    [
        (" council", "words"), ("é", "words"), ("3rd", "words"), ("2026", "digits"), (" 7", "digits"), ("½", "digits"),
        (",", "punctuation"), (' ("', "punctuation"), ("+=", "punctuation"), ("。", "punctuation"), ("雨", "cjk"),
        ("、", "punctuation"), ("３", "digits"), ("ひらがな", "cjk"), ("ㄅ", "cjk"),
        ("한국", "cjk"), (" 3月", "cjk"), ("\n\n", "whitespace"), ("\u3000", "whitespace"), ("", "other"), ("\x07", "other"),
        ("\ufffd", "other"),
    ],
)  # fmt: skip
def test_a_token_is_of_the_class_of_its_text(text: str, kind: str) -> None:
    assert class_of(text, special=False, code=False) == kind and kind in TOKEN_CLASSES


def test_in_a_program_all_but_the_marks_is_code() -> None:
    assert {class_of(t, special=False, code=True) for t in ("def", " 7", "\n", "(", "雨")} == {"code"}
    assert class_of("<|im_end|>", special=True, code=True) == "special"


@pytest.mark.parametrize("text", ["雨が降る", "a雨 7,\n", "雨", "é½한"])
def test_characters_cut_into_bytes_are_classed_by_the_whole_character(text: str) -> None:
    ids = list(text.encode())
    found = classes(ids, lambda some: bytes(some).decode(errors="replace"), set(), "news")
    expected = [class_of(c, special=False, code=False) for c in text for _ in c.encode()]
    assert found == expected


def test_bytes_that_are_no_character_stay_other_and_hide_nothing_after_them() -> None:
    ids = [0x41, 0xFF, 0x42, 0x20, 0x37, 0xE9, 0xFF]
    found = classes(ids, lambda some: bytes(some).decode(errors="replace"), set(), "news")
    assert found == ["words", "other", "words", "whitespace", "digits", "other", "other"]


def test_a_mark_ends_a_character_that_was_cut_off() -> None:
    ids = [*"雨".encode()[:2], 1, *b"x"]
    found = classes(ids, lambda some: bytes(some).decode(errors="replace"), {1}, "news")
    assert found == ["other", "other", "special", "words"]


def test_every_token_of_the_corpora_has_a_class_and_the_marks_are_special(tiny: Path) -> None:
    from transformers import AutoTokenizer

    from pipeline.evalset import load_texts

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = set(tokenizer.all_special_ids)
    seen = {}
    for row in load_texts(ROOT / "evalsets/corpus")[::6]:
        ids = [1, *tokenizer(row["text"]).input_ids]
        found = classes(ids, tokenizer.decode, special, row["domain"])
        assert len(found) == len(ids) and set(found) <= set(TOKEN_CLASSES) and found[0] == "special"
        seen[row["domain"]] = found
    assert seen["chinese"].count("cjk") > len(seen["chinese"]) / 2
    assert seen["news"].count("words") > len(seen["news"]) / 2
    assert set(seen["code-python"]) == {"special", "code"}
