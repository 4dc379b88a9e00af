"""Deterministic problems for the losses: ragged lengths, empty targets, large values.

Axes: N batch, T frames, U symbols, S band, E encoder width, D joiner width, V vocabulary,
K durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.loss.bounds import prune, prune_bounds
from pruned_rnnt.loss.ctc import ctc_loss
from pruned_rnnt.loss.fused import rnnt_loss_fused, rnnt_loss_tdt_fused
from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.logit_losses import (
    rnnt_loss,
    rnnt_loss_multi_blank,
    rnnt_loss_pruned,
    rnnt_loss_tdt,
)
from pruned_rnnt.loss.mutual_information import mutual_information
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import Bounds, Occupancy
from pruned_rnnt.loss.simple import rnnt_loss_simple
from pruned_rnnt.selfcheck.problem import Outputs

_N, _T, _U, _S, _E, _D, _V = 4, 29, 11, 5, 24, 16, 61
_DURATIONS = (0, 1, 2, 3, 4)
_LARGE = 200.0
_LENGTHS = (_T, 15, 22, 11)
_TARGET_LENGTHS = (_U, 7, 0, 3)


@dataclass(frozen=True, kw_only=True)
class LossProblem:
    """A loss of leaves.

    leaves: shapes of the inputs that get gradients. scale: their standard deviation.
    run: losses and other results by name, from the leaves in order.
    dtypes: that the loss takes. autocast: 16 bits are those of autocast, for float32 leaves.
    """

    name: str
    leaves: tuple[tuple[int, ...], ...]
    run: Callable[..., Outputs]
    scale: float = 2.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    autocast: bool = False


def _batch(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, logit lengths and target lengths."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(1, _V, (_N, _U), generator=generator)
    lengths = (torch.tensor(_LENGTHS), torch.tensor(_TARGET_LENGTHS))
    return targets.to(device), lengths[0].to(device), lengths[1].to(device)


def _bounds(device: torch.device) -> Bounds:
    """A band around the diagonals of the lattices, which it covers from corner to corner."""
    rows = []
    for frames, symbols in zip(_LENGTHS, _TARGET_LENGTHS, strict=True):
        last = max(symbols + 1 - _S, 0)
        rows.append([min(last * t // max(frames - 1, 1), last) for t in range(_T)])
    return Bounds(torch.tensor(rows, dtype=torch.int32, device=device), _S)


def _full(logits: Tensor, **options: object) -> Outputs:
    return {"loss": rnnt_loss(logits, *_batch(logits.device), reduction="none", **options)}  # type: ignore[arg-type]


def _pruned(logits: Tensor) -> Outputs:
    targets, *lengths = _batch(logits.device)
    bounds = _bounds(logits.device)
    return {"loss": rnnt_loss_pruned(logits, targets, bounds, *lengths, reduction="none")}


def _simple(am: Tensor, lm: Tensor) -> Outputs:
    batch = _batch(am.device)
    loss, occupancy = rnnt_loss_simple(am, lm, *batch, lm_only_scale=0.25, reduction="none")
    return {"loss": loss, "emit occupancy": occupancy.emit, "blank occupancy": occupancy.blank}


def _bounds_of(counts: Tensor, *, exact: bool) -> Outputs:
    # Small integers over a power of 2, so that sums are exact in every dtype.
    occupancy = ((counts.detach() * 64).round().clamp(-64, 64).abs() / 64).unbind()
    lengths = _batch(counts.device)[1:]
    emit_and_blank = Occupancy(*(x.contiguous() for x in occupancy))
    bounds = prune_bounds(emit_and_blank, *lengths, _S, exact=exact)
    return {"start": bounds.start}


def _fused(am: Tensor, lm: Tensor, weight: Tensor, bias: Tensor, *, banded: bool) -> Outputs:
    targets, *lengths = _batch(am.device)
    bounds = _bounds(am.device) if banded else None
    loss = rnnt_loss_fused(am, lm, weight, bias, targets, bounds, *lengths, reduction="none")
    return {"loss": loss}


def _tdt(logits: Tensor, durations: Tensor, *, banded: bool = False) -> Outputs:
    loss = rnnt_loss_tdt(
        logits,
        durations,
        *_batch(logits.device),
        durations=_DURATIONS,
        bounds=_bounds(logits.device) if banded else None,
        sigma=0.05,
        reduction="none",
    )
    return {"loss": loss}


def _tdt_fused(
    am: Tensor, lm: Tensor, weight: Tensor, bias: Tensor, weight_K: Tensor, bias_K: Tensor
) -> Outputs:
    targets, *lengths = _batch(am.device)
    loss = rnnt_loss_tdt_fused(
        am,
        lm,
        weight,
        bias,
        weight_K,
        bias_K,
        targets,
        _bounds(am.device),
        *lengths,
        durations=_DURATIONS,
        reduction="none",
    )
    return {"loss": loss}


def _multi_blank(logits: Tensor) -> Outputs:
    targets, *lengths = _batch(logits.device)
    targets = targets.clamp(max=_V - 3)
    big_blanks = {_V - 2: 2, _V - 1: 3}
    loss = rnnt_loss_multi_blank(logits, targets, *lengths, big_blanks=big_blanks, reduction="none")
    return {"loss": loss}


def _ctc(logits: Tensor) -> Outputs:
    return {"loss": ctc_loss(logits, *_batch(logits.device), reduction="none")}


def _gathered(am: Tensor, lm: Tensor) -> Outputs:
    """Encoder and predictor outputs inside the band."""
    inside = prune(am, lm, _bounds(am.device))
    return {"lm": inside.lm, "loss": (inside.am * inside.lm).sum((1, 2, 3))}


def _mutual_information(px: Tensor, py: Tensor) -> Outputs:
    result = mutual_information(px, py)
    return {"loss": result.total}


def _training_loss(encoder: Tensor, predictor: Tensor, *, durations: bool) -> Outputs:
    """The module of training, with fixed weights; results include the gradients of the weights."""
    count = len(_DURATIONS) if durations else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        joiner = Joiner(_E, _E, _D, _V, duration_count=count)
        loss = PrunedTransducerLoss(
            joiner, _E, _E, _V, s_range=_S, durations=_DURATIONS if durations else None
        )
    module = loss.to(encoder.device, encoder.dtype)
    losses = module(encoder, predictor, *_batch(encoder.device), 1000)
    parameters = [x for _, x in sorted(module.named_parameters())]
    found = torch.autograd.grad(losses.loss, parameters, retain_graph=True)
    return {
        "loss": losses.loss,
        "simple": losses.simple_loss.detach(),
        "gradients of the weights": torch.cat([x.flatten() for x in found]),
    }


def loss_problems() -> list[LossProblem]:
    """All problems of the losses."""
    full, band = (_N, _T, _U + 1, _V), (_N, _T, _S, _V)
    packed = sum(t * (u + 1) for t, u in zip(_LENGTHS, _TARGET_LENGTHS, strict=True))
    am_lm, projected = ((_N, _T, _V), (_N, _U + 1, _V)), ((_N, _T, _D), (_N, _U + 1, _D))
    output = ((_V, _D), (_V,))
    count = len(_DURATIONS)
    only_float32 = (torch.float32,)
    encoded = ((_N, _T, _E), (_N, _U + 1, _E))
    problems = [
        LossProblem(name="full", leaves=(full,), run=_full),
        LossProblem(name="full, large values", leaves=(full,), run=_full, scale=_LARGE),
        LossProblem(name="full, packed", leaves=((packed, _V),), run=_full),
        LossProblem(name="full, HAT", leaves=(full,), run=lambda x: _full(x, hat=True)),
        LossProblem(
            name="full, modified", leaves=(full,), run=lambda x: _full(x, rnnt_type="modified")
        ),
        LossProblem(name="pruned", leaves=(band,), run=_pruned),
        LossProblem(name="pruned, packed", leaves=((sum(_LENGTHS) * _S, _V),), run=_pruned),
        LossProblem(name="simple", leaves=am_lm, run=_simple),
        LossProblem(
            name="fused, whole lattice",
            leaves=(*projected, *output),
            run=lambda *x: _fused(*x, banded=False),
            scale=1.0,
        ),
        LossProblem(
            name="fused, pruned",
            leaves=(*projected, *output),
            run=lambda *x: _fused(*x, banded=True),
            scale=1.0,
        ),
        LossProblem(name="TDT", leaves=(full, (*full[:3], count)), run=_tdt),
        LossProblem(
            name="TDT, pruned",
            leaves=(band, (*band[:3], count)),
            run=lambda *x: _tdt(*x, banded=True),
        ),
        LossProblem(
            name="TDT, fused",
            leaves=(*projected, *output, (count, _D), (count,)),
            run=_tdt_fused,
            scale=1.0,
        ),
        LossProblem(name="multi-blank", leaves=(full,), run=_multi_blank),
        LossProblem(name="band", leaves=projected, run=_gathered, dtypes=only_float32),
        LossProblem(
            name="mutual information",
            leaves=((_N, _U, _T + 1), (_N, _U + 1, _T)),
            run=_mutual_information,
            dtypes=only_float32,
        ),
        LossProblem(name="CTC", leaves=((_N, _T, _V),), run=_ctc),
    ]
    for exact in (False, True):
        problems.append(
            LossProblem(
                name=f"bounds{', exact' * exact}",
                leaves=((2, _N, _T, _U + 1),),
                run=lambda x, exact=exact: _bounds_of(x, exact=exact),
                scale=0.5,
                dtypes=only_float32,
            )
        )
    for durations in (False, True):
        problems.append(
            LossProblem(
                name=f"training loss{', TDT' * durations}",
                leaves=encoded,
                run=lambda *x, durations=durations: _training_loss(*x, durations=durations),
                scale=1.0,
                autocast=True,
            )
        )
    return problems
