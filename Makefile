# `make test` and `make demo` do all their set-up themselves, on a fresh machine too.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# tests start some hundred processes, and each would compile the package's source again
unexport PYTHONDONTWRITEBYTECODE

# three workers, since many tests wait for processes; a file at a time, the longest of the last run first
# (tests/conftest.py)
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: test check nightly floor tests fast demo lint types map results entries reference scale sizes docs release setup browser clean

test: setup browser  ## everything CI checks; lint and types side by side, since each takes one core
	$(MAKE) --no-print-directory -j 2 lint types
	$(PYTEST) -m "not nightly"

check: setup  ## lint, types and the fast tests, side by side
	$(MAKE) --no-print-directory -j 2 lint types fast

nightly: setup browser $(DOCS)  ## every test, also the exhaustive grids
	$(PYTEST)

floor:  ## the tests of `make test` on the oldest torch, Triton and transformers that we take
	$(MAKE) --no-print-directory VENV=.venv-floor CONSTRAINTS=constraints-floor.txt tests

tests: setup browser  ## what `make test` runs after lint and types
	$(PYTEST) -m "not nightly"

fast: setup
	$(PYTEST) -n 2 -m "not slow and not nightly"

demo: setup  ## does a depth architecture pay? three seeds on this machine's CPU, in four minutes
	$(BIN)/residua compare --demo
	@echo
	@echo 'To call residua in this shell:  source $(BIN)/activate'
	@echo 'To have it everywhere:          pipx install .   or   uv tool install .'
	@echo 'Then a verdict on your own text in ten minutes: docs/quickstart.md'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/prose.py

types: setup
	$(BIN)/mypy

map: setup  ## draw docs/img: architecture.svg from the imports in the code, topology-*.svg and anchors-*.svg from the model
	$(BIN)/python tools/architecture.py
	$(BIN)/python tools/topologies.py
	$(BIN)/python tools/anchors.py

results: setup  ## write the tables and pictures of the documentation from docs/results
	$(BIN)/python tools/results.py
	$(BIN)/python tools/answer.py

entries: setup  ## write the table of `residua reproduce` into docs/reproduce.md
	$(BIN)/python tools/entries.py

reference: setup  ## write every option and every key of a configuration into docs/reference
	$(BIN)/python tools/reference.py

docs: $(DOCS)  ## the site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; for the search: $(BIN)/python -m http.server --bind 127.0.0.1 -d build/site"

release: $(DOCS)  ## check and build a release; nothing is uploaded
	$(BIN)/python tools/release.py

scale: setup  ## write the plans for 8 to 4096 GPUs into docs/lab/plans.md
	$(BIN)/python tools/scale.py

sizes: setup  ## count the parameters of every preset for `residua presets`
	$(BIN)/python tools/sizes.py

setup: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS) requirements-titan.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/pip install -q --no-deps -r requirements-titan.txt
	touch $@

$(DOCS): $(READY)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

browser:  ## the report's pages are opened in Chromium; without one those tests skip and say so
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
	  || echo "no Chromium and no way to install it here: the page tests will skip"

clean:
	rm -rf $(VENV) .venv-floor build runs .pytest_cache .mypy_cache .ruff_cache
