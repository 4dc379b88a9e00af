"""The files in the folder of a run: the only place that knows their names.

docs/run_folder.md says what each holds, and who writes and reads it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


def require_writable(folder: Path, advice: str) -> None:
    """Make a folder if it is missing, and write in it for a moment.

    Args:
        advice: what to do if that fails, for the message.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write in {folder} ({error.strerror}): {advice}") from error


class RunFolder:
    """The paths of a run in `path`; files and folders may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.tokens = path / "tokens"  # a folder: see `Tokenizer.save`
        self.checkpoints = path / "checkpoints"  # a folder: see `CheckpointFolder`
        self.log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.versions = path / "versions.jsonl"
        self.tensorboard = path / "tensorboard"
        self.loggers = path / "loggers.json"
        self.bad_steps = path / "bad_steps"
        self.durations = path / "utterances.json"
        self.finetuning = path / "finetune.json"
        self.licences = path / "licences.json"
        self.calibration = path / "calibration.json"
        self.results = path / "results"
        self.alignments = path / "alignments"
        self.export = path / "export"
        self.report = path / "report.html"

    def average(self, last: int) -> Path:
        """The mean of the last checkpoints, unless the user names another file."""
        return self.path / f"average-last-{last}.pt"

    def span_average(self, last: int) -> Path:
        """The mean over the last spans between checkpoints, unless the user names another file."""
        return self.path / f"average-over-last-{last}.pt"
