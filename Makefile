# `make demo` and `make test` do all the set-up; the second time they start at once.
SHELL := /bin/bash
PY := .venv/bin/python
CONFIG := recipes/digits_vlm/configs/train.yaml

.PHONY: setup demo test lint format clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv, once"
	@command -v uv >/dev/null || python3 -m pip install --quiet uv || python3 -m pip install --quiet --user --break-system-packages uv
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --seed .venv && \
	$$uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable '.[dev,hf,data]'
	@touch $@

demo: setup
	@$(PY) -m mvp_engine.cli train $(CONFIG)
	@echo; echo "All held-out questions, answered by the saved checkpoint:"
	@$(PY) -m mvp_engine.cli train $(CONFIG) workflow=report resume=auto log.backends=[terminal,file,jsonl]

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

format: setup
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

test: lint
	@.venv/bin/pytest

clean:
	rm -rf .venv outputs .pytest_cache .mypy_cache .ruff_cache
