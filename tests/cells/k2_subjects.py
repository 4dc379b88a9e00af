"""k2's functions that return the log-probabilities of arcs, px and py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.compat import k2
from tests.cells.band_references import smoothed
from tests.cells.compat_subjects import BOUNDARY, K2_NAMES, RANGES, renamed
from tests.cells.logit_subjects import N, S, T, U, V, batch, option, random
from tests.cells.references import texts
from tests.cells.subject import Arguments, Option, Results, Subject


def _arcs(scores_NTSV: Tensor, given: Arguments) -> tuple[Tensor, Tensor]:
    """px (N, S, T), py (N, S + 1, T) of log-probabilities; only columns have arcs."""
    symbols = given["symbols"].long()
    is_column = (symbols >= 0) & (symbols < V)
    index = symbols.where(is_column, 0)
    px = torch.stack([scores_NTSV[n, :, range(U), index[n]] for n in range(N)])
    return (
        px.masked_fill(~is_column[:, None], -torch.inf).mT,
        scores_NTSV[..., given["termination_symbol"]].mT,
    )


def _of_type(px: Tensor, py: Tensor, given: Arguments) -> Results:
    rnnt_type, boundary = given.get("rnnt_type", "regular"), given["boundary"]
    if rnnt_type == "constrained":
        px = px + py[:, 1:]
    if rnnt_type == "regular":
        px = torch.cat([px, torch.full_like(px[:, :, :1], -torch.inf)], 2)
        for n, frames in enumerate([] if boundary is None else boundary[:, 3].tolist()):
            px = _cut(px, n, frames)
    return {"0": px, "1": py}


def _cut(px: Tensor, n: int, frames: int) -> Tensor:
    """Without symbols after the last frame of an utterance."""
    is_cut = torch.zeros_like(px, dtype=torch.bool)
    is_cut[n, :, frames] = True
    return px.masked_fill(is_cut, -torch.inf)


def _of_scores(given: Arguments) -> Results:
    ours = {**renamed(given, K2_NAMES), "averages_padding": True}
    scores = smoothed(given["am"], given["lm"], texts(ours, T, U), ours)
    return _of_type(*_arcs(scores, given), given)


def _of_logits(given: Arguments) -> Results:
    return _of_type(*_arcs(given["logits"].log_softmax(-1), given), given)


def _of_band(given: Arguments) -> Results:
    scores, ranges = given["logits"].log_softmax(-1), given["ranges"].long()
    rows = []
    for n in range(N):
        columns = []
        for s in range(U + 1):
            inside = ranges[n] == s
            values = torch.where(inside[..., None], scores[n], 0.0).sum(1)
            columns.append(values.masked_fill(~inside.any(1)[:, None], -torch.inf))
        rows.append(torch.stack(columns, 1))
    return _of_type(*_arcs(torch.stack(rows), given), given)


def _subject(
    name: str,
    floats: dict[str, tuple[int, ...]],
    reference: Callable[[Arguments], Results],
    scalars: dict[str, str] | None = None,
    options: tuple[Option, ...] = (),
) -> Subject:
    tensors = random(*floats.values())
    has_ranges = name.endswith("pruned")

    def make() -> Arguments:
        given: dict[str, Any] = {k: x.clone() for k, x in zip(floats, tensors, strict=True)}
        given |= {"symbols": batch()["targets"], "termination_symbol": 0}
        return {**given, "boundary": BOUNDARY.clone(), **({"ranges": RANGES} if has_ranges else {})}

    return Subject(
        f"compat.k2.{name}",
        make,
        getattr(k2, name),
        reference,
        floats=tuple(floats),
        integers=("symbols", "boundary", *(["ranges"] if has_ranges else [])),
        scalars={"termination_symbol": "integer", "rnnt_type": "choice", **(scalars or {})},
        options=(option(rnnt_type="modified"), option(rnnt_type="constrained"), *options),
        has_products="lm" in floats,
        meanings=K2_NAMES,
        reduces=False,
    )


_AM_LM = {"lm": (N, U + 1, V), "am": (N, T, V)}
SUBJECTS = [
    _subject("get_rnnt_logprobs", _AM_LM, _of_scores),
    _subject(
        "get_rnnt_logprobs_smoothed",
        _AM_LM,
        lambda given: _of_scores({"lm_only_scale": 0.1, "am_only_scale": 0.1, **given}),
        {"lm_only_scale": "scale", "am_only_scale": "scale"},
        (option(lm_only_scale=0.0), option(am_only_scale=0.25)),
    ),
    _subject("get_rnnt_logprobs_joint", {"logits": (N, T, U + 1, V)}, _of_logits),
    _subject("get_rnnt_logprobs_pruned", {"logits": (N, T, S, V)}, _of_band),
]
