"""Steps which could not be made: named, dumped, counted, and the end after too many in a row."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pruned_rnnt.train.steps import StepReport

_NAMED_IN_LOG = 5

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and where to look."""


def dump_bad_step(
    folder: Path, step: int, rank: int, report: StepReport, shapes: Sequence[dict[str, Any]]
) -> None:
    """One line to the log about a step that was skipped; a file for this process' own problem.

    The file in `folder` holds the reason, the shapes and lattice sizes of the step's batches, and
    the suspected utterances with frames, symbols and loss.
    """
    if not report.suspects:
        logger.warning("step %d skipped: %s", step, report.problem)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}-rank-{rank}.json"
    dump = {
        "step": step,
        "problem": report.problem,
        "gradient_norm": str(report.gradient_norm),
        "batches": list(shapes),
        # NaN and infinity are no JSON numbers, so losses are strings here.
        "utterances": [dataclasses.asdict(u) | {"loss": str(u.loss)} for u in report.suspects],
    }
    path.write_text(json.dumps(dump, indent=2) + "\n", encoding="utf-8")
    names = ", ".join(utterance.id for utterance in report.suspects[:_NAMED_IN_LOG])
    names += ", ..." if len(report.suspects) > _NAMED_IN_LOG else ""
    sizes = "; ".join(
        ", ".join(f"{name} {value}" for name, value in batch.items()) for batch in shapes
    )
    logger.warning(
        "step %d skipped: %s; utterances: %s; %s; see %s", step, report.problem, names, sizes, path
    )
