#!/usr/bin/env bash
# Sets up .venv and runs the tests that are not slow, in a process for each core, at most eight.
# Arguments go to pytest; -m "" runs all tests, -n 0 runs them in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
cores="$(.venv/bin/python - <<'END'
import os

usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
print(min(8, len(usable)))
END
)"
# The tests of a file share its fixtures. In the order of the folders, because the files with the
# fewest tests, otherwise the last, take longest.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -n "$cores" --dist loadfile --no-loadscope-reorder "$@"
