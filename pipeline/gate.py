"""gate: metrics + rules -> PASS / FAIL / INCONCLUSIVE -> reports/gate.json

The stage writes the verdict and exits 0, so that report and MLflow follow. `--enforce` exits 0 pass, 1 fail, 2 missing or stale, 3
inconclusive; `--baseline REV` also compares with that commit; `--comment` writes the comment for a merge request.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pipeline.core import artifacts, cli, params
from pipeline.core.errors import ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.gating import comment, freshness, verdicts

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
STALE = 2
NO_BASE = "no baseline named: the rules were not compared with earlier ones (--baseline REV)"


def enforce(settings: Params, rev: str | None = None, *, write: bool = False, as_json: bool = False) -> int:
    """Exit code for a merge; missing or stale results never pass. write: also the comment; as_json: print JSON."""
    try:
        merge = verdicts.for_merge(settings, rev)
    except QuantgateError as e:
        return _no_verdict(e, write, as_json)
    word = merge.verdict["verdict"]
    passes = word == "INCONCLUSIVE" and settings.gate.inconclusive == "passes"
    code = 0 if passes else EXIT[word]
    if write:
        artifacts.write_text(comment.FILE, comment.render(merge))
    if as_json:
        against = merge.changes.commit if merge.changes else None
        more = {"exit": code, "baseline": against, "loosened": list(map(str, merge.loosened)), "absent": merge.absent}
        print(json.dumps({**merge.verdict, **more}, indent=1))
        return code
    for name, v in merge.verdict["variants"].items():
        print(f"{v['verdict']:<13} {name}{'' if v['required'] else ' (advisory)'}: {v['reason']}")
    baseline = f", against {merge.changes.rev} ({merge.changes.commit[:7]})" if merge.changes else ""
    print(f"{word:<13} overall{baseline}{' (passes: gate.inconclusive)' if passes else ''}")
    for line in [f"looser than at the baseline: {change}" for change in merge.loosened] if merge.changes else [NO_BASE]:
        print(line)
    if merge.absent:
        print(f"not here, and so not compared with dvc.lock: {', '.join(merge.absent)}")
    return code


def _no_verdict(error: QuantgateError, write: bool, as_json: bool) -> int:
    print(f"gate: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"verdict": None, "reason": str(error), "exit": STALE}, indent=1))
    if write:
        artifacts.write_text(comment.FILE, comment.problem(str(error)))
    return STALE


def main(
    enforcing: Annotated[bool, typer.Option("--enforce", help="Write no verdict; exit by the one on file.")] = False,
    rev: Annotated[str | None, typer.Option("--baseline", help="The commit merged into; with --enforce or --comment.")] = None,
    commenting: Annotated[bool, typer.Option("--comment", help=f"Write {comment.FILE}, for a merge request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts, rules and the exit code as JSON.")] = False,
) -> None:
    """Judge every variant by the rules in params.yaml."""
    if enforcing or commenting:
        try:
            code = enforce(params.load(), rev, write=commenting, as_json=as_json)
        except ParamsError as e:
            code = _no_verdict(e, commenting, as_json)
        sys.exit(code if enforcing else 0)
    if rev is not None or as_json:
        raise ParamsError(f"{'--json' if as_json else '--baseline'} goes with --enforce or --comment")
    settings = params.load()
    watch = artifacts.Stopwatch("gate")
    verdict = verdicts.of(verdicts.load_results(settings), settings)
    artifacts.write_json(artifacts.GATE, {**verdict, "inputs": freshness.inputs(settings)})
    words = ", ".join(f"{n} {v['verdict']}" for n, v in verdict["variants"].items())
    cli.say("gate", f"{verdict['verdict']} ({words}), {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
