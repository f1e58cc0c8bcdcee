# Every target works on a machine that has only Python 3.11+, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo worker publish test lint types unit evidence integration prove soak bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## plain Celery and IdempotentTask side by side, under fire
	$(BIN)/python -m example_project.demo

worker: $(INSTALLED)  ## only a worker of the example (starts the embedded AWS if none is configured)
	$(BIN)/python -m example_project.worker

publish: $(INSTALLED)  ## only a publisher of the example
	$(BIN)/python -m example_project.publish

test: lint types unit evidence integration  ## everything CI runs

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/pytest tests/unit tests/contract --cov --cov-report=term:skip-covered
	$(BIN)/coverage report --fail-under=100 --include="*/protocol.py,*/attempt.py,*/guard.py,*/keys.py,*/stores/*"

evidence: $(INSTALLED)
	@command -v strace > /dev/null || { apt-get update -qq && apt-get install -qq -y strace; } || echo "no strace: skipped where that is allowed"
	$(BIN)/pytest tests/properties tests/proof tests/crash -n 2

integration: $(INSTALLED)
	$(BIN)/pytest tests/integration -n 2

prove: $(INSTALLED)  ## attack the code: every interleaving, mutants, kills at every point, faults, peers beside it
	$(BIN)/python -m proof all

soak: $(INSTALLED)  ## real workers under fire: make soak MINUTES=5 SEED=1
	$(BIN)/python -m proof soak --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1)

bench: $(INSTALLED)  ## requests per path, CPU per call, key derivation, worker throughput
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
