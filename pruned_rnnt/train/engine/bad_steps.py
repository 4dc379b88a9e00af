"""Reports about skipped steps and validation batches, in the log and as files of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY
from pruned_rnnt.train.engine.task import Task

if TYPE_CHECKING:
    from pruned_rnnt.train.engine.report import StepReport, Utterance

_IDS_IN_LOG = 5

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message gives the reason and where to look."""


def dump_bad_step(
    folder: Path, step: int, rank: int, report: StepReport, shapes: Sequence[dict[str, Any]]
) -> None:
    """Log a skipped step; write a file if this process caused it.

    Of the processes that did not cause it, only the first one logs a line.

    The file in `folder` holds the reason, the shapes and lattice sizes of the step's batches, and
    the suspected utterances with frames, symbols and loss.
    """
    if not report.suspects:
        if rank == 0:
            logger.warning("step %d skipped: %s; see %s", step, report.problem, folder)
        return
    _dump(
        folder / f"step-{step:08d}-rank-{rank}.json",
        f"step {step} skipped",
        {"step": step, "problem": report.problem, "gradient_norm": str(report.gradient_norm)},
        shapes,
        report.suspects,
    )


def report_too_large(
    task: Task, run: Path, step: int, rank: int, batches: Sequence[tuple[Any, str]]
) -> None:
    """Log each validation batch that did not fit into memory and write a file about it.

    Args:
        batches: each with the allocator's message.
    """
    for place, (batch, message) in enumerate(batches):
        _dump(
            RunFolder(run).bad_steps / f"validation-{step:08d}-rank-{rank}-{place}.json",
            f"validation at step {step} continues without a batch",
            {"step": step, "problem": f"{OUT_OF_MEMORY} ({message})"},
            [task.shapes(batch)],
            task.utterances(batch),
        )


def _dump(
    path: Path,
    about: str,
    facts: dict[str, Any],
    shapes: Sequence[dict[str, Any]],
    utterances: Sequence[Utterance],
) -> None:
    dump = {
        **facts,
        "batches": list(shapes),
        # JSON has no NaN and infinity, so losses are strings.
        "utterances": [dataclasses.asdict(u) | {"loss": str(u.loss)} for u in utterances],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dump, indent=2) + "\n", encoding="utf-8")
        place = f"see {path}"
    except OSError as error:  # such as a full disk: a report must not end the training
        place = f"{path} could not be written ({error.strerror or error})"
    sizes = "; ".join(
        ", ".join(f"{name} {value}" for name, value in batch.items()) for batch in shapes
    )
    names = first_ids([utterance.id for utterance in utterances])
    logger.warning("%s: %s; utterances: %s; %s; %s", about, facts["problem"], names, sizes, place)


def first_ids(ids: Sequence[str]) -> str:
    """The first few ids, as text for a log line."""
    return ", ".join(ids[:_IDS_IN_LOG]) + (", ..." if len(ids) > _IDS_IN_LOG else "")
