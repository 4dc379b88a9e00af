"""The simple loss of a large vocabulary in tiles, against that of stored am and lm."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.simple import streamed_loss
from tests.loss import loss_cases as cases

N, T, U, E, P, D, V = 3, 9, 5, 6, 6, 6, 53
FRAMES, SYMBOLS = [9, 6, 8], [5, 3, 0]
# Columns of a tile: symbols and the padding.
TILE = 16


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_loss, "_TILE_BYTES", 1)
    monkeypatch.setattr(streamed_loss, "_LEAST_COLUMNS", TILE)
    monkeypatch.setattr(streamed_loss, "_MOST_COLUMNS", TILE)


def module_of(device: str, dtype: torch.dtype, **options) -> pruned_rnnt.PrunedTransducerLoss:
    torch.manual_seed(3)
    joiner = pruned_rnnt.Joiner(E, P, D, V)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, E, P, V, s_range=3, **options)
    return module.to(device, dtype)


def batch_of(device: str, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(4)
    encoder, predictor = scale * torch.randn(N, T, E), scale * torch.randn(N, U + 1, P)
    # Symbols of every tile, the last of one and the first of the next.
    targets = torch.tensor([[1, 14, 15, 16, 52], [29, 30, 45, 31, 44], [1, 2, 3, 4, 5]])
    leaves = [x.to(device, dtype).requires_grad_() for x in (encoder, predictor)]
    lengths = [torch.tensor(x, dtype=torch.int32) for x in (FRAMES, SYMBOLS)]
    return [*leaves, targets.int().to(device), *lengths]


def numbers(module: pruned_rnnt.PrunedTransducerLoss, batch: list[Tensor]) -> list[Tensor]:
    losses = module(*batch, step=4)
    leaves = [x for x in (*batch[:2], *module.parameters()) if x.requires_grad]
    weights = torch.linspace(0.5, 2.0, max(losses.loss.numel(), 1), device=losses.loss.device)
    total = (losses.loss.flatten() * weights.to(losses.loss)).sum()
    grads = torch.autograd.grad(total, leaves)
    parts = [losses.loss, losses.simple_loss, *losses.occupancy, losses.bounds.start]
    return [x.detach() for x in (*parts, *grads)]


def both(module, batch, monkeypatch) -> tuple[list[Tensor], list[Tensor]]:
    """In tiles, and with am and lm stored."""
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 0)
    got = numbers(module, batch)
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 1 << 40)
    return got, numbers(module, batch)


def check_equal(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-10) -> None:
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lm_only_scale": 0.0, "reduction": "none"},
        {"blank": V - 1, "fastemit_lambda": 0.2},
        {"blank": 15, "delay_penalty": 0.1},
        {"blank": 17, "rnnt_type": "modified", "reduction": "sum"},
        {"lm_only_scale": 1.0},
    ],
    ids=str,
)
def test_equals_stored_logits(options, device, monkeypatch) -> None:
    module = module_of(device, torch.float64, **options)
    batch = batch_of(device, torch.float64)
    if "blank" in options:
        batch[2] = torch.where(batch[2] == options["blank"], 7, batch[2])
    check_equal(*both(module, batch, monkeypatch))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_peaks_far_apart(device, monkeypatch) -> None:
    """Where the products of whole tiles underflow, in one tile or in all."""
    module = module_of(device, torch.float64, reduction="none")
    with torch.no_grad():
        module.simple_am_proj.weight.mul_(400)
        module.simple_lm_proj.weight.mul_(400)
    batch = batch_of(device, torch.float64, scale=3.0)
    check_equal(*both(module, batch, monkeypatch), tolerance=1e-9)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_symbols_without_probability(device, monkeypatch) -> None:
    """Masked symbols, a whole tile of them, which the second utterance has."""
    module = module_of(device, torch.float64, reduction="none")
    with torch.no_grad():
        module.simple_am_proj.bias[28:46] = -torch.inf
        module.simple_lm_proj.bias[2] = -torch.inf
    batch = batch_of(device, torch.float64)
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 0)
    got = module(*batch, step=4)
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 1 << 40)
    wanted = module(*batch, step=4)
    torch.testing.assert_close(got.simple_loss, wanted.simple_loss)
    assert got.simple_loss.isinf().tolist() == [False, True, False]
    for left, right in zip(got.occupancy, wanted.occupancy, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)], ids=str
)
def test_dtypes(dtype, tolerance, device, monkeypatch) -> None:
    module = module_of(device, dtype)
    batch = batch_of(device, dtype)
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 0)
    got = numbers(module, batch)
    exact = module_of("cpu", torch.float64)
    exact.load_state_dict({name: x.cpu().double() for name, x in module.state_dict().items()})
    wide = [x.detach().cpu().double().requires_grad_() for x in batch[:2]]
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 1 << 40)
    wanted = numbers(exact, [*wide, batch[2].cpu(), *batch[3:]])
    for left, right in zip(got, wanted, strict=True):
        scale = max(right.abs().max().item(), 1e-3)
        torch.testing.assert_close(
            left.cpu().double(), right.double(), rtol=0, atol=tolerance * scale
        )


@pytest.mark.parametrize("device", cases.DEVICES)
def test_autocast_gives_gradients_in_the_parameters_dtype(device, monkeypatch) -> None:
    module = module_of(device, torch.float32)
    batch = batch_of(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got, wanted = both(module, batch, monkeypatch)
    for left, right in zip(got, wanted, strict=True):
        assert left.dtype == right.dtype
        scale = right.abs().max().item()
        torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=3e-2 * scale + 1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("tied", ["am and lm", "all"])
def test_tied_layers(tied, device, monkeypatch) -> None:
    module = module_of(device, torch.float64)
    module.simple_lm_proj.weight = module.simple_am_proj.weight
    if tied == "all":
        module.joiner.output_linear.weight = module.simple_am_proj.weight
    batch = batch_of(device, torch.float64)
    check_equal(*both(module, batch, monkeypatch))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_frozen_layers_get_no_gradient(device, monkeypatch) -> None:
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 0)
    module = module_of(device, torch.float64)
    names = [name for name, _ in module.named_parameters()]
    gradients = numbers(module, batch_of(device, torch.float64))[-len(names) :]
    wanted = dict(zip(names, gradients, strict=True))
    frozen = ("simple_lm_proj.weight", "joiner.output_linear.weight", "simple_am_proj.bias")
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    module(*batch_of(device, torch.float64), step=4).loss.backward()
    for name, parameter in module.named_parameters():
        if name in frozen:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, wanted[name] / 0.5)


def test_gradcheck() -> None:
    torch.manual_seed(8)
    encoder = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    predictor = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    layers = [torch.randn(37, 3), torch.randn(37), torch.randn(37, 3), torch.randn(37)]
    layers = [x.double().requires_grad_() for x in layers]
    options = pruned_rnnt.PrunedTransducerLoss(
        pruned_rnnt.Joiner(3, 3, 3, 37), 3, 3, 37, lm_only_scale=0.3
    ).simple_options
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([4, 3], [2, 1])]
    targets = torch.tensor([[14, 36], [20, 1]], dtype=torch.int32)
    batch = streamed_loss.TargetsAndLengths(targets, *lengths)

    def loss(*tensors: Tensor) -> Tensor:
        encoder, am_weight, am_bias, predictor, lm_weight, lm_bias = tensors
        inputs = streamed_loss.ProjectedInputs(
            encoder, am_weight, am_bias, predictor, lm_weight, lm_bias
        )
        return streamed_loss.streamed_simple_loss(inputs, batch, options)[0]

    arguments = (encoder, *layers[:2], predictor, *layers[2:])
    assert torch.autograd.gradcheck(loss, arguments, eps=1e-6, atol=1e-7)


LARGE = """
import resource, torch, pruned_rnnt
from pruned_rnnt.ops.simple import streamed_loss
streamed_loss.MOST_STORED_BYTES = 0
torch.set_num_threads(1)
joiner = pruned_rnnt.Joiner(4, 4, 4, 60000)
module = pruned_rnnt.PrunedTransducerLoss(joiner, 4, 4, 60000, s_range=2)
encoder = torch.randn(4, 500, 4, requires_grad=True)
predictor = torch.randn(4, 6, 4, requires_grad=True)
targets = torch.randint(1, 60000, (4, 5))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
losses = module(encoder, predictor, targets, None, None, 0)
assert bool(losses.loss.isfinite())
losses.simple_loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
def test_memory_on_the_cpu_is_bounded() -> None:
    """am alone would take 458 MiB in float32, and its exponentials and gradient as much each: with
    both stored the step takes 1.5 GiB, in tiles 0.6 GiB."""
    result = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 800
