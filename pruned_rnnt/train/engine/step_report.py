"""The result of one optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pruned_rnnt.train.engine.task import BatchSize, Utterance


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Result of one step over the batches of this process.

    sums: losses by part, and measures with a name that ends in PER_UTTERANCE, summed over
        utterances.
    seconds: from the start of the step, or from the result of the previous one if that came later,
        to the result of this one.
    gradient_norm: norm before clipping, of the loss per frame; NaN if it was not computed.
    problem: reason why the parameters were not updated, empty if they were; all processes agree on
        whether it is empty.
    suspects: if this process caused the problem, the utterances with infinite or NaN loss, or all
        utterances if there are none.
    """

    sums: dict[str, float] = field(default_factory=dict)
    size: BatchSize
    seconds: float
    gradient_norm: float
    problem: str = ""
    suspects: tuple[Utterance, ...] = ()


class LaunchedStep:
    """A step whose work is launched; the device may still be busy with it.

    Args:
        read: waits for the result and makes the report; called once.

    Attributes:
        stop_requested: some process received a request to stop.
        is_finished: the report is known.
    """

    def __init__(self, read: Callable[[], StepReport], *, stop_requested: bool) -> None:
        self.stop_requested = stop_requested
        self._read: Callable[[], StepReport] | None = read
        self._report: StepReport | None = None

    @property
    def is_finished(self) -> bool:
        return self._report is not None

    def report(self) -> StepReport:
        """The result; waits for it if necessary."""
        if self._report is None:
            assert self._read is not None
            self._report = self._read()
            # It holds the batches.
            self._read = None
        return self._report
