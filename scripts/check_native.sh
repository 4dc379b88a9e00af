#!/usr/bin/env bash
# Compiles the native libraries from scratch with plain CMake (the CUDA one if nvcc is on the path,
# for any installed torch) and checks that they use only torch's stable C interface.
#   BUILD      the build folder (default build/check)
#   CUDAARCHS  the CUDA architectures (default 90 alone, which saves minutes)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build="${BUILD:-build/check}"
command -v cmake >/dev/null || python -m pip install --quiet cmake ninja
export CUDAARCHS="${CUDAARCHS:-90}"
cuda=OFF
command -v nvcc >/dev/null && cuda=ON
options=(-DPRUNED_RNNT_CUDA="$cuda" -DPython_EXECUTABLE="$(command -v python)")
# Nothing runs these kernels, and without optimization they compile in half the time.
if [[ "$cuda" == ON && "$(nvcc --help)" == *--Ofast-compile* ]]; then
    options+=(-DCMAKE_CUDA_FLAGS=--Ofast-compile=max)
fi
rm -rf "$build"
cmake -S csrc -B "$build" "${options[@]}"
cmake --build "$build" --parallel 2
python scripts/check_symbols.py "$build"/libpruned_rnnt_*.so
