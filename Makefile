# Everything runs in .venv, which `make setup` fills once; it is filled anew when what it is made from changes.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two test processes share the cores; one thread each keeps them out of each other's way.
# Each begins with one half of the tests, so that it makes what the tests of a file share once; who is done takes over.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: setup demo test test-all test-gpu test-page lint format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/longstride doctor
	mkdir -p demo
	$(BIN)/longstride plot patterns --out demo/patterns.png --force
	$(BIN)/longstride demo --folder demo

test: lint
	$(TEST)

test-all: lint
	$(TEST) -m ''

# On a machine with a GPU: the tests that use it where there is one, slow ones too.
test-gpu: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -q -m 'not page' \
		$$(grep -rl --include='test_*.py' 'cuda.is_available' tests)

# The page in Chromium: Debian's package, and Playwright to drive it.
test-page: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,page-tests]'
	command -v chromium > /dev/null || { apt-get update && apt-get install --yes chromium; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m page tests/serving

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/longstride bench attention --lengths 16384 --peers all --repeats 9 \
		--json benchmarks/results/attention-cpu.json --force
	$(BIN)/longstride bench attention --lengths 16384 --repeats 7 --heads 4 \
		--json benchmarks/results/attention-cpu-4-heads.json --force
	$(BIN)/longstride bench attention --lengths 2048 4096 8192 16384 32768 65536 --peers none \
		--json benchmarks/results/attention-cpu-scaling.json --force

clean:
	rm -rf .venv build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
