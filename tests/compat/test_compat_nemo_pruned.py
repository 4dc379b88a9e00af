"""nemo_loss.use(model, pruned=...): the pruned loss in NeMo's joint."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt import Joiner, PrunedTransducerLoss
from pruned_rnnt.compat import nemo_loss
from pruned_rnnt.compat.pruned_joint import PrunedJointLoss, PrunedOptions
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

OWN = {"s_range": 3, "lm_only_scale": 0.1, "am_only_scale": 0.2, "simple_scale": 0.3}


def plain_loss(joint: Any, **options: Any) -> PrunedTransducerLoss:
    """A PrunedTransducerLoss with the parameters of the joint and of its simple loss."""
    head = joint.joint_net[-1]
    vocab = SYMBOLS + 1
    joiner = Joiner(7, 6, 8, vocab, "relu", duration_count=head.out_features - vocab)
    if head.out_features > vocab:
        options["durations"] = DURATIONS
    loss = PrunedTransducerLoss(joiner, 7, 6, vocab, blank=SYMBOLS, reduction="none", **options)
    loss.load_state_dict(dict(joint.pruned_loss.named_parameters()), strict=False)
    joiner.encoder_proj.load_state_dict(joint.enc.state_dict())
    joiner.decoder_proj.load_state_dict(joint.pred.state_dict())
    with torch.no_grad():
        for name, of_head in head.named_parameters():
            getattr(joiner.output_linear, name).copy_(of_head[:vocab])
            if joiner.duration_linear is not None:
                getattr(joiner.duration_linear, name).copy_(of_head[vocab:])
    return loss.to(head.weight.dtype)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"fastemit_lambda": 0.1, "delay_penalty": 0.05},
        {"durations": DURATIONS},
        {"durations": DURATIONS, "sigma": 0.05, "fastemit_lambda": 0.1},
        {"durations": DURATIONS, "omega": 1.0},
    ],
)
def test_losses_and_gradients_are_those_of_the_module(
    model_of: Made, kwargs: dict[str, Any]
) -> None:
    model = model_of("durations" in kwargs)
    joint = model.joint.double()
    nemo_loss.use(model, pruned=PrunedOptions(warm_up_steps=4, **OWN), **kwargs)  # type: ignore[arg-type]
    assert model.loss.reduction == "mean_volume"
    for step in (0, 1, 7):
        joint.pruned_loss.calls = step
        plain = plain_loss(joint, warm_up_steps=4, **OWN, **kwargs)
        frames, positions = given = inputs(torch.float64)
        turned = frames.transpose(1, 2), positions.transpose(1, 2)
        each = plain(*turned, TARGETS, FRAMES, LENGTHS, step=step).loss
        expected = each.sum() / LENGTHS.sum()
        expected.backward()  # type: ignore[no-untyped-call]
        found = dict(
            zip(
                ("value", "frames", "positions", *dict(joint.named_parameters())),
                loss_and_gradients(model, torch.float64),
                strict=True,
            )
        )
        of = {name: x.grad for name, x in plain.named_parameters()}
        wanted = {"value": expected, "frames": given[0].grad, "positions": given[1].grad}
        wanted |= {f"pruned_loss.{n}": x for n, x in of.items() if not n.startswith("joiner.")}
        for name in ("weight", "bias"):
            wanted[f"enc.{name}"] = of[f"joiner.encoder_proj.{name}"]
            wanted[f"pred.{name}"] = of[f"joiner.decoder_proj.{name}"]
            head = [of[f"joiner.output_linear.{name}"]]
            if "durations" in kwargs:
                head.append(of[f"joiner.duration_linear.{name}"])
            wanted[f"joint_net.1.{name}"] = torch.cat(head)
        assert set(wanted) == set(found)
        for name, right in wanted.items():
            torch.testing.assert_close(found[name], right.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("durations", [False, True])
def test_a_band_as_wide_as_the_text_gives_the_exact_loss(model_of: Made, durations: bool) -> None:
    model = model_of(durations)
    model.joint.double()
    kwargs: dict[str, Any] = {"durations": DURATIONS} if durations else {}
    nemo_loss.use(model, fused=True, **kwargs)
    exact = loss_and_gradients(model, torch.float64)
    for width, is_whole in ((4, True), (2, False)):
        pruned = PrunedOptions(s_range=width, simple_scale=0.0, warm_up_steps=0)
        nemo_loss.use(model, pruned=pruned, **kwargs)
        found = loss_and_gradients(model, torch.float64)
        pairs = zip(found, exact, strict=False)
        same = [torch.allclose(ours, right, rtol=1e-9, atol=1e-11) for ours, right in pairs]
        assert len(found) > len(exact)
        assert all(same) if is_whole else not any(same)


def test_parts_of_a_batch_are_one_step(model_of: Made) -> None:
    """With fuse_loss_wer, the joint's forward calls loss and joint for each part of a batch."""
    model = model_of()
    nemo_loss.use(model, pruned=PrunedOptions(warm_up_steps=2, simple_scale=0.0))
    used = []
    loss = model.joint.pruned_loss
    loss.register_forward_hook(lambda *args: used.append(args[-1].simple_scale))
    for _ in range(3):
        outputs = model.joint(*inputs())
        for _ in range(2):
            model.loss(outputs, TARGETS, FRAMES, LENGTHS)
    assert used == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0]


