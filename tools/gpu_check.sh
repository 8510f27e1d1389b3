#!/usr/bin/env bash
# tests/gpu and the benchmarks on a machine with one CUDA GPU, without a network.
#
#     tools/gpu_check.sh [FOLDER] [PART ...]    # default: runs/gpu-check, all parts in this order
#
# Each part ends within 10 minutes and leaves FOLDER/PART.json (tests: tests.xml) after every round, so what is cut off is
# not lost. Compiled kernels and installed wheels stay in FOLDER/cache for the next call. At the end the table for
# docs/benchmarks.md is printed (tools/gpu_table.py FOLDER prints it again).
# Runs in .venv where that has CUDA; else with python3, and what that lacks from .wheels/ (tools/gpu_wheels.sh).
# What does not fit the GPU's memory is skipped (8b, context-8b below 130 GiB), and peers that do not fit beside each other
# are measured one after another. Exit code: 0 passed, 1 a part failed, 2 no CUDA device or packages missing.
set -uo pipefail
cd "$(dirname "$0")/.."
all=(tests 0.5b 1.2b 8b 1.2b-fp8 8b-fp8 host checkpoints parity context-1b context-8b sft-1b lora-1b packing)
out=${1:-runs/gpu-check}
parts=("${@:2}")
((${#parts[@]})) || parts=("${all[@]}")
for part in "${parts[@]}"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then
    echo "gpu-check: no part $part; there are ${all[*]}" >&2
    exit 2
  fi
done
mkdir -p "$out/cache"
out=$(cd "$out" && pwd)
log=$out/gpu-check.log

say() { echo "gpu-check: $*" | tee -a "$log"; }
has_cuda() { "$1" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" >>"$log" 2>&1; }

if [[ -x .venv/bin/python ]] && has_cuda .venv/bin/python; then
  python=$PWD/.venv/bin/python
elif command -v python3 >/dev/null && has_cuda python3; then
  python=$(command -v python3)
else
  say "no CUDA device: neither .venv nor python3 has a torch that sees one. Nothing was checked."
  exit 2
fi
cache=$out/cache
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor TORCH_EXTENSIONS_DIR=$cache/extensions
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONPATH=$PWD:$cache/packages
if ! "$python" -c "import deepspeed, accelerate, jsonargparse, peft, torchao, xxhash, pytest_timeout" >>"$log" 2>&1; then
  if ! compgen -G ".wheels/*.whl" >/dev/null; then
    say "$python lacks packages and there is no .wheels folder. Make it with tools/gpu_wheels.sh where there is a network."
    exit 2
  fi
  if ! "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$cache/packages" \
    .wheels/*.whl >>"$log" 2>&1; then
    say "pip could not install .wheels/*.whl; $log says why"
    exit 2
  fi
fi
say "$("$python" -c "import torch, transformers, deepspeed, platform; print(torch.cuda.get_device_name(), '| python',
platform.python_version(), '| torch', torch.__version__, '| transformers', transformers.__version__, '| deepspeed',
deepspeed.__version__)" 2>>"$log" | tail -1)"

limited() { # limited SECONDS COMMAND...
  timeout --kill-after=10 "$1" "${@:2}" 2>&1 | tee -a "$log"
  return "${PIPESTATUS[0]}"
}
speed=("$python" tools/bench/train_speed.py --rounds 5)
tuning=("$python" tools/bench/posttraining.py --preset 1.2b --steps 4)
packing=("${tuning[@]}" --sequence 16384 --recompute --rounds 2)
context=("$python" tools/bench/long_context.py --limit-s 540)
parity() { # a small copy of the quickstart in each form that one rank can have
  local name failed=0 passed=()
  for name in zero1 zero2 zero3 zero1_fp32; do
    limited 140 "$python" -m llmtrain parity launch/recipes/quickstart.yaml --deepspeed "ds_configs/$name.json" \
      --ranks 1 --device cuda && passed+=("\"$name\"") || failed=1
    (IFS=,; echo "{\"passed\": [${passed[*]}]}") >"$out/parity.json"
  done
  return "$failed"
}
run() {
  case $1 in
    tests) limited 580 "$python" -m pytest tests/gpu -p no:cacheprovider --junitxml "$out/tests.xml" ;;
    0.5b | 1.2b) limited 580 "${speed[@]}" --preset "$1" --json "$out/$1.json" ;;
    8b) limited 580 "${speed[@]}" --preset 8b --only llmtrain --json "$out/8b.json" ;;
    1.2b-fp8)
      limited 580 "${speed[@]}" --preset 1.2b --only llmtrain rowwise tensorwise --json "$out/1.2b-fp8.json"
      ;;
    8b-fp8) limited 580 "${speed[@]}" --preset 8b --only llmtrain rowwise --json "$out/8b-fp8.json" ;;
    host) limited 580 "${speed[@]}" --preset 0.5b --sequence 128 --micro-batch 1 --accumulation 1 --json "$out/host.json" ;;
    checkpoints)
      limited 580 "$python" tools/bench/checkpoint.py --preset 1.2b --rounds 2 --json "$out/checkpoints.json"
      ;;
    parity) parity ;;
    context-1b) limited 580 "${context[@]}" --preset 1b --tokens 393216 --json "$out/context-1b.json" ;;
    sft-1b)
      limited 580 "${tuning[@]}" --only sft --contestants llmtrain-full,trainer-full,trl-sft --json "$out/sft-1b.json"
      ;;
    lora-1b)
      limited 580 "${tuning[@]}" --only lora --contestants llmtrain-lora,trainer-lora,trl-lora --json "$out/lora-1b.json"
      ;;
    packing) # two tables, the first of which may fail without the second
      local failed=0
      limited 290 "${packing[@]}" --only packing --contestants llmtrain-full,trl-sft --json "$out/packing.json" || failed=1
      limited 290 "${packing[@]}" --only packing-dpo --contestants llmtrain-dpo,trl-online \
        --json "$out/packing-dpo.json" || failed=1
      return "$failed"
      ;;
    context-8b) limited 580 "${context[@]}" --preset 8b --tokens 65536 --json "$out/context-8b.json" ;;
  esac
}

failed=()
for part in "${parts[@]}"; do
  from=$SECONDS
  run "$part"
  case $? in
    0) ;;
    3) say "$part: skipped, it does not fit this GPU" ;;
    *) failed+=("$part") ;;
  esac
  say "$part: ended after $((SECONDS - from)) s"
done
"$python" tools/gpu_table.py "$out" | tee -a "$log"
if ((${#failed[@]})); then
  say "FAILED: ${failed[*]}; log and figures in $out"
  exit 1
fi
say "passed; log and figures in $out"
