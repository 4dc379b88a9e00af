"""Autograd of every loss: upstream gradients of any sign, retained graphs, refused second
derivatives, gradients of some inputs, torch.compile without graph breaks."""

import pytest
import torch
from torch.autograd import forward_ad

import pruned_rnnt
from tests.loss.loss_calls import NAMES, make_call
from tests.loss.loss_cases import DEVICES

# One of them is compiled in a default run, too.
SLOW = [name for name in NAMES if name != "module_fused"]
MARKED_NAMES = ["module_fused", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

UPSTREAM = [[1.0, 1.0, 1.0], [-0.5, 0.0, 3.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_linear_in_the_upstream_gradient(name, device) -> None:
    """Repeated backward passes through one graph give the same numbers, too."""
    losses, inputs = make_call(name, device)
    loss = losses(*inputs)
    each = [torch.autograd.grad(loss[n], inputs, retain_graph=True) for n in range(loss.shape[0])]
    for upstream in UPSTREAM:
        weights = torch.tensor(upstream, dtype=loss.dtype, device=device)
        for _ in range(2):
            grads = torch.autograd.grad(loss, inputs, weights, retain_graph=True)
            for i, grad in enumerate(grads):
                expected = sum(w * each[n][i] for n, w in enumerate(upstream))
                torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_bit_identical(name, device) -> None:
    results = []
    for _ in range(2):
        losses, inputs = make_call(name, device, torch.float32)
        loss = losses(*inputs)
        results.append([loss, *torch.autograd.grad(loss.sum(), inputs)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("upstream_needs_gradient", [False, True])
@pytest.mark.parametrize("only_inputs", [False, True])
def test_second_derivatives_are_refused(name, only_inputs, upstream_needs_gradient, device) -> None:
    losses, inputs = make_call(name, device)
    upstream = torch.ones(3, dtype=torch.float64, device=device)
    upstream.requires_grad_(upstream_needs_gradient)

    def differentiate_twice() -> None:
        grads = torch.autograd.grad(losses(*inputs), inputs, upstream, create_graph=True)
        penalty = sum((grad**2).sum() for grad in grads) + sum((x**2).sum() for x in inputs)
        if only_inputs:
            torch.autograd.grad(penalty, inputs)
        else:
            penalty.backward()

    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        differentiate_twice()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_incoming_gradients_is_right_or_refused(name) -> None:
    losses, inputs = make_call(name)
    upstream_33 = torch.eye(3, dtype=torch.float64)
    loss = losses(*inputs)
    if name != "ctc":
        with pytest.raises(RuntimeError, match="take no batch of incoming gradients"):
            torch.autograd.grad(loss, inputs, upstream_33, is_grads_batched=True)
        return
    (grads,) = torch.autograd.grad(
        loss, inputs, upstream_33, is_grads_batched=True, retain_graph=True
    )
    for upstream_3, grad in zip(upstream_33, grads, strict=True):
        (expected,) = torch.autograd.grad(loss, inputs, upstream_3, retain_graph=True)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused(name) -> None:
    losses, inputs = make_call(name)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in inputs]
        with pytest.raises(RuntimeError, match="is a dual tensor of forward-mode AD"):
            losses(*duals)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["simple_smoothed", "pruned", "fused_band", "mutual_information"])
def test_gradient_of_some_inputs_only(name, device) -> None:
    losses, inputs = make_call(name, device)
    all_grads = torch.autograd.grad(losses(*inputs).sum(), inputs)
    for i, wanted in enumerate(all_grads):
        fixed = [x if j == i else x.detach() for j, x in enumerate(inputs)]
        (grad,) = torch.autograd.grad(losses(*fixed).sum(), inputs[i])
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_inputs(name, device) -> None:
    losses, inputs = make_call(name, device)
    turned = [
        x.detach().transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        for x in inputs
    ]
    assert not any(x.is_contiguous() for x in turned if x.dim() > 1)
    leaves = [x.requires_grad_() for x in turned]
    expected, loss = losses(*inputs), losses(*leaves)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for a, b in zip(
        torch.autograd.grad(loss.sum(), leaves),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_without_gradient(name, device) -> None:
    losses, inputs = make_call(name, device)
    with torch.no_grad():
        plain = losses(*inputs)
    assert not plain.requires_grad
    torch.testing.assert_close(plain, losses(*inputs).detach())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MARKED_NAMES)
def test_compiles_in_one_graph(name, device) -> None:
    losses, inputs = make_call(name, device)
    expected = losses(*inputs)
    wanted = torch.autograd.grad(expected.sum(), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    got = compiled(*inputs)
    torch.testing.assert_close(got, expected)
    for grad, want in zip(torch.autograd.grad(got.sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(grad, want)


def test_in_place_compiles_in_one_graph() -> None:
    """It has no effect there."""
    logits, targets = torch.randn(2, 5, 4, 7, requires_grad=True), torch.randint(1, 7, (2, 3))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return pruned_rnnt.rnnt_loss(2 * x, targets, in_place=True)

    torch._dynamo.reset()
    got, expected = torch.compile(loss, fullgraph=True, backend="aot_eager")(logits), loss(logits)
    torch.testing.assert_close(got, expected)
    grads = (torch.autograd.grad(x, logits)[0] for x in (got, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "module_fused"])
def test_compiles_with_changing_shapes(name, device) -> None:
    """A second batch of another shape, for which torch makes sizes symbolic."""

    torch._dynamo.reset()
    joiner = pruned_rnnt.Joiner(6, 6, 10, 11)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, 6, 6, 11, s_range=3).to(device)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        if name == "full":
            return pruned_rnnt.rnnt_loss(x[0], x[1])
        return module(x[0], x[1], x[2], None, None, 0).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for frames, symbols in ((8, 4), (9, 3), (12, 6)):
        targets = torch.randint(1, 11, (2, symbols), device=device)
        if name == "full":
            arguments = (leaf(2, frames, symbols + 1, 11), targets)
        else:
            arguments = (leaf(2, frames, 6), leaf(2, symbols + 1, 6), targets)
        expected, got = loss(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, expected)
        (want,) = torch.autograd.grad(expected, arguments[0])
        (grad,) = torch.autograd.grad(got, arguments[0])
        torch.testing.assert_close(grad, want)
