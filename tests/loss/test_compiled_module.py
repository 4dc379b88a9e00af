"""torch.compile of PrunedTransducerLoss itself: every result it returns, and training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt import Joiner, PrunedTransducerLoss, TransducerLosses
from tests.loss.loss_cases import DEVICES, make_batch

pytestmark = pytest.mark.slow

E, P, D, V = 6, 5, 16, 12
NUMBERS = ("loss", "simple_loss", "pruned_loss")


class StoredJoiner(nn.Module):
    """A joiner that is not a Joiner, so that its logits are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.am, self.lm = nn.Linear(E, D), nn.Linear(P, V)
        self.output = nn.Linear(D, V)

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        return self.output(torch.tanh(self.am(am))) + self.lm(lm)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(5)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def example(device: str) -> tuple[Tensor, ...]:
    batch = make_batch([12, 9, 5], [5, 3, 0], V, 0)
    inputs = [torch.randn(3, n, width, device=device) for n, width in ((12, E), (6, P))]
    return *inputs, batch.targets.to(device), *batch.lengths(device)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("joiner", ["fused", "stored"])
def test_compiled_results_equal_eager_results(joiner, reduction, device) -> None:
    made = Joiner(E, P, D, V) if joiner == "fused" else StoredJoiner()
    module = PrunedTransducerLoss(made, E, P, V, s_range=3, reduction=reduction).to(device)
    arguments = example(device)
    expected, got = module(*arguments, 700), compiled(module)(*arguments, 700)
    assert isinstance(got, TransducerLosses)
    for name in NUMBERS:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    torch.testing.assert_close(got.occupancy, expected.occupancy)
    assert not any(x.requires_grad for x in (*got.occupancy, got.bounds.start))
    assert torch.equal(got.bounds.start, expected.bounds.start)
    assert got.bounds.s_range == 3
    assert (got.simple_scale, got.pruned_scale) == module.scales(700)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NUMBERS)
def test_compiled_gradients_equal_eager_gradients(name, device) -> None:
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V, s_range=3).to(device)
    arguments = example(device)
    inputs = [x.requires_grad_() for x in (*arguments[:2], *module.parameters())]
    grads = [
        torch.autograd.grad(getattr(m(*arguments, 0), name), inputs, allow_unused=True)
        for m in (module, compiled(module))
    ]
    for want, grad in zip(*grads, strict=True):
        want, grad = (torch.zeros(()) if x is None or not x.any() else x for x in (want, grad))
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6, check_device=False)


@pytest.mark.parametrize("device", DEVICES)
def test_trains(device) -> None:
    module = PrunedTransducerLoss(Joiner(E, P, D, V), E, P, V, s_range=4, warm_up_steps=0)
    module = module.to(device)
    encoder, predictor, *rest = example(device)
    inputs = [encoder.requires_grad_(), predictor.requires_grad_()]
    optimiser = torch.optim.Adam([*module.parameters(), *inputs], lr=0.1)
    step_of = compiled(module)
    losses = []
    for _ in range(40):
        result = step_of(*inputs, *rest, 0)
        losses.append(result.loss.item())
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
    assert losses[-1] < 0.3 * losses[0]
