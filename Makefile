# One command serves, one tests; each does its own set-up in .venv. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=

.PHONY: help setup serve demo test sanitize lint types bench clean

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

# torch goes first and pinned: asked for through an open range, pip may take a build of several gigabytes.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[serve,plot,dev]'
	touch $(STAMP)

setup: $(STAMP) ## install everything into .venv and pull the embedded model
	$(BIN)/foliolm doctor
	$(BIN)/foliolm pull smollm2-135m

serve: $(STAMP) ## serve MODEL on HOST:PORT (ARGS: further flags of `foliolm serve`)
	exec $(BIN)/foliolm serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

demo: setup ## eight streams against a server of its own, then two LoRA adapters trained here (ARGS: further flags)
	test -d demo-adapters/librarian || $(BIN)/python examples/train_adapters.py demo-adapters
	$(BIN)/foliolm demo --ledger demo-ledger --adapters demo-adapters $(ARGS)

# Much of the suite waits for servers: three workers keep two cores busy. A file stays on one worker.
test: setup ## the whole test suite (ARGS: further flags of pytest)
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

sanitize: $(STAMP) ## the native kernels' own checks under AddressSanitizer and UBSan
	$(BIN)/python tests/native/sanitize.py

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

bench: setup ## the benchmarks' figures, as JSON lines
	for name in scheduler batching serve predict itl_target explain_effects batch_curve explain_speed; do $(BIN)/python benchmarks/$$name.py --json || exit 1; done
	for name in b16 mix32; do $(BIN)/python benchmarks/offline.py --workload $$name --compare transformers --json || exit 1; done

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
