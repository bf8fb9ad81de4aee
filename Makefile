# make serve   a real model on http://127.0.0.1:1025        make test   every test
PY ?= python3
BIN := .venv/bin

.PHONY: setup serve demo test check bench wheel clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

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

bench: setup
	$(BIN)/python -m benches

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist src/*.egg-info
