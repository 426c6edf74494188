# `make demo` and `make test` are all that a fresh clone needs; both set up .venv from the lock file first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := $(wildcard ../shared/data)
export CONSILIENCE_DATA ?= $(if $(DATA),$(abspath $(DATA)),)
# Tests start many processes: without bytecode on disk each of them compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test collected lint docs bench clean

setup: $(VENV)/ready

# torch first and alone: with it in place, nothing else pulls another build of it.
$(VENV)/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: setup
	$(BIN)/consilience demo

# One thread a test process: processes of two threads each fight over two cores. Three of them, as some tests wait for
# processes of their own. They find the tests compiled and the images decoded: that is done once, while mypy reads.
test: setup
	$(MAKE) -j2 lint collected
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

collected: setup
	@$(BIN)/python -m pytest --collect-only > /dev/null || true  # what is wrong is said when they run
	@$(BIN)/python -c "import consilience as cs; cs.load('cifar10'), cs.load('cifar100')" 2> /dev/null || true

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python benchmarks/simulator.py

clean:
	rm -rf $(VENV) site runs build dist
