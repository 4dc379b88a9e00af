#!/usr/bin/env bash
# Sets up .venv, synthesises a corpus of spoken commands with espeak-ng, trains a transducer
# on it, prints its word error rate on voices that were not in training, and makes a web page of it.
#   OUTPUT  folder for data and run (default: data and exp in the repository root)
set -euo pipefail
if [ -n "${OUTPUT:-}" ]; then
  OUTPUT="$(mkdir -p "$OUTPUT" && cd "$OUTPUT" && pwd)"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXTRAS="${EXTRAS:-recipes,report}" bash scripts/setup.sh

data="${OUTPUT:-.}/data/synthetic"
run="${OUTPUT:-.}/exp/synthetic"
.venv/bin/pruned-rnnt prepare synthetic --output "$data"
.venv/bin/pruned-rnnt train --config synthetic data.path="$data" train.folder="$run"
.venv/bin/pruned-rnnt decode "$run" decode.method=greedy
.venv/bin/pruned-rnnt decode "$run" decode.method=modified_beam
.venv/bin/pruned-rnnt inspect "$run"
.venv/bin/pruned-rnnt report "$run"
echo "open $run/report.html in a browser: curves, errors, and the worst utterances with audio"
