"""What is wrong with a generated text whatever it says: broken characters, a loop, another script, nothing at all.

Each fault is counted for the reference's own reply too: a small model loops at full precision as well.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Sequence
from itertools import groupby

FAULTS = ("empty", "invalid", "loop", "script")

# A loop: the reply's last tokens are one block, at least so often in a row ...
LOOP_TURNS = 3  # twice is a refrain, and a row of a table after its head
LOOP_TOKENS = 12  # ... over at least so many tokens: "ha ha ha" and "----" are not one
NGRAM = 4  # repetition: share of 4-grams that stood in the reply before (seq-rep-4: Welleck et al. 2019)
CUT_CHARACTERS = 3  # a reply cut off within a character of 4 bytes lacks at most 3 of them
WHOLE_WORDS = {"CJK", "KANA", "HANGUL"}  # one letter of these is a word or a syllable, and strange enough alone
STRAY = 2  # of any other script it takes two in a row: a lone Greek or Cyrillic letter is a symbol
LATIN_SHARE = 0.5  # names, units and code stand in Latin letters in every language: only a reply that is mostly Latin counts


def repeated_tail(tokens: Sequence[Hashable]) -> int:
    """How many tokens at the end of a reply are one block over and over; 0 where they are no loop (LOOP_TURNS, LOOP_TOKENS).
    Greedy decoding does not leave a loop, so one is looked for at the end alone: a list or a refrain is left again."""
    n = len(tokens)
    for period in range(1, n // LOOP_TURNS + 1):
        run = period
        while run < n and tokens[n - 1 - run] == tokens[n - 1 - run + period]:
            run += 1
        if run >= max(LOOP_TURNS * period, LOOP_TOKENS):
            return run
    return 0


def repetition(tokens: Sequence[Hashable]) -> float | None:
    """Share of a reply's 4-grams that stood in it before; None for a reply of fewer than 4 tokens."""
    grams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def broken_characters(text: str, prompt: str, cut: bool) -> int:
    """Number of U+FFFD in a reply: bytes that are no UTF-8. cut: the reply stopped at the limit, perhaps within a character. A
    prompt that holds U+FFFD itself may be answered with it."""
    if "\ufffd" in prompt:
        return 0
    if cut:
        bare = text.rstrip("\ufffd")
        text = bare + text[len(bare) :][CUT_CHARACTERS:]
    return text.count("\ufffd")


def script_of(character: str) -> str | None:
    """The script of a letter, by its Unicode name (hiragana and katakana: KANA); None for digits, emoji, marks."""
    if unicodedata.category(character) not in ("Lu", "Ll", "Lt", "Lo"):
        return None
    first = unicodedata.name(character, "?").split(" ")[0].split("-")[0]
    return {"HIRAGANA": "KANA", "KATAKANA": "KANA"}.get(first, first)


def scripts(text: str) -> set[str]:
    """Scripts that a text's letters are of; fullwidth and mathematical letters count as the plain ones (NFKC)."""
    return {s for c in unicodedata.normalize("NFKC", text) if (s := script_of(c))}


def foreign_scripts(reply: str, prompt: str, reference: str) -> list[str]:
    """Scripts of a reply that neither the prompt nor the reference's reply uses, as far as they count (see the constants). Nothing
    can be said where prompt and reference hold no letter at all."""
    home = scripts(prompt) | scripts(reference)
    if not home:
        return []
    home |= {"CJK"} if "KANA" in home else set()  # Japanese is written in both
    by_character = [script_of(c) for c in unicodedata.normalize("NFKC", reply)]
    longest: dict[str, int] = {}
    for script, run in groupby(by_character):
        if script and script not in home:
            longest[script] = max(longest.get(script, 0), len(list(run)))
    letters = sum(s is not None for s in by_character)
    mostly_latin = by_character.count("LATIN") > LATIN_SHARE * letters
    counts = {s for s, run in longest.items() if run >= (1 if s in WHOLE_WORDS else STRAY)}
    return sorted(s for s in counts if s != "LATIN" or mostly_latin)


def faults(text: str, tokens: Sequence[Hashable], cut: bool, prompt: str, reference: str) -> dict[str, bool]:
    """{fault: whether a reply has it} for each of FAULTS. reference: the reference's reply to the same prompt."""
    return {
        "empty": not text.strip(),
        "invalid": broken_characters(text, prompt, cut) > 0,
        "loop": repeated_tail(tokens) > 0,
        "script": bool(foreign_scripts(text, prompt, reference)),
    }


def departure(tokens: Sequence[Hashable], reference: Sequence[Hashable]) -> int | None:
    """Number (from 1) of the first token in which a reply is not the reference's; None where they are the same to the end."""
    for k, (a, b) in enumerate(zip(tokens, reference), 1):
        if a != b:
            return k
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference)) + 1
