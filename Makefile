# `make train` and `make test` need Python 3.10 to 3.13 with venv, git and make, and nothing else; they set up .venv in this folder.
#   make train PYTHON=python3.12                                              another Python for .venv
#   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    the CPU build of torch, 200 MB in place of 5 GB
PYTHON ?= python3
PIP_ARGS ?=
TRAIN_ARGS ?= mesh=dp2_pp2
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-xla lint clean
.DELETE_ON_ERROR:

train: $(STAMP)
	$(BIN)/python train.py $(TRAIN_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TEST_ARGS)

# PyTorch/XLA's tests, in an environment of their own: torch_xla fits one version of torch only. Where that environment cannot be
# made, they run in .venv, which skips them, with the reason.
test-xla: $(STAMP)
	python="$$($(BIN)/python tests/xla/environment.py)" || python=$(BIN)/python; \
	  "$$python" -m pytest tests/xla -m xla $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info < (3, 14); ok or sys.exit("Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
