"""How often the documents and items that certify were looked at, by git.

Every commit whose results differ is a look: who tries, sees and tries again chooses by these texts, and a PASS then errs more often
than a rule says. tests/bench/simulations.py measures by how much.
"""

from __future__ import annotations

import re

from pipeline.core import git
from pipeline.core.params import Params

WORN = 8  # looks: a variant at its margin then passes by chance in a tenth of such histories (simulations.py)
SETS = ("evalsets/corpus", "evalsets/tasks", "evalsets/prompts")


def count(settings: Params) -> int:
    """Commits with other results on the same documents and items: since the sets or the seed changed last."""
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
    """How worn the set that certifies is, and how to draw another."""
    times = f"the documents that certify were looked at in {looks} earlier commits with other results"
    if looks < WORN:
        return times
    if settings.amount.documents == "all":
        return f"{times}: they are worn, and tier {settings.tier} draws all of them; add others to {settings.diverge.corpus}"
    return (
        f"{times}: they are worn; another seed draws other documents (seed: {settings.seed + 1} in params.yaml, then `make repro`)"
    )
