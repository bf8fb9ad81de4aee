# make serve   a real model on http://127.0.0.1:1025        make test   every test
PY ?= python3
BIN := .venv/bin

.PHONY: setup browser serve demo test check coverage golden mutants bench audit wheel clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps text-generation==0.7.0  # claims to need an old huggingface_hub
	touch $@

# What tests/browser drives; Debian's.
browser:
	command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium)

serve: setup
	$(BIN)/kvloom serve

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check src tests tools benches examples
	$(BIN)/ruff check src tests tools benches examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lines.py
	$(MAKE) --no-print-directory coverage

# Every branch of the pure modules is taken by their tests.
PURE := src/kvloom/engine/blocks.py,src/kvloom/engine/scheduler.py,src/kvloom/engine/stop.py,src/kvloom/engine/detok.py,src/kvloom/engine/policies.py,src/kvloom/engine/lookup.py,src/kvloom/engine/swap.py,src/kvloom/engine/memory.py,src/kvloom/engine/transfers.py
coverage: setup
	$(BIN)/coverage run --branch --include=$(PURE) -m pytest -q \
	  tests/engine/test_blocks.py tests/engine/test_scheduler.py tests/engine/test_stop.py tests/engine/test_detok.py \
	  tests/engine/test_policies.py tests/engine/test_speculation.py tests/engine/test_swap.py tests/engine/test_memory.py \
	  tests/engine/test_transfers.py
	$(BIN)/coverage report --show-missing --fail-under=100

# Write the files again that tests/wire/test_golden.py compares with.
golden: setup
	$(BIN)/python -m tests.wire.golden

mutants: setup
	$(BIN)/python tools/mutants.py

bench: setup
	$(BIN)/kvloom bench
	$(BIN)/python -m benches

audit:
	$(PY) -m venv .venv/audit
	.venv/audit/bin/pip install -q pip-audit
	.venv/audit/bin/pip-audit --no-deps --disable-pip -r constraints.txt

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist src/*.egg-info
