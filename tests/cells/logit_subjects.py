"""The losses of logits: rnnt_loss, rnnt_loss_pruned, rnnt_loss_tdt, rnnt_loss_multi_blank.

All subjects share one ragged batch: N 3, T 4, U 2, V 6, T_n = 4, 3, 2 and U_n = 2, 0, 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.cells import references
from tests.cells.subject import Arguments, Option, Subject

N, T, U, V, S, D, K = 3, 4, 2, 6, 2, 5, 3
FRAMES, SYMBOLS = [4, 3, 2], [2, 0, 1]
DURATIONS = (0, 1, 2)
LENGTHS = ("logit_lengths", "target_lengths")
PENALTIES = {"delay_penalty": "finite", "fastemit_lambda": "from 0", "clamp": "positive"}
OF_LOGITS = {"blank": "integer", "rnnt_type": "choice", "reduction": "choice", **PENALTIES}


def batch() -> Arguments:
    """targets and lengths."""
    return {
        "targets": torch.tensor([[1, 2], [3, 4], [4, 1]]),
        "logit_lengths": torch.tensor(FRAMES),
        "target_lengths": torch.tensor(SYMBOLS),
    }


def start() -> Tensor:
    return torch.tensor([[0, 0, 1, 1], [0] * T, [0] * T], dtype=torch.int32)


def random(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def with_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """function, whose argument bounds is given as start and s_range."""

    def call(*, start: Any, s_range: Any, **given: Any) -> Any:
        return function(**given, bounds=Bounds(start, s_range))

    return call


def of_lattice(**options: Any) -> Callable[[], Arguments]:
    (logits,) = random((N, T, U + 1, V))
    return lambda: {"logits": logits.clone(), **batch(), "reduction": "none", **options}


def rows_of(columns_N: list[int], width: int, seed: int = 0) -> Tensor:
    rows = sum(frames * columns for frames, columns in zip(FRAMES, columns_N, strict=True))
    return random((rows, width), seed=seed)[0]


def of_packed(width: int = V, **options: Any) -> Callable[[], Arguments]:
    logits = rows_of([u + 1 for u in SYMBOLS], width)
    return lambda: {"logits": logits.clone(), **batch(), "reduction": "none", **options}


def in_band(packed: bool) -> Callable[[], Arguments]:
    logits = rows_of([S] * N, V) if packed else random((N, T, S, V))[0]
    options = {"s_range": S, "reduction": "none"}
    return lambda: {"logits": logits.clone(), **batch(), "start": start(), **options}


def option(**given: Any) -> Option:
    return Option(", ".join(f"{name}={value}" for name, value in given.items()), given)


_SHARED = (
    option(fastemit_lambda=0.3),
    option(clamp=0.1),
    option(delay_penalty=0.2),
)
_OF_RNNT = (
    option(rnnt_type="modified"),
    option(rnnt_type="constrained"),
    option(rnnt_type="rna"),
    option(hat=True),
    option(from_log_probs=True),
    *_SHARED,
)
_IN_PLACE = (option(in_place=True), option(validate=True))
_NAMES_OF_BOUNDS = {"start": ("bounds",), "s_range": ("bounds",)}


def _rnnt(name: str, function: Any, make: Any, band: bool = False) -> Subject:
    return Subject(
        name,
        make,
        with_bounds(function) if band else function,
        references.rnnt,
        floats=("logits",),
        integers=("targets", *LENGTHS, *(["start"] if band else [])),
        scalars={**OF_LOGITS, **({"s_range": "integer"} if band else {})},
        # The bands of these types move by one column a frame.
        options=(*_OF_RNNT, *_IN_PLACE),
        words=_NAMES_OF_BOUNDS,
    )


def _tdt(name: str, kind: str) -> Subject:
    columns = {"padded": U + 1, "band": S}.get(kind, 0)
    if kind == "packed":
        each = [rows_of([u + 1 for u in SYMBOLS], width, seed=width) for width in (V, K)]
    else:
        each = random((N, T, columns, V), (N, T, columns, K))
    of_band = {"start": start(), "s_range": S} if kind == "band" else {}
    options = {"durations": DURATIONS, "sigma": 0.05, "reduction": "none"}

    def make() -> Arguments:
        logits, waits = (x.clone() for x in each)
        band = {k: x.clone() if isinstance(x, Tensor) else x for k, x in of_band.items()}
        return {"logits": logits, "duration_logits": waits, **batch(), **band, **options}

    function = pruned_rnnt.rnnt_loss_tdt
    return Subject(
        name,
        make,
        with_bounds(function) if of_band else function,
        references.tdt,
        floats=("logits", "duration_logits"),
        integers=("targets", *LENGTHS, *(["start"] if of_band else [])),
        scalars={
            "durations": "durations",
            "sigma": "finite",
            "omega": "probability",
            "blank": "integer",
            "reduction": "choice",
            **PENALTIES,
        },
        options=(*_SHARED, option(durations=(1, 0, 2)), option(sigma=0.0), *_IN_PLACE),
        words=_NAMES_OF_BOUNDS,
    )


def _multi_blank(name: str, packed: bool) -> Subject:
    options = {"big_blanks": {7: 2, 6: 3}, "sigma": 0.05, "reduction": "none"}
    if packed:
        make = of_packed(V + 2, **options)
    else:
        (logits,) = random((N, T, U + 1, V + 2))

        def make() -> Arguments:
            return {"logits": logits.clone(), **batch(), **options}

    return Subject(
        name,
        make,
        pruned_rnnt.rnnt_loss_multi_blank,
        references.multi_blank,
        floats=("logits",),
        integers=("targets", *LENGTHS),
        scalars={
            "big_blanks": "mapping",
            "sigma": "finite",
            "blank": "integer",
            "reduction": "choice",
            **PENALTIES,
        },
        options=(*_SHARED, option(big_blanks={}), option(sigma=0.0), *_IN_PLACE),
    )


SUBJECTS = [
    _rnnt("rnnt_loss", pruned_rnnt.rnnt_loss, of_lattice()),
    _rnnt("rnnt_loss (packed)", pruned_rnnt.rnnt_loss, of_packed()),
    _rnnt("rnnt_loss_pruned", pruned_rnnt.rnnt_loss_pruned, in_band(False), band=True),
    _rnnt("rnnt_loss_pruned (packed)", pruned_rnnt.rnnt_loss_pruned, in_band(True), band=True),
    _tdt("rnnt_loss_tdt", "padded"),
    _tdt("rnnt_loss_tdt (packed)", "packed"),
    _tdt("rnnt_loss_tdt (band)", "band"),
    _multi_blank("rnnt_loss_multi_blank", packed=False),
    _multi_blank("rnnt_loss_multi_blank (packed)", packed=True),
]
