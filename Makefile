# Two commands matter on a fresh machine: `make demo` and `make test`. Each installs what it needs
# into .venv and installs nothing the second time.

# Of this Python the distribution's build, where there is one: compiled with the profile of a run,
# it takes an eighth less time for the tests than a plain build has, such as pyenv's.
SAME   := import sys, ensurepip, venv; print(sys.version_info[:2])
PYTHON ?= $(shell test "`/usr/bin/python3 -c '$(SAME)' 2>&1`" = "`python3 -c '$(SAME)' 2>&1`" \
  && echo /usr/bin/python3 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Torch comes as one stated version: a plain `torch` would pull gigabytes of accelerator libraries.
PIN    := --constraint constraints.txt
# One more than there are processors: many tests wait, for processes to end and silences to last.
WORKERS ?= $(shell expr `getconf _NPROCESSORS_ONLN` + 1)
# Neighbours stay together, so that what they share is made once; who is done takes from the others.
SPREAD := -n $(WORKERS) --dist worksteal
VERSION = $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
# Tests start hundreds of interpreters and rewrite their asserts: compiled once, not each time.
test quick soak lowest: export PYTHONDONTWRITEBYTECODE :=
# Every processor has a test to run: threads of libraries would only spin beside it.
test quick soak lowest: export OMP_NUM_THREADS := 1
# They write many small files: into memory where it has 4 GB for them, `make soak` onto the disk.
MEMORY := $(shell test `df --output=avail /dev/shm 2>/dev/null | tail -1` -gt 4000000 2>/dev/null \
  && mkdir -p /dev/shm/tests-of-`id -u` && echo /dev/shm/tests-of-`id -u`)
test quick lowest: export TMPDIR := $(or $(TMPDIR),$(MEMORY))

# A recipe that fails leaves no half-made target behind.
.DELETE_ON_ERROR:
.PHONY: demo test quick check bench conformance soak docs docs-version lowest package clean

demo: $(VENV)/.core
	$(BIN)/tokenmill demo

test: $(VENV)/.test
	$(BIN)/python -m pytest $(SPREAD) -m "not soak" $(ARGS)

# The packages that a change touches, or the fast tests where it touches none.
quick: $(VENV)/.test
	$(BIN)/python -m scripts.quick $(SPREAD) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks conformance scripts
	$(BIN)/ruff format --check src tests benchmarks conformance scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

# Trainers' own code on the same rows: HOSTS holds their checkouts (docs/conformance.md says which),
# ROWS is how many rows of the corpora per template, TEMPLATES which templates.
conformance: $(VENV)/.test
	@test -n "$(HOSTS)" || { echo "say where the checkouts are: make conformance HOSTS=DIR" >&2; exit 2; }
	$(BIN)/python -m conformance --hosts $(HOSTS) $(if $(ROWS),--rows $(ROWS)) \
	  $(if $(TEMPLATES),--templates $(TEMPLATES)) $(ARGS)

# What is long, and every property with all the examples that it states.
soak: $(VENV)/.test
	TOKENMILL_TEST_EXAMPLES_SHARE=1 $(BIN)/python -m pytest -m "soak or hypothesis" --timeout 3600 $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Keeps the site of this version beside those of others, on the local branch gh-pages; pushes nothing.
docs-version: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default latest

# The core tests with the lowest versions that pyproject.toml allows, in environments of their own
# under build/: on each of these Pythons that there is, or on the one that is given as PYTHON=.
PYTHONS := $(if $(filter file,$(origin PYTHON)),python3.11 python3.12 python3.13,$(PYTHON))
lowest:
	python3 -m scripts.lowest $(PYTHONS) -- $(SPREAD) $(ARGS)

# dist/: a wheel and a source distribution, each installed alone and tried with the demo.
package:
	$(PYTHON) -m scripts.package

clean:
	rm -rf $(VENV) site build dist

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokenmill needs Python 3.11 or newer; say which: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python makes no virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml
	$(PIP) install --editable . $(PIN)
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
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
