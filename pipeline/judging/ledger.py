"""The ledger: each rule's bound beside the noise it was set from -> reports/ledger.yaml, in git.

A margin can always be widened until a variant passes. So every rule stands here once more, with what repeated runs said of
its noise; the gate fails where params.yaml asks for less than the ledger does. `python -m pipeline.gate --justify RULE`
writes an entry: from what differs between runs of the same weights (floor.json's reruns; rounds, for speed), from the
interval of the variant that ships, and from the entry's earlier evidence. A looser bound needs figures that were not
evidence before, and beyond what noise explains also a reason in words, which stays in the entry.
"""

from __future__ import annotations

import math
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.judging.evidence import commit, evidence, today
from pipeline.numbers.definitions import definition
from pipeline.numbers.rules import bound_of, neutral_of

FILE = artifacts.LEDGER
HEAD = "# Each gate rule and the noise it was set from, by `python -m pipeline.gate --justify RULE`; an edit by hand is seen.\n"
POLICY = "policy"
Book = dict[str, Any]
Row = dict[str, Any]


# --- the file ----------------------------------------------------------------------------------------------------


def read() -> Book:
    """The ledger; empty where there is none, so that every rule lacks its entry. Raises `ArtifactError` if damaged."""
    return parse(FILE.read_text(encoding="utf-8"), str(FILE)) if FILE.exists() else {POLICY: None, "rules": []}


def judged(verdict: Row, settings: Params, then: Book | None = None) -> Row:
    """`hold` by the ledger on file; a damaged one fails everything, for nothing vouches for any bound."""
    try:
        return hold(verdict, settings, read(), then)
    except ArtifactError as e:
        variants = {n: v | {"verdict": "FAIL", "reason": str(e)} for n, v in verdict["variants"].items()}
        return verdict | {"verdict": "FAIL", "variants": variants, "ledger": [str(e)], "loosened": []}


def parse(text: str, where: str) -> Book:
    """Raises `ArtifactError` for what `--justify` would not have written."""
    try:
        book: Book = yaml.safe_load(text)
        for entry in book["rules"]:
            Rule.model_validate(entry["rule"])
            if entry["seal"] != seal(entry):
                raise ArtifactError(
                    f"{where}: the entry of {entry['rule']['metric']} was edited by hand; {_how(entry['rule']['metric'])}"
                )
        for entry in book.get("removed", []):
            if entry["seal"] != seal(entry):
                raise ArtifactError(f"{where}: the removal of {entry['metric']} was edited by hand; take it back from git")
        if book[POLICY] is not None and book[POLICY]["seal"] != seal(book[POLICY]):
            raise ArtifactError(f"{where}: the policy was edited by hand; {_how(POLICY)}")
    except (yaml.YAMLError, ValidationError, KeyError, TypeError) as e:
        raise ArtifactError(f"{where} is damaged ({type(e).__name__}); take it back from git") from None
    return book


def write(book: Book) -> None:
    text = yaml.safe_dump(artifacts.jsonable(book), sort_keys=False, allow_unicode=True, width=120)
    artifacts.write_text(FILE, HEAD + text)


def seal(entry: Row) -> str:
    """Tells an entry that was edited by hand; no secret, so that a review of its change is still needed."""
    return artifacts.digest({k: v for k, v in entry.items() if k != "seal"})[:16]


def sealed(entry: Row) -> Row:
    entry = dict(artifacts.jsonable(entry))
    return entry | {"seal": seal(entry)}


def _how(name: str) -> str:
    return f"measure anew (another seed or tier) and run `python -m pipeline.gate --justify {name}`, or take the change back"


# --- what the gate asks it ---------------------------------------------------------------------------------------


def faults(settings: Params, book: Book) -> list[Row]:
    """Where params ask for less than the ledger, or for what it does not know: [{name, reason, variants, loosened}]."""
    names = [n for n in settings.variants if n != settings.reference]
    found = _policy_faults(settings, book.get(POLICY), names)
    for entry in book["rules"]:
        theirs = Rule.model_validate(entry["rule"])
        told = {v: _least(settings, theirs, v) for v in names if _applies(theirs, v)}
        for reason in dict.fromkeys(filter(None, told.values())):
            where = [v for v, said in told.items() if said == reason]
            text = f"{theirs.metric}: {reason} ({_evidence_line(entry)}); {_how(theirs.metric)}"
            found.append({"name": theirs.metric, "reason": text, "variants": where, "loosened": True})
    for rule in settings.gate.rules:
        known = [r for e in book["rules"] if _same(rule, r := Rule.model_validate(e["rule"]))]
        lacking = [v for v in names if _applies(rule, v) and not any(_applies(r, v) for r in known)]
        if lacking:
            text = f"{rule.metric}: the rule has no entry in {FILE}; run `python -m pipeline.gate --justify {rule.metric}`"
            found.append({"name": rule.metric, "reason": text, "variants": lacking, "loosened": False})
    return found


