"""The ledger: each rule's bound beside the noise it was set from -> reports/ledger.yaml, in git.

A margin can always be widened until a variant passes. So every rule stands here once more, with what repeated runs said of
its noise; the gate fails where params.yaml asks for less than the ledger does. `python -m pipeline.gate --justify RULE`
writes an entry (justify.py). What a commit's ledger held still holds: an entry taken out or replaced by hand is seen by
`--enforce`, which compares with every ledger behind HEAD and with the baseline's.
"""

from __future__ import annotations

import math
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.core import artifacts, git
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.params import Params, Rule
from pipeline.core.yamls import read_text
from pipeline.judging import proof
from pipeline.numbers.definitions import definition
from pipeline.numbers.rules import QUANTITY, UNITS, bound_of, neutral_of

FILE = artifacts.LEDGER
HEAD = "# Each gate rule and the noise it was set from, by `python -m pipeline.gate --justify RULE`; an edit by hand is seen.\n"
POLICY, BASELINE = "policy", "the baseline"
Book = dict[str, Any]
Row = dict[str, Any]


# --- the file ----------------------------------------------------------------------------------------------------


def read() -> Book:
    """The ledger; empty where there is none, so that every rule lacks its entry. Raises `ArtifactError` if damaged."""
    return parse(read_text(FILE, ArtifactError, ""), str(FILE)) if FILE.exists() else {POLICY: None, "rules": []}


def judged(verdict: Row, settings: Params, earlier: dict[str, Book] | None = None) -> Row:
    """`hold` by the ledger on file; a damaged one fails everything, for nothing vouches for any bound."""
    try:
        return hold(verdict, settings, read(), earlier)
    except ArtifactError as e:
        variants = {n: v | {"verdict": "FAIL", "reason": str(e)} for n, v in verdict["variants"].items()}
        return verdict | {"verdict": "FAIL", "variants": variants, "ledger": [str(e)], "loosened": []}


def parse(text: str, where: str) -> Book:
    """Raises `ArtifactError` for what `--justify` would not have written."""
    try:
        book: Book = yaml.safe_load(text)
        for entry in book["rules"]:
            Rule.model_validate(entry["rule"])
            _evidence_line(entry)  # as it is told
            if entry["seal"] != seal(entry):
                raise ArtifactError(
                    f"{where}: the entry of {entry['rule']['metric']} was edited by hand; {_how(entry['rule']['metric'])}"
                )
        for entry in book.get("removed", []):
            if entry["seal"] != seal(entry):
                raise ArtifactError(f"{where}: the removal of {entry['metric']} was edited by hand; take it back from git")
        if book[POLICY] is not None and book[POLICY]["seal"] != seal(book[POLICY]):
            raise ArtifactError(f"{where}: the policy was edited by hand; {_how(POLICY)}")
    except (yaml.YAMLError, ValidationError, AttributeError, KeyError, TypeError, ValueError) as e:
        raise ArtifactError(f"{where} is damaged ({_wrong(e)}); take it back from git") from None
    return book


def _wrong(e: Exception) -> str:
    """What keeps a ledger from being read, in a few words."""
    if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark:
        return f"line {e.problem_mark.line + 1} is not valid YAML: {e.problem}"
    return f"{e} is missing" if isinstance(e, KeyError) else f"it is not what --justify writes: {type(e).__name__}"


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


def committed() -> dict[str, Book]:
    """{`commit abc1234`: its ledger}, newest first, of each commit behind HEAD that changed it; empty where there is no git.

    One that is damaged or was edited by hand vouches for nothing, and neither does a rule that could not be written today.
    """
    found = {}
    for name in (git.line("log", "--full-history", "--format=%h", "--", f"./{FILE.as_posix()}") or "").split():
        text = git.show(name, FILE)
        try:
            book = parse((text or b"").decode(), f"{FILE} of {name}")
        except (ArtifactError, UnicodeDecodeError):
            continue
        found[f"commit {name}"] = book | {"rules": [e for e in book["rules"] if _known(e)]}
    return found


def _known(entry: Row) -> bool:
    try:
        return bool(bound_of(Rule.model_validate(entry["rule"])))
    except ParamsError:  # a metric or unit of another version
        return False


def key(rule: Rule) -> tuple[str, str]:
    """What makes rules rules of one thing."""
    return rule.metric, rule.against


