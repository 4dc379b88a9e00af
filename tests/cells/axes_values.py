"""Values: those of lengths and targets, and of scalar options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.cells.cell import Cell, changing, replacing, unchanged
from tests.cells.subject import Subject


class Value(NamedTuple):
    """change: of the argument; is_bad: no result is right."""

    change: Callable[[Tensor], Any]
    is_bad: bool = True


def _with(n: int, value: int) -> Callable[[Tensor], Tensor]:
    """Sets the value of an utterance."""

    def change(x: Tensor) -> Tensor:
        fits = -(2**31) <= value < 2**31
        x = x.clone() if fits else x.to(torch.int64)
        x.view(len(x), -1)[n, 0] = value
        return x

    return change


def _boundary(column: int, value: int) -> Callable[[Tensor], Tensor]:
    """Sets one number of an utterance."""

    def change(x: Tensor) -> Tensor:
        x = x.to(torch.int64).clone()
        x[1, column] = value
        return x

    return change


def _apart(x: Tensor) -> Tensor:
    """On the other device, if there is one."""
    return x.cpu()


LENGTHS = {
    "None": Value(lambda x: None, False),
    "on the CPU": Value(_apart, False),
    "tuple": Value(lambda x: tuple(x.tolist())),
    "too long": Value(_with(1, 99)),
    "negative": Value(_with(1, -3)),
    "2^32 + 1": Value(_with(1, 2**32 + 1)),
    "shape (N, 1)": Value(lambda x: x[:, None]),
    "a number": Value(lambda x: int(x[0])),
}
# Not values: these are seen on every device.
_SHAPES = ("tuple", "shape (N, 1)", "a number")
ZERO = Value(_with(1, 0))
TARGETS = {
    "negative": Value(_with(0, -1)),
    "V or above": Value(_with(0, 6)),
    "the blank": Value(_with(0, 0)),
    "2^32 + 1": Value(_with(0, 2**32 + 1)),
    "padding -1": Value(lambda x: _with(1, -1)(x), False),
    "padding 2^40": Value(lambda x: _with(1, 2**40)(x), False),
}
STARTS = {
    # Without a column of the lattice, so that there is no path.
    "negative": Value(_with(0, -9)),
    "too high": Value(_with(0, 99)),
    "2^32": Value(_with(0, 2**32)),
}
BOUNDARIES = {
    "too long": Value(_boundary(3, 99)),
    "negative": Value(_boundary(2, -3)),
    "2^32 + 1": Value(_boundary(3, 2**32 + 1)),
}
# By the name of the argument, also in compat.
_VALUES = {
    "logit_lengths": {**LENGTHS, "zero": ZERO},
    "target_lengths": LENGTHS,
    "targets": TARGETS,
    "start": STARTS,
    "boundary": BOUNDARIES,
}
# Functions that take any band, and k2's losses.
_MASKS = ("prune", "diagnostics.retained_mass", "diagnostics.band_edge_mass")
_NEMO = "nemo_loss.NemoRNNTLoss"
_OF_K2 = ("k2.rnnt_loss_simple", "k2.rnnt_loss_smoothed", "k2.rnnt_loss", "k2.rnnt_loss_pruned")
_OF_K2 += ("fast_rnnt.rnnt_loss", "fast_rnnt.rnnt_loss_pruned", "k2.get_rnnt_logprobs")
_OF_K2 += tuple(f"k2.get_rnnt_logprobs_{x}" for x in ("smoothed", "joint", "pruned"))
# Values that have a meaning for some functions.
_RIGHT_VALUES = {
    # Their blank is the last column.
    *((f"compat.{x}", "the blank") for x in ("torchaudio.functional.rnnt_loss", _NEMO)),
    # k2 takes any symbol.
    *((f"compat.{x}", "the blank") for x in _OF_K2),
    ("ctc_consistency_loss", "zero"),
    # A batch may be taken a few frames at a time, of which an utterance has none.
    *((f"diagnostics.{x}log_prob_rows", "zero") for x in ("", "tdt_")),
    *((f"diagnostics.{x}viterbi_alignment", "zero") for x in ("", "tdt_")),
}
_LARGE = 10**12
SCALARS: dict[str, dict[str, Value]] = {
    "finite": {
        "NaN": Value(lambda _: float("nan")),
        "inf": Value(lambda _: float("inf")),
        "text": Value(lambda _: "0.1"),
        "None": Value(lambda _: None),
        "complex": Value(lambda _: 0.1j),
        "list": Value(lambda _: [0.1]),
        "integer": Value(lambda _: 1, False),
        "NumPy": Value(lambda _: np.float32(0.125), False),
        "tensor": Value(lambda _: torch.tensor(0.125), False),
    },
    "integer": {
        "float": Value(lambda x: float(x)),
        "NaN": Value(lambda _: float("nan")),
        "text": Value(lambda x: str(x)),
        "None": Value(lambda _: None),
        "list": Value(lambda x: [x]),
        "too large": Value(lambda _: _LARGE, False),
        "too small": Value(lambda _: -_LARGE),
        "NumPy": Value(lambda x: np.int64(x), False),
        "tensor": Value(lambda x: torch.tensor(x), False),
        "bool": Value(lambda x: bool(x), False),
    },
    "choice": {
        "unknown": Value(lambda _: "other"),
        "None": Value(lambda _: None),
        "number": Value(lambda _: 3),
        "upper case": Value(lambda x: x.upper()),
        "list": Value(lambda x: [x]),
    },
    "durations": {
        "floats": Value(lambda _: (0.0, 1.0, 2.0)),
        "negative": Value(lambda _: (-1, 1, 2)),
        "twice": Value(lambda _: (1, 1, 2)),
        "zeros": Value(lambda _: (0,)),
        "too many": Value(lambda _: tuple(range(40))),
        "other count": Value(lambda _: (0, 1)),
        "text": Value(lambda _: "012"),
        "None": Value(lambda _: None),
        "number": Value(lambda _: 3),
        "large": Value(lambda _: (0, 1, _LARGE), False),
        "range": Value(lambda _: range(3), False),
        "list": Value(lambda _: [0, 1, 2], False),
        "NumPy": Value(lambda _: np.arange(3), False),
        "tensor": Value(lambda _: torch.arange(3), False),
    },
    "mapping": {
        "list": Value(lambda _: [2]),
        "None": Value(lambda _: None),
        "float column": Value(lambda _: {7.0: 2}),
        "float duration": Value(lambda _: {7: 2.0}),
        "duration 1": Value(lambda _: {7: 1}),
        "column of blank": Value(lambda _: {0: 2}),
        "column outside": Value(lambda _: {8: 2}),
        "a target": Value(lambda _: {1: 2}),
        "twice": Value(lambda _: {6: 2, 7: 2}),
        "NumPy": Value(lambda _: {np.int64(7): np.int64(2)}, False),
    },
}
SCALARS["positive"] = {
    **{k: v for k, v in SCALARS["finite"].items() if k != "None"},
    "zero": Value(lambda _: 0.0),
    "negative": Value(lambda _: -1.0),
}
SCALARS["from 0"] = {**SCALARS["finite"], "negative": Value(lambda _: -1.0)}
SCALARS["probability"] = {
    **{k: v for k, v in SCALARS["finite"].items() if k not in ("integer", "NumPy", "tensor")},
    "above 1": Value(lambda _: 1.5),
    "negative": Value(lambda _: -0.1),
}
SCALARS["scale"] = SCALARS["probability"]
_NO_STEP = ("bool", "float", "too large", "None")
SCALARS["step"] = {
    **{k: v for k, v in SCALARS["integer"].items() if k not in _NO_STEP},
    "infinite": Value(lambda _: float("inf"), False),
}
_DEFAULTS = {
    "blank": 0,
    "rnnt_type": "regular",
    "reduction": "none",
    "activation": "tanh",
    "step": 4,
}


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject in subjects:
        for name in subject.integers:
            yield from _integers(subject, name)
        yield from _scalars(subject)


def _integers(subject: Subject, name: str) -> Iterator[Cell]:
    meaning = subject.meaning_of(name)
    words = (*subject.names_of(name), "utterance", *subject.integers)
    for column, value in _VALUES.get(meaning, {}).items():
        row = f"{subject.name}: {name}"
        is_right = meaning == "start" and subject.function in _MASKS
        is_bad = value.is_bad and not is_right and (subject.function, column) not in _RIGHT_VALUES
        is_unread = is_bad and column not in _SHAPES
        bad_utterance = 0 if meaning in ("targets", "start") else 1
        options: dict[str, Any] = {
            "words": words,
            "must_refuse": is_bad,
            "bad_utterance": bad_utterance if is_unread else None,
        }
        change = changing(name, value.change)
        yield Cell(subject, "lengths and targets", row, column, change, **options)
        if is_unread or column == "None":
            yield Cell(subject, "unread values", row, column, change, **options, reads_values=False)


def _scalars(subject: Subject) -> Iterator[Cell]:
    for name, kind in subject.scalars.items():
        for column, value in SCALARS[kind].items():
            default = subject.make().get(name, _DEFAULTS.get(name, 0.0))
            row = f"{subject.name}: {name}"
            change = replacing(**{name: value.change(default)})
            is_bad = value.is_bad and (subject.function, column) not in _RIGHT_VALUES
            options: dict[str, Any] = {
                "words": (*subject.names_of(name), *_disagreement(subject, kind)),
                "must_refuse": is_bad,
                # The first utterance has the target.
                "bad_utterance": 0 if column == "a target" else None,
            }
            yield Cell(subject, "options", row, column, change, **options)
            if column == "a target":
                yield Cell(
                    subject, "unread values", row, column, change, **options, reads_values=False
                )


def _disagreement(subject: Subject, kind: str) -> tuple[str, ...]:
    """Arguments that may be blamed as well."""
    return (*subject.floats, "targets") if kind in ("durations", "mapping") else ()


def options(subjects: list[Subject]) -> Iterator[Cell]:
    """Valid values of options, against the reference that knows them."""
    for subject in subjects:
        yield Cell(subject, "values of options", subject.name, "defaults", unchanged)
        for option in subject.options:
            change = replacing(**option.given)
            yield Cell(subject, "values of options", subject.name, option.name, change)
