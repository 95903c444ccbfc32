PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := .demo/audit
DEMO_CONFIGS := fp32-eager fp32-tp3 bf16-eager bf16-sdpa bf16-fp32head
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help setup demo test check bench
.DEFAULT_GOAL := help

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment (.venv) and install into it.

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	touch $(STAMP)

demo: $(STAMP) ## Record and replay a small real model, and report the differences.
	$(BIN)/trace-audit record demo --prompts examples/prompts.jsonl -o $(DEMO) \
		--max-tokens 64 --ignore-eos --force
	$(BIN)/trace-audit replay $(DEMO) $(DEMO_CONFIGS:%=--config configs/%.toml) --force
	$(BIN)/trace-audit diff report $(DEMO)

# One intra-op thread a test process: two of them share the machine's cores.
test: export OMP_NUM_THREADS ?= 1
test: $(STAMP) ## Run the tests.
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: $(STAMP) ## Lint, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## Run the benchmarks.
	$(BIN)/python -m benchmarks.correctness
	$(BIN)/python -m benchmarks.trace_storage
	$(BIN)/python -m benchmarks.throughput