def _policy_faults(settings: Params, policy: Row | None, names: list[str]) -> list[Row]:
    """What decides at all: the required variants, what INCONCLUSIVE does, and how sure an interval must be."""
    if policy is None:
        text = f"{FILE} has no policy; run `python -m pipeline.gate --justify {POLICY}`"
        return [{"name": POLICY, "reason": text, "variants": names, "loosened": False}]
    gone = [n for n in policy["required"] if n not in settings.gate.required]
    said = [f"no longer required: {', '.join(gone)}"] if gone else []
    if policy["inconclusive"] == "blocks" != settings.gate.inconclusive:
        said.append("INCONCLUSIVE no longer blocks")
    if settings.compare.confidence < policy["confidence"]:
        said.append(f"confidence {settings.compare.confidence} instead of {policy['confidence']}")
    how = f"run `python -m pipeline.gate --justify {POLICY} --reason WHY`, or take the change back"
    return [{"name": POLICY, "reason": f"{'; '.join(said)}: {how}", "variants": names, "loosened": True}] if said else []


def _applies(rule: Rule, variant: str) -> bool:
    return rule.variants is None or variant in rule.variants


def _same(a: Rule, b: Rule) -> bool:
    return (a.metric, a.against) == (b.metric, b.against)


def _least(settings: Params, theirs: Rule, variant: str) -> str:
    """In words, how far params fall short of one entry for one variant; empty where they do not."""
    ours = [r for r in settings.gate.rules if _same(r, theirs) and _applies(r, variant)]
    if not ours:
        return f"{bound_of(theirs).text} stands in {FILE} and no rule of params.yaml asks for it"
    said = [_looser(r, theirs) for r in ours]
    return "" if not all(said) else said[0]


def _looser(ours: Rule, theirs: Rule) -> str:
    """How a rule asks for less than another on the same metric; empty where it asks for as much."""
    a, b = bound_of(ours), bound_of(theirs)
    past = a.threshold - b.threshold if a.better == "lower" else b.threshold - a.threshold
    if ours.above is not None and ours.above != theirs.above:
        return f"{a.text} now counts from the {ours.above}"
    if past > 1e-12 * max(abs(b.threshold), 1e-6):
        return f"{a.text} is looser than the {b.text} of {FILE}"
    return f"{a.text} is no longer required" if theirs.required and not ours.required else ""


def _evidence_line(entry: Row) -> str:
    last = entry["evidence"][-1] if entry.get("evidence") else None
    if last is None:
        return "set without evidence"
    return f"set {last['date']} from {last['of']}, n = {last['n']}, noise {last['noise']:.2g} {last['unit']}"


def hold(verdict: Row, settings: Params, book: Book, then: Book | None = None) -> Row:
    """A verdict with what the ledger says: whatever is loosened without new evidence fails the variants it concerns.

    then: the ledger of the baseline; what asks for less than that must have evidence that was not there.
    """
    found = faults(settings, book)
    loosened = [f for f in faults(settings, then) if f["loosened"]] if then is not None else []
    known = {f["name"] for f in found}
    held = [
        f | {"reason": f"since the baseline, {f['reason']}"}
        for f in loosened
        if f["name"] not in known and not _grown(f["name"], book, then)
    ]
    notes = [f["reason"].split("; measure anew")[0] for f in loosened if f["name"] not in known and _grown(f["name"], book, then)]
    found += held
    variants = dict(verdict["variants"])
    for name, v in variants.items():
        own = [f["reason"] for f in found if name in f["variants"]]
        if own and v["verdict"] != "UNSUPPORTED":
            own += [v["reason"]] if v["verdict"] == "FAIL" else []
            variants[name] = v | {"verdict": "FAIL", "reason": f"the bounds are not those of {FILE}: {'; '.join(own)}"}
    overall = "FAIL" if found else verdict["verdict"]
    return verdict | {"verdict": overall, "variants": variants, "ledger": [f["reason"] for f in found], "loosened": notes}


def _grown(name: str, book: Book, then: Book | None) -> bool:
    """Whether an entry has evidence (or the policy a reason) that it did not have at the baseline."""
    if then is None or name == POLICY:
        ours, theirs = (((b or {}).get(POLICY) or {}).get("reason") for b in (book, then))
        return ours is not None and ours != theirs
    return bool(_proofs(book, name) - _proofs(then, name))


