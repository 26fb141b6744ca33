"""`python -m pipeline.gate --justify RULE`: an entry of the ledger, from figures that say how noisy its rule is.

It is made from what differs between runs of the same weights (floor.json's reruns; for speed, compare.between_runs), from
the interval of the variant that ships, and from the entry's earlier evidence. A looser bound needs figures that were not
evidence before, and beyond what noise explains also a reason in words, which stays in the entry. An entry that was taken out
by hand counts as if it still stood.
"""

from __future__ import annotations

from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.judging import proof
from pipeline.judging.evidence import commit, evidence, today
from pipeline.judging.ledger import (
    BETWEEN,
    FILE,
    POLICY,
    Book,
    Row,
    beyond_noise,
    committed,
    faults,
    key,
    keys,
    lost,
    noise_in_words,
    policy_faults,
    read,
    sealed,
    write,
)
from pipeline.numbers.rules import bound_of


def justify(name: str, settings: Params, results: dict[str, Row], reason: str | None = None) -> list[str]:
    """Write the entries of a metric's rules (`all`: of every rule; `policy`: of what decides); returns what was written."""
    if reason is not None and (name == "all" or not reason.strip()):
        raise ParamsError("a reason is one rule's: name it in place of `all`" if reason.strip() else "--reason is empty; say why")
    book = put_back(read(), settings, committed())
    metrics = list(dict.fromkeys([r.metric for r in settings.gate.rules] + [e["rule"]["metric"] for e in book["rules"]]))
    if name not in (POLICY, "all", *metrics):
        raise ParamsError(f"no gate rule is on {name!r}{did_you_mean(name, [*metrics, POLICY, 'all'])}")
    told = [_justify_policy(book, settings, reason)] if name in (POLICY, "all") else []
    for metric in metrics if name == "all" else [] if name == POLICY else [name]:
        told += _justify_metric(book, metric, settings, results, reason)
    write(book)
    return told


def put_back(book: Book, settings: Params, earlier: dict[str, Book]) -> Book:
    """A ledger with the newest of what earlier ones held and it lacks: entries, unless taken out with a reason and not asked
    for again since, and the policy."""
    removed = {k for gone in book.get("removed", []) for k in keys(gone["rules"])}
    there = (removed - {key(rule) for rule in settings.gate.rules}) | keys([e["rule"] for e in book["rules"]])
    policy, rules = book.get(POLICY), list(book["rules"])
    for then in earlier.values():
        lost = [e for e in then["rules"] if not keys([e["rule"]]) <= there]
        there |= keys([e["rule"] for e in lost])
        policy, rules = policy or then.get(POLICY), rules + lost
    return book | {POLICY: policy, "rules": rules}


def _justify_policy(book: Book, settings: Params, reason: str | None) -> str:
    loosened = [f["reason"] for f in policy_faults(settings, book.get(POLICY), []) if f["loosened"]]
    if loosened and not reason:
        raise ArtifactError(f"{loosened[0].partition(': run')[0]}: no figure can say why; give --reason WHY")
    policy = {
        "reference": settings.reference,
        "required": settings.gate.required,
        "inconclusive": settings.gate.inconclusive,
        "confidence": settings.compare.confidence,
        BETWEEN: settings.compare.between_runs.model_dump(),
    }
    reason = reason or (book[POLICY] or {}).get("reason")
    book[POLICY] = sealed(policy | {"reason": reason, "date": today(), "commit": commit()})
    return f"policy: required {', '.join(settings.gate.required)}; INCONCLUSIVE {settings.gate.inconclusive}"


def _justify_metric(book: Book, metric: str, settings: Params, results: dict[str, Row], reason: str | None) -> list[str]:
    rules = [r for r in settings.gate.rules if r.metric == metric]
    old = [e for e in book["rules"] if e["rule"]["metric"] == metric]
    gone = [e["rule"] for e in old if not keys([e["rule"]]) <= {key(rule) for rule in rules}]
    if gone and not reason:
        which = " and ".join(f"against the {Rule.model_validate(r).against}" for r in gone)
        raise ArtifactError(f"the rule on {metric} {which} is gone from params.yaml; no figure can say why: give --reason WHY")
    ours: Book = {"rules": [{"rule": r.model_dump(exclude_defaults=True)} for r in rules]}
    if not reason and any(lost(key(rule), ours, {"rules": old}) for rule in rules):
        raise ArtifactError(f"the rule on {metric} holds for fewer variants than before; no figure can say why: give --reason WHY")
    loosened = {f["key"] for f in faults(settings, book) if f["loosened"]}
    entries, told = [], []
    for rule in rules:
        entry, said = _entry(
            rule, [e for e in old if keys([e["rule"]]) == {key(rule)}], key(rule) in loosened, settings, results, reason
        )
        entries.append(entry)
        told.append(said)
    at = next((k for k, e in enumerate(book["rules"]) if e["rule"]["metric"] == metric), len(book["rules"]))
    kept = [e for e in book["rules"] if e["rule"]["metric"] != metric]
    book["rules"] = [*kept[:at], *entries, *kept[at:]]
    if gone:
        record = {"metric": metric, "rules": gone, "reason": reason, "date": today(), "commit": commit()}
        book["removed"] = [*book.get("removed", []), sealed(record)]
    return told or [f"{metric}: taken out"]


def _entry(
    rule: Rule, old: list[Row], loosened: bool, settings: Params, results: dict[str, Row], reason: str | None
) -> tuple[Row, str]:
    """(a rule's entry, what was written in words). old: its entries of before."""
    earlier = [e for entry in old for e in entry["evidence"]]
    found = evidence(rule, settings, results)
    new = found["figures"] not in {e["figures"] for e in earlier}
    entry: Row = {
        "rule": rule.model_dump(exclude_defaults=True),
        "reason": reason or next((e["reason"] for e in old if not loosened), None),
        "evidence": [*earlier, found] if new else earlier,
    }
    if loosened:
        _refuse(entry, new)
    known = [e["noise"] for e in entry["evidence"] if e["noise"] is not None]
    noise = noise_in_words(rule, max(known, default=None))
    why = found["from"] if new else "these figures were evidence before; nothing is added"
    return sealed(entry), f"{rule.metric}: {bound_of(rule).text}; noise {noise} ({why})"


def _refuse(entry: Row, new: bool) -> None:
    """Raise unless a looser bound stands on new figures, and on a reason in words where noise does not explain it."""
    rule = Rule.model_validate(entry["rule"])
    if not new:
        raise ArtifactError(f"{rule.metric}: these figures are evidence in {FILE} already; measure anew (another seed or tier)")
    *earlier, made = entry["evidence"]  # made of what is on file now
    noise = beyond_noise(entry | {"evidence": [*proof.proven(entry | {"evidence": earlier}), made]})
    if noise is not None and not entry["reason"]:
        words = noise_in_words(rule, noise)
        known = f"the noise of {words} explains" if made["noise"] is not None else "noise explains: it is not known"
        raise ArtifactError(
            f"{rule.metric}: {bound_of(rule).text} is more than {known}; give --reason WHY, or take a margin that it does explain"
        )
