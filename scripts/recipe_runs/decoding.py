"""Decodes a run with several searches, loading the model once; prints one line of JSON.

python -m scripts.recipe_runs.decoding RUN '{"searches": {"greedy": []}, "splits": ["dev"]}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.decode.decode_set import decode_set
from pruned_rnnt.decode.scoring.error_rates import confidence_interval, count_errors
from pruned_rnnt.train.engine.checkpoint import CheckpointError
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.train.tasks.lm_task import load_language_model
from scripts.benchmark.results import commit, machine


def decode_run(
    folder: Path, searches: Mapping[str, Sequence[str]], splits: Sequence[str]
) -> dict[str, Any]:
    """Steps, size and WER of a run, by split and search; a search without its model has none."""
    config = run_config(folder)
    loaded = load_model(config)
    data = DataModule(config.data)
    results: dict[str, dict[str, Any]] = {split: {} for split in splits}
    for name, settings in searches.items():
        search = run_config(folder, settings).decode
        language_model = None
        if search.fusion.lm:
            device = next(loaded.model.parameters()).device
            try:
                language_model, _ = load_language_model(Path(search.fusion.lm), device)
            except CheckpointError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
        for split in splits:
            started = time.monotonic()
            decoded = decode_set(
                loaded.model, data.test_loader(split), loaded.tokenizer, search, language_model
            )
            transcripts = [utterance.transcript for utterance in decoded.utterances]
            counts = count_errors(transcripts)
            characters = count_errors([transcript.characters() for transcript in transcripts])
            lower, upper = confidence_interval(transcripts)
            results[split][name] = {
                "wer": counts.rate,
                "errors": [counts.insertions, counts.deletions, counts.substitutions],
                "words": counts.reference_words,
                "cer": characters.rate,
                "interval": [lower, upper],
                "seconds": round(time.monotonic() - started, 1),
            }
    return {
        "steps": loaded.step,
        "planned_steps": config.train.steps,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "results": results,
        "machine": machine(str(next(loaded.model.parameters()).device)),
        "torch": torch.__version__,
        "commit": commit(),
    }


if __name__ == "__main__":
    request = json.loads(sys.argv[2])
    print(json.dumps(decode_run(Path(sys.argv[1]), request["searches"], request["splits"])))
