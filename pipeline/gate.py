"""gate: metrics + rules -> PASS / FAIL / INCONCLUSIVE -> reports/gate.json

The stage only writes the verdict and exits 0, so that report and MLflow always come after it. `--enforce` is what a
merge runs: 0 pass, 1 fail, 2 missing or stale, 3 inconclusive. With `--baseline REV` it also judges the rules against
what that commit had (baseline.py says why the stage does not), and `--comment` writes what a merge's reader should see.
`--justify RULE` writes the ledger, without which no bound holds (ledger.py, justify.py). How results become a verdict:
judging/verdicts.py.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import ArtifactError, ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.judging import baseline, comment, justify, ledger, proof, recomputed, stale, verdicts
from pipeline.serving import results as server_results

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
STALE = 2
# what reading and judging damaged files raises
DAMAGED = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)


def _results(settings: Params) -> dict[str, dict[str, Any]]:
    """{variant: its metrics} of those that are there; a file that `compare` did not write is an error."""
    results = {n: artifacts.read_json(artifacts.metrics(n)) for n in settings.variants if artifacts.metrics(n).exists()}
    for name, result in results.items():
        if not isinstance(result, dict) or not isinstance(result.get("metrics"), dict) or "asked" not in result:
            raise ArtifactError(f"{artifacts.metrics(name)} is damaged; delete it and run `dvc repro`")
    server_results.add(results, settings)
    return results


def judged(settings: Params) -> dict[str, Any]:
    """What the stage says of the results on file."""
    return dict(artifacts.jsonable(ledger.judged(verdicts.of(_results(settings), settings), settings)))


# --- for a merge -------------------------------------------------------------------------------------------------


def for_merge(settings: Params, rev: str | None = None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(the verdict that a merge goes by, the baseline beside it or None where nobody names one).

    Raises `ArtifactError` for whatever keeps a verdict from being given: the one on file is missing or stale, a file was
    edited by hand, a baseline is asked for and not there.
    """
    if rev is not None and not rev.strip():
        raise ArtifactError("no baseline: --baseline is empty; name the commit merged into, or leave it out")
    _on_file(settings)
    results, wanted = _results(settings), baseline.wanted(rev, settings)
    beside, earlier = None, ledger.committed()
    if wanted is not None:
        base = baseline.read(wanted)
        beside = baseline.beside(base, results, settings)
        if (then := baseline.show(base, ledger.FILE)) is not None:
            earlier = {ledger.BASELINE: ledger.parse(then.decode(), f"{ledger.FILE} of {base.name}"), **earlier}
    elif any(rule.against == "baseline" for rule in settings.gate.rules):
        raise ArtifactError(
            f"no baseline: params.yaml has rules against it; name the commit: --baseline, {baseline.VARIABLE} or gate.baseline"
        )
    return dict(artifacts.jsonable(ledger.judged(verdicts.of(results, settings, beside), settings, earlier))), beside


def _on_file(settings: Params) -> dict[str, Any]:
    """The verdict of gate.json, if it is what the rules say of what is here now; else raises `ArtifactError`."""
    if not artifacts.GATE.exists():
        raise ArtifactError(f"{artifacts.GATE} is missing; run `dvc repro`")
    verdict: dict[str, Any] = artifacts.read_json(artifacts.GATE)
    if (ref := verdict.get("reference")) != settings.reference:
        why = f"judged against {ref or 'a reference that it does not name'}, not {settings.reference}"
        raise ArtifactError(f"the verdict is stale: {why}; run `dvc repro`")
    if changed := stale.since(verdict, settings):
        ledger.read()  # a damaged one says so itself: `dvc repro` would not mend it
        raise ArtifactError(f"the verdict is stale; {stale.sentence(changed)}")
    if wrong := recomputed.differing(_results(settings), settings):
        raise ArtifactError(f"results are not what their rows say; {'; '.join(wrong)}; run `dvc repro --force compare@VARIANT`")
    found = judged(settings)
    if any(verdict.get(key) != found[key] for key in found):
        raise ArtifactError("the verdict on file is not what the rules say of the results; run `dvc repro`")
    return verdict


