#!/bin/sh
# Every path that wants a card, at smoke size, under 12 minutes on one large card: prints a Markdown table for docs/tried.md.
#
#     sh tests/bench/gpu.sh [--dry] [--only NAME,NAME] [--minutes 12]
#
# --dry: what would run here, and why the rest would not. Without a card the paths that a CPU has are run, and the rest is skipped.
# PYTHON: one with this project's packages (.venv/bin/python). VLLM_PYTHON: one with vLLM (a CPU's is built by
# `python -m pipeline.core.venvs vllm`). MODEL: a folder in transformers' format, where the base cannot be downloaded.
# WHEELS: a folder of wheels, where there is no index: what PYTHON lacks of requirements is taken from there.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --find-links "$WHEELS" "$WHEELS"/*.whl
fi
exec "$python" tests/bench/gpu.py "$@"
