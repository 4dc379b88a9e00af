"""The compat layers on CUDA tensors: the CPU's numbers, and warp_rnnt's device error."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import (
    k2,
    k2_pruning,
    nemo_loss,
    optimized_transducer,
    torchaudio,
    warp_rnnt,
)
from pruned_rnnt.compat.pruned_joint import PrunedOptions
from tests.compat import nemo_stand_in
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, batch

pytestmark = pytest.mark.gpu


def k2_losses(device: str) -> list[Tensor]:
    """Losses, ranges and gradients of a whole k2 step, on the CPU."""
    data = batch()
    am, lm = (x.detach().to(device).requires_grad_() for x in (data.am, data.lm))
    targets, boundary = data.targets.to(device), data.boundary.to(device)
    simple, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
        lm, am, targets, BLANK, 0.25, 0.1, boundary, return_grad=True
    )
    ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 2)
    am_pruned, lm_pruned = k2.do_rnnt_pruning(am, lm, ranges)
    pruned = k2.rnnt_loss_pruned(
        (am_pruned + lm_pruned).tanh(), targets, ranges, BLANK, boundary, delay_penalty=0.1
    )
    full = k2.rnnt_loss(am[:, :, None] + lm[:, None], targets, BLANK, boundary)
    native = k2.rnnt_loss_smoothed(lm, am, targets, BLANK, 0.25, 0.0, boundary)
    gradients = torch.autograd.grad(simple + 2 * pruned - full + native, (am, lm))
    return [x.detach().cpu() for x in (simple, pruned, full, native, ranges, *gradients)]


def test_k2_equals_the_cpu() -> None:
    for got, expected in zip(k2_losses("cuda"), k2_losses("cpu"), strict=True):
        torch.testing.assert_close(got, expected)


def test_k2_needs_a_larger_s_range_on_the_gpu_too() -> None:
    k2_pruning._WARNED.clear()
    boundary = torch.tensor([[0, 0, 9, 3]], device="cuda")
    px_grad, py_grad = torch.rand(1, 9, 4, device="cuda"), torch.rand(1, 10, 3, device="cuda")
    with pytest.warns(UserWarning, match="s_range=2 cannot reach"):
        ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 2)
    assert ranges.is_cuda
    assert ranges.shape == (1, 3, 4)


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_k2_losses_that_are_not_native_under_autocast(dtype: torch.dtype, hat: bool) -> None:
    """A target is the blank; the numbers are those of float32."""
    data = batch()
    targets = data.targets.clone()
    targets[0, 1] = BLANK
    am, lm = (20 * x.detach().to("cuda", dtype) for x in (data.am, data.lm))
    logits, targets, boundary = am[:, :, None] + lm[:, None], targets.cuda(), data.boundary.cuda()
    ranges = torch.arange(4, device="cuda").expand(4, 4, 4)

    def losses(*inputs: Tensor) -> list[Tensor]:
        am, lm, logits = inputs
        options = {"boundary": boundary, "use_hat_loss": hat}
        return [
            k2.rnnt_loss_smoothed(lm, am, targets, BLANK, boundary=boundary),
            k2.rnnt_loss(logits, targets, BLANK, **options),
            k2.rnnt_loss_pruned(logits, targets, ranges, BLANK, **options),
            k2.rnnt_loss_pruned(logits, targets, ranges, BLANK, return_grad=True, **options)[0],
        ]

    expected = losses(*(x.float() for x in (am, lm, logits)))
    for inputs in ((am, lm, logits), [x.float() for x in (am, lm, logits)]):
        with torch.autocast("cuda", dtype):
            found = losses(*inputs)
        torch.testing.assert_close(found, expected)


def other_losses(device: str) -> list[Tensor]:
    data = batch()
    logits = data.logits.detach().float().to(device).requires_grad_()
    targets, frames, symbols = (x.int().to(device) for x in (data.targets, FRAMES, SYMBOLS))
    packed = torch.cat(
        [
            logits[n, :t, : u + 1].reshape(-1, logits.shape[-1])
            for n, (t, u) in enumerate(zip(FRAMES.tolist(), SYMBOLS.tolist(), strict=True))
        ]
    )
    results = [
        torchaudio.functional.rnnt_loss(logits, targets, frames, symbols, BLANK, reduction="sum"),
        warp_rnnt.rnnt_loss(
            logits.log_softmax(-1), targets, frames, symbols, True, "sum", BLANK, True
        ),
        optimized_transducer.transducer_loss(packed, targets, frames, symbols, BLANK, False),
    ]
    gradients = torch.autograd.grad(sum(results), logits)
    return [x.detach().cpu() for x in (*results, *gradients)]


def test_other_losses_equal_the_cpu() -> None:
    for got, expected in zip(other_losses("cuda"), other_losses("cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["xs", "ys", "xn", "yn"])
def test_warp_rnnt_names_the_tensor_that_is_not_on_the_gpu(name: str) -> None:
    data = batch()
    arguments = {
        "xs": data.logits.detach().float().log_softmax(-1),
        "ys": data.targets.int(),
        "xn": FRAMES.int(),
        "yn": SYMBOLS.int(),
    }
    arguments = {key: x if key == name else x.cuda() for key, x in arguments.items()}
    with pytest.raises(RuntimeError, match=f"^{name} must be located in the CUDA$"):
        warp_rnnt.rnnt_loss(*arguments.values(), blank=BLANK)


@pytest.mark.parametrize("durations", [False, True], ids=["rnnt", "tdt"])
def test_the_pruned_loss_in_nemos_joint_equals_the_cpu(
    model_of: nemo_stand_in.Made, durations: bool
) -> None:
    """The compiled step gets parts of the joint's last layer."""
    model = model_of(durations)
    kwargs: dict[str, Any] = {"durations": nemo_stand_in.DURATIONS} if durations else {}
    nemo_loss.use(model, pruned=PrunedOptions(s_range=3, warm_up_steps=0), **kwargs)
    found = []
    for device in ("cpu", "cuda"):
        joint = copy.deepcopy(model.joint).to(device)
        given = [x.detach().to(device).requires_grad_() for x in nemo_stand_in.inputs()]
        batch = nemo_stand_in.TARGETS, nemo_stand_in.FRAMES, nemo_stand_in.LENGTHS
        loss = model.loss(joint(*given), *(x.to(device) for x in batch))
        gradients = torch.autograd.grad(loss, [*given, *joint.parameters()])
        found.append([x.detach().cpu() for x in (loss, *gradients)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
