"""The result of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pruned_rnnt.train.engine.task import BatchSize, Utterance


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did, over the batches of this process.

    sums: losses by part, summed over utterances. gradient_norm: before clipping, of the loss per
    frame, NaN when it was never known. problem: empty when the parameters were updated, else the
    reason why they were not; it is empty on all processes or on none. suspects: of a problem of
    this process, the utterances with infinite or NaN loss, or all of them when there are none.
    stop_requested: some process was asked to stop.
    """

    sums: dict[str, float] = field(default_factory=dict)
    size: BatchSize
    seconds: float
    gradient_norm: float
    problem: str = ""
    suspects: tuple[Utterance, ...] = ()
    stop_requested: bool = False
