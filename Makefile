# Start with `make demo` and `make test`. Each installs what it needs into .venv, once.

# Use /usr/bin/python3 if it has the version of python3: distributions compile with profile-guided
# optimisation, which makes the tests 12% faster than pyenv's build.
SAME   := import sys, ensurepip, venv; print(sys.version_info[:2])
PYTHON ?= $(shell test "`/usr/bin/python3 -c '$(SAME)' 2>&1`" = "`python3 -c '$(SAME)' 2>&1`" \
  && echo /usr/bin/python3 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# The constraints pin a CPU build of torch; the default needs gigabytes of accelerator libraries.
PIN    := --constraint constraints.txt
# One more than the number of CPUs, because many tests wait for processes.
WORKERS ?= $(shell expr `getconf _NPROCESSORS_ONLN` + 1)
# Tests of one module stay together and share fixtures; idle workers take over tests of others.
SPREAD := -n $(WORKERS) --dist worksteal
VERSION = $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
# Tests start hundreds of interpreters, which should not compile the modules each time.
test quick soak lowest: export PYTHONDONTWRITEBYTECODE :=
# The tests use all CPUs, so threads of libraries would only compete.
test quick soak lowest: export OMP_NUM_THREADS := 1
# Tests write many small files: to /dev/shm if it has 4 GB; `make soak` uses the disk.
MEMORY := $(shell test `df --output=avail /dev/shm 2>/dev/null | tail -1` -gt 4000000 2>/dev/null \
  && mkdir -p /dev/shm/tests-of-`id -u` && echo /dev/shm/tests-of-`id -u`)
test quick lowest: export TMPDIR := $(or $(TMPDIR),$(MEMORY))

.DELETE_ON_ERROR:
.PHONY: demo test quick check bench conformance soak docs docs-version lowest package clean

demo: $(VENV)/.core
	$(BIN)/tokenmill demo

test: $(VENV)/.test
	$(BIN)/python -m pytest $(SPREAD) -m "not soak" $(ARGS)

# The tests of changed packages; the fast tests if no package changed.
quick: $(VENV)/.test
	$(BIN)/python -m scripts.quick $(SPREAD) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks conformance contrib scripts
	$(BIN)/ruff format --check src tests benchmarks conformance contrib scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

# Run the trainers' own code on our rows. TRAINERS is the directory of their checkouts (see
# docs/internals/conformance.md), ROWS the number of rows per template, TEMPLATES a selection.
conformance: $(VENV)/.test
	@test -n "$(TRAINERS)" || { echo "set the directory of the checkouts: make conformance TRAINERS=DIR" >&2; exit 2; }
	$(BIN)/python -m conformance --trainers $(TRAINERS) $(if $(ROWS),--rows $(ROWS)) \
	  $(if $(TEMPLATES),--templates $(TEMPLATES)) $(ARGS)

# Long tests, and every hypothesis property with all its examples.
soak: $(VENV)/.test
	TOKENMILL_TEST_EXAMPLES_SHARE=1 $(BIN)/python -m pytest $(SPREAD) -m "soak or hypothesis" \
	  --timeout 3600 $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Add the site of this version to the local branch gh-pages; pushes nothing.
docs-version: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default latest

# The core tests with the lowest versions that pyproject.toml allows, in environments under build/,
# with each of these Pythons that is installed, or with PYTHON=.
PYTHONS := $(if $(filter file,$(origin PYTHON)),python3.10 python3.11 python3.12 python3.13,$(PYTHON))
lowest:
	python3 -m scripts.lowest $(PYTHONS) -- $(SPREAD) $(ARGS)

# Build a wheel and a source distribution in dist/, install each and run the demo.
package:
	$(PYTHON) -m scripts.package

clean:
	rm -rf $(VENV) site build dist

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "tokenmill needs Python 3.10 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python cannot create virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml
	@echo "Installing tokenmill and its core libraries (about 150 MB) into $(VENV), once."
	$(PIP) install --editable . $(PIN)
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing torch and the libraries of the tests (about 2 GB) into $(VENV), once."
	$(PIP) install torch $(PIN)
	$(PIP) install --editable '.[test]' $(PIN)
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[dev]' $(PIN)
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) install --editable '.[bench]' $(PIN)
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[docs]' $(PIN)
	@touch $@
