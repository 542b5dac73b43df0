# From a fresh clone: `make demo` or `make test`. Needs make and Python >= 3.11; everything else goes into .venv.
#   PYTHON=python3.12      the Python to build .venv with
#   TORCH_SOURCE=...       where torch comes from: an index URL, a folder of wheels, or one .whl file
#   ARGS="-k resume -x"    passed on to pytest, or to the benchmark; ARGS="-n 4 --dist loadfile" tests four
#                          files at a time, where there are eight cores or more: most start several processes
#   PART=train             what gpu-check does: train-tests, train, layouts-tests, layouts, bench-tests, bench, plan or
#                          networks;
#                          PART="hook layouts": which records bench renews
#   WHEELS=wheels          where gpu-check finds the packages that its Python lacks
#   TORCH=2.11.0           the torch of gpu-rehearse and test-torch, in .venv-torch-2.11.0 (6 GB with CUDA)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH_SOURCE ?=
ARGS ?=
PART ?=
WHEELS ?=
TORCH ?= 2.11.0
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo
OTHER := .venv-torch-$(TORCH)
# `mypy --strict` for every module that does not mention torch, plain mypy for the rest.
TORCH_FREE = $(shell grep -rLE --include='*.py' '^ *(import|from) torch' src/shoal tools)

unexport PYTHONDONTWRITEBYTECODE  # each of some hundred processes would compile the sources anew
.NOTPARALLEL:  # setup and demo install into the same .venv
.PHONY: help setup demo test proof check mutate bench bench-train gpu-check gpu-rehearse test-torch wheels clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install (does nothing when nothing changed)

$(OTHER)/.ready: export TORCH_VERSION = $(TORCH)
$(READY) $(OTHER)/.ready: export EXTRAS = test
$(DEMO_READY): export EXTRAS = data,report
$(READY) $(DEMO_READY) $(OTHER)/.ready: pyproject.toml constraints.txt tools/setup.py
	@test -n "$(PYTHON)" || { echo 'error: no Python >= 3.11 found; install one, or: make setup PYTHON=/path/to/python3.12' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: $(PYTHON) is not a Python >= 3.11; name another one: make setup PYTHON=...' >&2; exit 1; }
	@VENV="$(@D)" TORCH_SOURCE="$(TORCH_SOURCE)" "$(PYTHON)" tools/setup.py
	@touch $@ $(@D)/.ready-demo

demo: $(DEMO_READY) ## text in, a trained GPT out, with a killed and recovered process on the way (3 minutes)
	$(BIN)/shoal quickstart

test: setup ## run the test suite, three files at a time: many tests wait
	$(BIN)/python -m pytest -m "not proof" -n 3 --dist loadfile $(ARGS)

proof: setup ## run the long tests, those that take times or all cores by themselves; the rest two files at a time
	@failed=0; \
	$(BIN)/python -m pytest -m "proof and alone" $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(BIN)/python -m pytest -m "proof and not alone" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	exit $$failed

check: setup ## format, lint, types, architecture, size
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict --follow-imports=silent --cache-dir=.mypy_cache/strict $(TORCH_FREE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python tools/lines.py

mutate: setup ## change the code in 150 places and see which the tests notice; goes on where it stopped (hours)
	$(BIN)/python -m tools.mutate $(ARGS)

bench: setup ## renew the records of benchmarks that are stale, or those of PART="hook layouts"; says first how long
	$(BIN)/python -m tools.records --run $(PART) $(ARGS)

bench-train: setup ## training speed beside transformers, litgpt and bare torch on this CPU (32 minutes)
	$(BIN)/python -m benchmarks.train_step $(ARGS)

gpu-check: ## GPU tests (PART=train-tests), then speed (PART=train), with PYTHON as it is; docs/gpu.md (10 minutes each)
	@PYTHONPATH=src:$$PYTHONPATH "$(PYTHON)" -m benchmarks.gpu_check --part "$(PART)" $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

gpu-rehearse: $(OTHER)/.ready ## train every layout and strategy on fake CUDA tensors, without a GPU (10 minutes)
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal tests/rehearse $(ARGS)

test-torch: $(OTHER)/.ready ## run the tests that touch torch most under another torch: make test-torch TORCH=2.11.0
	$(OTHER)/bin/python -m benchmarks.torch_versions $(ARGS)

wheels: setup ## download into wheels/ what gpu-check needs beside torch on a machine without a network
	$(BIN)/python tools/wheels.py

clean: ## remove .venv, those with another torch, and caches; data and runs stay
	rm -rf .venv .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/shoal.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
