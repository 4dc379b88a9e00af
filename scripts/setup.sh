#!/usr/bin/env bash
# Makes .venv in the repository root with torch and this project in it (editable, with the
# development tools). Running it again updates what is there.
#   PYTHON  the interpreter to start from (default python3, 3.11 or later)
#   TORCH   the torch requirement (default torch==2.13.0; any from 2.11 on works). A torch that is
#           already in .venv and satisfies it is kept, so a CUDA build of your choice stays.
#   EXTRAS  this project's extras to install (default dev)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
.venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}"
.venv/bin/python -m pip install --quiet --editable ".[${EXTRAS:-dev}]"
.venv/bin/python -c 'import pruned_rnnt; print(pruned_rnnt.backend_report())'
