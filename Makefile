# `make serve` and `make test` work on a bare machine: they set up .venv first, and again only when
# pyproject.toml changed. `make ci` is exactly what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and exactly: left to the resolver, another build with gigabytes of CUDA comes along.
# The extra index has 2.13.0+cpu, which counts as newer than 2.13.0; with a GPU, name another index.
# It is asked for torch alone: one that does not answer costs each package it is asked for a minute.
TORCH := torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Of thousands of modules few are ever imported, and who does first compiles them for all.
PIP := --progress-bar off --quiet --no-compile
# uv does in seconds what takes a processor one minute or two by pip, but reads no settings of pip, so
# it is told of the index. Where it cannot be had, or nobody answers it, pip does all of it.
UV_INSTALL := $(BIN)/pip install $(PIP) --retries 1 'uv<1' && \
	UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --python $(BIN)/python \
	$$($(BIN)/pip config list | sed -n "s/^[^=]*[.]index-url='\(.*\)'/--default-index \1/p" | tail -1)
PARALLEL := -q -n auto --dist worksteal --durations=30 --durations-min=1
MODEL ?=
MACHINE ?=
ARGS ?=
# What two targets print beside each other comes whole; make of macOS cannot.
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# Those that need no words of their own.
BENCH ?= $(shell grep -rl --include='*.py' '^if __name__ ==' benchmarks | grep -v gpu/leader \
	| xargs grep -LE 'required=True|add_argument."[a-z]' | sort | sed 's/\.py$$//; s,/,.,g')

# Images set it for what runs once. Each process of tests would compile every module of theirs again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup fmt lint type protos lock protos-check test test-browser test-node test-cluster test-prometheus test-arm test-gpu sim serve bench guard flakes mutants wheel images compose-test doctor ci clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*##/  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(VENV)/.installed  ## the virtual environment with everything in it

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kaiten needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install it, or name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "Python's venv module is missing: apt install python3-venv"; exit 1; }
	@echo "installing torch and the packages of pyproject.toml into $(VENV): a few minutes, mostly downloads"
	@$(BIN)/pip install $(PIP) --no-deps --retries 1 --timeout 10 \
	  --extra-index-url $(TORCH_INDEX) '$(TORCH)' || { \
	  echo "torch could not be installed. Is the network there? For another source of it:"; \
	  echo "make TORCH_INDEX=URL $(MAKECMDGOALS)"; exit 1; }
	@{ $(UV_INSTALL) -e '.[dev]'; } 2>/dev/null || $(BIN)/pip install $(PIP) -e '.[dev]' || { \
	  echo "The packages of pyproject.toml could not be installed; pip says why above. Then: make $(MAKECMDGOALS)"; exit 1; }
	@echo "compiling the CPU kernels for this processor: ten seconds, once per machine"
	@$(BIN)/python -c 'from kernels import native; native.build(); print(native.reason())'
	@touch $@

fmt: setup  ## rewrite the code as ruff likes it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup  ## format, ruff and buf, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd protos && ../$(BIN)/buf lint

type: setup  ## mypy --strict
	$(BIN)/mypy .

protos: setup  ## rewrite the stubs from the .proto files
	$(BIN)/python protos/generate.py

lock: setup  ## write anew what the images install, from the ranges of pyproject.toml
	$(BIN)/python -m tools.lock

protos-check: setup  ## are the checked-in stubs fresh?
	$(BIN)/python protos/generate.py --check

test: setup  ## every test, on all cores: 5 to 20 minutes on two
	@echo "about 7,000 tests in $$($(PYTHON) -c 'import os; print(2 * os.cpu_count())') processes with real stores and services: 5 to 20 minutes on two cores, by the processor."
	@echo "One folder, with output as it comes: $(BIN)/python -m pytest tests/unit -x"
	PYTHONHASHSEED=0 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-browser: setup  ## what web pages can do to a local gateway, by a real Chromium
	$(BIN)/python -m pytest tests/browser -m browser $(ARGS)

test-node: setup  ## the official JavaScript SDK before a real stack
	$(BIN)/python -m pytest tests/node -m node $(ARGS)

test-prometheus: setup  ## every query of dashboards and alerts, asked of a real Prometheus that scrapes a cell
	$(BIN)/python -m pytest tests/prometheus -m prometheus $(ARGS)

test-cluster: setup  ## the ledger in a cluster of stores and under Sentinels, real processes; ARGS='-m stores' for all of it
	$(BIN)/python -m pytest tests/stores -m 'stores and not slow' $(ARGS)

test-arm: setup  ## the CPU kernels for ARM, cross-compiled and run by qemu; ARGS='-m arm' for every variant
	$(BIN)/python -m pytest tests/arm -m 'arm and not slow' $(ARGS)

# What makes a stack, or takes much memory, is one process's.
test-gpu: setup  ## on a machine with a GPU: kernels, recorded steps, and the stack computing there
	$(BIN)/python -m pytest tests/gpu -m gpu -q -n auto --dist loadgroup --durations=30 --durations-min=1 $(ARGS)

sim: setup  ## the other half of the whole-system simulation's seeds, under another hash seed
	PYTHONHASHSEED=1 $(BIN)/python -m pytest tests/sim $(PARALLEL) $(ARGS)

serve: setup  ## serve the shipped model, or MODEL=folder-or-hub-id, with ARGS='--workers 2'
	$(BIN)/kaiten serve $(MODEL) $(ARGS)

wheel: setup  ## dist/*.whl with the CPU kernels of every x86-64 inside: needs no compiler where it is installed; MACHINE=aarch64 CXX=aarch64-linux-gnu-g++: for ARM
	$(BIN)/python -m tools.prebuilt $(if $(MACHINE),--machine $(MACHINE)) $(if $(filter default,$(origin CXX)),,--compiler $(CXX))
	rm -rf build
	$(if $(MACHINE),_PYTHON_HOST_PLATFORM=linux-$(MACHINE)) $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

images: setup  ## build the container images with docker or podman, look into them, say how large they are; deploy/README.md
	$(BIN)/python -m tools.containers.images $(ARGS)

compose-test: setup  ## images, then docker-compose.yml up, scaled, every container killed under streams, down; deploy/README.md
	$(BIN)/python -m tools.containers.compose_test $(ARGS)

doctor: setup  ## check this machine
	$(BIN)/kaiten doctor

bench: setup  ## every benchmark, or BENCH=benchmarks.core.bench_scheduler; see benchmarks/results
	@for module in $(BENCH); do echo "== $$module"; $(BIN)/python -m $$module $(ARGS) || exit 1; done

guard: setup  ## fails when a hot path costs more than twice what is kept; ARGS=--store keeps anew
	$(BIN)/python -m benchmarks.guard $(ARGS)

flakes: setup  ## tests that start a process or wait, 20 times, half beside busy loops; docs/testing.md
	$(BIN)/python -m tools.flakes $(ARGS) $(if $(findstring -- ,$(ARGS)),,-- $(PARALLEL))

mutants: setup  ## which tests catch which mistakes, each made in a copy of the tree; docs/testing.md
	$(BIN)/python -m tools.mutants $(ARGS)

# Most of these wait more than they compute: five of them keep two cores busy, as the tests do.
ci: setup  ## what CI runs
	$(MAKE) -j5 $(SYNC) type lint protos-check test-browser test-node test-cluster test-prometheus test-arm sim
	$(MAKE) test guard

clean:  ## remove what can be made again, except the store and the models
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist kernels/cpp/prebuilt *.egg-info
