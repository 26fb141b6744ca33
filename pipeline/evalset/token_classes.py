"""The kind of text a token is part of: strings and ids in, names of `metrics.TOKEN_CLASSES` out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Sequence

BROKEN = "\ufffd"  # a decoder's mark for bytes of an incomplete character
LONGEST = 8  # tokens of one character, with some room
WIDE = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "IDEOGRAPHIC", "FULLWIDTH", "BOPOMOFO")  # first words of Unicode names


def classes(ids: Sequence[int], decode: Callable[[list[int]], str], special: Collection[int], domain: str) -> list[str]:
    """The class of each token of one text. decode: ids to text; special: ids of the tokenizer's own marks."""
    code = domain.startswith("code")
    return [class_of(text, special=t in special, code=code) for t, text in zip(ids, whole_characters(ids, decode, special))]


def class_of(text: str, *, special: bool, code: bool) -> str:
    """The class of a token that decodes to `text`. code: it is part of a program, where all but special tokens are code."""
    if special:
        return "special"
    if code:
        return "code"
    bare = text.strip()
    if not bare:
        return "whitespace" if text else "other"
    scripts = (unicodedata.name(c, "").split(" ")[0].split("-")[0] for c in bare if c.isalpha() and ord(c) > 0x10FF)
    if any(script in WIDE for script in scripts):
        return "cjk"
    if any(c.isalpha() for c in bare):
        return "words"
    if any(c.isnumeric() for c in bare):
        return "digits"
    kinds = {unicodedata.category(c)[0] for c in bare}
    return "punctuation" if kinds <= {"P", "S"} and BROKEN not in bare else "other"


def whole_characters(ids: Sequence[int], decode: Callable[[list[int]], str], special: Collection[int]) -> list[str]:
    """The text of each token; byte-level tokens that share a character all get it. Tokens that form no whole character within
    LONGEST tokens stay broken."""
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        text, n = decode([ids[at]]), 1
        while BROKEN in text and n < LONGEST and at + n < len(ids) and ids[at + n] not in special:
            n += 1
            text = decode(list(ids[at : at + n]))
        if BROKEN in text:
            text, n = decode([ids[at]]), 1
        texts += [text] * n
    return texts
