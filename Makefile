# make pretrain   make .venv and train a small model on the sample corpus; ARGS="--steps 20" passes options on
# make test       make .venv and run every check
# make lint       the checks that run no code: format, style, types, import rules
# make clean      remove .venv and what the tools leave behind; runs in out/ stay
#
# A different interpreter: make test PYTHON=/path/to/python3.12

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help pretrain test lint clean

IS_RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	if $$p -c '$(IS_RECENT)' 2>/dev/null; then echo $$p; exit; fi; done; echo python3)

# With an NVIDIA driver JAX comes with CUDA. It is part of the stamps' names: a driver that appears later is noticed.
CUDA := $(shell if nvidia-smi >/dev/null 2>&1 || test -e /proc/driver/nvidia/version; then echo cuda12; fi)
PRETRAIN_EXTRAS := $(CUDA:%=[%])
TEST_EXTRAS := [dev,torch,hf,tracking,data,serve,eval$(CUDA:%=,%)]
PRETRAIN_STAMP := .venv/installed-pretrain$(CUDA:%=-%)
TEST_STAMP := .venv/installed-test$(CUDA:%=-%)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

pretrain: $(PRETRAIN_STAMP)
	@.venv/bin/python scripts/train.py --stage pretrain $(ARGS)

test: lint
	@echo "== pytest"
	@.venv/bin/pytest -n 2 --dist loadfile $(ARGS)

lint: $(TEST_STAMP)
	@echo "== ruff"
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/ruff check --quiet .
	@echo "== mypy"
	@.venv/bin/mypy
	@echo "== import-linter"
	@.venv/bin/lint-imports

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# A stamp is touched last, so an install that failed or was interrupted is done again. Byte-compiling every package
# would take longer than the installation; what is imported is compiled then.
$(PRETRAIN_STAMP): pyproject.toml constraints.txt | .venv/created
	@echo "Installing minigpt$(PRETRAIN_EXTRAS) into .venv (a few minutes the first time)"
	@.venv/bin/python -m pip install -q --no-compile -c constraints.txt -e ".$(PRETRAIN_EXTRAS)"
	@touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | .venv/created
	@echo "Installing minigpt$(TEST_EXTRAS) into .venv (a few minutes the first time)"
	@.venv/bin/python -m pip install -q --no-compile -c constraints.txt -e ".$(TEST_EXTRAS)"
	@touch $@ $(PRETRAIN_STAMP)

.venv/created:
	@$(PYTHON) -c '$(IS_RECENT)' 2>/dev/null || { \
		echo "error: minigpt needs Python 3.11 or newer, and $(PYTHON) is older or missing;" \
			"name another with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@
