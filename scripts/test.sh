#!/usr/bin/env bash
# Sets up .venv and runs the tests that are not slow. Arguments go to pytest; -m "" runs all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
