"""Losses inside torch's selective activation checkpointing, with any policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import pruned_rnnt
from pruned_rnnt import Joiner, PrunedTransducerLoss

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def _own_saved(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return SAVE if "pruned_rnnt" in str(op) else AGAIN


def _allocated_again(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return AGAIN if "empty" in str(op) or "relu" in str(op) else SAVE


def _all_saved(*_: Any, **__: Any) -> CheckpointPolicy:
    return SAVE


def _module_loss(encoder_out: Tensor, predictor_out: Tensor) -> Tensor:
    torch.manual_seed(1)
    module = PrunedTransducerLoss(Joiner(6, 6, 8, 7), 6, 6, 7, s_range=3)
    targets = torch.randint(1, 7, (3, 4))
    lengths = torch.tensor([11, 9, 10]), torch.tensor([4, 2, 3])
    loss: Tensor = module(encoder_out * 1, predictor_out * 1, targets, *lengths, step=3).loss
    return loss


def _full_loss(encoder_out: Tensor, predictor_out: Tensor) -> Tensor:
    logits = (encoder_out[:, :, None] + predictor_out[:, None]).tanh() * 3
    targets = torch.randint(1, 6, (3, 4), generator=torch.Generator().manual_seed(0))
    return pruned_rnnt.rnnt_loss(logits, targets)


@pytest.mark.parametrize("mutates", [False, True])
@pytest.mark.parametrize("policy", [_own_saved, _allocated_again, _all_saved])
@pytest.mark.parametrize("loss", [_module_loss, _full_loss])
def test_gradients_are_those_without_checkpoints(
    loss: Callable[[Tensor, Tensor], Tensor], policy: Callable[..., CheckpointPolicy], mutates: bool
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 11, 6).requires_grad_(), torch.randn(3, 5, 6).requires_grad_()]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = checkpoint(
        loss,
        *inputs,
        use_reentrant=False,
        context_fn=partial(
            create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=mutates
        ),
    )
    try:
        gradients = torch.autograd.grad(found, inputs)
    except RuntimeError as error:
        # An op that writes to a cached tensor is an error without allow_cache_entry_mutation.
        if "has been mutated" in str(error) and policy is not _own_saved and not mutates:
            return
        raise
    for got, want in zip(gradients, expected, strict=True):
        assert torch.equal(got, want)


def test_all_ops_that_write_to_arguments_are_recomputed() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("pruned_rnnt::")]
    writing = [s.name for s in schemas if any(x.is_out or _is_written(x) for x in s.arguments)]
    assert len(writing) > 30
    recomputed = {op._schema.name for op in SAC_IGNORED_OPS}
    assert set(writing) <= recomputed


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
