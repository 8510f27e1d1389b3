#!/usr/bin/env bash
# What one CUDA GPU gives within so many seconds, without a network: figures, and that the GPU's code is right.
#
#     tools/gpu_check.sh [--seconds N] [--keep FOLDER] [OUT] [PART ...]    # default: runs/gpu-check, all parts
#
# A part begins only with its least time left of N seconds, and is ended at them. It leaves OUT/PART.json (tests: the log)
# after every round. --keep: FOLDER/figures.tar has all of that, renewed every 5 s, so what is cut off loses little.
# Compiled kernels and installed wheels stay in OUT/cache for the next call. At the end the tables for docs/developers/benchmarks.md
# are printed (tools/gpu_table.py OUT prints them again).
# Runs in .venv where that has CUDA; else with python3, and what that lacks from .wheels/ (tools/gpu_wheels.sh).
# What does not fit the GPU's memory is skipped (8b below 130 GiB), and peers that do not fit beside each other are
# measured one after another. Exit code: 0 passed, 1 a part failed or was not begun, 2 no CUDA device, packages missing, or
# no folder for the figures.
set -uo pipefail
cd "$(dirname "$0")/.."
# The order of a call without PART; the least seconds that a part is worth beginning with.
all=(facts 1.2b lora-8b saves tests 1.2b-fp8 moe parity 0.5b packing packing-dpo sft-1b lora-1b host context-1b
  8b 8b-fp8 context-8b)
declare -A least=([facts]=20 [1.2b]=80 [tests]=80 [lora-8b]=110 [saves]=60 [1.2b-fp8]=85 [moe]=60 [parity]=65 [0.5b]=80
  [packing]=120 [packing-dpo]=120)
seconds=100000 keep=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --seconds) seconds=$2 ;;
    --keep) keep=$2 ;;
    *) echo "gpu-check: $1 is none of --seconds N and --keep FOLDER" >&2; exit 2 ;;
  esac
  shift 2
