"""The folder of a run for a model that was not trained in it: imported, or joined from others.

config.yaml, tokens/, checkpoints/step-0.pt      as after training, without the training state
"""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.config.load import to_dict, to_yaml
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.experiment import ExperimentConfig


def check_is_new(output: Path) -> None:
    """ValueError if the folder already holds a run."""
    if RunFolder(output).config.exists():
        raise ValueError(f"{output} already holds a run: choose another folder")


def save_run(
    model: SpeechModel, tokenizer: Tokenizer, config: ExperimentConfig, output: Path
) -> None:
    """Write the run to the new folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(RunFolder(output).tokens)
    CheckpointFolder(RunFolder(output).checkpoints).save(
        0,
        {
            "config": to_dict(config),
            "vocab_size": model.vocab_size,
            "model": model.state_dict(),
            "average": None,
            "counters": {"step": 0},
            "score": None,
        },
    )
    RunFolder(output).config.write_text(to_yaml(config), encoding="utf-8")
