"""How many joiner evaluations greedy search takes for each encoder frame, and how fast it is.

    python -m scripts.greedy_steps exp/fsdd exp/fsdd_tdt
    python -m scripts.greedy_steps RUN --split test --repeat 5 --json rows.jsonl

A model with durations skips frames; others evaluate the joiner in every frame at least once. Times
are medians over the repetitions, after one pass that is not counted, and end when the results are
on the host. Prints a Markdown table; --json also appends a row for each run to a file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.decode_set import encode_batch
from pruned_rnnt.decode.search.greedy_frames import pending_hypotheses
from pruned_rnnt.train.run import load_model, run_config
from scripts.benchmark.results import commit, machine
from scripts.documented_parser import documented_parser

_COLUMNS = ("run", "durations", "frames", "evaluations", "share", "encoder_ms", "search_ms", "rtf")


def measure(folder: Path, split: str, repeat: int) -> dict[str, Any]:
    """A row of the table: counts over the split, and times of all its batches together."""
    config = run_config(folder)
    model = load_model(config).model.eval()
    batches = list(DataModule(config.data).test_loader(split))
    device = next(model.parameters()).device
    search = new_greedy_search(model, [UNKNOWN_ID])
    frames = evaluations = 0
    encoder_seconds, search_seconds = [], []
    for turn in range(repeat + 1):
        frames = evaluations = 0
        encoder, searching = 0.0, 0.0
        for batch in batches:
            started = time.perf_counter()
            encoded_NTE, lengths = encode_batch(model, batch)
            _finish(device)
            encoded = time.perf_counter()
            start = search.start(len(batch), device)
            found = search.frames(encoded_NTE, lengths.to(device), start)
            pending_hypotheses(found).result()
            searching += time.perf_counter() - encoded
            encoder += encoded - started
            frames += int(lengths.sum())
            # Each evaluation leaves a log-probability, which is 0 nowhere else.
            evaluations += int((found.scores_NTM != 0).sum())
        if turn > 0:
            encoder_seconds.append(encoder)
            search_seconds.append(searching)
    seconds = sum(sum(batch.durations) for batch in batches)
    encoder, searching = map(statistics.median, (encoder_seconds, search_seconds))
    return {
        "run": folder.name,
        "durations": list(config.loss.durations),
        "split": split,
        "frames": frames,
        "evaluations": evaluations,
        "share": round(evaluations / max(frames, 1), 3),
        "encoder_ms": round(1000 * encoder, 1),
        "search_ms": round(1000 * searching, 1),
        "rtf": round((encoder + searching) / seconds, 6),
        "machine": machine(str(device)),
        "torch": torch.__version__,
        "commit": commit(),
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = documented_parser("scripts.greedy_steps", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--split", default="test")
    parser.add_argument("--repeat", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS))
    for folder in options.runs:
        row = measure(folder, options.split, options.repeat)
        print("| " + " | ".join(str(row[column]) for column in _COLUMNS) + " |", flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