done
out=${1:-runs/gpu-check}
parts=("${@:2}")
((${#parts[@]})) || parts=("${all[@]}")
for part in "${parts[@]}"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then
    echo "gpu-check: no part $part; there are ${all[*]}" >&2
    exit 2
  fi
done
folder() { # its absolute path
  mkdir -p "$1" && (cd "$1" && pwd) || { echo "gpu-check: $1 cannot be made: give another folder" >&2; return 2; }
}
out=$(folder "$out") && folder "$out/cache" >/dev/null || exit 2
[[ -z $keep ]] || keep=$(folder "$keep") || exit 2
cache=$out/cache log=$out/gpu-check.log

# Parts write to this process and not to the caller's output: what one leaves running would hold it open.
exec > >(exec tee -i -a "$log") 2>&1
tee=$!
say() { echo "gpu-check: $*"; }
left() { echo $((seconds - SECONDS)); }
copy() { # one file for all: a place to bring figures to may take few
  tar -cf "$keep/.new" --exclude=./cache -C "$out" . 2>>"$log"
  (($? < 2)) && mv "$keep/.new" "$keep/figures.tar" # 1: a file has grown meanwhile
}
job='' copier=''
finish() {
  [[ $job ]] && kill "$job" 2>/dev/null # timeout, which ends what it has started
  end_leftovers
  [[ $keep ]] && { kill "$copier"; wait "$copier"; copy; } 2>/dev/null
  rm -rf "$TMPDIR"
  exec >&- 2>&-
  for _ in {1..40}; do kill -0 "$tee" && sleep 0.05 || return; done
  kill "$tee" # something still holds its input
}
end_leftovers() { # a part's processes may be in sessions of their own
  local each
  for each in $(grep -lzsxF "GPU_CHECK_PART=$TMPDIR" /proc/[0-9]*/environ); do
    each=${each#/proc/}
    kill -KILL "${each%/environ}" 2>/dev/null
  done
}
shared_gb=$(df --output=avail -B1G /dev/shm 2>/dev/null | tail -1)
base=${TMPDIR:-/tmp}
((${shared_gb:-0} > 40)) && base=/dev/shm # memory is faster than a disk that nobody knows
TMPDIR=$(mktemp -d "$base/gpu-check.XXXXXX")
export TMPDIR
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [[ $keep ]]; then
  while kill -0 $$ && sleep 5; do copy; done >/dev/null 2>&1 &
  copier=$!
fi
limited() { # limited SECONDS COMMAND...: 124 where it is cut off, also by the deadline
  local most=$(($(left) - 6))
  ((most > $1)) && most=$1
  ((most > 5)) || return 124
  GPU_CHECK_PART=$TMPDIR timeout --kill-after=5 "$most" "${@:2}" &
  job=$!
  wait "$job"
  local code=$?
  job=
  end_leftovers
  return "$code"
}

# Offline, gloo and NCCL would ask a resolver for this host. Bytes of compiled sources are kept for the next process.
unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor TORCH_EXTENSIONS_DIR=$cache/extensions
export LLMTRAIN_CACHE=$cache/llmtrain HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONPATH=$PWD:$cache/site-packages

# Its name tells dill that these modules are installed: those elsewhere it would pickle whole.
[[ -d .wheels ]] && ! cmp -s <(ls .wheels) "$cache/site-packages/.wheels" && rm -rf "$cache/site-packages"
install() {
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$cache/site-packages" .wheels/*.whl \
    >>"$log" 2>&1 && ls .wheels >"$cache/site-packages/.wheels"
}
# One process imports everything, says what there is, and measures the ceilings: each import of torch takes seconds.
facts=(tools/bench/facts.py)
[[ " ${parts[*]} " == *" facts "* ]] && facts+=(--json "$out/facts.json")
code=2
for python in "$PWD/.venv/bin/python" "$(command -v python3)"; do
  [[ -x $python ]] || continue
  limited 90 "$python" "${facts[@]}"
  code=$?
  if ((code == 3)) && compgen -G ".wheels/*.whl" >/dev/null; then
    install || { say "pip could not install .wheels/*.whl; $log says why"; exit 2; }
    limited 90 "$python" "${facts[@]}"
    code=$?
  fi
  ((code == 2)) || break
done
if ((code == 2)); then
  say "no CUDA device: neither .venv nor python3 has a torch that sees one. Nothing was checked."
  exit 2
elif ((code == 3)); then
  say "$python lacks packages and .wheels has them not. Make it with tools/gpu_wheels.sh where there is a network."
  exit 2
fi
facts_code=$code facts_s=$SECONDS

speed=("$python" tools/bench/train_speed.py --rounds 2 --steps 6 --warm-steps 2)
tuning=("$python" tools/bench/posttraining.py --rounds 2)
packing=("${tuning[@]}" --preset 1.2b --steps 4 --at-once 4 --recompute)
context=("$python" tools/bench/long_context.py --limit-s 540)
parity() { # a small copy of the quickstart in forms that one rank can have
  local name failed=0 passed=()
  for name in zero2 zero3; do
    limited 140 "$python" -m llmtrain parity launch/recipes/quickstart.yaml --deepspeed "ds_configs/$name.json" \
      --optim.name adamw --optim.muon_lr null --ranks 1 --steps 8 --device cuda && passed+=("\"$name\"") || failed=1
    (IFS=,; echo "{\"passed\": [${passed[*]}]}") >"$out/parity.json"
  done
  return "$failed"
}
gpu_tests() { # offloading and Muon compile for minutes; the plugins of a machine are none of ours
  local workers=()
  "$python" -c "import xdist" 2>/dev/null && workers=(-p xdist -n 8 --dist worksteal)
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 limited 200 "$python" -m pytest tests/gpu -p pytest_timeout "${workers[@]}" -vv \
    -k "not offload and not muon and not optimizer" -p no:cacheprovider --junitxml "$out/tests.xml"
}
run() {
  case $1 in
    facts) return "$facts_code" ;;
    tests) gpu_tests || return $(($? > 100 ? 124 : 1)) ;; # pytest has a 3 of its own
    0.5b | 1.2b) limited 300 "${speed[@]}" --preset "$1" --only llmtrain trainer plain --json "$out/$1.json" ;;
    8b) limited 580 "${speed[@]}" --preset 8b --only llmtrain --json "$out/8b.json" ;;
    1.2b-fp8) limited 300 "${speed[@]}" --preset 1.2b --only llmtrain tensorwise --json "$out/1.2b-fp8.json" ;;
    8b-fp8) limited 580 "${speed[@]}" --preset 8b --only llmtrain rowwise --json "$out/8b-fp8.json" ;;
    host)
      limited 300 "${speed[@]}" --preset 0.5b --sequence 128 --micro-batch 1 --accumulation 1 --json "$out/host.json"
      ;;
    lora-8b)
      limited 240 "${tuning[@]}" --only lora --preset 8b --batch 2 --steps 6 --contestants llmtrain-lora \
        --json "$out/lora-8b.json"
      ;;
    saves)
      limited 150 "$python" tools/bench/checkpoint.py --preset 0.5b --only saves --rounds 1 \
        --savers llmtrain deepspeed "dcp thread" --json "$out/saves.json"
      ;;
    moe) limited 150 "$python" tools/bench/experts.py --preset gpu --rounds 2 --steps 6 --json "$out/moe.json" ;;
    parity) parity ;;
    sft-1b)
      limited 300 "${tuning[@]}" --only sft --preset 1.2b --steps 4 --contestants llmtrain-full,trainer-full,trl-sft \
        --json "$out/sft-1b.json"
      ;;
    lora-1b)
      limited 300 "${tuning[@]}" --only lora --preset 1.2b --steps 4 \
        --contestants llmtrain-lora,trainer-lora,trl-lora --json "$out/lora-1b.json"
      ;;
    packing)
      limited 300 "${packing[@]}" --only packing --contestants llmtrain-full,trl-sft --json "$out/packing.json"
      ;;
    packing-dpo)
      limited 300 "${packing[@]}" --only packing-dpo --contestants llmtrain-dpo,trl-online \
        --json "$out/packing-dpo.json"
      ;;
    context-1b) limited 300 "${context[@]}" --preset 1b --tokens 131072 --json "$out/context-1b.json" ;;
    context-8b) limited 580 "${context[@]}" --preset 8b --tokens 65536 --json "$out/context-8b.json" ;;
  esac
}

failed=() waiting=()
for part in "${parts[@]}"; do
  from=$SECONDS
  if (($(left) < ${least[$part]:-30})) && [[ $part != facts ]]; then
    say "$part: $(left) s are left, of the ${least[$part]:-30} that it takes at least: not begun"
    waiting+=("$part")
    continue
  fi
  run "$part"
  case $? in
    0) ;;
    3) say "$part: skipped, it does not fit this GPU" ;;
    124 | 137) say "$part: cut off"; failed+=("$part") ;;
    *) failed+=("$part") ;;
  esac
  rm -rf "${TMPDIR:?}"/* # of a part that was cut off
  [[ $part == facts ]] && from=$((SECONDS - facts_s))
  say "$part: ended after $((SECONDS - from)) s"
done
"$python" tools/gpu_table.py "$out"
((${#waiting[@]})) && say "not begun: ${waiting[*]}; log and figures in $out"
((${#failed[@]})) && say "FAILED: ${failed[*]}; log and figures in $out"
((${#failed[@]} + ${#waiting[@]} == 0)) || exit 1
say "passed; log and figures in $out"
