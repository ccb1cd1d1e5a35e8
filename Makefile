# Two commands matter on a fresh machine: `make demo` and `make test`. Each installs what it needs
# into .venv and does nothing the second time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Torch comes as one stated version: a plain `torch` would pull gigabytes of accelerator libraries.
PIN    := --constraint constraints.txt
WORKERS ?= auto

.PHONY: demo test check bench soak docs clean

demo: $(VENV)/.core
	$(BIN)/tokenmill demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m "not soak" $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml
	$(PIP) install --editable . $(PIN)
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install torch $(PIN)
	$(PIP) install --editable '.[test]' $(PIN)
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[dev]' $(PIN)
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) install --editable '.[bench]' $(PIN)
	touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[docs]' $(PIN)
	touch $@
