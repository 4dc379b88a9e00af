"""ctc_loss: warp-ctc's contract over torch's implementation."""

import pytest
import torch

import pruned_rnnt
from tests.loss import bad_input_calls as calls
from tests.loss.bad_input_calls import SPOILT
from tests.loss.loss_cases import DEVICES, gradients, make_batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blank", [0, 3, 5])
def test_equals_torch_and_infeasible_utterances_cost_nothing(blank, device) -> None:
    torch.manual_seed(2)
    # The third has fewer frames than symbols, the fourth no symbols.
    batch = make_batch([9, 7, 2, 5], [4, 3, 4, 0], 6, blank)
    logits = (3 * torch.randn(4, 9, 6, dtype=torch.float64)).to(device).requires_grad_()
    targets = batch.targets.clone()
    targets[3] = -7  # padding may have any values
    lengths = batch.lengths(device)
    loss = pruned_rnnt.ctc_loss(logits, targets.to(device), *lengths, blank=blank, reduction="none")
    expected = torch.nn.functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        batch.targets.to(device),
        *lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )
    assert loss[2] == 0
    torch.testing.assert_close(loss, expected)
    (grad,) = gradients(loss, batch.upstream(), logits)
    assert not grad[2].any()
    torch.testing.assert_close(grad, gradients(expected, batch.upstream(), logits)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_and_activations_give_the_same(device) -> None:
    logits = torch.randn(2, 8, 5).to(device)
    targets = torch.tensor([[1, 2, 2], [4, 3, 1]], device=device)
    losses = [
        pruned_rnnt.ctc_loss(x, targets, reduction="sum")
        for x in (logits, logits.log_softmax(-1), logits + 7)
    ]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, device) -> None:
    logits = torch.randn(2, 8, 5).to(device, dtype).requires_grad_()
    targets = torch.tensor([[1, 2, 2], [4, 3, 1]], device=device)
    loss = pruned_rnnt.ctc_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, pruned_rnnt.ctc_loss(logits.float(), targets))
    loss.backward()
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_values_that_are_not_read(name, value, device) -> None:
    losses, grads = [], []
    # On the CPU, values are not read in torch.compile.
    compiled = torch.compile(pruned_rnnt.ctc_loss, backend="eager")
    loss_of = compiled if device == "cpu" else pruned_rnnt.ctc_loss
    for spoilt in (calls.arguments(), calls.changed(name, value)):
        given = {key: x.to(device) for key, x in spoilt.items()}
        logits = given["am"].requires_grad_()
        batch = (given["targets"], given["logit_lengths"], given["target_lengths"])
        losses.append(loss_of(logits, *batch, reduction="none"))
        grads.append(torch.autograd.grad(losses[-1].sum(), logits)[0])
    assert losses[1][1] == torch.inf
    assert not grads[1][1].any()
    others = [0, 2]
    torch.testing.assert_close(losses[1][others], losses[0][others])
    torch.testing.assert_close(grads[1][others], grads[0][others])
