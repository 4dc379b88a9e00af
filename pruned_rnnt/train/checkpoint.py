"""Checkpoints: written whole or not at all, read without running code, kept by number and score.

A checkpoint is one dictionary of tensors and plain values:

    format, version   what the file is
    config            the resolved configuration
    vocab_size        size of the model's output
    model, average    parameters, and their running average (None when switched off)
    optimiser, scaler, sampler, random   states for an exact continuation; `random` one a rank
    buffers           of the model, one set a rank; none when one process trains
    counters          step, epoch, batches of the epoch, ...
    score             validation WER when there was one, else None
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = "pruned_rnnt checkpoint"
VERSION = 1
_SCORES_NAME = "scores.json"
_UNREADABLE = (
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    KeyError,
    OSError,
    zipfile.BadZipFile,
)

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A file which is no usable checkpoint, or could not be written; the message names it."""


def save_checkpoint(path: Path, values: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` holds either all of it or what it held before.

    Raises:
        CheckpointError: the disk is full, or cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(
        path, lambda file: torch.save({"format": FORMAT, "version": VERSION, **values}, file)
    )


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to CPU tensors; the file can hold no code.

    Raises:
        CheckpointError: missing, truncated, damaged or foreign file, or one of a newer version.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint not found: {path}")
    try:
        # torch writes checksums, but does not look at them.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
        values = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or no checkpoint ({reason})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a {FORMAT}")
    if values["version"] > VERSION:
        raise CheckpointError(
            f"{path} has version {values['version']}, this program reads up to {VERSION}"
        )
    return values


@dataclass(frozen=True)
class CheckpointFolder:
    """`step-00001234.pt` files of one run.

    keep_last: newest checkpoints that are kept.
    keep_best: so many with the lowest score are kept as well.
    """

    folder: Path
    keep_last: int = 3
    keep_best: int = 1

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, values: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove those which are not to be kept.

        Later ones, which could not be read when the run went on from an earlier one, stay as they
        are until the run comes to them.
        """
        path = self.path(step)
        save_checkpoint(path, values)
        for half in self.folder.glob(".step-*.tmp"):
            half.unlink()  # of a process that was killed while it wrote
        scores = self._scores()
        if values["score"] is not None:
            scores[path.name] = values["score"]
        passed = [p for p in self.paths() if p.name <= path.name]
        kept = {p.name for p in passed[-max(1, self.keep_last) :]}
        kept.update(sorted(scores, key=lambda name: scores[name])[: self.keep_best])
        text = json.dumps({name: scores[name] for name in sorted(scores) if name in kept})
        _write_whole(self.folder / _SCORES_NAME, lambda file: file.write(text.encode()))
        for old in passed:
            if old.name not in kept:
                old.unlink()
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, None if there are none at all.

        Those that cannot be read are named in the log.

        Raises:
            CheckpointError: none of them can be read.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return load_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s", error)
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read: move them "
                "away to start anew"
            )
        return None

    def best(self) -> Path | None:
        """The checkpoint with the lowest score, of those that have one."""
        scores = {
            name: score for name, score in self._scores().items() if (self.folder / name).is_file()
        }
        return self.folder / min(scores, key=lambda name: scores[name]) if scores else None

    def _scores(self) -> dict[str, float]:
        path = self.folder / _SCORES_NAME
        if not path.is_file():
            return {}
        scores: dict[str, float] = json.loads(path.read_text())
        return scores


def _write_whole(path: Path, write: Any) -> None:
    """Write under a temporary name, force it to the disk, then give it its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        temporary.unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise CheckpointError(
            f"{path} could not be written ({str(reason).splitlines()[0]}); what was there before "
            "is as it was"
        ) from error
    # The new name itself is only durable once the folder is on the disk.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
