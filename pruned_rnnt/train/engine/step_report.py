"""The result of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pruned_rnnt.train.engine.task import BatchSize, Utterance


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Result of one step over the batches of this process.

    sums: losses by part, and measures with a name that ends in PER_UTTERANCE, summed over
        utterances.
    gradient_norm: norm before clipping, of the loss per frame; NaN if it was not computed.
    problem: reason why the parameters were not updated, empty if they were; all processes agree on
        whether it is empty.
    suspects: if this process caused the problem, the utterances with infinite or NaN loss, or all
        utterances if there are none.
    stop_requested: some process received a request to stop.
    """

    sums: dict[str, float] = field(default_factory=dict)
    size: BatchSize
    seconds: float
    gradient_norm: float
    problem: str = ""
    suspects: tuple[Utterance, ...] = ()
    stop_requested: bool = False
