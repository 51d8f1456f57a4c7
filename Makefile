# Works on a fresh machine with Linux and Python 3.11 or later; no GPU. PYTHON chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help install demo test matrix examples bench bench-peers bench-training parity lint format clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(STAMP)  ## create .venv and install the package with what its development needs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## train over two ranks (or all GPUs) and on one, and draw demo.png; ARGS="--data FILE" takes your text
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP)  ## run the core suite; ARGS="-k name" goes to pytest
	$(BIN)/python -m pytest -m "not examples and not matrix" $(ARGS)

matrix: $(STAMP)  ## run the rest of the tests: every mode, predicates, and each cell of the support table
	$(BIN)/python -m pytest -m matrix $(ARGS)

parity: $(STAMP)  ## write build/parity/parity.md: errors on 1 to 8 ranks, dependence, public reports; ten minutes
	$(BIN)/python -m benchmarks.parity $(ARGS)

examples: $(STAMP)  ## run the examples and the commands of the README, and check what they say
	$(BIN)/python -m pytest -m examples $(ARGS)

bench: $(STAMP)  ## 12 cases in ten minutes; SUITE=full: all, under 100 minutes, can be stopped and resumed; ARGS="--only window"
	$(BIN)/python benchmarks/bench.py --suite $(or $(SUITE),quick) $(ARGS)

$(PEERS_STAMP): benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement $<
	touch $@

bench-peers: $(PEERS_STAMP)  ## ringcp beside other libraries, in 15 to 20 minutes; ARGS="--only documents" or "--smoke"
	$(PEERS)/bin/python -m benchmarks.peers.bench $(ARGS)

bench-training: $(STAMP)  ## train a small decoder in every mode and in one process: speed, memory, loss curves; ARGS="--smoke"
	$(BIN)/python -m benchmarks.training $(ARGS)

lint: $(STAMP)  ## ruff, formatting, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the files as ruff would have them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
