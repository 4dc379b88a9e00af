"""Every loss as a function of its differentiable inputs, on one ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.loss.loss_cases import Batch, make_batch


class LossCall(NamedTuple):
    """losses(*inputs) -> (N,), and inputs that require gradients."""

    losses: Callable[..., Tensor]
    inputs: list[Tensor]


NAMES = [
    "full",
    "full_packed",
    "hat",
    "simple",
    "simple_smoothed",
    "pruned",
    "pruned_packed",
    "fused_band",
    "fused_full",
    "mutual_information",
    "ctc",
    "module_fused",
    "module_stored",
    "tdt",
    "tdt_packed",
    "tdt_band",
    "tdt_fused",
    "multi_blank",
    "multi_blank_packed",
]


def _leaf(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()


def make_call(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0
) -> LossCall:
    """One of NAMES. Lengths and targets are on `device`."""
    torch.manual_seed(seed)
    batch = make_batch([8, 6, 3], [4, 0, 2], 11, 0)
    return _CALLS[name](batch, batch.targets.to(device), batch.lengths(device), device, dtype)


def _full(batch: Batch, y: Tensor, lengths: tuple[Tensor, Tensor], device, dtype, **options):
    logits = _leaf(batch.size, 8, 5, 11, device=device, dtype=dtype)
    return LossCall(
        lambda x: pruned_rnnt.rnnt_loss(x, y, *lengths, reduction="none", **options), [logits]
    )


def _hat(*arguments):
    return _full(*arguments, hat=True)


def _full_packed(batch, y, lengths, device, dtype):
    rows = sum(t * (u + 1) for t, u in zip(batch.frames_N, batch.symbols_N, strict=True))
    logits = _leaf(rows, 11, device=device, dtype=dtype)
    return LossCall(lambda x: pruned_rnnt.rnnt_loss(x, y, *lengths, reduction="none"), [logits])


def _simple(batch, y, lengths, device, dtype, **scales):
    inputs = [_leaf(3, n, 11, device=device, dtype=dtype) for n in (8, 5)]
    return LossCall(
        lambda am, lm: (
            pruned_rnnt.rnnt_loss_simple(am, lm, y, *lengths, reduction="none", **scales).loss
        ),
        inputs,
    )


def _simple_smoothed(*arguments):
    return _simple(*arguments, lm_only_scale=0.25, am_only_scale=0.1)


def _bounds(device: str) -> Bounds:
    start = [[0, 0, 1, 1, 2, 2, 2, 2], [0] * 8, [0] * 8]
    return Bounds(torch.tensor(start, dtype=torch.int32, device=device), 3)


def _pruned(batch, y, lengths, device, dtype):
    inputs = [_leaf(3, n, 11, device=device, dtype=dtype) for n in (8, 5)]
    bounds = _bounds(device)

    def losses(am: Tensor, lm: Tensor) -> Tensor:
        am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
        return pruned_rnnt.rnnt_loss_pruned(am_p + lm_p, y, bounds, *lengths, reduction="none")

    return LossCall(losses, inputs)


def _pruned_packed(batch, y, lengths, device, dtype):
    logits = _leaf(sum(batch.frames_N) * 3, 11, device=device, dtype=dtype)
    bounds = _bounds(device)
    return LossCall(
        lambda x: pruned_rnnt.rnnt_loss_pruned(x, y, bounds, *lengths, reduction="none"), [logits]
    )


def _fused(batch, y, lengths, device, dtype, bounds=None):
    shapes = [(3, 8, 6), (3, 5, 6), (11, 6), (11,)]
    inputs = [_leaf(*shape, device=device, dtype=dtype) for shape in shapes]
    return LossCall(
        lambda *x: pruned_rnnt.rnnt_loss_fused(*x, y, bounds, *lengths, reduction="none"), inputs
    )


def _fused_band(batch, y, lengths, device, dtype):
    return _fused(batch, y, lengths, device, dtype, _bounds(device))


def _mutual_information(batch, y, lengths, device, dtype):
    inputs = [
        _leaf(3, 4, 9, device=device, dtype=dtype),
        _leaf(3, 5, 8, device=device, dtype=dtype),
    ]
    zeros = torch.zeros_like(lengths[0])
    boundary = torch.stack([zeros, zeros, lengths[1], lengths[0]], 1)
    return LossCall(lambda px, py: pruned_rnnt.mutual_information(px, py, boundary).total, inputs)


def _ctc(batch, y, lengths, device, dtype):
    logits = _leaf(3, 8, 11, device=device, dtype=dtype)
    return LossCall(lambda x: pruned_rnnt.ctc_loss(x, y, *lengths, reduction="none"), [logits])


def _module(batch, y, lengths, device, dtype, joiner=None):
    joiner = joiner or pruned_rnnt.Joiner(6, 6, 10, 11)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, 6, 6, 11, s_range=3, reduction="none")
    module = module.to(device, dtype)
    inputs = [_leaf(3, n, 6, device=device, dtype=dtype) for n in (8, 5)]
    return LossCall(lambda am, lm: module(am, lm, y, *lengths, 100).loss, inputs)


class _StoredJoiner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(6, 11)

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return self.output(torch.sigmoid(am + lm))


def _module_stored(*arguments):
    return _module(*arguments, joiner=_StoredJoiner())


def _tdt(batch, y, lengths, device, dtype, packed=False, bounds=None):
    nodes = (3, 8, 5 if bounds is None else bounds.s_range)
    if packed:
        lattices = zip(batch.frames_N, batch.symbols_N, strict=True)
        nodes = (sum(t * (u + 1) for t, u in lattices),)
    inputs = [_leaf(*nodes, width, device=device, dtype=dtype) for width in (11, 5)]
    options = {"bounds": bounds, "sigma": 0.05, "reduction": "none"}
    return LossCall(lambda *x: pruned_rnnt.rnnt_loss_tdt(*x, y, *lengths, **options), inputs)


def _tdt_packed(*arguments):
    return _tdt(*arguments, packed=True)


def _tdt_band(*arguments):
    return _tdt(*arguments, bounds=_bounds(arguments[3]))


def _tdt_fused(batch, y, lengths, device, dtype):
    shapes = [(3, 8, 6), (3, 5, 6), (11, 6), (11,), (5, 6), (5,)]
    inputs = [_leaf(*shape, device=device, dtype=dtype) for shape in shapes]
    return LossCall(
        lambda *x: pruned_rnnt.rnnt_loss_tdt_fused(*x, y, None, *lengths, reduction="none"), inputs
    )


def _multi_blank(batch, y, lengths, device, dtype, packed=False):
    lattices = zip(batch.frames_N, batch.symbols_N, strict=True)
    nodes = (sum(t * (u + 1) for t, u in lattices),) if packed else (3, 8, 5)
    # Targets are in 1..10.
    options = {"big_blanks": {12: 2, 11: 4}, "fastemit_lambda": 0.1, "reduction": "none"}
    return LossCall(
        lambda x: pruned_rnnt.rnnt_loss_multi_blank(x, y, *lengths, **options),
        [_leaf(*nodes, 13, device=device, dtype=dtype)],
    )


def _multi_blank_packed(*arguments):
    return _multi_blank(*arguments, packed=True)


_CALLS = dict(
    zip(
        NAMES,
        [
            _full,
            _full_packed,
            _hat,
            _simple,
            _simple_smoothed,
            _pruned,
            _pruned_packed,
            _fused_band,
            _fused,
            _mutual_information,
            _ctc,
            _module,
            _module_stored,
            _tdt,
            _tdt_packed,
            _tdt_band,
            _tdt_fused,
            _multi_blank,
            _multi_blank_packed,
        ],
        strict=True,
    )
)
