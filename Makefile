# All targets need Python 3.10 to 3.13 with venv, git and make, and nothing else; they set up .venv in this folder.
#   make train       a run on four workers, and text that its model writes: 53 seconds on two quiet cores
#   make demo        two runs, one of which loses a worker, compared bit for bit: 20 seconds on two quiet cores
#   make check       lint, types, unit tests with few examples of each property, 200 random schedules: before each commit
#   make test        all tests but the next two kinds
#   make test-faults the tests that kill and stop processes and hosts of real runs
#   make test-xla    the tests that need PyTorch/XLA
#   make test-ray    the tests on a Ray cluster of this machine
#   make golden      bits and outcomes as recorded in tests/golden.json: 192 simulated runs, 8 real ones, 2,000 schedules
#   make docs        the documentation as a site, in site/: open site/index.html
#   make soak        40 faults at awkward moments of real runs, drawn from a seed: 2 to 4 minutes on two cores
#   make train PYTHON=python3.12                                              another Python for .venv
#   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    the CPU build of torch, 200 MB in place of 5 GB
PYTHON ?= python3
PIP_ARGS ?=
TRAIN_ARGS ?= mesh=dp2_pp2 model=llama_tiny train.steps=300 train.global_batch=16 train.validate_every=150 optim.lr=4e-3
TEST_ARGS ?=
SOAK_ARGS ?= --quick

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

# Hundreds of processes import the package in a check. Bytecode that is kept saves a tenth of what the tests of real runs take.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train demo check check-units check-schedules test test-faults test-xla test-ray golden soak docs lint xla-environment ray-environment clean
.DELETE_ON_ERROR:

# The run's directory: as TRAIN_ARGS names it, in which a resumed run goes on, or a new one.
NAMED := $(or $(patsubst run.dir=%,%,$(filter run.dir=%,$(TRAIN_ARGS))),$(patsubst train.resume=%,%,$(filter train.resume=%,$(TRAIN_ARGS))))
RUN := $(or $(NAMED),runs/train-$(shell date +%Y%m%d_%H%M%S))
PROMPT := "    def __init__(self"

# Text is written by models that are built in; a run of another one has succeeded all the same.
train: $(STAMP)
	$(BIN)/python train.py $(if $(NAMED),,run.dir=$(RUN)) $(TRAIN_ARGS)
	-$(BIN)/python -m elaswave_spmd generate $(RUN) $(PROMPT) --tokens 120 --temperature 0.7

demo: $(STAMP)
	$(BIN)/python -m elaswave_spmd demo

# Side by side: types are checked by one process. Tests that start a compiler are left to `make test`.
check: $(STAMP)
	$(MAKE) -j 3 --output-sync=target lint check-units check-schedules

check-units: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "units and not compiler" --hypothesis-profile=check $(TEST_ARGS)

check-schedules: $(STAMP)
	$(BIN)/python -m tests.cluster.schedules --count 200

# Three processes for two cores: tests of real runs wait now and then for what workers do. Files stay whole, so that the
# tests of one file share what its fixtures have run; tests/conftest.py puts the longest files first.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/faults $(TEST_ARGS)

test-faults: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/faults $(TEST_ARGS)

golden: $(STAMP)
	$(BIN)/python -m tests.golden check --jobs 2

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

# PyTorch/XLA's tests, in an environment of their own: torch_xla fits one version of torch only. Where that environment cannot be
# made, they run in .venv, which skips them, with the reason.
test-xla: $(STAMP)
	python="$$($(BIN)/python tests/xla/environment.py)" || python=$(BIN)/python; \
	  "$$python" -m pytest -n 2 --dist worksteal tests/xla -m xla $(TEST_ARGS)

# What cannot be made is said by `test-xla`.
xla-environment: $(STAMP)
	-$(BIN)/python tests/xla/environment.py

# The tests on Ray, in .venv-ray, which sees the packages of .venv. Where it cannot be made, .venv skips them, with the reason.
test-ray: $(STAMP)
	python="$$($(BIN)/python tests/on_ray/environment.py)" || python=$(BIN)/python; \
	  "$$python" -m pytest -n 3 --dist worksteal tests/on_ray -m ray $(TEST_ARGS)

ray-environment: $(STAMP)
	-$(BIN)/python tests/on_ray/environment.py

# The pages of reference are made by importing the package, so the site is built in the same environment.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site is in site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info < (3, 14); ok or sys.exit("Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[dev]" -c constraints.txt
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[docs]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-ray $(VENV)-ray.lock site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
