"""nemo_loss.use(model, fused=True): losses and gradients of a joint that stores no logits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import nemo_loss
from pruned_rnnt.compat.joint_inputs import JointInputs
from tests.compat.nemo_stand_in import (
    DURATIONS,
    FRAMES,
    LENGTHS,
    SYMBOLS,
    TARGETS,
    Made,
    inputs,
    loss_and_gradients,
)


@pytest.mark.parametrize("log_softmax", [None, False])
@pytest.mark.parametrize(
    ("durations", "kwargs"),
    [
        (False, {}),
        (False, {"fastemit_lambda": 0.5, "delay_penalty": 0.1}),
        (False, {"fastemit_lambda": 0.5, "fastemit_scales_value": True}),
        (True, {"durations": DURATIONS}),
        (True, {"durations": DURATIONS, "sigma": 0.05, "fastemit_lambda": 0.1}),
        (True, {"durations": DURATIONS, "omega": 1.0}),
        (True, {"durations": [2, 0, 5, 1]}),
    ],
)
def test_losses_and_gradients_are_those_of_stored_logits(
    model_of: Made, durations: bool, kwargs: dict[str, Any], log_softmax: bool | None
) -> None:
    model = model_of(durations)
    model.joint.double().log_softmax = log_softmax
    nemo_loss.use(model, **kwargs)
    stored = loss_and_gradients(model, torch.float64)
    nemo_loss.use(model, fused=True, **kwargs)
    assert isinstance(model.joint(*inputs(torch.float64)), JointInputs)
    assert model.loss.reduction == "mean_volume"
    for ours, theirs in zip(loss_and_gradients(model, torch.float64), stored, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    nemo_loss.use(model, **kwargs)
    assert isinstance(model.joint(*inputs(torch.float64)), Tensor)


def test_clamp_bounds_gradients_of_logits(model_of: Made) -> None:
    model = model_of()
    model.joint.double().log_softmax = False
    plain = loss_and_gradients_of(model, fused=True)
    clamped = loss_and_gradients_of(model, fused=True, clamp=0.02)
    for ours, theirs in zip(clamped, loss_and_gradients_of(model, clamp=0.02), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(clamped[1], plain[1])


def loss_and_gradients_of(model: Any, **kwargs: Any) -> list[Tensor]:
    nemo_loss.use(model, **kwargs)
    return loss_and_gradients(model, torch.float64)


@pytest.mark.parametrize("durations", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["loss-inside", "loss-outside"])
def test_under_autocast(model_of: Made, durations: bool, inside: bool) -> None:
    """The loss may be called within autocast or after it, with bfloat16 inputs and float32 layers;
    both are as near to float32 as stored logits in bfloat16."""
    model = model_of(durations)
    kwargs: dict[str, Any] = {"durations": DURATIONS} if durations else {}
    nemo_loss.use(model, **kwargs)
    exact = loss_and_gradients(model)

    def under_autocast() -> list[Tensor]:
        given = inputs()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model.joint(*given)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            value = model.loss(outputs, TARGETS, FRAMES, LENGTHS)
        return [value.detach(), *torch.autograd.grad(value, [*given, *model.joint.parameters()])]

    stored = under_autocast()
    nemo_loss.use(model, fused=True, **kwargs)
    found = under_autocast()
    for ours, theirs, right in zip(found, stored, exact, strict=True):
        assert ours.dtype == right.dtype
        # Both round to eight bits in several places.
        rounding = 2**-7 * right.abs().max() + 2 * (theirs - right).abs().max()
        assert (ours - right).abs().max() <= rounding


def test_evaluation_has_logits_and_a_copy_is_its_own(model_of: Made) -> None:
    model = model_of()
    expected = model.joint(*inputs())
    nemo_loss.use(model, fused=True)
    model.joint.eval()
    assert torch.equal(model.joint(*inputs()), expected)
    copied = copy.deepcopy(model.joint).train()
    outputs = copied(*inputs())
    torch.testing.assert_close(outputs.stored().log_softmax(-1), expected)
    model.loss(outputs, TARGETS, FRAMES, LENGTHS).backward()
    assert copied.joint_net[-1].weight.grad.norm() > 0
    assert model.joint.joint_net[-1].weight.grad is None


def test_durations_are_never_scored_as_rnnt(model_of: Made) -> None:
    rnnt, tdt = model_of(), model_of(durations=True)
    nemo_loss.use(rnnt, fused=True)
    with pytest.raises(ValueError, match=r"joint has 4 outputs .*pass the durations"):
        nemo_loss.use(tdt, fused=True)
    nemo_loss.use(tdt, fused=True, durations=DURATIONS)
    with pytest.raises(ValueError, match="this joint has 4 outputs more"):
        rnnt.loss(tdt.joint(*inputs()), TARGETS, FRAMES, LENGTHS)


def doubled(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def with_another_forward(joint: Any) -> None:
    joint.joint_net[-1].forward = lambda x: 3 * x.sum(-1, keepdim=True).expand(-1, -1, -1, 6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda joint: joint.joint_net[-1].register_forward_hook(doubled), "ends with a layer"),
        (lambda joint: joint.joint_net[0].register_forward_hook(doubled), "a ReLU that has forw"),
        (lambda joint: joint.joint_net.register_forward_hook(doubled), "a Sequential that has"),
        (lambda joint: joint.register_forward_hook(doubled), "joint has forward hooks"),
        (with_another_forward, "has a forward of its own"),
        (lambda joint: setattr(joint, "temperature", 2.0), "joint.temperature is 2.0"),
        (lambda joint: setattr(joint, "is_adapter_available", lambda: True), "has adapters"),
        (lambda joint: setattr(joint.joint_net, "0", torch.nn.SiLU()), "begins with a SiLU"),
    ],
)
def test_what_changes_the_joint_takes_part_in_it(
    model_of: Made, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    change(model.joint)
    expected = outputs_of(model)
    model = model_of()
    nemo_loss.use(model, fused=True)
    change(model.joint)
    found = outputs_of(model)
    assert torch.equal(found, expected)
    assert reason in caplog.text


def outputs_of(model: Any) -> Tensor:
    outputs: Tensor = model.joint(*inputs())
    return outputs


def test_a_parametrised_output_layer_is_trained(model_of: Made) -> None:
    from torch.nn.utils import parametrizations

    model = model_of()
    parametrizations.weight_norm(model.joint.joint_net[-1])
    model.joint.double()
    stored = loss_and_gradients_of(model)
    for ours, theirs in zip(loss_and_gradients_of(model, fused=True), stored, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_what_cannot_be_fused_is_refused_and_changes_nothing(model_of: Made) -> None:
    dropout, sigmoid, masked, other = (
        model_of(dropout=0.2),
        model_of(activation="sigmoid"),
        model_of(),
        model_of(),
    )
    masked.joint.masking_prob = 0.1
    other.joint.__class__ = type("SampledRNNTJoint", (type(other.joint),), {})
    for model, message in (
        (dropout, r"does not support dropout .* 0\.2: set model\.joint\.joint_net\[1\]\.p = 0"),
        (sigmoid, r"needs a joint with relu or tanh; this one has Sigmoid"),
        (masked, r"model\.joint\.masking_prob is 0\.1"),
        (other, r"model\.joint to be an RNNTJoint, not SampledRNNTJoint"),
    ):
        kept, kind = model.loss, type(model.joint)
        with pytest.raises(ValueError, match=message):
            nemo_loss.use(model, fused=True)
        assert model.loss is kept
        assert type(model.joint) is kind
    with pytest.raises(ValueError, match="in_place writes over the logits"):
        nemo_loss.use(model_of(), fused=True, in_place=True)
    dropout.joint.joint_net[1].p = 0.0
    nemo_loss.use(dropout, fused=True)
    assert isinstance(dropout.joint(*inputs()), JointInputs)


def test_other_uses_of_the_logits_are_errors(model_of: Made) -> None:
    model = model_of()
    nemo_loss.use(model, fused=True)
    outputs = model.joint(*inputs())
    assert outputs.shape == (3, 7, 4, SYMBOLS + 1)
    for use in (
        lambda: outputs.argmax(-1),
        lambda: outputs.float(),
        lambda: outputs.narrow(2, 0, 1),
        lambda: outputs[0],
    ):
        with pytest.raises((AttributeError, TypeError), match="fused=True does not store"):
            use()
    # NeMo's own loss would have been called with the logits.
    assert not hasattr(outputs, "neural_type")
