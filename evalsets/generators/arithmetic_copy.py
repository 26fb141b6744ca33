#!/usr/bin/env python3
"""Write evalsets/tasks/arithmetic_copy.jsonl: short sums, copying, reversing, counting, what comes next.

Run from the parent of evalsets:  python evalsets/generators/arithmetic_copy.py
Only the standard library is used; numbers come from SHA-256, so the file is the
same on every machine and Python version.

Each prompt holds a few solved lines in the format of the last, unsolved one, so
the model has only to go on; the answer is that one line, whole.

A row: id, slice (the kind of question), cluster (rows that share the solved
lines), context, target.
"""
import hashlib
import json
import sys
from pathlib import Path

SEED = "arithmetic_copy-1"
OUT = Path(__file__).resolve().parent.parent / "tasks" / "arithmetic_copy.jsonl"
VARIANTS = 14       # sets of solved lines per slice
PER_VARIANT = 3     # questions per set


class Draw:
    """Whole numbers from a hash counter."""

    def __init__(self, *key):
        self.key, self.i = "\x1f".join((SEED, *key)), 0

    def below(self, n):
        self.i += 1
        return int.from_bytes(hashlib.sha256(f"{self.key}\x1f{self.i}".encode()).digest()[:8], "big") % n

    def between(self, lo, hi):
        return lo + self.below(hi - lo + 1)

    def some(self, items, k):
        """k different items, in a drawn order."""
        items = list(items)
        return [items.pop(self.below(len(items))) for _ in range(k)]


WORDS = """river stone lamp garden window bread winter silver horse letter music paper orange summer
market bottle forest candle yellow bridge basket pencil mirror island butter engine ladder pocket
rabbit copper village hammer ribbon carpet pepper shadow tunnel saddle violin meadow""".split()
SHORT = "cat sun map cup dog hat pen key bus red box fan jar leaf moon ship door bird fish tree".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBERS = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty""".split()
NUMERALS = [str(x) for x in range(2, 60)]
# days come once in nine: they are too few for more questions that all differ
SEQUENCES = [DAYS, MONTHS, LETTERS, NUMERALS, NUMBERS, MONTHS, LETTERS, NUMERALS, NUMBERS]


# each gives (question, answer) for the i-th line of set v; the line reads question + " " + answer.
# Where a slice has several kinds of sets, five sets in a row hold them in fixed shares.
def add_one_digit(d, i, v):
    a, b = d.between(2, 9), d.between(2, 9)
    return f"{a} + {b} =", str(a + b)


def add_two_digit(d, i, v):
    if v % 5 in (0, 3):     # whole tens
        a, b = 10 * d.between(1, 9), 10 * d.between(1, 9)
    elif v % 5 in (1, 4):   # the same tens added all along
        a, b = d.between(11, 59), 10 * (1 + v % 4)
    else:                   # no carry
        a, b = 10 * d.between(1, 5) + d.between(1, 4), 10 * d.between(1, 4) + d.between(1, 5)
    return f"{a} + {b} =", str(a + b)


def subtract(d, i, v):
    if v % 5 % 2 == 0:  # the sum it undoes is given
        a, b = d.between(5, 18), d.between(1, 4)
        return f"{a} + {b} = {a + b}, so {a + b} - {b} =", str(a)
    b = 1 + v % 3       # the same number taken away all along
    a = b + d.between(1, 9)
    return f"{a} - {b} =", str(a - b)


def multiply(d, i, v):
    a, b = d.between(2, 9), d.between(2, 9)
    if i % 4 == 3:
        a = d.between(10, 15)
    return f"{a} * {b} =", str(a * b)


def copy_words(d, i, v):
    w = " ".join(d.some(WORDS, 4 + i % 4))
    return f'Repeat "{w}":', w


def copy_digits(d, i, v):
    s = "".join(str(d.below(10)) for _ in range(10 + 2 * (i % 6)))
    return f"Number: {s}\nCopy:", s


def copy_code(d, i, v):
    s = "".join("abcdefghijkmnpqrstuvwxyz23456789"[d.below(32)] for _ in range(6 + i % 5))
    return f"Code: {s}\nCopy:", s


def reverse_list(d, i, v):
    if v % 5 % 2:
        w = d.some("123456789", 3)
        return f"{' '.join(w)} reversed is", " ".join(reversed(w))
    a, b = d.some(SHORT, 2)
    return f"{a} and {b} ->", f"{b} and {a}"


def count_from(d, i, v):
    a, n = d.between(1, 40), d.between(4, 5)
    return f"Count from {a} to {a + n - 1}:", " ".join(str(a + k) for k in range(n))


def next_in_sequence(d, i, v):
    seq = SEQUENCES[i % len(SEQUENCES)]
    k = d.below(len(seq) - 1)
    return f"After {seq[k]} comes", seq[k + 1]


# slice -> (maker, solved lines shown)
SLICES = {
    "add_one_digit": (add_one_digit, 4),
    "add_two_digit": (add_two_digit, 4),
    "subtract": (subtract, 3),
    "multiply": (multiply, 4),
    "copy_words": (copy_words, 2),
    "copy_digits": (copy_digits, 2),
    "copy_code": (copy_code, 2),
    "reverse_list": (reverse_list, 5),
    "count_from": (count_from, 3),
    "next_in_sequence": (next_in_sequence, 4),
}


def build():
    rows, asked = [], set()
    for name, (make, shots) in SLICES.items():
        n = 0
        for v in range(VARIANTS):
            d = Draw(name, "shots", str(v))
            shown = []
            while len(shown) < shots:
                qa = make(d, len(shown), v)
                if qa[0] not in [q for q, _ in shown]:
                    shown.append(qa)
            head = "".join(f"{q} {a}\n" for q, a in shown)
            for k in range(PER_VARIANT):
                d = Draw(name, "ask", str(v), str(k))
                while True:
                    q, a = make(d, n, v)
                    if q not in asked and q not in [s for s, _ in shown]:
                        break
                asked.add(q)
                rows.append({"id": f"arithmetic_copy-{name}-{n:03d}", "slice": name, "cluster": f"{name}/{v}",
                             "context": head + q, "target": a})
                n += 1
    return rows


def main():
    rows = build()
    assert len({r["id"] for r in rows}) == len(rows) == len({r["context"] for r in rows})
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for r in rows:
            f.write(json.dumps(r, ensure_ascii=False) + "\n")
    print(f"{OUT}: {len(rows)} rows, {len({r['cluster'] for r in rows})} clusters", file=sys.stderr)


if __name__ == "__main__":
    main()