def _proofs(book: Book, name: str) -> set[str]:
    """What tells evidence from other evidence: the figures it was made from; of a rule taken out, the words why."""
    figures = {e["figures"] for entry in book["rules"] if entry["rule"]["metric"] == name for e in entry["evidence"]}
    return figures | {entry["seal"] for entry in book.get("removed", []) if entry["metric"] == name}


# --- --justify ---------------------------------------------------------------------------------------------------


def justify(name: str, settings: Params, results: dict[str, Row], reason: str | None = None) -> list[str]:
    """Write the entries of a metric's rules (`all`: of every rule; `policy`: of what decides); returns what was written."""
    book = read()
    metrics = list(dict.fromkeys([r.metric for r in settings.gate.rules] + [e["rule"]["metric"] for e in book["rules"]]))
    if name not in (POLICY, "all", *metrics):
        raise ParamsError(f"no gate rule is on {name!r}{did_you_mean(name, [*metrics, POLICY, 'all'])}")
    told = [_justify_policy(book, settings, reason)] if name in (POLICY, "all") else []
    for metric in metrics if name == "all" else [] if name == POLICY else [name]:
        told += _justify_metric(book, metric, settings, results, reason)
    write(book)
    return told


def _justify_policy(book: Book, settings: Params, reason: str | None) -> str:
    loosened = [f["reason"] for f in _policy_faults(settings, book.get(POLICY), []) if f["loosened"]]
    if loosened and not reason:
        raise ArtifactError(f"{loosened[0].partition(': run')[0]}: no figure can say why; give --reason WHY")
    policy = {
        "required": settings.gate.required,
        "inconclusive": settings.gate.inconclusive,
        "confidence": settings.compare.confidence,
    }
    book[POLICY] = sealed(policy | {"reason": reason, "date": today(), "commit": commit()})
    return f"policy: required {', '.join(settings.gate.required)}; INCONCLUSIVE {settings.gate.inconclusive}"


def _justify_metric(book: Book, metric: str, settings: Params, results: dict[str, Row], reason: str | None) -> list[str]:
    rules = [r for r in settings.gate.rules if r.metric == metric]
    old = [e for e in book["rules"] if e["rule"]["metric"] == metric]
    loosened = [f for f in faults(settings, book) if f["name"] == metric and f["loosened"]]
    if not rules and not reason:
        raise ArtifactError(f"the rule on {metric} is gone from params.yaml; no figure can say why: give --reason WHY")
    entries, told = [], []
    for rule in rules:
        earlier = [e for entry in old if _same(Rule.model_validate(entry["rule"]), rule) for e in entry["evidence"]]
        found = evidence(rule, settings, results)
        new = found["figures"] not in {e["figures"] for e in earlier}
        noise = max(e["noise"] for e in [*earlier, found])
        if loosened:
            _refuse(rule, new, noise, reason)
        evidences = [*earlier, found] if new else earlier
        kept_reason = reason or next((e["reason"] for e in old if not loosened), None)
        entries.append(sealed({"rule": rule.model_dump(exclude_defaults=True), "reason": kept_reason, "evidence": evidences}))
        told.append(
            f"{metric}: {bound_of(rule).text}; noise {noise:.2g} {found['unit']} "
            f"({found['from'] if new else 'these figures were evidence before; nothing is added'})"
        )
    at = next((k for k, e in enumerate(book["rules"]) if e["rule"]["metric"] == metric), len(book["rules"]))
    kept = [e for e in book["rules"] if e["rule"]["metric"] != metric]
    book["rules"] = [*kept[:at], *entries, *kept[at:]]
    if not rules:
        gone = {"metric": metric, "rules": [e["rule"] for e in old], "reason": reason, "date": today(), "commit": commit()}
        book["removed"] = [*book.get("removed", []), sealed(gone)]
    return told or [f"{metric}: taken out"]


def _refuse(rule: Rule, new: bool, noise: float, reason: str | None) -> None:
    """Raise unless a looser bound stands on new figures, and on a reason in words where noise does not explain it."""
    bound, what = bound_of(rule), definition(rule.metric)
    assert what is not None  # bound_of has refused unknown metrics
    if not new:
        raise ArtifactError(f"{rule.metric}: these figures are evidence in {FILE} already; measure anew (another seed or tier)")
    neutral = neutral_of(rule, what)
    amount = math.inf if rule.margin is None or neutral is None else abs(bound.threshold - neutral)
    if amount > noise and not reason:
        raise ArtifactError(
            f"{rule.metric}: {bound.text} is more than the noise of {noise:.2g} {what.unit} explains; "
            "give --reason WHY, or take a margin that it does explain"
        )
