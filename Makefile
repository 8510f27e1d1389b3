# Two commands: `make train` and `make test`. Both make .venv first, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A rank for each GPU: those of CUDA_VISIBLE_DEVICES where that is set, else all; without any, 2 ranks on the CPU.
ifeq ($(origin CUDA_VISIBLE_DEVICES),undefined)
SLOTS := $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true))
else
comma := ,
SLOTS := $(filter-out 0,$(words $(subst $(comma), ,$(CUDA_VISIBLE_DEVICES))))
endif
ifeq ($(SLOTS),)
export DS_ACCELERATOR ?= cpu
endif
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test test-slow lint install gpu-check clean launch/hostfile.local

# DeepSpeed's setup looks for the CUDA toolkit, which a machine with a driver and torch need not have.
$(VENV)/.run $(VENV)/.dev: export DS_IGNORE_CUDA_DETECTION := 1

# torch goes first and alone: with its version there, pip fetches no other build of it. PyPI's is for CUDA 13 (driver 580
# or newer); make TORCH_INDEX=https://download.pytorch.org/whl/cu126 takes the one for CUDA 12.6, /cpu the one without.
$(VENV)/.run: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q 'torch>=2.11,<2.14' -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -q setuptools
	$(BIN)/python -m pip install -q --no-build-isolation -e . -c constraints.txt
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[dev]' -c constraints.txt
	touch $@

install: $(VENV)/.dev

launch/hostfile.local:
	@echo "localhost slots=$(or $(SLOTS),2)" > $@

data/stdlib/manifest.json: | $(VENV)/.run
	$(BIN)/llmtrain prepare --source stdlib --vocab-size 1024 --out data/stdlib

# VERBOSE=1 shows DeepSpeed's launcher's own lines, and the tracebacks of all ranks after a fault.
train: $(VENV)/.run launch/hostfile.local data/stdlib/manifest.json
	@llmtrain launch --hostfile launch/hostfile.local --max-restarts 0 $(if $(VERBOSE),--verbose) -- \
	  launch/recipes/quickstart.yaml

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	tools/lab/install.sh
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# PARTS="tests 0.5b": these only; each ends within 10 minutes.
gpu-check:
	tools/gpu_check.sh runs/gpu-check $(PARTS)

clean:
	rm -rf $(VENV) build *.egg-info launch/hostfile.local
