# Two commands: `make repro` and `make ui`. Each target is one or two plain commands; run them by hand if you like.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install repro smallest test bench full models docs ui
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1 - /'

# DVC runs stages in the order of its graph: what decides is asked for first, so that it is seen first.
FIRST := from pipeline.core import params; s = params.load(); print(*(f"compare@{v}" for v in (s.reference, s.gate.required[0])))

install: .venv/installed  ## install into .venv, and run nothing

# WORKERS=ray: as many stages at once as there are GPUs; a cluster: `quantgate fan-out --help`.
repro: .venv/installed  ## install what is missing, run the whole pipeline, print the table
	@python -m pipeline.check > /dev/null && python -m pipeline.speed.hardware
	@python -m pipeline.core.copies "$$(dvc cache dir)/runs"
	@{ $(if $(WORKERS),python -m pipeline.fan_out,dvc repro $$(python -c '$(FIRST)') && python -m pipeline.report --first && dvc repro); } || { echo "make: stopped at the stage \
	that is named above; all that was finished before it is kept, and \`make repro\` goes on from there"; exit 1; }
	@python -m pipeline.report --summary

smallest: .venv/installed  ## after `make repro`: the smallest model that passes the gate, chosen on other texts
	@dvc repro tools/smallest/dvc.yaml && dvc repro && python -m pipeline.report --summary

test: .venv/installed  ## install what is missing, check style, types and imports, run the tests
	ruff check pipeline tools tests evalsets && ruff format --check pipeline tools tests evalsets && mypy pipeline tools tests/bench
	lint-imports
	pytest -n 2 --dist loadfile --no-loadscope-reorder

bench: .venv/installed  ## what the figures are checked against, after `make repro`; an hour, nothing else may run
	@failed=''; try() { echo "== $$*"; "$$@" || failed="$$failed\n  exit $$?: $$*"; }; \
	try python tests/bench/simulations.py; \
	try python tests/bench/llamacpp.py; \
	try python tests/bench/diverge.py memory; \
	try python tests/bench/diverge.py speed bf16 int8; \
	try python tests/bench/diverge.py speed --random --rounds 3 --windows 4; \
	try python tests/bench/evaluate.py; \
	try python tests/bench/processors.py; \
	try python tests/bench/stability.py int8; \
	try python tests/bench/merge.py; \
	try python tests/bench/kills.py; \
	if [ -n "$$failed" ]; then printf "not as they should be:$$failed\n"; exit 1; fi

full: .venv/installed  ## every variant of tests/bench/full.yaml, in a clone, smoke tier
	python tests/bench/full.py

models: .venv/installed  ## small random models of every architecture through every method, after `make repro`; an hour
	python tests/bench/models.py

docs: .venv/installed  ## build the pages of docs/ into site/
	pip install --quiet -e '.[docs]' -c constraints.txt -c constraints-dev.txt
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict -f tools/mkdocs.yml

ui: .venv/installed  ## open the MLflow UI on 127.0.0.1:5000
	mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

.venv/installed: constraints.txt constraints-dev.txt pyproject.toml
	@command -v git >/dev/null || { echo "error: git is missing; install it with your system's package manager"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing; install Python 3.10, 3.11 or 3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 12) else "error: Python 3.10, 3.11 or 3.12 is needed, %s is %d.%d; try: make PYTHON=python3.11" % (sys.executable, v[0], v[1]))'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; install python3-venv"; exit 1; }
	$(PYTHON) -m pipeline.core.install
	@touch $@
