# The one door to every task; "make" alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Threads of the demo (default: all physical cores) and of the benchmarks (default: 2).
THREADS ?=
BENCH_ARGS ?=
# Further ones of either benchmark on a GPU: REDUCTION_ARGS="--only paper2", MODEL_ARGS="--only gpt2".
REDUCTION_ARGS ?=
MODEL_ARGS ?=
PACK ?=
PACK_ARGS ?=
# Processes that share the tests.
JOBS ?= 2
TEST_ARGS ?=
FAULT_ARGS ?=

# Without bytecode each process that the tests start would compile the package's source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all faults fuzz lint types docs map bench bench-gpu pack-gpu bench-load bench-mpi bench-predict bench-zoo clean

help: ## list the tasks
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: $(VENV)/.stamp-check ## make .venv with the package and what the demo needs

demo: $(VENV)/.stamp-check ## compile MobileNet-V2, check it and race it
	$(BIN)/python examples/demo.py $(if $(THREADS),--threads $(THREADS))

test: $(VENV)/.stamp-test $(VENV)/.stamp-pytorch-cpu ## run the quick tests; TEST_ARGS="-k clip" for some
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(if $(CI),--durations=40) $(TEST_ARGS)

test-all: $(VENV)/.stamp-test $(VENV)/.stamp-pytorch-cpu ## run all tests, with more examples of each property
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile thorough $(TEST_ARGS)

faults: $(VENV)/.stamp-test $(VENV)/.stamp-pytorch-cpu ## seed faults; the quick tests must catch each; FAULT_ARGS="--only 3"
	$(BIN)/python tests/faults/run.py $(FAULT_ARGS)

fuzz: $(VENV)/.stamp-test ## 10,000 damaged models, files and arguments; FUZZ_ARGS="--cases 500 --seed 1"
	$(BIN)/python tests/fuzz/run.py $(FUZZ_ARGS)

lint: $(VENV)/.stamp-test ## check style, and that imports go down only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.stamp-test ## check types
	$(BIN)/mypy

docs: $(VENV)/.stamp-docs ## build the documentation in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

map: $(VENV)/.stamp-test ## draw the map of the families in CONTRIBUTING.md again
	$(BIN)/python docs/family_map.py

bench: $(VENV)/.stamp-bench ## run the benchmarks against ONNX Runtime, OpenVINO, numpy and the machine's limits
	$(BIN)/python examples/benchmarks/networks.py --threads $(or $(THREADS),2) $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/pairs.py --threads $(or $(THREADS),2) $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/shipped_records.py --threads $(or $(THREADS),2)
	$(BIN)/python examples/benchmarks/rooflines.py --threads $(or $(THREADS),2)
	$(BIN)/python examples/benchmarks/reductions_cpu.py --threads $(or $(THREADS),2)
	$(BIN)/python examples/benchmarks/recurrent.py --threads $(or $(THREADS),2)
	$(BIN)/python examples/benchmarks/quantized.py --threads $(or $(THREADS),2)
	$(BIN)/python examples/benchmarks/decoders.py --threads $(or $(THREADS),2)

bench-zoo: $(VENV)/.stamp-bench $(VENV)/.stamp-pytorch-cpu $(VENV)/.stamp-zoo ## race exported architectures against ONNX Runtime; BENCH_ARGS="--only bert --resume"
	$(BIN)/python examples/benchmarks/zoo.py --threads $(or $(THREADS),2) $(BENCH_ARGS)

bench-load: $(VENV)/.stamp-bench ## race beside 0 to 12 processes that keep the cores busy; BENCH_ARGS="--beside 0 4"
	$(BIN)/python examples/benchmarks/load.py --threads $(or $(THREADS),2) $(BENCH_ARGS)

bench-mpi: $(VENV)/.stamp-mpi ## run stencils, networks, exchanges and choices on one rank and on two, each a process of MPI
	$(BIN)/python examples/benchmarks/distributed.py $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/distributed_networks.py $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/exchanges.py $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/distributed_choices.py $(BENCH_ARGS)

# Offline: no environment is made, PYTHON must have TVM, PyTorch and what else is to be compared.
bench-gpu: ## race reductions and whole models on a GPU; ends with 2 where there is none
	@$(PYTHON) examples/benchmarks/reductions_gpu.py $(BENCH_ARGS) $(REDUCTION_ARGS); \
	first=$$?; [ $$first -eq 2 ] && exit 2; \
	$(PYTHON) examples/benchmarks/models_gpu.py $(BENCH_ARGS) $(MODEL_ARGS) && exit $$first

# For a GPU machine without TVM and network: there, bash .gpu/device_run.sh 500.
pack-gpu: $(VENV)/.stamp-cuda $(VENV)/.stamp-check ## compile the cases and models of a run on a GPU elsewhere into PACK=.gpu; PACK_ARGS="--only small"
	$(BIN)/python examples/benchmarks/pack_gpu.py $(PACK) $(PACK_ARGS)

bench-predict: $(VENV)/.stamp-bench ## check predicted times against the measured ones of PREDICT_DATA=DIR
	$(BIN)/python examples/benchmarks/predict.py $(BENCH_ARGS)
	$(BIN)/python examples/benchmarks/predict_traces.py

clean: ## remove .venv and all that was built
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: a second call installs nothing.
$(VENV)/.stamp-%: pyproject.toml requirements.lock | $(BIN)/python
	$(PIP) install -c requirements.lock setuptools
	$(PIP) install -c requirements.lock --no-build-isolation --editable '.[$*]'
	@touch $@

# Not an extra of the tests: with its libraries for CUDA, PyTorch takes several GB, and pins older
# ones than the extra cuda. Where pip finds no build for CPUs, the tests of PyTorch are skipped.
$(VENV)/.stamp-pytorch-cpu: $(VENV)/.stamp-test
	@$(PIP) install -c requirements.lock 'torch==2.13.0+cpu' --no-build-isolation --editable '.[torch]' || \
	  echo "pip finds no PyTorch for CPUs; its tests will be skipped"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.10 to 3.13 is needed; set PYTHON, for example make PYTHON=python3.12 demo"; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
