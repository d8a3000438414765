# Each target makes the virtual environment and installs what it needs, once.
# Another interpreter: make test PYTHON=python3.13 VENV=.venv313
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
# Eight virtual CPU devices. NPROC sizes XLA's thread pool: JAX before 0.12 can deadlock with fewer
# threads than twice the devices. Set here, for the commands, because the library never touches the environment.
DEVICES = NPROC=32 JAX_PLATFORMS="$${JAX_PLATFORMS:-cpu}" \
  XLA_FLAGS="--xla_force_host_platform_device_count=8 $(FLAGS) $${XLA_FLAGS:-}"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-cluster test slow processes ray tpu gpu ecosystem results peers bench drift lint format docs notebooks wheel dist clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.has-core  ## a small training run on 8 virtual devices, with its report
	$(DEVICES) $(PY) -m shardfn demo

demo-cluster: $(VENV)/.has-cluster  ## two processes on this machine, a killed one, and recovery
	$(PY) -m shardfn demo --cluster

# What LLVM makes better is a third of the tests' time, and nothing that they look at; `make slow` has it. `conftest.py` adds to it.
test: FLAGS := --xla_backend_optimization_level=0
test: $(VENV)/.has-test  ## the tests, slow ones left out
	$(DEVICES) $(PY) -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

slow: $(VENV)/.has-test  ## the slow tests, and 1,000 examples of every property
	$(DEVICES) HYPOTHESIS_PROFILE=slow $(PY) -m pytest -n $(WORKERS) --dist worksteal \
	  -m "(slow or large or hypothesis) and not tpu and not gpu" $(PYTEST_ARGS)

processes: FLAGS := --xla_backend_optimization_level=0
processes: $(VENV)/.has-test  ## the tests that start 2 and 4 processes on this machine, with time limits
	$(DEVICES) $(PY) -m pytest -m "not slow and not large and not ray" tests/cluster tests/data/test_processes.py \
	  tests/checkpoint/test_processes.py $(PYTEST_ARGS)

# In a network of its own: Ray listens at all addresses of a machine. NETWORK= runs it in the machine's network.
NETWORK ?= unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$0" "$$@"'
ray: $(VENV)/.has-test $(VENV)/.has-ray  ## the tests that start a Ray cluster on this machine
	$(DEVICES) $(NETWORK) $(PY) -m pytest -m ray tests/cluster $(PYTEST_ARGS)

tpu: $(VENV)/.has-test $(VENV)/.has-tpu-aot  ## the tests that compile for TPU topologies (no TPU needed)
	$(DEVICES) TPU_SKIP_MDS_QUERY=1 $(PY) -m pytest -m tpu $(PYTEST_ARGS)

gpu: $(VENV)/.has-test $(VENV)/.has-gpu-aot  ## the tests that compile for GPUs (no GPU needed); JAX_PLATFORMS=cuda,cpu where one is here
	$(DEVICES) $(PY) -m pytest -m gpu $(PYTEST_ARGS)

ecosystem: override VENV := $(VENV)-ecosystem
ecosystem: FLAGS := --xla_backend_optimization_level=0
ecosystem: ## functions of some thirty JAX libraries, in a virtual environment of their own
	@$(MAKE) --no-print-directory VENV=$(VENV) $(VENV)/.has-ecosystem
	$(DEVICES) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m ecosystem tests/ecosystem tests/examples/test_gallery.py $(PYTEST_ARGS)

# A thousand programs take about ten minutes on one core. MINUTES=90 PROGRAMS=20000 ends at whichever comes first.
PROGRAMS ?= 1000
MINUTES ?= 1000
SEED ?= 1000
fuzz: $(VENV)/.has-test  ## random programs, sharded and unsharded: PROGRAMS=, MINUTES=, SEED=, WORKERS=
	$(PY) -m tests.fuzz --programs $(PROGRAMS) --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS) $(FUZZ_ARGS)

results: $(VENV)/.has-test  ## the benchmarks that one machine runs in half an hour, and the tables of benchmarks/RESULTS.md
	PYTHONPATH=. $(PY) benchmarks/results.py --run

peers: override VENV := $(VENV)-peers
peers:  ## shardfn beside scalax, haliax, Flax and plain jax.jit, in a virtual environment of their own
	@$(MAKE) --no-print-directory VENV=$(VENV) $(VENV)/.has-peers
	PYTHONPATH=. $(VENV)/bin/python benchmarks/peers.py --json benchmarks/results/peers.json
	PYTHONPATH=. $(VENV)/bin/python benchmarks/results.py

bench: $(VENV)/.has-test  ## every benchmark that needs no files, no GPU and no further libraries, one table each
	@set -e; for script in $(filter-out %/harness.py %/results.py %/peers.py %/iopddl.py %/rehearse.py,$(sort $(wildcard benchmarks/*.py))); do \
	  echo "== $$script"; $(DEVICES) PYTHONPATH=. $(PY) $$script; done

drift: $(VENV)/.has-test  ## what this JAX partitions otherwise than the release that benchmarks/drift.json was recorded with
	$(DEVICES) PYTHONPATH=. $(PY) benchmarks/partition_diff.py --drift

lint: $(VENV)/.has-core $(VENV)/.has-lint  ## format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.has-lint  ## rewrite the files as `make lint` wants them
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(VENV)/.has-docs  ## the documentation, in docs/_build/html
	$(DEVICES) $(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

notebooks: $(VENV)/.has-test  ## run every notebook of examples/
	$(DEVICES) $(PY) -m pytest --nbmake $(or $(sort $(wildcard examples/notebooks/*.ipynb)),$(error examples/ has no notebooks))

wheel: $(VENV)/.has-test  ## the wheel, in an empty environment of its own, runs the demo
	$(DEVICES) $(PY) -m pytest -m slow tests/test_wheel.py $(PYTEST_ARGS)

dist: $(VENV)/.has-dist  ## a wheel, in dist/
	rm -rf dist
	$(PY) -m build --wheel --quiet --outdir dist .

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardfn needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.has-core: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --editable .
	@touch $@

$(VENV)/.has-%: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --editable ".[$*]"
	@touch $@ $(VENV)/.has-core
