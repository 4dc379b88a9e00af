#!/usr/bin/env bash
# Checks that the installed native libraries use only torch's stable C interface. If nvcc is on the
# path, compiles the CUDA library from scratch with plain CMake, for any installed torch, and checks
# it, too.
#   BUILD      the build folder (default build/check)
#   CUDAARCHS  the CUDA architectures (default 90-real alone, which saves minutes)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python scripts/check_symbols.py
if ! command -v nvcc >/dev/null; then
  echo "the CUDA library is not compiled: nvcc is not on the path"
  exit 0
fi
build="${BUILD:-build/check}"
command -v cmake >/dev/null || python -m pip install --quiet cmake ninja
export CUDAARCHS="${CUDAARCHS:-90-real}"
options=(-DPRUNED_RNNT_CUDA=ON -DPython_EXECUTABLE="$(command -v python)")
# Nothing runs these kernels, and without optimization they compile in half the time.
if [[ "$(nvcc --help)" == *--Ofast-compile* ]]; then
    options+=(-DCMAKE_CUDA_FLAGS=--Ofast-compile=max)
fi
rm -rf "$build"
cmake -S csrc -B "$build" "${options[@]}"
cmake --build "$build" --parallel 2 --target pruned_rnnt_cuda
python scripts/check_symbols.py "$build"/libpruned_rnnt_cuda.so
