"""Functions with a backward pass of their own, against plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model.gated_depthwise import gated_depthwise
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.subsampling_convolutions import FirstConv2d
from pruned_rnnt.model.zipformer.attention import dot_products, sums_of_squashed
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.residual import Bypass, end_of_layer
from pruned_rnnt.model.zipformer.schedule import Clock, Recorder
from pruned_rnnt.model.zipformer.scores import masked_softmax
from pruned_rnnt.model.zipformer.whiten import Whiten

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Sequences and frames: one frame, no multiple of anything, longer than a tile.
SHAPES = ((1, 1), (3, 37), (2, 1031))


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    available.set_mode("auto")
    yield
    available.set_mode("auto")


def compare(
    function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], tolerance: float
) -> None:
    """Values and gradients in float32 with kernels, against those in float64 without."""
    results = []
    for dtype in (torch.float32, torch.float64):
        available.set_mode("auto" if dtype == torch.float32 else "off")
        leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in inputs]
        output = function(leaves)
        torch.manual_seed(7)
        grad = torch.randn(output.shape, dtype=torch.float64).to(DEVICE, dtype)
        results.append([output, *torch.autograd.grad(output, leaves, grad)])
    for fused, plain in zip(*results, strict=True):
        assert (fused - plain).norm() <= tolerance * (plain.norm() + 1e-3)


@pytest.mark.parametrize(("batch", "frames"), SHAPES)
def test_gated_depthwise(batch: int, frames: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv1d(20, 20, 31, padding=15, groups=20).to(DEVICE)
    lengths = torch.tensor([frames, frames // 2, 1])[:batch]
    real = (torch.arange(frames) < lengths[:, None]).unsqueeze(-1).to(DEVICE)

    def run(leaves: Sequence[Tensor]) -> Tensor:
        x, weight, bias = leaves
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        return gated_depthwise(convolution, x, real)

    inputs = [torch.randn(batch, frames, 40), torch.randn(20, 1, 31), torch.randn(20)]
    compare(run, inputs, 5e-6)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("batch", "frames"), [*SHAPES[:2], (2, 523)])
def test_sums_of_squashed_values(batch: int, frames: int, on_device: bool, uniform: bool) -> None:
    torch.manual_seed(0)
    weights = (torch.randn(batch, 4, frames, frames) - 0.5).clamp(min=0.0)
    weights[..., 0] = 1.0
    switch = torch.full((1,), float(uniform), device=DEVICE)

    def run(leaves: Sequence[Tensor]) -> Tensor:
        squashed, value, _ = leaves[1].chunk(3, dim=-1)
        fused = leaves[0].dtype == torch.float32
        chosen = switch if on_device and fused else uniform
        # Uniform weights have no gradient, as a zero or as none.
        zero = 0.0 * leaves[0].sum()
        return sums_of_squashed(leaves[0][:, 0], value, squashed, chosen) + zero

    compare(run, [weights, 5 * torch.randn(batch, frames, 3 * 36)], 2e-6)


def test_squashed_values_of_any_size_are_exact_to_float32() -> None:
    """Each by itself: a norm over all would hide an error of the small ones."""
    from pruned_rnnt.model.kernels.attention import squash

    size = torch.logspace(-12, 2, 4001, dtype=torch.float64)
    squashed = torch.cat((size, -size, torch.tensor([0.25, 0.0]))).float()
    found = squash(torch.ones(1, len(squashed), device=DEVICE), squashed[None].to(DEVICE))
    expected = squashed.double().tanh()
    assert ((found[0].cpu() - expected).abs() <= 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("batch", "frames"), [*SHAPES[:2], (2, 523)])
def test_gradients_of_the_readers_of_weights_are_added(batch: int, frames: int, heads: int) -> None:
    torch.manual_seed(0)
    factors = torch.randn(3, batch, heads, frames, frames + 2, dtype=torch.float64)

    def run(leaves: Sequence[Tensor]) -> Tensor:
        blocked = torch.zeros(1, 1, 1, frames + 2, dtype=torch.bool, device=DEVICE)
        first, *both = masked_softmax(leaves[0], None, blocked)
        of_first, *of_both = factors.to(DEVICE, first.dtype)
        summed = [x * factor for x, factor in zip(both, of_both, strict=True)]
        return torch.stack([*summed, (first * of_first[:, 0]).unsqueeze(1).expand_as(both[0])])

    compare(run, [torch.rand(batch, heads, frames, frames + 2)], 2e-6)


@pytest.mark.parametrize(("batch", "frames"), SHAPES[:2])
def test_dot_products_of_parts_of_a_projection(batch: int, frames: int) -> None:
    torch.manual_seed(0)

    def run(leaves: Sequence[Tensor]) -> Tensor:
        query, key, _ = leaves[0].split([32, 32, 8], -1)
        return dot_products(query, key, heads=4)

    compare(run, [torch.randn(batch, frames, 72)], 2e-6)


@pytest.mark.parametrize(("batch", "frames"), [(1, 3), (3, 37)])
def test_first_convolution(batch: int, frames: int) -> None:
    torch.manual_seed(0)
    convolution = FirstConv2d(1, 8, 3, padding=(0, 1)).to(DEVICE)
    features = torch.randn(batch, 1, frames, 80)

    def run(leaves: Sequence[Tensor]) -> Tensor:
        weight, bias = leaves
        convolution._parameters.update(weight=weight, bias=bias)  # type: ignore[dict-item]
        x = features.to(DEVICE, weight.dtype)
        if weight.dtype == torch.float32:
            return convolution(x)
        return nn.functional.conv2d(x, weight, bias, padding=(0, 1))

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        compare(run, [torch.randn(8, 1, 3, 3), torch.randn(8)], 1e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("acts", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("batch", "frames"), SHAPES[1:])
def test_end_of_layer(batch: int, frames: int, acts: tuple[bool, bool], keep: bool) -> None:
    """With balancer and whitener that act or do not act on the batch."""
    torch.manual_seed(0)
    width = 24
    clock = Clock()
    norm, bypass = BiasNorm(clock, width), Bypass(clock, width)
    balancer = Balancer(clock, min_positive=0.45, max_positive=0.55, min_abs=3.0, probability=0.3)
    whiten = Whiten(clock, 1.01)
    modules = nn.ModuleList([norm, bypass, balancer, whiten]).to(DEVICE).train()
    kept = (torch.rand(batch, 1, 1) > 0.4).to(DEVICE)
    masked = (torch.rand(batch, 1, width) > 0.2).to(DEVICE)
    # Limits of the parameters act with probability 0.6, the whitener over its limit with 0.25.
    clock.bernoulli = lambda probability: probability == 0.6 or acts[probability != 0.3]  # type: ignore[method-assign]
    clock.uniform = lambda: 0.1 if acts[1] else 0.9  # type: ignore[method-assign]

    def run(leaves: Sequence[Tensor]) -> Tensor:
        begin, x, bias, log_scale, scale = leaves
        on_device = x.dtype == torch.float32
        clock.recorder = Recorder(DEVICE) if on_device else None
        whiten.over_limit.fill_(True)
        norm._parameters.update(bias=bias, log_scale=log_scale)  # type: ignore[dict-item]
        bypass._parameters["bypass_scale"] = scale  # type: ignore[assignment]
        out = end_of_layer(
            begin,
            x,
            kept.to(x.dtype) if keep else None,
            masked.to(x.dtype) if keep else None,
            norm=norm,
            bypass=bypass,
            balancer=balancer,
            whiten=whiten,
        )
        if clock.recorder is not None:
            clock.recorder.refresh(clock.recorder.program)
        return out

    inputs = [
        torch.randn(batch, frames, width) + 0.5,
        torch.randn(batch, frames, width) @ torch.randn(width, width),
        torch.randn(width),
        torch.tensor(0.7),
        torch.rand(width),
    ]
    compare(run, inputs, 1e-4)
    assert modules.training
