"""Every loss on CUDA: equal to the CPU in all dtypes, under autocast, on any stream and device, the
same bits from run to run, and without synchronization."""

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.common.native import has_native_kernel
from tests.loss.loss_calls import NAMES, LossCall, make_call

pytestmark = pytest.mark.gpu

# torch's own CTC reads the lengths on the host.
NEVER_WAIT = [name for name in NAMES if name != "ctc"]
needs_kernels = pytest.mark.skipif(
    not has_native_kernel("log_probs", "cuda"), reason="the CUDA library is not built"
)
# Bound of the error as a share of the largest element.
DTYPES = [
    (torch.float64, 1e-9),
    (torch.float32, 1e-4),
    (torch.float16, 1e-2),
    (torch.bfloat16, 6e-2),
]
# In 16 bits rounding can move a narrow band: test_training_step.py has modules with a wide one.
CASES_16_BIT = [
    (*kind, name) for kind in DTYPES[2:] for name in NAMES if not name.startswith("module")
]
CASES = [*((*kind, name) for kind in DTYPES[:2] for name in NAMES), *CASES_16_BIT]


def results(call: LossCall) -> list[Tensor]:
    """Losses, and gradients for an upstream gradient with a zero and a negative element."""
    loss = call.losses(*call.inputs)
    upstream = torch.tensor([1.5, -0.5, 0.0], device=loss.device, dtype=loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, call.inputs, upstream)]


def assert_near(got: Tensor, expected: Tensor, share: float) -> None:
    assert got.dtype == expected.dtype
    scale = expected.double().abs().max().item()
    torch.testing.assert_close(
        got.cpu().double(), expected.cpu().double(), rtol=share, atol=share * scale
    )


@pytest.mark.parametrize(("dtype", "share", "name"), CASES, ids=str)
def test_equals_the_cpu(dtype, share, name) -> None:
    expected = results(make_call(name, "cpu", dtype))
    for got, want in zip(results(make_call(name, "cuda", dtype)), expected, strict=True):
        assert_near(got, want, share)


@pytest.mark.parametrize(("dtype", "share", "name"), CASES_16_BIT, ids=str)
def test_under_autocast(dtype, share, name) -> None:
    """Products in 16 bits, recursion and results in float32; gradients in the inputs' dtype."""
    exact = results(make_call(name, "cuda", torch.float32))
    call = make_call(name, "cuda", torch.float32)
    with torch.autocast("cuda", dtype):
        loss = call.losses(*call.inputs)
    upstream = torch.tensor([1.5, -0.5, 0.0], device="cuda")
    got = [loss.detach(), *torch.autograd.grad(loss, call.inputs, upstream)]
    for value, want in zip(got, exact, strict=True):
        assert_near(value, want, share)


@pytest.mark.parametrize("name", NAMES)
def test_three_runs_have_the_same_bits(name) -> None:
    runs = [results(make_call(name, "cuda", torch.float32)) for _ in range(3)]
    for others in runs[1:]:
        for first, other in zip(runs[0], others, strict=True):
            assert torch.equal(first, other)


@needs_kernels
@pytest.mark.parametrize("name", NEVER_WAIT)
def test_does_not_synchronize_with_the_device(name) -> None:
    call = make_call(name, "cuda", torch.float32)
    results(call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = call.losses(*call.inputs)
        torch.autograd.grad(loss, call.inputs, torch.ones_like(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_current_stream(name) -> None:
    """Inputs are written late on a side stream: work on another stream would read old values."""
    expected = results(make_call(name, "cuda", torch.float32))
    losses, late = make_call(name, "cuda", torch.float32)
    inputs = [torch.zeros_like(x).requires_grad_() for x in late]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, value in zip(inputs, late, strict=True):
                x.copy_(value)
        got = results(LossCall(losses, inputs))
    stream.synchronize()
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_device_of_its_inputs(name) -> None:
    """Device 0 stays the current device."""
    expected = results(make_call(name, "cuda:0", torch.float32))
    got = results(make_call(name, "cuda:1", torch.float32))
    for left, right in zip(got, expected, strict=True):
        assert left.device == torch.device("cuda:1")
        assert torch.equal(left.cpu(), right.cpu())


@needs_kernels
def test_compiles_with_inductor() -> None:
    losses, inputs = make_call("module_fused", "cuda", torch.float32)
    expected = results(LossCall(losses, inputs))
    torch._dynamo.reset()
    compiled = torch.compile(losses, fullgraph=True)
    for got, want in zip(results(LossCall(compiled, inputs)), expected, strict=True):
        assert_near(got, want, 1e-4)


def test_tensors_on_different_devices_are_refused() -> None:
    logits = torch.randn(1, 4, 3, 5, device="cuda")
    with pytest.raises(ValueError, match="targets is on cpu but logits on cuda:0"):
        pruned_rnnt.rnnt_loss(logits, torch.tensor([[1, 2]]))
