#!/usr/bin/env bash
# What only a CUDA machine can show, in under ten minutes:
#   1. the Triton kernels against their references, and the other tests marked gpu;
#   2. each kernel's share of the copy bandwidth or of the rate of matrix products (gpu_kernels.py);
#   3. the engine's greedy tokens against transformers: batched, chunked, prefix-cached, preempted;
#   4. the engine's throughput against transformers' generate, Qwen3-0.6B shape, random weights.
# Writes gpu_DEVICE.json and .md to RESULTS (an absolute folder, or one under the checkout). A part that fails or runs out
# of time does not keep the others from running, and makes the exit code 1. Nothing needs to be installed but what
# gpu_preflight.py asks for: Flyball itself is taken from this checkout.
#
#   benchmarks/gpu.sh
#   FLYBALL_COMMIT=abc1234 benchmarks/gpu.sh    # where the checkout was copied without its .git
#   PYTHON=/path/to/python RESULTS=/some/folder benchmarks/gpu.sh --batch 64    # arguments go to engine_throughput.py
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)
fi
RESULTS=${RESULTS:-benchmarks/results}
KERNELS_S=${KERNELS_S:-190} RATES_S=${RATES_S:-120} TOKENS_S=${TOKENS_S:-110} THROUGHPUT_S=${THROUGHPUT_S:-165} # 9.8 minutes
PARTS=out/gpu

export PYTHONPATH="$PWD/protocol:$PWD/kernels:$PWD/runtime${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET

echo "== $PYTHON ($("$PYTHON" --version 2>&1))"
"$PYTHON" benchmarks/gpu_preflight.py
rm -rf "$PARTS"
mkdir -p "$PARTS" "$RESULTS"

failed=()

# part NAME SECONDS COMMAND...: run it, keep its output in PARTS/NAME.log, note a failure
part() {
  local name=$1 seconds=$2 status=0
  shift 2
  echo "== $name (at most $seconds s): $*"
  local begin=$SECONDS
  # interrupted, pytest still writes what it knows
  timeout --signal=INT --kill-after=10 "$seconds" "$@" 2>&1 | tee "$PARTS/$name.log" || status=$?
  if ((status == 124 || status == 137)); then
    echo "== $name: stopped after $seconds s"
  fi
  echo "== $name: exit code $status after $((SECONDS - begin)) s"
  echo "$status" >"$PARTS/$name.status"
  if ((status != 0)); then failed+=("$name"); fi
}

# Versions here may be others than those we develop with: their warnings are shown and fail nothing.
# Most of their time is the compiler's, so they run side by side.
tests=("$PYTHON" -m pytest -q -W default -p no:cacheprovider -n "$(($(nproc) < 10 ? $(nproc) : 10))")
part kernels "$KERNELS_S" "${tests[@]}" --junitxml="$PARTS/kernels.xml" -m "gpu or not gpu" -k "triton or gpu" \
  tests/kernels tests/runtime/model/test_transformer.py tests/runtime/model/test_sampler.py \
  tests/runtime/engine/test_warm_up.py tests/runtime/test_quantization.py tests/runtime/test_rounded_kv_cache.py
part rates "$RATES_S" "$PYTHON" benchmarks/gpu_kernels.py --out "$PARTS/rates.json"
part tokens "$TOKENS_S" "${tests[@]}" --junitxml="$PARTS/tokens.xml" -m gpu tests/runtime/engine/test_tokens.py
part throughput "$THROUGHPUT_S" "$PYTHON" benchmarks/engine_throughput.py --out "$PARTS/throughput.json" \
  --max-len 512 --time-limit-s $((THROUGHPUT_S - 40)) "$@"

"$PYTHON" benchmarks/gpu_report.py "$PARTS" --results "$RESULTS"
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}; the whole output is in $PARTS/*.log" >&2
  exit 1
fi
echo "All parts passed."
