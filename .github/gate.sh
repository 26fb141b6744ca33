#!/bin/sh
# The gate in any CI: run what changed, judge it against the commit that is merged into, exit by the verdict.
#
#   .github/gate.sh [BASE]     0 pass, 1 fail, 2 missing or stale, 3 inconclusive; artifacts/comment.md says why
#
# Keep .dvc/cache between runs, or name a DVC remote: then only what changed is measured, and the rows of both commits are
# paired. Without either, everything that dvc.lock does not vouch for is measured anew.
set -u
cd "$(dirname "$0")/.." || exit 2
if [ -x .venv/bin/python ]; then
  PATH="$PWD/.venv/bin:$PATH"
  export PATH
fi
rm -f artifacts/comment.md
dvc fetch --quiet 2>/dev/null || true # a remote, where there is one
failed=0
dvc repro --allow-missing gate || dvc repro gate || failed=2
git diff --quiet -- reports/machine.yaml || dvc repro gate || failed=2 # something was timed here: then all is, on one machine
dvc repro --allow-missing report || echo "gate.sh: the report needs rows that are not here; the verdict does not" >&2
code=0
case "${1:-}" in *[!0]*) base=$1 ;; *) base= ;; esac # git's forty zeros: a branch that was not there before
python -m pipeline.gate --enforce --comment ${base:+--baseline "$base"} || code=$?
if [ "$failed" -ne 0 ]; then
  echo "gate.sh: dvc repro failed: nothing that it left is a verdict" >&2
  code=2
fi
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -f artifacts/comment.md ]; then
  cat artifacts/comment.md >>"$GITHUB_STEP_SUMMARY"
fi
exit "$code"
