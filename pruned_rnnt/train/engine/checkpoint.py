"""Checkpoints: written atomically, read without running code; the newest and best are kept.

A checkpoint is one dictionary of tensors and plain values:

    format, version   kind of file, and version of its format
    config            the resolved configuration
    vocab_size        size of the model's output; None for a model of the user's own
    model, average    parameters, and their running average (None when switched off)
    mean              plain mean of the parameters since the start, see `ParameterMean`, or None
    optimiser, scaler, sampler, random   states for an exact continuation; `random` one per rank
    buffers, samplers  buffers of the model and states of the sampler, one set per rank; none if one
                      process trains
    task, task_class  states of the task, one per rank, and the name of its class
    counters          step, epoch, batches of the epoch, ...
    score             error rate of the validation if it was measured, else None
    is_average        True in files of `pruned-rnnt average` alone
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.model.saved_file import (
    NewerFileError,
    UnusableFileError,
    check_contents,
    describe_unreadable,
    read_saved,
)

FORMAT = "pruned_rnnt checkpoint"
VERSION = 1
_SCORES_NAME = "scores.json"

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


def save_checkpoint(path: Path, values: dict[str, Any]) -> None:
    """Write a checkpoint atomically: if writing fails, `path` keeps its old content.

    Raises:
        CheckpointError: the disk is full or not writable, or a value is one that `load_checkpoint`
            would refuse.
    """
    if fault := describe_unreadable(values):
        raise CheckpointError(
            f"{path} was not written, as it could not be read again: {fault}; a checkpoint has "
            "only dense tensors and plain values, so convert it, for example with float()"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(
        path, lambda file: torch.save({"format": FORMAT, "version": VERSION, **values}, file)
    )


def load_checkpoint(path: str | Path | None) -> dict[str, Any]:
    """Read a checkpoint into CPU tensors; code in the file is refused.

    Raises:
        CheckpointError: missing, truncated, damaged or foreign file, one of a newer version, or one
            whose parameters or buffers are NaN, infinite or huge; or None, as from
            `CheckpointFolder.best`.
    """
    if path is None:
        raise CheckpointError("there is no best checkpoint: no validation has given a score yet")
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint not found: {path}")
    try:
        values = read_saved(path, "checkpoint")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a {FORMAT}")
        check_contents(
            values,
            path,
            VERSION,
            parameters=("model", "average"),
            optional=("average", "vocab_size"),
            needed=("counters",),
        )
        counters = values["counters"]
        if not isinstance(counters, dict) or not isinstance(counters.get("step"), int):
            raise CheckpointError(f"{path} is damaged: 'counters' has no step")
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from error
    names = values.get("buffer_names")  # absent in checkpoints of version 0.2
    buffers = frozenset(names) if isinstance(names, list) else ()
    for state in (values["model"], values["average"]):
        if state is not None and (broken := describe_broken(state, buffers)):
            raise CheckpointError(
                f"{path} cannot be used, as training had diverged: {broken}. Use an earlier one"
            )
    return values


@dataclass(frozen=True)
class CheckpointFolder:
    """`step-00001234.pt` files of one run.

    keep_last: number of newest checkpoints to keep.
    keep_best: number of checkpoints with the lowest scores to keep as well.
    """

    folder: Path
    keep_last: int = 3
    keep_best: int = 1

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first; not files of other names, such as a user's copies."""
        return sorted(self.folder.glob(f"step-{'[0-9]' * 8}.pt"))

    def refuse_newer(self, step: int, known: Collection[Path]) -> None:
        """Raise CheckpointError if there is one of a later step that is not among `known`: another
        process has trained the run since."""
        for path in self.paths():
            if path.name > self.path(step).name and path not in known:
                raise CheckpointError(
                    f"{path} is newer than this process, which begins at step {step}: another one "
                    "has trained the run since; start again to continue from there"
                )

    def save(
        self,
        step: int,
        values: dict[str, Any],
        *,
        keep_all: bool = False,
        drop_scores: bool = False,
    ) -> Path:
        """Write the checkpoint of a step, then remove those that need not be kept.

        With `keep_all` none is removed: the new one may be worse than the earlier ones. Later ones,
        which were unreadable when the run continued from an earlier one, stay until the run reaches
        their step; their scores are dropped. `drop_scores` drops those of all earlier ones, which
        were measured in another way, if the new one has a score; until then, they are kept for it.
        """
        path = self.path(step)
        if values["score"] is not None:
            # Before the checkpoint: a run that is killed in between repeats the validation, while
            # a checkpoint without its score would never be the best.
            scores = {} if drop_scores else self._scores()
            scores[path.name] = values["score"]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_scores(scores)
        save_checkpoint(path, values)
        for half in self.folder.glob(".step-*.tmp"):
            half.unlink()  # left by a process that was killed while writing
        scores = self._scores()
        passed = [p for p in self.paths() if p.name <= path.name]
        kept = {p.name for p in passed[-max(1, self.keep_last) :]}
        # Only what can be kept has a rank.
        scores = {p.name: scores[p.name] for p in passed if p.name in scores}
        kept.update(_best_first(scores)[: self.keep_best])
        if keep_all:
            kept.update(p.name for p in passed)
        self._write_scores({name: score for name, score in scores.items() if name in kept})
        for old in passed:
            if old.name not in kept:
                old.unlink()
        return path

    def load_newest(self, *, quiet: bool = False) -> dict[str, Any] | None:
        """The newest usable checkpoint, None if there is no checkpoint.

        Unusable ones are named in the log; with `quiet` only at debug level, for all but one of
        several processes.

        Raises:
            CheckpointError: none of them can be used, or a checkpoint after the last usable one is
                in the format of a later version: it is intact, and the run would overwrite it.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return load_checkpoint(path)
            except CheckpointError as error:
                if isinstance(error.__cause__, NewerFileError):
                    raise CheckpointError(
                        f"{error}, or move the file away to continue from an earlier checkpoint"
                    ) from error
                logger.log(logging.DEBUG if quiet else logging.WARNING, "%s", error)
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be used: move them "
                "away to start a new run"
            )
        return None

    def best(self) -> Path | None:
        """The checkpoint with the lowest score; None if none has a score."""
        scores = {
            name: score for name, score in self._scores().items() if (self.folder / name).is_file()
        }
        return self.folder / _best_first(scores)[0] if scores else None

    def _scores(self) -> dict[str, float]:
        """Scores by file name; read from the checkpoints themselves if the file is damaged."""
        path = self.folder / _SCORES_NAME
        if not path.is_file():
            return {}
        try:
            scores = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            scores = None
        if isinstance(scores, dict) and all(isinstance(s, int | float) for s in scores.values()):
            return scores
        logger.warning("%s is damaged: reading the scores from the checkpoints themselves", path)
        return self._scores_of_checkpoints()

    def _scores_of_checkpoints(self) -> dict[str, float]:
        scores = {}
        for path in self.paths():
            try:
                score = load_checkpoint(path)["score"]
            except (CheckpointError, KeyError):
                continue
            if score is not None:
                scores[path.name] = score
        return scores

    def _write_scores(self, scores: dict[str, float]) -> None:
        text = json.dumps(dict(sorted(scores.items())))
        _write_whole(self.folder / _SCORES_NAME, lambda file: file.write(text.encode()))


def _best_first(scores: dict[str, float]) -> list[str]:
    """The names by score, the newest first among equals."""
    return sorted(sorted(scores, reverse=True), key=lambda name: scores[name])


def _write_whole(path: Path, write: Any) -> None:
    """Write under a temporary name, sync to disk, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        temporary.unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise CheckpointError(
            f"{path} could not be written ({str(reason).splitlines()[0]}); earlier files are "
            "unchanged: make room, or let it be written, and run the same again"
        ) from error
    # The new name is durable only once the folder is on disk, too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
