"""How often the documents and items that certify have been looked at, according to git.

Each commit with other results is a look. Trying again after a look means choosing by these texts, and a PASS is then wrong more
often than a rule says (by how much: tests/bench/simulations.py).
"""

from __future__ import annotations

import re

from pipeline.core import git
from pipeline.core.params import Params

WORN = 8  # looks, after which a variant at its margin has passed by chance in a tenth of histories (simulations.py)
SETS = ("evalsets/corpus", "evalsets/tasks", "evalsets/prompts")


def count(settings: Params) -> int:
    """Number of commits with other results since the sets or the seed last changed."""
    looks, same = 0, _sets("HEAD")
    for commit in (git.line("log", "--format=%H", "--", "reports/metrics", "reports/smallest") or "").split():
        if _sets(commit) != same or (settings.amount.documents != "all" and _seed(commit) != settings.seed):
            break
        looks += 1
    return looks


def _sets(commit: str) -> str | None:
    return git.line("rev-parse", *(f"{commit}:{path}" for path in SETS))


def _seed(commit: str) -> int | None:
    given = re.search(r"^seed: *(\d+)", git.line("show", f"{commit}:params.yaml") or "", re.MULTILINE)
    return int(given[1]) if given else None


def note(looks: int, settings: Params) -> str:
    """How worn the certifying set is, and how to draw another."""
    times = f"the documents that certify were looked at in {looks} earlier commits with other results"
    if looks < WORN:
        return times
    if settings.amount.documents == "all":
        return f"{times}: they are worn, and tier {settings.tier} draws all of them; add others to {settings.diverge.corpus}"
    return (
        f"{times}: they are worn; another seed draws other documents (seed: {settings.seed + 1} in params.yaml, then `make repro`)"
    )
