"""ScaledAdam changes parameters in proportion to their size, up to a limit of the size."""

import torch
from torch import nn

from pruned_rnnt.train.optim.scaled_adam import ScaledAdam


def test_steps_are_proportional_to_the_parameter() -> None:
    changes = []
    for size in (1.0, 100.0):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10) * size)
        before = parameter.detach().clone()
        optimiser = ScaledAdam([parameter], lr=0.01, max_rms=1e9)
        parameter.grad = torch.randn(10, generator=torch.Generator().manual_seed(0))
        optimiser.step()
        changes.append((parameter.detach() - before) / size)
    torch.testing.assert_close(changes[0], changes[1])
    assert changes[0].abs().max() > 1e-4


def test_no_size_grows_beyond_its_limit() -> None:
    def size_after(max_rms: float) -> float:
        parameter = nn.Parameter(torch.ones(10))
        optimiser = ScaledAdam([parameter], lr=1e-3, size_lr=10.0, max_rms=max_rms)
        for _ in range(100):
            parameter.grad = -parameter.detach().clone()
            optimiser.step()
        return float(parameter.detach().square().mean().sqrt())

    assert size_after(1e9) > 2.5
    assert 1.4 < size_after(1.5) < 1.7