def enforce(settings: Params, rev: str | None = None, *, write: bool = False) -> int:
    """Exit code for a merge; anything missing or changed since is never a pass. write: the comment, too."""
    try:
        verdict, beside = for_merge(settings, rev)
    except QuantgateError as e:
        return _stale(str(e), write)
    for name, v in verdict["variants"].items():
        print(f"{v['verdict']:<13} {name}{'' if v['required'] else ' (advisory)'}: {v['reason']}")
    against = f", against {beside['rev']} ({beside['commit'][:7]})" if beside else ""
    passes = verdict["verdict"] == "INCONCLUSIVE" and settings.gate.inconclusive == "passes"
    print(f"{verdict['verdict']:<13} overall{against}{' (passes: gate.inconclusive)' if passes else ''}")
    if unread := proof.unread():
        print(f"not compared with earlier ledgers: {unread}")
    if missing := stale.absent(settings):
        print(f"not here, and so not compared with what was measured: {', '.join(missing)}")
    if write:
        comment.write(comment.render(verdict, _results(settings), beside))
    return 0 if passes else EXIT.get(verdict["verdict"], STALE)


def _stale(problem: str, write: bool) -> int:
    print(f"gate: {problem}", file=sys.stderr)
    if write:
        comment.write(comment.problem(problem))
    return STALE


def _enforce_or_stale(rev: str | None = None, *, write: bool = False) -> int:
    """`enforce`, where whatever keeps a verdict from being read (params, a damaged file) is exit 2 and never a verdict."""
    try:
        return enforce(params.load(), rev, write=write)
    except QuantgateError as e:
        return _stale(str(e), write)
    except DAMAGED as e:
        return _stale(f"{artifacts.GATE} or a file beside it, or a row behind it, is damaged ({e!r}); run `dvc repro`", write)


def main(
    enforcing: Annotated[bool, typer.Option("--enforce", help="Judge nothing; exit by the verdict on file.")] = False,
    rev: Annotated[str | None, typer.Option("--baseline", help="The commit merged into; with --enforce or --comment.")] = None,
    commenting: Annotated[bool, typer.Option("--comment", help=f"Write {comment.FILE}, for a merge request.")] = False,
    rule: Annotated[str | None, typer.Option("--justify", help="Write a rule's entry in the ledger (or: policy, all).")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why a bound is looser, with --justify.")] = None,
) -> None:
    """Judge every variant by the rules in params.yaml."""
    _refuse_odd_options(enforcing or commenting, rev, rule, reason)
    if enforcing or commenting:
        code = _enforce_or_stale(rev, write=commenting)
        sys.exit(code if enforcing else 0)
    settings = params.load()
    if rule is not None:
        for line in justify.justify(rule, settings, _results(settings), reason):
            cli.say("ledger", line)
        return
    watch = artifacts.Stopwatch("gate")
    try:
        verdict = judged(settings) | {"inputs": stale.inputs(settings)}
    except DAMAGED as e:
        raise ArtifactError(f"a file of {artifacts.REPORTS} is damaged ({e!r}); run `dvc repro compare`") from None
    artifacts.write_json(artifacts.GATE, verdict)
    told = ", ".join(f"{n} {v['verdict']}" for n, v in verdict["variants"].items())
    cli.say("gate", f"{verdict['verdict']} ({told}), {watch.done():.1f} s")
    for line in verdict["ledger"]:
        cli.say("ledger", line)


def _refuse_odd_options(merging: bool, rev: str | None, rule: str | None, reason: str | None) -> None:
    if merging and rule is not None:
        raise ParamsError("--justify writes the ledger, --enforce and --comment read a verdict: give one, then the other")
    if (rev is not None and not merging) or (reason is not None and rule is None):
        raise ParamsError("--baseline goes with --enforce or --comment, --reason with --justify")


if __name__ == "__main__":
    cli.run(main)
