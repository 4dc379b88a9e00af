"""torch.compile and torch.export of the losses for batches of any size: one graph serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pruned_rnnt
from pruned_rnnt import Joiner, PrunedTransducerLoss

pytestmark = pytest.mark.slow

D, V = 8, 6
SIZES = [(2 + n % 3, 5 + n, 3 + n % 4) for n in range(8)]


class Case(NamedTuple):
    """A loss of the inputs, targets and lengths, and the shapes of its inputs by sizes N, T, U."""

    loss: Callable[..., Tensor]
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]


def cases() -> dict[str, Case]:
    joiner = Joiner(D, D, D, V)
    module = PrunedTransducerLoss(joiner, D, D, V, s_range=2)
    layer = joiner.output_linear

    def fused(am: Tensor, lm: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        return pruned_rnnt.rnnt_loss_fused(
            am, lm, layer.weight, layer.bias, targets, None, *lengths
        )

    def tdt(logits: Tensor, durations: Tensor, *rest: Tensor) -> Tensor:
        return pruned_rnnt.rnnt_loss_tdt(logits, durations, *rest, durations=(0, 1, 2))

    return {
        "full": Case(pruned_rnnt.rnnt_loss, lambda n, t, u: [(n, t, u + 1, V)]),
        "tdt": Case(tdt, lambda n, t, u: [(n, t, u + 1, V), (n, t, u + 1, 3)]),
        "simple": Case(
            lambda *inputs: pruned_rnnt.rnnt_loss_simple(*inputs).loss,
            lambda n, t, u: [(n, t, V), (n, u + 1, V)],
        ),
        "fused": Case(fused, lambda n, t, u: [(n, t, D), (n, u + 1, D)]),
        "module": Case(
            lambda *inputs: module(*inputs, step=0).loss,
            lambda n, t, u: [(n, t, D), (n, u + 1, D)],
        ),
    }


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch_of(case: Case, utterances: int, frames: int, symbols: int) -> list[Tensor]:
    shapes = case.shapes(utterances, frames, symbols)
    return [
        *(torch.randn(shape, requires_grad=True) for shape in shapes),
        torch.randint(1, V, (utterances, symbols)),
        torch.full((utterances,), frames),
        torch.full((utterances,), symbols),
    ]


@pytest.mark.parametrize("name", list(cases()))
def test_sizes_stay_dynamic(name: str) -> None:
    case = cases()[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.loss, dynamic=True, fullgraph=True, backend=counter)
    for sizes in SIZES:
        batch = batch_of(case, *sizes)
        inputs = [x for x in batch if x.requires_grad]
        loss, expected = compiled(*batch), case.loss(*batch)
        torch.testing.assert_close(loss, expected)
        for gradient, wanted in zip(
            torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
        ):
            torch.testing.assert_close(gradient, wanted)
    # Sizes that agree by chance may need another graph.
    assert counter.frame_count <= 3


class Full(torch.nn.Module):
    def forward(self, logits: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        return pruned_rnnt.rnnt_loss(logits, targets, *lengths)


def test_exported_for_any_number_of_frames_and_symbols() -> None:
    case = cases()["full"]
    frames = torch.export.Dim("logit_frames", min=2, max=500)
    symbols = torch.export.Dim("target_symbols", min=2, max=50)
    shapes = {
        "logits": {1: frames, 2: symbols + 1},
        "targets": {1: symbols},
        "lengths": ({}, {}),
    }
    example = [x.detach() for x in batch_of(case, 2, 9, 4)]
    program = torch.export.export(Full(), tuple(example), dynamic_shapes=shapes).module()
    for sizes in ((2, 12, 3), (2, 30, 7)):
        batch = [x.detach() for x in batch_of(case, *sizes)]
        torch.testing.assert_close(program(*batch), case.loss(*batch))
