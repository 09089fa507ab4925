# The only door: every task of this project is a target here; `make` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that makes the virtual environment; 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled when the package is installed; a change builds them again.
HOT := $(addprefix cdc_relay/binlog/,jsonb.py values.py rows.py decoder.py)
# What ruff looks at; mypy's list is in pyproject.toml.
CODE := .

.PHONY: help venv up down demo test chaos page manifests check lint bench bench-peers sbom docs fmt python

help:  ## list the targets
	@echo "cdc-relay: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: venv  ## the whole path on real servers, with kills; ORDERS=118402 SEED=7 KEEP=1
	@$(BIN)/python -m examples.shop.demo $(if $(ORDERS),--orders $(ORDERS)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep)

# The servers are fetched while the code is checked (not earlier: both may install packages).
# The decoder's part runs first on the plain sources, then, with everything else, compiled.
# Tests of the relay mostly wait, so three run beside each other where memory allows.
# At the end the bill of materials, and whether an advisory is known against a package in it.
test: venv  ## check, then the whole suite on real MySQL, MariaDB and Kafka (started here); WORKERS=3
	@$(PYTHON) -m dev fetch & fetch=$$!; trap 'kill $$fetch 2>/dev/null || :' EXIT; \
	    $(MAKE) --no-print-directory lint; wait $$fetch
	@CDC_RELAY_PURE=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile \
	    tests/unit tests/integration/test_decoder_differential.py
	@$(BIN)/python -m pytest -q -n $(or $(WORKERS),$$($(PYTHON) -m dev.workers)) --dist worksteal --durations=15 $(ARGS)
	@$(BIN)/python -m dev.sbom .sbom --advisories

chaos: venv  ## seeded faults on real servers, and the account; SEEDS=1..100
	@$(PYTHON) -m dev fetch
	@$(BIN)/python -m tests.chaos $(or $(SEEDS),1..10) $(ARGS)

page: venv  ## the page in a real Chromium (screenshots in .page/) and the alerts by promtool
	@$(PYTHON) -m dev fetch
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'playwright>=1.48,<2'
	@tools=$$($(PYTHON) -m dev.browser); eval "$$tools"; \
	    $(BIN)/python -m pytest -q -o python_files='check_*.py' tests/page $(ARGS)

manifests: venv  ## what is in deploy/ by kubectl, systemd, Compose and promtool, as far as they are here
	@$(BIN)/python -m tests.support.manifests

check: lint  ## under a minute: ruff, mypy, import contracts, unit tests
	@$(BIN)/python -m pytest -q tests/unit $(ARGS)

lint: venv
	@$(BIN)/python -m ruff check $(CODE)
	@$(BIN)/python -m ruff format --check $(CODE)
	@$(BIN)/python -m mypy
	@$(BIN)/python -c 'from importlinter.cli import lint_imports_command as lint; lint()'

bench: venv  ## the figures of this machine, beside the stock library
	@$(PYTHON) -m dev fetch
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: venv  ## the same rows by Debezium, beside us
	@$(PYTHON) -m dev fetch
	@$(BIN)/python -m benchmarks.peers $(ARGS)

sbom: venv  ## bill of materials of an installation, in .sbom/; ARGS=--advisories asks about it
	@$(BIN)/python -m dev.sbom .sbom $(ARGS)

docs: venv  ## bring docs/configuration.md up to date with the settings
	@$(BIN)/python -m tests.support.configuration_doc

fmt: venv  ## format the code and mend what ruff can mend
	@$(BIN)/python -m ruff check --fix $(CODE)
	@$(BIN)/python -m ruff format $(CODE)

up: python  ## start the development servers and print their environment
	@$(PYTHON) -m dev up

down: python  ## stop the development servers
	@$(PYTHON) -m dev down

venv: $(VENV)/.stamp  ## the virtual environment, remade when pyproject.toml changed

# The stamp is written last, so an interrupted install is done again.
$(VENV)/.stamp: pyproject.toml setup.py $(HOT) | python
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing python3-venv (this Python has no ensurepip)"; \
	        apt-get update -qq; \
	        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; \
	    else \
	        echo "make: $(PYTHON) has no ensurepip; install it first: sudo apt-get install python3-venv" >&2; \
	        exit 1; \
	    fi; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 \
	    || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "installing cdc-relay and its tools into $(VENV)"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' >$(VENV)/install.log 2>&1 \
	    || { cat $(VENV)/install.log >&2; exit 1; }
	@touch $@

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "make: $(PYTHON) is not Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	    exit 1; }