def keys(rules: list[Row]) -> set[tuple[str, str]]:
    """The same of rules as the ledger has them."""
    return {key(Rule.model_validate(r)) for r in rules}


# --- what the gate asks it ---------------------------------------------------------------------------------------


def faults(settings: Params, book: Book) -> list[Row]:
    """Where params ask for less than the ledger, or for what it does not know: [{name, key, reason, variants, loosened}]."""
    names = [n for n in settings.variants if n != settings.reference]
    found = policy_faults(settings, book.get(POLICY), names)
    for entry in book["rules"]:
        theirs = Rule.model_validate(entry["rule"])
        told = {v: _least(settings, theirs, v) for v in names if _applies(theirs, v)}
        for reason in dict.fromkeys(filter(None, told.values())):
            where = [v for v, said in told.items() if said == reason]
            text = f"{theirs.metric}: {reason} ({_evidence_line(entry)}); {_how(theirs.metric)}"
            found.append({"name": theirs.metric, "key": key(theirs), "reason": text, "variants": where, "loosened": True})
    for rule in settings.gate.rules:
        known = [r for e in book["rules"] if key(rule) == key(r := Rule.model_validate(e["rule"]))]
        lacking = [v for v in names if _applies(rule, v) and not any(_applies(r, v) for r in known)]
        if lacking:
            text = f"{rule.metric}: the rule has no entry in {FILE}; run `python -m pipeline.gate --justify {rule.metric}`"
            found.append({"name": rule.metric, "key": key(rule), "reason": text, "variants": lacking, "loosened": False})
    return found


BETWEEN = "between_runs"


def policy_faults(settings: Params, policy: Row | None, names: list[str]) -> list[Row]:
    """What decides at all: the required variants, what INCONCLUSIVE does, how sure an interval must be, what bounds count from."""
    if policy is None:
        text = f"{FILE} has no policy; run `python -m pipeline.gate --justify {POLICY}`"
        return [{"name": POLICY, "key": (POLICY, ""), "reason": text, "variants": names, "loosened": False}]
    gone = [n for n in policy["required"] if n not in settings.gate.required]
    said = [f"no longer required: {', '.join(gone)}"] if gone else []
    if policy["inconclusive"] == "blocks" != settings.gate.inconclusive:
        said.append("INCONCLUSIVE no longer blocks")
    if settings.compare.confidence < policy["confidence"]:
        said.append(f"confidence {settings.compare.confidence} instead of {policy['confidence']}")
    between = settings.compare.between_runs.model_dump()
    if policy.get(BETWEEN, between) != between:  # larger makes a FAIL INCONCLUSIVE, smaller that a PASS; older policies name none
        said.append(f"whole runs are taken to differ by {between} instead of {policy[BETWEEN]}")
    if policy.get("reference", settings.reference) != settings.reference:  # older policies name none
        said.append(f"bounds count from {settings.reference} instead of {policy['reference']}")
    how = f"run `python -m pipeline.gate --justify {POLICY} --reason WHY`, or take the change back"
    text = f"{'; '.join(said)}: {how}"
    return [{"name": POLICY, "key": (POLICY, ""), "reason": text, "variants": names, "loosened": True}] if said else []


def _applies(rule: Rule, variant: str) -> bool:
    return rule.variants is None or variant in rule.variants


def _least(settings: Params, theirs: Rule, variant: str) -> str:
    """In words, how far params fall short of one entry for one variant; empty where they do not."""
    ours = [r for r in settings.gate.rules if key(r) == key(theirs) and _applies(r, variant)]
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
    noise = noise_in_words(Rule.model_validate(entry["rule"]), last["noise"])
    return f"set {last['date']} from {last['of']}, n = {last['n']}, noise {noise}"


def noise_in_words(rule: Rule, noise: float | None) -> str:
    """A noise, given in its metric's own unit, in the unit that the rule's bound is written in: `0.35 pp` beside `margin 7 pp`."""
    if noise is None:
        return "unknown"
    bound, what = rule.margin or rule.gain or rule.limit or "", definition(rule.metric)
    written = QUANTITY.match(bound)
    assert what is not None and written is not None  # bound_of has refused unknown metrics, and bounds that are no quantity
    return f"{noise / UNITS[what.unit][written.group(2)]:.2g} {written.group(2)}"


