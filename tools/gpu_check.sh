#!/usr/bin/env bash
# tests/gpu and the benchmarks on a machine with one CUDA GPU, each part in under 10 minutes, without a network.
#
#     tools/gpu_check.sh [FOLDER] [PART]    # log and figures go to FOLDER (default: runs/gpu-check)
#
# PART: main (default: tests/gpu and the training speed) or checkpoints (tools/bench/checkpoint.py with 1.2 B parameters).
# Runs in .venv where that has CUDA; else with python3, and what that lacks from .wheels/ (tools/gpu_wheels.sh).
# Exit code: 0 passed, 1 a test or a benchmark failed, 2 no CUDA device or packages missing.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu-check}
part=${2:-main}
mkdir -p "$out"
log=$out/gpu-check-$part.log
: >"$log"

say() { echo "gpu-check: $*" | tee -a "$log"; }
has_cuda() { "$1" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" >>"$log" 2>&1; }

began=$SECONDS
if [[ -x .venv/bin/python ]] && has_cuda .venv/bin/python; then
  python=$PWD/.venv/bin/python
elif command -v python3 >/dev/null && has_cuda python3; then
  python=$(command -v python3)
else
  say "no CUDA device: neither .venv nor python3 has a torch that sees one. Nothing was checked."
  exit 2
fi
# Compiled kernels and wheels stay in a folder that goes away with this script.
work=$(mktemp -d -t llmtrain-gpu-check.XXXXXX)
trap 'rm -rf "$work"' EXIT
export TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor TORCH_EXTENSIONS_DIR=$work/extensions
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONPATH=$PWD
if ! "$python" -c "import deepspeed, accelerate, jsonargparse, xxhash, pytest_timeout" >>"$log" 2>&1; then
  if ! compgen -G ".wheels/*.whl" >/dev/null; then
    say "$python lacks packages and there is no .wheels folder. Make it with tools/gpu_wheels.sh where there is a network."
    exit 2
  fi
  if ! "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/packages" \
    .wheels/*.whl >>"$log" 2>&1; then
    say "pip could not install .wheels/*.whl; $log says why"
    exit 2
  fi
  export PYTHONPATH=$PWD:$work/packages
fi
say "$("$python" -c "import torch, transformers, deepspeed, platform; print(torch.cuda.get_device_name(), '| python',
platform.python_version(), '| torch', torch.__version__, '| transformers', transformers.__version__, '| deepspeed',
deepspeed.__version__)" 2>>"$log" | tail -1)"

failed=0
step() { # step SECONDS NAME COMMAND...
  local limit=$1 name=$2 from=$SECONDS
  shift 2
  say "$name: $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log"
  local code=${PIPESTATUS[0]}
  say "$name: exit code $code after $((SECONDS - from)) s"
  if ((code != 0)); then failed=1; fi
}

if [[ $part == checkpoints ]]; then
  step 540 "checkpoints, 1.2B" "$python" tools/bench/checkpoint.py --preset 1.2b --rounds 2 --json "$out/checkpoints.json"
else
  compile=()
  if "$python" -c "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device='cuda'))" >>"$log" 2>&1; then
    compile=(--compile)
  else
    say "torch.compile does not work on this machine ($log says why): the benchmark runs without compiled layers"
  fi
  bench=("$python" tools/bench/train_speed.py)
  step 220 tests "$python" -m pytest tests/gpu -p no:cacheprovider
  step 110 "0.5B" "${bench[@]}" --preset 0.5b --rounds 3 "${compile[@]}" --json "$out/0.5b.json"
  step 150 "1.2B" "${bench[@]}" --preset 1.2b --rounds 3 "${compile[@]}" --json "$out/1.2b.json"
  step 90 "0.5B, host time" "${bench[@]}" --preset 0.5b --sequence 128 --micro-batch 1 --accumulation 1 --rounds 3 \
    --json "$out/host.json"
fi
say "$( ((failed)) && echo FAILED || echo passed) in $((SECONDS - began)) s; log and figures in $out"
exit "$failed"
