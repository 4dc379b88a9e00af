"""Runs cells in this process: reads their numbers from stdin, a line each, writes JSON lines.

python -m tests.cells.worker DEVICE MODULE

MODULE has a function cells(), such as tests.cells.table.
Each number is answered twice: before the cell runs, and with its outcome, so that the reader knows
which cell ended the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings

import torch

from tests.cells.cell import outcome


def main() -> None:
    device = sys.argv[1]
    # torch's deterministic mode needs it for products on CUDA devices.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print would otherwise be read as answers.
    os.dup2(2, 1)
    cells = list(importlib.import_module(sys.argv[2]).cells())
    for line in sys.stdin:
        number = int(line)
        print(json.dumps([number, None, ""]), file=answers)
        found = outcome(cells[number], device)
        print(json.dumps([number, *found]), file=answers)
        if device == "cuda" and "CUDA error" in found.detail:
            # No later result of this process would mean anything.
            break


if __name__ == "__main__":
    main()