def test_evaluation_has_logits_and_a_copy_is_its_own(model_of: Made) -> None:
    model = model_of()
    expected, names = model.joint(*inputs()), set(model.joint.state_dict())
    nemo_loss.use(model, pruned=PrunedOptions())
    model.joint.eval()
    assert torch.equal(model.joint(*inputs()), expected)
    copied = copy.deepcopy(model.joint).train()
    outputs = copied(*inputs())
    torch.testing.assert_close(outputs.stored().log_softmax(-1), expected)
    model.loss(outputs, TARGETS, FRAMES, LENGTHS).backward()
    assert copied.pruned_loss.simple_lm_proj.weight.grad.norm() > 0
    assert model.joint.pruned_loss.simple_lm_proj.weight.grad is None
    # Of a checkpoint, in which the number of steps is too.
    model.joint.load_state_dict(copied.state_dict())
    assert model.joint.pruned_loss.calls == 1
    nemo_loss.use(model)
    assert set(model.joint.state_dict()) == names


@pytest.mark.parametrize("durations", [False, True])
def test_a_joint_learns_a_batch(model_of: Made, durations: bool) -> None:
    model = model_of(durations)
    kwargs: dict[str, Any] = {"durations": DURATIONS} if durations else {}
    nemo_loss.use(model, pruned=PrunedOptions(s_range=3, warm_up_steps=10), **kwargs)
    given = inputs()
    optimiser = torch.optim.AdamW([*given, *model.joint.parameters()], lr=0.05)
    before = exact_loss(model, given)
    for _ in range(60):
        optimiser.zero_grad()
        model.loss(model.joint(*given), TARGETS, FRAMES, LENGTHS).backward()
        optimiser.step()
    assert before > 1
    assert exact_loss(model, given) < 0.05


@torch.no_grad()
def exact_loss(model: Any, given: list[Tensor]) -> float:
    """That of evaluation, whose logits are stored."""
    logits = model.joint.eval()(*given)
    assert isinstance(logits, Tensor)
    model.joint.train()
    return float(model.loss(logits, TARGETS, FRAMES, LENGTHS))


@pytest.mark.parametrize("durations", [False, True])
def test_under_autocast(model_of: Made, durations: bool) -> None:
    """Frames of the encoder may be in float32 and predictor outputs in bfloat16."""
    model = model_of(durations)
    kwargs: dict[str, Any] = {"durations": DURATIONS} if durations else {}
    nemo_loss.use(model, pruned=PrunedOptions(warm_up_steps=0), **kwargs)
    frames, positions = inputs()
    expected = model.loss(model.joint(frames, positions), TARGETS, FRAMES, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model.joint(frames, positions.bfloat16())
        found = model.loss(outputs, TARGETS, FRAMES, LENGTHS)
    found.backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_what_the_pruned_loss_does_not_have_is_refused(model_of: Made) -> None:
    model, dropout, sigmoid = model_of(), model_of(dropout=0.2), model_of(activation="sigmoid")
    pruned = PrunedOptions()
    for each, options, message in (
        (dropout, {}, r"pruned=\.\.\. does not support dropout .*joint_net\[1\]\.p = 0"),
        (sigmoid, {}, r"pruned=\.\.\. needs a joint with relu or tanh; this one has Sigmoid"),
        (model, {"clamp": 0.1}, "clamp is 0.1, which the pruned loss does not have"),
        (model, {"in_place": True}, "in_place is True, which the pruned loss does not have"),
        (model, {"validate": True}, "validate is True, which the pruned loss does not have"),
    ):
        kept, kind = each.loss, type(each.joint)
        with pytest.raises(ValueError, match=message):
            nemo_loss.use(each, pruned=pruned, **options)
        assert each.loss is kept
        assert type(each.joint) is kind
    for options, message in (
        ({"in_place": "no"}, "in_place is 'no', needs True or False"),
        ({"validate": 1}, "validate is 1, needs True or False"),
        ({"clamp": "0.1"}, "clamp is '0.1'"),
    ):
        with pytest.raises(TypeError, match=message):
            nemo_loss.use(model, pruned=pruned, **options)
    with pytest.raises(TypeError, match="pruned is True; it must be a PrunedOptions"):
        nemo_loss.use(model, pruned=True)  # type: ignore[arg-type]
    nemo_loss.use(model, pruned=pruned)
    model.joint.temperature = 2.0
    with pytest.raises(ValueError, match=r"joint\.temperature is 2\.0, so that the pruned loss"):
        model.joint(*inputs())


def test_a_joint_with_durations_is_never_scored_as_rnnt(model_of: Made) -> None:
    rnnt, tdt = model_of(), model_of(durations=True)
    with pytest.raises(ValueError, match=r"joint has 4 outputs .*pass the durations"):
        nemo_loss.use(tdt, pruned=PrunedOptions())
    nemo_loss.use(rnnt, pruned=PrunedOptions())
    nemo_loss.use(tdt, pruned=PrunedOptions(), durations=DURATIONS)
    with pytest.raises(ValueError, match="this joint has 4 outputs more"):
        rnnt.loss(tdt.joint(*inputs()), TARGETS, FRAMES, LENGTHS)
    tdt.loss.loss.durations = (0, 1, 2, 5)
    message = r"durations is \(0, 1, 2, 5\) in the loss and \[0, 1, 2, 3\] in the joint"
    with pytest.raises(ValueError, match=message):
        tdt.loss(tdt.joint(*inputs()), TARGETS, FRAMES, LENGTHS)


def test_calls_are_counted_on_the_cpu() -> None:
    loss = PrunedJointLoss(PrunedOptions(), (4, 4), torch.zeros(5, 6), None)
    with torch.device("meta"):
        assert loss.get_extra_state().item() == 0
