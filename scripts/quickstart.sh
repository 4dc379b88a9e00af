#!/usr/bin/env bash
# From nothing to a word error rate: sets up .venv, makes a spoken-command corpus with espeak-ng,
# trains a pruned transducer on it, and decodes voices that were not in training.
#   OUTPUT  where the data and the run go (default: exp and data in the repository root)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

data="${OUTPUT:-.}/data/synthetic"
run="${OUTPUT:-.}/exp/synthetic"
.venv/bin/pruned-rnnt prepare synthetic --output "$data"
.venv/bin/pruned-rnnt train --config configs/synthetic.yaml data.path="$data" train.folder="$run"
.venv/bin/pruned-rnnt decode "$run" decode.method=greedy
.venv/bin/pruned-rnnt decode "$run" decode.method=modified_beam
.venv/bin/pruned-rnnt inspect "$run"
