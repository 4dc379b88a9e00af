"""A cell of the table: one call, which must be right or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.cells.judge import (
    Comparison,
    Upstream,
    compared,
    compute,
    expected,
    precision,
    widened,
    wrong_refusal,
)
from tests.cells.subject import Arguments, Subject, placed, results_of, seed
from tests.loss.loss_cases import not_reading

RIGHT, REFUSED, WRONG, CRASH, ABSENT = "right", "refused", "wrong", "crash", "-"
DEFAULT = Upstream()
Change = Callable[[Arguments], Arguments]
Run = Callable[[Subject, Arguments, Upstream], Comparison]


class Outcome(NamedTuple):
    """status: one of the above; detail: the message of a refusal, or what is wrong."""

    status: str
    detail: str = ""


class Absent(Exception):
    """The cell needs a package or a device that is missing."""


def unchanged(given: Arguments) -> Arguments:
    return given


def plain(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Results and gradients of a call."""
    return compute(subject, given, results_of(subject.call(**given)), upstream)


@dataclass(frozen=True, eq=False)
class Cell:
    """One call.

    family, row, column: where it is printed.
    change: of the valid arguments, on the device and in float32.
    run: the call and its gradients, such as plain.
    words: a refusal must name one of them.
    must_refuse: no result is right.
    bad_utterance: that of a bad value, whose loss is +inf on devices where values are not read. Of
        others that the CPU refuses, some utterance's loss must be.
    reads_values: False: they are not read on the CPU either, as inside of torch.compile.
    upstream: of which results gradients are taken.
    reference_change: of the arguments of the reference, if not change.
    precision: dtype whose roundings the results may have, if not that of the arguments.
    dtype: of the floating arguments before the change.
    """

    subject: Subject
    family: str
    row: str
    column: str
    change: Change = unchanged
    run: Run = plain
    words: tuple[str, ...] = ()
    must_refuse: bool = False
    upstream: Upstream = DEFAULT
    precision: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    reference_change: Change | None = None
    bad_utterance: int | None = None
    reads_values: bool = True
    slow: bool = False
    only: str = ""

    @property
    def name(self) -> str:
        return f"{self.family} | {self.row} | {self.column}"

    def arguments(self, device: str) -> Arguments:
        subject = self.subject
        return placed(subject.make(), device, self.dtype, subject.is_differentiable)


def outcome(cell: Cell, device: str) -> Outcome:
    seed(0)
    try:
        given = cell.change(cell.arguments(device))
    except Absent as missing:
        return Outcome(ABSENT, str(missing))
    try:
        with warnings.catch_warnings(), _readable(cell):
            warnings.simplefilter("ignore")
            got = cell.run(cell.subject, given, cell.upstream)
    except Absent as missing:
        return Outcome(ABSENT, str(missing))
    except Exception as error:
        reason = wrong_refusal(error, cell.words)
        return Outcome(REFUSED, str(error)) if reason is None else Outcome(WRONG, reason)
    is_read = device == "cpu" and cell.reads_values
    if cell.bad_utterance is not None and not is_read:
        return _of_unread_values(cell, got)
    if cell.must_refuse:
        return Outcome(WRONG, "accepted")
    try:
        reason = _difference(cell, got)
    except Exception as error:
        reason = f"accepted, but it has no meaning: {type(error).__name__} {error}"
    if reason is None:
        return Outcome(RIGHT)
    if not is_read and cell.run is plain:
        on_cpu = outcome(dataclasses.replace(cell, reads_values=True), "cpu")
        if on_cpu.status == REFUSED:
            return _of_unread_values(cell, got)
    return Outcome(WRONG, reason)


@contextlib.contextmanager
def _readable(cell: Cell) -> Iterator[None]:
    """Without values, memory that no kernel writes has NaN, so that none of it goes unnoticed."""
    if cell.reads_values:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with not_reading():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _difference(cell: Cell, got: Comparison) -> str | None:
    seed(0)
    change = cell.reference_change or cell.change
    wide = widened(change(cell.arguments("cpu")))
    if cell.subject.is_module:
        wide["observed"] = got.results
    want = expected(cell.subject, wide, cell.upstream)
    dtype = cell.precision or precision(cell.subject, got)
    return compared(cell.subject, got, want, dtype)


def _of_unread_values(cell: Cell, got: Comparison) -> Outcome:
    """What is documented for values that are refused where they are read: the loss of a bad
    utterance is +inf and its gradient 0. Other results are not specified."""
    n = cell.bad_utterance
    loss_N = next((got.results[name].cpu() for name in got.losses), None)
    if loss_N is None or loss_N.dim() > 1:
        return Outcome(ABSENT, "values are not read on this device")
    worst = -torch.inf if cell.subject.gives_scores else torch.inf
    is_bad = loss_N == worst
    if not bool(is_bad[n] if n is not None and loss_N.dim() == 1 else is_bad.any()):
        return Outcome(WRONG, f"accepted, the loss of the utterance is {loss_N.tolist()}")
    grads = [x.cpu() for x in got.grads.values() if x is not None]
    if not all(bool(x.isfinite().all()) for x in grads):
        return Outcome(WRONG, "accepted, a gradient is not finite")
    if loss_N.dim() == 0:
        return Outcome(RIGHT)
    # Those of an utterance, not of a layer. The smoothed loss takes a mean over all utterances.
    own = [x for x in grads if x.dim() > 2 and "smoothed" not in cell.subject.name]
    if any(bool(x[is_bad].any()) for x in own):
        return Outcome(WRONG, "accepted, the gradient of the utterance is not 0")
    # Packed rows of others begin elsewhere than their lengths say.
    is_other = ~is_bad
    if n is not None and "packed" not in cell.subject.name:
        is_other = torch.arange(len(loss_N)) != n
    if not bool(loss_N[is_other].isfinite().all()):
        return Outcome(WRONG, "accepted, another utterance's loss is lost")
    return Outcome(RIGHT)


def changing(name: str, value: Callable[[Any], Any]) -> Change:
    """Replaces one argument."""
    return lambda given: {**given, name: value(given[name])}


def replacing(**values: Any) -> Change:
    return lambda given: {**given, **values}
