# make help: all targets. make quickstart: set up, and run the main job on the embedded data. make test:
# set up, and test.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Python compiles what it imports, once, also where it is told to keep nothing
RUN = PYTHONDONTWRITEBYTECODE= $(BIN)/python
EXTRAS ?= dev
# --no-compile: a minute less, since Python imports a third of these packages' files at most
PIP = $(BIN)/python -m pip install --quiet --no-compile
# an independent implementation of defences and attacks, which tests compare with; not its plots
BYZFL = byzfl==0.0.11

.PHONY: help setup quickstart test test-all test-fast lint format docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## create .venv with pl_fed and its tools

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pl_fed needs Python 3.11 or newer, but %s is %d.%d: run make PYTHON=python3.12, say" % (sys.executable, *sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[$(EXTRAS)]'
	@$(PIP) --no-deps $(BYZFL) || echo "$(BYZFL) is not to be had: the tests that compare with it will be skipped"
	@touch $@

quickstart: setup ## run Ditto on scikit-learn's digits, about 10 seconds
	$(RUN) -m pl_fed fit --config configs/quickstart.yaml

# a process per core, up to four, of one thread each: the tests' tensors are small, and threads only get
# in each other's way
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal

# every promise, once; of the tests of further combinations none, or those of PART=3/8, say
PART ?= none
test: setup ## run the tests
	$(PYTEST) --exhaustive $(PART)

test-all: setup ## run the tests of all combinations, too: before a release
	$(PYTEST)

# between two edits: no process, no compiler, no real data, no more than an eighth of a second for a test
test-fast: setup ## run the contracts and exact numbers that take a moment, in 75 seconds on two cores
	$(PYTEST) -m "not slow"

lint: setup ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) -m pytest -n 0 .ci/language.py

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

# html writes the site; dummy resolves all references and writes nothing, in half the time
BUILDER ?= html
docs: $(VENV)/.docs ## build the site from the pages and the docstrings into build/docs/html
	$(RUN) .ci/docs/gather.py build/docs/source
	$(RUN) -m sphinx -b $(BUILDER) -q -W --keep-going -c .ci/docs build/docs/source build/docs/$(BUILDER)

clean: ## remove .venv, runs and everything that was built
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
