#!/usr/bin/env bash
# Checks on a machine with a CUDA device: builds the libraries for its architecture, then runs
#   tests      the tests that need the device
#   sanitizer  a memory and a race check of all kernels, if compute-sanitizer is installed
#   benchmark  the benchmark table, appended to its results
# or those named as arguments. Installs nothing; needs torch with CUDA, nvcc, cmake, ninja, and the
# packages of the extra `dev` for the python3 on the path.
#   BUILD   the build folder (default build/gpu)
#   OUT     folder for logs and a copy of the results (default: the build folder)
#   SHAPES  an .npz with arrays `frames` and `tokens`, for the batches of real utterances
#   PEERS   a folder with source archives of other packages to compile (scripts/benchmark/README.md)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build="${BUILD:-build/gpu}"
logs="${OUT:-$build}"
mkdir -p "$build" "$logs"
export PYTHONDONTWRITEBYTECODE=1
cmake -S csrc -B "$build" -G Ninja -DPRUNED_RNNT_CUDA=ON -DPRUNED_RNNT_CUDA_ARCHITECTURES=native \
  -DPython_EXECUTABLE="$(command -v python3)" >"$logs/cmake.log"
cmake --build "$build" >"$logs/build.log" || { tail -n 30 "$logs/build.log"; exit 1; }
PRUNED_RNNT_LIBRARY_DIR="$(cd "$build" && pwd)"
export PRUNED_RNNT_LIBRARY_DIR PRUNED_RNNT_BACKEND=native

status=0
for part in ${@:-tests sanitizer benchmark}; do
  case "$part" in
    tests)
      python3 -m pytest -q -m gpu -p no:cacheprovider --durations=10 --tb=short tests 2>&1 |
        tee "$logs/tests.log" | tail -n 60 || status=1
      ;;
    sanitizer)
      for tool in memcheck racecheck; do
        if command -v compute-sanitizer >/dev/null; then
          timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            --kernel-name kns=pruned_rnnt \
            python3 -m tests.cuda.all_kernels >"$logs/$tool.log" 2>&1 || status=1
          echo "$tool: $(tail -n 2 "$logs/$tool.log" | tr '\n' ' ')"
        else
          echo "$tool: skipped, compute-sanitizer is not installed"
        fi
      done
      ;;
    benchmark)
      python3 -m scripts.benchmark cuda --keep ${SHAPES:+--shapes "$SHAPES"} \
        ${PEERS:+--peer-sources "$PEERS"} 2>&1 |
        tee "$logs/benchmark.log" | tail -n 80 || status=1
      cp scripts/benchmark/results/cuda.jsonl "$logs"
      ;;
    *)
      echo "unknown part $part: pass tests, sanitizer or benchmark" >&2
      exit 2
      ;;
  esac
done
exit "$status"