def hold(verdict: Row, settings: Params, book: Book, earlier: dict[str, Book] | None = None) -> Row:
    """A verdict with what the ledger says: whatever is loosened without new evidence fails the variants it concerns.

    earlier: ledgers of before by name, the baseline's and those of commits; what asks for less than one of them must have
    evidence, and words, that were not there.
    """
    found, notes = faults(settings, book), []
    for since, then in (earlier or {}).items():
        known = {f["key"] for f in found}
        for f in faults(settings, then):
            if f["loosened"] and f["key"] not in known and not _supported(f["key"], book, then):
                found.append(f | {"reason": f"since {since}, {f['reason']}{_doubts(f['key'], book, then)}"})
            elif f["loosened"] and f["key"] not in known and since == BASELINE:
                notes.append(f["reason"].split("; measure anew")[0])
    variants = dict(verdict["variants"])
    for name, v in variants.items():
        own = [f["reason"] for f in found if name in f["variants"]]
        if own and v["verdict"] != "UNSUPPORTED":
            own += [v["reason"]] if v["verdict"] == "FAIL" else []
            variants[name] = v | {"verdict": "FAIL", "reason": f"the bounds are not those of {FILE}: {'; '.join(own)}"}
    overall = "FAIL" if found else verdict["verdict"]
    return verdict | {"verdict": overall, "variants": variants, "ledger": [f["reason"] for f in found], "loosened": notes}


def _supported(of: tuple[str, str], book: Book, then: Book) -> bool:
    """Whether what is looser than in an earlier ledger stands on figures that were not there, and on words where noise does
    not explain it; of a rule taken out, and of the policy, on words that were not there."""
    if of[0] == POLICY:
        ours, theirs = ((b.get(POLICY) or {}).get("reason") for b in (book, then))
        return ours is not None and ours != theirs
    entries = [e for e in book["rules"] if keys([e["rule"]]) == {of}]
    if not entries:
        return bool(_removals(of, book) - _removals(of, then))
    if lost(of, book, then) and not {e["reason"] for e in entries} - {None, *(e["reason"] for e in then["rules"])}:
        return False
    real = [entry | {"evidence": [e for e in proof.proven(entry) if _speaks(e["of"], entry, book)]} for entry in entries]
    before = _figures(of, then)
    return all(
        {e["figures"] for e in entry["evidence"]} - before and (entry["reason"] or beyond_noise(entry) is None) for entry in real
    )


def _speaks(variant: str, entry: Row, book: Book) -> bool:
    """Whether a variant's figures are evidence on a rule: where it holds for required variants, only theirs are."""
    deciding = [n for n in (book.get(POLICY) or {}).get("required", []) if _applies(Rule.model_validate(entry["rule"]), n)]
    return variant in deciding or not deciding


def lost(of: tuple[str, str], book: Book, then: Book) -> bool:
    """Whether a rule that an earlier ledger holds for some variants holds for fewer now."""
    ours, theirs = ([e["rule"].get("variants") for e in b["rules"] if keys([e["rule"]]) == {of}] for b in (book, then))
    if not ours or None in ours or not theirs:
        return False
    return None in theirs or bool({v for own in theirs for v in own} - {v for own in ours for v in own})


def _figures(of: tuple[str, str], book: Book) -> set[str]:
    """What is evidence on a metric in a ledger."""
    return {e["figures"] for entry in book["rules"] if entry["rule"]["metric"] == of[0] for e in entry["evidence"]}


def _doubts(of: tuple[str, str], book: Book, then: Book) -> str:
    entries = [e for e in book["rules"] if keys([e["rule"]]) == {of}]
    return "".join(proof.doubts(entry, _figures(of, then)) for entry in entries)


def _removals(of: tuple[str, str], book: Book) -> set[str]:
    return {gone["seal"] for gone in book.get("removed", []) if of in keys(gone["rules"])}


def beyond_noise(entry: Row) -> float | None:
    """The noise that an entry's evidence measured (0 where none is known), where its bound allows more than that; else None."""
    rule = Rule.model_validate(entry["rule"])
    bound, what = bound_of(rule), definition(rule.metric)
    assert what is not None  # bound_of has refused unknown metrics
    neutral = neutral_of(rule, what)
    amount = math.inf if rule.margin is None or neutral is None else abs(bound.threshold - neutral)
    noise: float = max((e["noise"] for e in entry["evidence"] if e["noise"] is not None), default=0.0)
    return noise if amount > noise else None
