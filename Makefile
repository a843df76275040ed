# Two commands matter: `make demo` and `make test`. Both make the environment first, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One framework thread for each test worker: two workers on two cores, and counts that do not depend on the machine. Each
# begins with its half of the tests, so that those which share a browser or a run of the demo mostly share a worker.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=20
# These register a device with torch, which has to be done before a process runs its first backward.
DEVICE := tests/device
COVER := --cov=lowtide --cov-report=
COVERED := --cov-report=term --cov-fail-under=100

# The tests of the report page drive a browser. Where none can be had they are skipped, and say so.
BROWSERS := chromium chromium-browser google-chrome
APT_GET := $(if $(filter 0,$(shell id -u)),,sudo -n )env DEBIAN_FRONTEND=noninteractive apt-get -qq

.PHONY: help demo check test test-all mutants lint types browser docs format bench compat clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Show what Lowtide does; writes demo-output/
	$(BIN)/lowtide demo

check: lint types  ## Lint, types and the tests that find most, within three minutes
	$(PYTEST) -m "not slow and not long" --ignore=$(DEVICE)
	$(PYTEST) -m "not slow and not long" $(DEVICE)

test: lint types browser  ## Lint, types and the tests, within minutes
	$(PYTEST) -m "not slow" --ignore=$(DEVICE) $(COVER)
	$(PYTEST) -m "not slow" $(DEVICE) $(COVER) --cov-append $(COVERED)

test-all: lint types browser  ## The same with the whole sweeps and soaks
	$(PYTEST) --ignore=$(DEVICE) $(COVER)
	$(PYTEST) $(DEVICE) $(COVER) --cov-append $(COVERED)

mutants: $(INSTALLED)  ## Run the tests of deliberately wrong variants of the library; fails if one is not caught
	$(BIN)/python -m tests.mutants

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

browser:
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit 0; done; \
	echo "installing Chromium, for the tests of the report page"; \
	{ $(APT_GET) update && $(APT_GET) install -y --no-install-recommends chromium; } > /dev/null 2>&1 \
	|| echo "Chromium could not be installed: the tests of the report page will be skipped"

docs: $(INSTALLED)  ## Build the documentation; writes docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

format: $(INSTALLED)  ## Put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Time planners, rollouts, functions and layers beside their peers (pyrevolve and compile= need a C++ compiler)
	$(PIP_INSTALL) pyrevolve
	$(BIN)/lowtide bench

# In an environment outside the tree, which stays for the next time; an ordinary torch brings gigabytes of CUDA packages.
COMPAT_FRONT := $(if $(TORCH),torch,jax)
COMPAT_VERSION := $(or $(TORCH),$(JAX))
COMPAT := $(or $(TMPDIR),/tmp)/lowtide-compat/$(COMPAT_FRONT)-$(COMPAT_VERSION)
COMPAT_EXTRAS := $(if $(TORCH),torch$(COMMA)transformers$(COMMA)lightning,jax)
COMPAT_INSTALL := $(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(COMPAT)/constraints.txt
TESTS ?= $(if $(TORCH),tests/torch tests/test_transformers.py tests/test_lightning.py,tests/jax)

compat:  ## Run a front end's tests with another version: make compat TORCH=2.9.1, or JAX=0.8.3
	@test -n "$(COMPAT_VERSION)" || { echo "which version? make compat TORCH=2.9.1, or JAX=0.8.3"; exit 2; }
	$(PYTHON) -m venv $(COMPAT)
	grep -vE '^(torch|jax|jaxlib)==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT_INSTALL) "$(COMPAT_FRONT)==$(COMPAT_VERSION)" --editable ".[$(COMPAT_EXTRAS),dev]"
	$(COMPAT_INSTALL) --no-deps --requirement tests/partners.txt
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(COMPAT)/bin/python -m pytest -n 2 --dist worksteal -W ignore::DeprecationWarning \
		-m "not slow" $(TESTS)

clean:  ## Remove the environment and everything generated
	rm -rf $(VENV) demo-output docs/_build docs/_generated .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(INSTALLED): pyproject.toml constraints.txt tests/partners.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lowtide needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable ".[all]"
	$(PIP_INSTALL) --no-deps --requirement tests/partners.txt
	touch $@
