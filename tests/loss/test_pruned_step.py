"""The pruned losses as one compiled step, on CUDA, against their composition of layers."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pruned_rnnt
from pruned_rnnt.loss import pruned_transducer
from pruned_rnnt.loss.composed_losses import LossCall
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner import fused_joiner
from pruned_rnnt.ops.lattice.recursion import Recursion
from pruned_rnnt.ops.simple import simple_products
from tests.loss.step_cases import (
    DEVICES,
    STEP,
    assert_near,
    assert_same,
    every_kind,
    inputs,
    modules,
    results,
    sized_step,
)


@pytest.mark.parametrize("device", STEP)
@every_kind
@pytest.mark.parametrize("vocabulary", [24, 29])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["total", "simple", "pruned", "all"])
def test_equals_composition(device, kind, vocabulary, reduction, what) -> None:
    step, composition = modules(device, vocabulary, torch.float64, reduction=reduction, **kind)
    batch = inputs(device, vocabulary, torch.float64)
    got, wanted = results(step, batch, what), results(composition, batch, what)
    assert_same(got, wanted, 1e-10, 1e-10)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize(
    "options",
    [
        {"rnnt_type": "modified", "fastemit_lambda": 0.2},
        {"rnnt_type": "constrained", "delay_penalty": 0.1},
        {"hat": True, "exact_bounds": True},
        {"lm_only_scale": 0.2, "am_only_scale": 0.3},
        # The predictor's prior couples utterances that the test weights differently.
        {"lm_only_scale": 0.2, "am_only_scale": 0.3, "reduction": "none"},
        {"lm_only_scale": 0.0, "blank": 20},
    ],
    ids=str,
)
def test_options_equal_composition(device, options) -> None:
    step, composition = modules(device, 21, torch.float64, **options)
    batch = list(inputs(device, 21, torch.float64))
    batch[2] = batch[2].clamp(max=19)
    assert_same(results(step, batch, "total"), results(composition, batch, "total"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", DEVICES)
@every_kind
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-4), (torch.float16, 4e-2), (torch.bfloat16, 2e-1)],
    ids=str,
)
def test_dtypes(device, kind, dtype, tolerance) -> None:
    step, _ = modules(device, 29, dtype, **kind)
    _, exact = modules("cpu", 29, torch.float64, **kind)
    with torch.no_grad():
        for left, right in zip(exact.parameters(), step.parameters(), strict=True):
            left.copy_(right.cpu().double())
    batch = inputs(device, 29, dtype)
    wide = [x.detach().cpu().double().requires_grad_() for x in batch[:2]]
    wanted = results(exact, (*wide, batch[2].cpu(), *batch[3:]), "total")
    got = [x.cpu() for x in results(step, batch, "total")]
    for left, right in zip(got[:3], wanted[:3], strict=True):
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=tolerance)
    first_gradient = len(got) - len(list(step.parameters())) - 2
    # What rounds to another band would have other gradients.
    assert torch.equal(got[first_gradient - 1], wanted[first_gradient - 1])
    assert_near(got[first_gradient:], wanted[first_gradient:], tolerance)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_in_float16_have_the_scale_of_the_loss(device, training, monkeypatch) -> None:
    """Gradients of a probability below 3e-8 are 0 in float16 unless they are scaled."""
    step, _ = modules(device, 29, torch.float32)
    batch = inputs(device, 29, torch.float32)
    calls = []
    made = pruned_transducer.pruned_step
    monkeypatch.setattr(
        pruned_transducer, "pruned_step", lambda *given: calls.append(1) or made(*given)
    )
    with torch.autocast(device, torch.float16), torch.set_grad_enabled(training):
        step(*batch, step=4)
    assert bool(calls) != training


@pytest.mark.parametrize("device", DEVICES)
@every_kind
@pytest.mark.parametrize("together", [1, 2])
def test_sums_of_some_utterances_at_a_time(device, kind, together, monkeypatch) -> None:
    step, _ = modules(device, 29, torch.float32, **kind)
    batch = inputs(device, 29, torch.float32)
    wanted = results(step, batch, "simple")
    layout = simple_products.ExpLayout
    monkeypatch.setattr(layout, "together", lambda *_: together)
    got = results(step, batch, "simple")
    assert_near(got, wanted, 1e-5)


@pytest.mark.parametrize("device", STEP)
@every_kind
def test_autocast_gives_gradients_in_the_parameters_dtype(device, kind) -> None:
    step, composition = modules(device, 29, torch.float32, **kind)
    batch = inputs(device, 29, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got, wanted = results(step, batch, "total"), results(composition, batch, "total")
    for left, right in zip(got, wanted, strict=True):
        assert left.dtype == right.dtype
        scale = right.abs().max().item()
        torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=3e-2 * scale + 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@every_kind
def test_second_backward_and_frozen_parameters(device, kind) -> None:
    step, composition = modules(device, 24, torch.float64, **kind)
    batch = inputs(device, 24, torch.float64)
    loss = step(*batch, step=4).loss
    first = torch.autograd.grad(loss, list(step.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(step.parameters()))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    for module in (step, composition):
        if module.tdt is None:
            module.joiner.requires_grad_(False)
        else:
            module.tdt.requires_grad_(False)
            module.joiner.duration_linear.requires_grad_(False)
        module(batch[0].detach(), *batch[1:], step=4).loss.backward()
    for left, right in zip(step.parameters(), composition.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_loss_of_a_kept_graph(device, reduction) -> None:
    """One after the other, in an order in which nothing of the last pass can be used."""
    step, composition = modules(device, 21, torch.float64, reduction=reduction)
    batch = inputs(device, 21, torch.float64)
    got, wanted = (module(*batch, step=4) for module in (step, composition))

    def gradients(losses, module, name: str) -> list[Tensor]:
        leaves = [*batch[:2], *module.parameters()]
        upstream = 3 * getattr(losses, name).sum()
        grads = torch.autograd.grad(upstream, leaves, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]

    for name in ("loss", "pruned_loss", "loss", "simple_loss") * 2:
        left, right = gradients(got, step, name), gradients(wanted, composition, name)
        assert_same(left, right, 1e-9, 1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_no_grad_and_change_in_place(device) -> None:
    step, composition = modules(device, 24, torch.float64)
    batch = inputs(device, 24, torch.float64)
    with torch.no_grad():
        assert not step(*batch, step=4).loss.requires_grad
    loss = step(*batch, step=4).loss
    loss /= 2
    loss.backward()
    (expected,) = torch.autograd.grad(composition(*batch, step=4).loss / 2, batch[0])
    torch.testing.assert_close(batch[0].grad, expected)


@pytest.mark.parametrize("device", STEP)
def test_chunks_of_a_wide_band(device, monkeypatch) -> None:
    """Many more bytes of logits and hidden rows than the simple loss takes."""
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", 1)
    step, composition, batch = sized_step(device, (3, 14, 30, 8, 256, 8), 16)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
def test_more_utterances_than_lengths_in_one_launch(device) -> None:
    step, composition, batch = sized_step(device, (1000, 4, 2, 4, 4, 8), 3)
    # Lengths as a column of a table, in int64.
    batch[3:] = torch.stack(batch[3:], dim=1).unbind(1)
    assert not batch[3].is_contiguous()
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
@every_kind
def test_lengths_on_the_device_and_another_default_device(device, kind) -> None:
    step, composition, batch = sized_step(device, (3, 14, 6, 8, 8, 12), 4, **kind)
    wanted = results(composition, batch, "all")
    batch[3:] = [x.to(device) for x in batch[3:]]
    with torch.device(device):
        assert_same(results(step, batch, "all"), wanted, 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("vocabulary", [8, 40, 500])
def test_hidden_gradients_in_pieces(device, vocabulary, monkeypatch) -> None:
    """Vocabularies that are narrower than the joiner, and wider."""
    monkeypatch.setattr(fused_joiner, "_GRADIENT_BYTES", 1)
    step, composition, batch = sized_step(device, (5, 30, 20, 8, 64, vocabulary), 16)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("vocabulary", [140, 301, 3000])
@pytest.mark.parametrize("workspace", [1, 1 << 30])
def test_rows_of_logits_of_all_lengths(device, vocabulary, workspace, monkeypatch) -> None:
    """Summed by warps, by blocks and by themselves, in one chunk and in several."""
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", workspace)
    step, composition, batch = sized_step(device, (4, 40, 30, 8, 16, vocabulary), 30)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("vocabulary", [300, 1500])
def test_long_rows_under_autocast(device, vocabulary) -> None:
    step, composition, batch = sized_step(device, (4, 40, 30, 8, 16, vocabulary), 16)
    for module in (step, composition):
        module.float()
    batch[:2] = [x.detach().float().requires_grad_() for x in batch[:2]]
    with torch.autocast(device, torch.bfloat16):
        got, wanted = results(step, batch, "total"), results(composition, batch, "total")
    for left, right in zip(got[6:], wanted[6:], strict=True):
        scale = right.abs().max().item()
        torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=3e-2 * scale + 1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_utterances(device, reduction) -> None:
    """Whatever the reduction, and without gradient."""
    joiner = pruned_rnnt.Joiner(7, 5, 6, 11)
    criterion = pruned_rnnt.PrunedTransducerLoss(joiner, 7, 5, 11, reduction=reduction)
    criterion.to(device)
    encoder_out = torch.randn(3, 9, 7, device=device, requires_grad=True)
    predictor_out = torch.randn(3, 5, 5, device=device)
    targets = torch.randint(1, 11, (3, 4), device=device)
    frames, symbols = torch.tensor([9, 7, 8]), torch.tensor([4, 2, 0])
    losses = criterion(encoder_out, predictor_out, targets, frames, symbols, 3)
    names = {"loss": "total", "simple_loss": "simple", "pruned_loss": "pruned"}
    for name, of_utterances in names.items():
        each = getattr(losses.utterances, of_utterances)
        assert each.shape == (3,)
        assert not each.requires_grad
        want = each if reduction == "none" else getattr(each, reduction)()
        torch.testing.assert_close(getattr(losses, name).detach(), want)
    assert losses.loss.requires_grad


def test_the_step_takes_no_fake_tensors(monkeypatch) -> None:
    """The library would follow addresses that do not exist."""

    def parameters(*_: object) -> None:
        raise AssertionError("the step would run")

    monkeypatch.setattr(pruned_transducer, "has_native_step", lambda: True)
    monkeypatch.setattr(pruned_transducer, "plain_parameters", parameters)
    criterion = pruned_rnnt.PrunedTransducerLoss(pruned_rnnt.Joiner(7, 5, 6, 11), 7, 5, 11)
    with FakeTensorMode():
        encoder_out, predictor_out = (torch.empty(3, x, x, device="cuda") for x in (7, 5))
        targets = torch.empty(3, 4, dtype=torch.int32, device="cuda")
        lengths = torch.empty(3, dtype=torch.int32, device="cuda")
        utterances = Utterances(targets, lengths, lengths, None)
        recursion = Recursion(criterion.options)
        call = LossCall(encoder_out, predictor_out, utterances, (0.5, 1.0), recursion, 5)
        assert criterion._in_one_step(call) is None
