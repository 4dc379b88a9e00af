"""Losses of am and lm, CTC, the recursion, bands, and packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pruned_rnnt
from pruned_rnnt import Occupancy, TdtOccupancy
from tests.cells import band_references, references
from tests.cells.logit_subjects import (
    DURATIONS,
    FRAMES,
    LENGTHS,
    OF_LOGITS,
    PENALTIES,
    SYMBOLS,
    D,
    K,
    N,
    S,
    T,
    U,
    V,
    batch,
    option,
    random,
    start,
    with_bounds,
)
from tests.cells.subject import Arguments, Subject

_TDT_SCALARS = {"durations": "durations", "sigma": "finite", "omega": "probability"}
_SCALES = {"lm_only_scale": "scale", "am_only_scale": "scale"}


def _made(names: str, *shapes: tuple[int, ...], **others: Any) -> Callable[[], Arguments]:
    """Random floating arguments by name, and other arguments (functions are called)."""
    tensors = random(*shapes)

    def make() -> Arguments:
        given = {name: x.clone() for name, x in zip(names.split(), tensors, strict=True)}
        return given | {key: x() if callable(x) else x for key, x in others.items()}

    return make


def _in_batch(names: str, *shapes: tuple[int, ...], **others: Any) -> Callable[[], Arguments]:
    make = _made(names, *shapes, **others)
    return lambda: {**make(), **batch()}


def _probabilities(names: str, *shapes: tuple[int, ...], **others: Any) -> Callable[[], Arguments]:
    make = _made(names, *shapes, **others)

    def positive() -> Arguments:
        given = make()
        for name in names.split():
            given[name] = given[name].sigmoid()
        return {**given, **{name: batch()[name] for name in LENGTHS}}

    return positive


_simple_scalars = {k: kind for k, kind in OF_LOGITS.items() if k != "clamp"} | _SCALES
_LAYERS = "am lm weight bias"
_SHAPES = [(N, T, D), (N, U + 1, D), (V, D), (V,)]
_TDT_LAYERS = f"{_LAYERS} duration_weight duration_bias"
_TDT_SHAPES = [*_SHAPES, (K, D), (K,)]
_OF_FUSED = (
    option(activation="relu"),
    option(activation="none"),
    option(rnnt_type="modified"),
    option(rnnt_type="rna"),
    option(hat=True),
    option(fastemit_lambda=0.3),
    option(clamp=0.1),
    option(bias=None),
)


def _simple(name: str, **scales: float) -> Subject:
    return Subject(
        name,
        _in_batch("am lm", (N, T, V), (N, U + 1, V), reduction="none", **scales),
        pruned_rnnt.rnnt_loss_simple,
        band_references.simple,
        floats=("am", "lm"),
        integers=("targets", *LENGTHS),
        scalars=_simple_scalars,
        options=(
            option(rnnt_type="modified"),
            option(rnnt_type="constrained"),
            option(rnnt_type="rna"),
            option(fastemit_lambda=0.3),
            option(delay_penalty=0.2),
            option(validate=True),
        ),
        has_products=True,
    )


def _fused(name: str, band: bool, tdt: bool) -> Subject:
    of_band = {"start": start, "s_range": S} if band else {"bounds": None}
    others = {"durations": DURATIONS, "sigma": 0.05} if tdt else {}
    function = pruned_rnnt.rnnt_loss_tdt_fused if tdt else pruned_rnnt.rnnt_loss_fused
    names, shapes = (_TDT_LAYERS, _TDT_SHAPES) if tdt else (_LAYERS, _SHAPES)
    scalars = {"activation": "choice", "blank": "integer", "reduction": "choice", **PENALTIES}
    scalars |= _TDT_SCALARS if tdt else {"rnnt_type": "choice"}
    options = [x for x in _OF_FUSED if not (tdt and ({"rnnt_type", "hat"} & set(x.given)))]
    return Subject(
        name,
        _in_batch(names, *shapes, **of_band, **others, reduction="none"),
        with_bounds(function) if band else function,
        references.tdt_fused if tdt else references.fused,
        floats=tuple(names.split()),
        integers=("targets", *LENGTHS, *(["start"] if band else [])),
        scalars={**scalars, **({"s_range": "integer"} if band else {})},
        options=tuple(options),
        has_products=True,
        words={"start": ("bounds",), "s_range": ("bounds",)},
    )


def _prune_bounds(*, emit: Any, blank: Any, **given: Any) -> Any:
    return pruned_rnnt.prune_bounds(Occupancy(emit, blank), **given)


def _prune_bounds_tdt(*, emit: Any, blank: Any, stay: Any, arcs: Any, **given: Any) -> Any:
    return pruned_rnnt.prune_bounds(TdtOccupancy(emit, blank, stay, arcs), **given)


def _information_arguments() -> Arguments:
    px, py = random((N, U, T + 1), (N, U + 1, T))
    boundary = torch.tensor([[0, 0, u, t] for t, u in zip(FRAMES, SYMBOLS, strict=True)])
    return {"px": px, "py": py, "boundary": boundary}


_arcs = (N, T, U + 1)
_OCCUPANCY_WORDS = {
    name: ("occupancy", f"occupancy.{name}") for name in ("emit", "blank", "stay", "durations")
}
_OCCUPANCY_WORDS["arcs"] = ("occupancy", "occupancy.durations")

SUBJECTS = [
    _simple("rnnt_loss_simple"),
    _simple("rnnt_loss_simple (smoothed)", lm_only_scale=0.25, am_only_scale=0.1),
    _fused("rnnt_loss_fused", band=False, tdt=False),
    _fused("rnnt_loss_fused (band)", band=True, tdt=False),
    _fused("rnnt_loss_tdt_fused", band=False, tdt=True),
    _fused("rnnt_loss_tdt_fused (band)", band=True, tdt=True),
    Subject(
        "ctc_loss",
        _in_batch("logits", (N, T, V), reduction="none"),
        pruned_rnnt.ctc_loss,
        references.ctc,
        floats=("logits",),
        integers=("targets", *LENGTHS),
        scalars={"blank": "integer", "reduction": "choice"},
        options=(option(validate=True),),
    ),
    Subject(
        "ctc_consistency_loss",
        lambda: {
            **_made("logits other_logits", (N, T, V), (N, T, V), reduction="none")(),
            "logit_lengths": torch.tensor(FRAMES),
        },
        pruned_rnnt.ctc_consistency_loss,
        references.ctc_consistency,
        floats=("logits", "other_logits"),
        integers=("logit_lengths",),
        scalars={"reduction": "choice"},
    ),
    Subject(
        "mutual_information",
        _information_arguments,
        pruned_rnnt.mutual_information,
        band_references.information,
        floats=("px", "py"),
        integers=("boundary",),
        gives_scores=True,
        scalars={"rnnt_type": "choice"},
        options=(option(boundary=None), option(validate=True)),
        reduces=False,
    ),
    Subject(
        "prune_bounds",
        _probabilities("emit blank", _arcs, _arcs, s_range=S),
        _prune_bounds,
        band_references.prune_bounds,
        floats=("emit", "blank"),
        integers=LENGTHS,
        scalars={"s_range": "integer", "rnnt_type": "choice"},
        options=(option(rnnt_type="modified"), option(s_range=3), option(validate=True)),
        words=_OCCUPANCY_WORDS,
        reduces=False,
        is_differentiable=False,
    ),
    Subject(
        "prune_bounds (TDT)",
        _probabilities(
            "emit blank stay arcs", *[_arcs] * 3, (*_arcs, K), s_range=S, durations=DURATIONS
        ),
        _prune_bounds_tdt,
        band_references.prune_bounds_tdt,
        floats=("emit", "blank", "stay", "arcs"),
        integers=LENGTHS,
        scalars={"s_range": "integer", "durations": "durations"},
        options=(option(s_range=3), option(validate=True)),
        words=_OCCUPANCY_WORDS,
        reduces=False,
        is_differentiable=False,
    ),
    Subject(
        "prune",
        _made("am lm", (N, T, D), (N, U + 1, D), start=start, s_range=S),
        with_bounds(pruned_rnnt.prune),
        band_references.prune,
        floats=("am", "lm"),
        integers=("start",),
        scalars={"s_range": "integer"},
        words={"start": ("bounds",), "s_range": ("bounds",)},
        reduces=False,
    ),
]
