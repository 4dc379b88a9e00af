"""compat.nemo_loss: NeMo's published numbers, its calling convention, and registration."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import nemo_loss, transformers_loss
from pruned_rnnt.compat.nemo_loss import NemoRNNTLoss
from tests.compat import nemo_numbers as numbers
from tests.compat import nemo_stand_in
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, assert_same_gradients, batch, oracle_losses

LOSS_MODULE = "nemo.collections.asr.losses.rnnt"


@pytest.fixture
def nemo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new, importable replacement for NeMo's loss module."""
    module = nemo_stand_in.loss_module()
    monkeypatch.setitem(sys.modules, LOSS_MODULE, module)
    return module


def full_lengths(logits: Tensor) -> tuple[Tensor, Tensor]:
    size, frames, columns = logits.shape[:3]
    return torch.full((size,), frames), torch.full((size,), columns - 1)


def costs_and_gradient(loss: NemoRNNTLoss, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logits = logits.clone().requires_grad_()
    costs = loss(logits, targets, *full_lengths(logits))
    return costs.detach(), *torch.autograd.grad(costs.sum(), logits)


def test_published_small_case() -> None:
    cost, gradient = costs_and_gradient(
        NemoRNNTLoss(blank=0), numbers.SMALL_LOGITS, numbers.SMALL_TARGETS
    )
    assert cost.tolist() == pytest.approx([numbers.SMALL_COST], rel=1e-6)
    torch.testing.assert_close(gradient, numbers.SMALL_GRADIENT, rtol=1e-5, atol=1e-7)


def test_published_clamped_case() -> None:
    cost, gradient = costs_and_gradient(
        NemoRNNTLoss(blank=0, clamp=0.1), numbers.SMALL_LOGITS, numbers.SMALL_TARGETS
    )
    assert cost.tolist() == pytest.approx([numbers.SMALL_COST], rel=1e-6)
    torch.testing.assert_close(gradient, numbers.SMALL_CLAMPED_GRADIENT, rtol=1e-5, atol=1e-7)


def test_published_big_case() -> None:
    costs, gradient = costs_and_gradient(
        NemoRNNTLoss(blank=0), numbers.BIG_LOGITS, numbers.BIG_TARGETS
    )
    torch.testing.assert_close(costs, numbers.BIG_COSTS)
    torch.testing.assert_close(gradient, numbers.BIG_GRADIENT, rtol=1e-3, atol=1e-6)


def test_ragged_batch_against_all_paths_as_nemo_calls_it(nemo: Any) -> None:
    """float64 must reach the loss as it is, and NeMo's blank is the last column."""
    nemo_loss.register()
    example = batch()
    last = example.logits.shape[-1] - 1
    targets = example.targets - (example.targets > BLANK).long()  # labels are 0 .. last - 1
    loss = nemo.RNNTLoss(num_classes=last, reduction=None, loss_name="pruned_rnnt")
    # NeMo pads targets and frames beyond the longest.
    padded_targets = torch.nn.functional.pad(targets, (0, 2))
    padded_logits = torch.nn.functional.pad(example.logits, (0, 0, 0, 0, 0, 3))
    got = loss(
        log_probs=padded_logits,
        targets=padded_targets,
        input_lengths=FRAMES,
        target_lengths=SYMBOLS,
    )
    expected = oracle_losses(example.logits, targets, blank=last)
    assert_same_gradients(got, expected, [example.logits])


def test_nemo_reduces(nemo: Any) -> None:
    nemo_loss.register()
    example = batch()
    last = example.logits.shape[-1] - 1
    targets = example.targets - (example.targets > BLANK).long()
    arguments = {
        "log_probs": example.logits,
        "targets": targets,
        "input_lengths": FRAMES,
        "target_lengths": SYMBOLS,
    }
    expected = oracle_losses(example.logits, targets, blank=last)
    for reduction, value in (
        ("mean_batch", expected.mean()),
        ("mean_volume", expected.sum() / SYMBOLS.sum()),
    ):
        loss = nemo.RNNTLoss(last, reduction=reduction, loss_name="pruned_rnnt")
        torch.testing.assert_close(loss(**arguments), value)


def test_outputs_of_durations_are_refused(nemo: Any) -> None:
    """NeMo gives the joint of a TDT model outputs behind the blank."""
    nemo_loss.register()
    example = batch()
    loss = nemo.RNNTLoss(example.logits.shape[-1] - 1, reduction=None, loss_name="pruned_rnnt")
    with_durations = torch.nn.functional.pad(example.logits, (0, 5))
    with pytest.raises(ValueError, match="this joint has 5 outputs more"):
        loss(with_durations, example.targets, FRAMES, SYMBOLS)


def test_own_reductions() -> None:
    example = batch()
    arguments = (example.logits, example.targets, FRAMES, SYMBOLS)
    expected = oracle_losses(example.logits, example.targets)
    torch.testing.assert_close(NemoRNNTLoss(BLANK, "mean")(*arguments), expected.mean())
    torch.testing.assert_close(NemoRNNTLoss(BLANK, "sum")(*arguments), expected.sum())
    torch.testing.assert_close(NemoRNNTLoss(BLANK, None)(*arguments), expected)


def test_fastemit_value_and_gradient() -> None:
    example = batch()

    def run(**options: Any) -> tuple[Tensor, Tensor]:
        loss = NemoRNNTLoss(BLANK, **options)(example.logits, example.targets, FRAMES, SYMBOLS)
        return loss.detach(), torch.autograd.grad(loss.sum(), example.logits)[0]

    plain, plain_gradient = run()
    value, gradient = run(fastemit_lambda=0.5)
    scaled, scaled_gradient = run(fastemit_lambda=0.5, fastemit_scales_value=True)
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(scaled, 1.5 * plain)
    torch.testing.assert_close(scaled_gradient, gradient)
    assert (gradient - plain_gradient).abs().max() > 0.01


def test_kwargs_of_the_yaml_reach_the_loss(nemo: Any) -> None:
    nemo_loss.register()
    kwargs = {"fastemit_lambda": 0.01, "clamp": 1, "delay_penalty": 0.1, "in_place": True}
    loss = nemo.RNNTLoss(4, loss_name="pruned_rnnt", loss_kwargs=kwargs).loss
    assert (loss.fastemit_lambda, loss.clamp, loss.delay_penalty) == (0.01, 1.0, 0.1)
    assert loss.in_place
    assert loss.blank == 4
    assert not nemo.RNNTLoss(4, loss_name="pruned_rnnt").loss.in_place


def test_unknown_kwargs_are_refused(nemo: Any) -> None:
    nemo_loss.register()
    with pytest.raises(ValueError, match="unknown key 'fastemit'; did you mean 'fastemit_lambda'"):
        nemo.resolve_rnnt_loss("pruned_rnnt", 4, {"fastemit": 0.1})
    with pytest.raises(ValueError, match="unknown key 'xyz'; The keys are fastemit_lambda, clamp"):
        nemo.resolve_rnnt_loss("pruned_rnnt", 4, {"xyz": 0.1})


def test_other_names_stay_nemos_own(nemo: Any) -> None:
    original = nemo.resolve_rnnt_loss
    nemo_loss.register()
    once = nemo.resolve_rnnt_loss
    nemo_loss.register()
    assert nemo.resolve_rnnt_loss is once
    assert once.__wrapped__ is original
    theirs = nemo.resolve_rnnt_loss("warprnnt_numba", blank_idx=7, loss_kwargs={"clamp": 2})
    assert (theirs.blank, theirs.kwargs) == (7, {"clamp": 2})
    assert nemo.resolve_rnnt_loss("default", 7).loss_name == "warprnnt_numba"


def test_register_as_the_default(nemo: Any) -> None:
    nemo_loss.register()
    nemo_loss.register(default=True)
    assert nemo.RNNT_LOSS_RESOLVER["default"].loss_name == "pruned_rnnt"
    loss = nemo.RNNTLoss(num_classes=5)
    assert isinstance(loss.loss, NemoRNNTLoss)
    assert isinstance(nemo.resolve_rnnt_loss("warprnnt_numba", 1), nemo_stand_in.RecordedLoss)


class Joint:
    """The properties of NeMo's RNNTJoint on which the choice of a loss depends."""

    num_classes_with_blank = 6

    def __init__(self, num_extra_outputs: int = 0, fuse_loss_wer: bool = False) -> None:
        self.num_extra_outputs, self.fuse_loss_wer = num_extra_outputs, fuse_loss_wer
        self.loss: Any = None

    def set_loss(self, loss: Any) -> None:
        self.loss = loss


@pytest.mark.parametrize("fused", [False, True])
def test_use_changes_a_built_model(nemo: Any, fused: bool) -> None:
    old = nemo.RNNTLoss(5, reduction="mean_volume")
    model = types.SimpleNamespace(joint=Joint(fuse_loss_wer=fused), loss=old)
    nemo_loss.use(model, fastemit_lambda=0.25)
    assert isinstance(model.loss.loss, NemoRNNTLoss)
    assert (model.loss.loss.blank, model.loss.loss.fastemit_lambda) == (5, 0.25)
    assert model.loss.reduction == "mean_volume"
    assert model.joint.loss is (model.loss if fused else None)


def test_half_precision_logits_are_not_copied_to_float32(nemo: Any) -> None:
    nemo_loss.register()
    loss = nemo.RNNTLoss(4, reduction="mean_batch", loss_name="pruned_rnnt")
    loss.loss.blank = 0  # the numbers' blank
    assert not loss.force_float32
    logits = numbers.SMALL_LOGITS.bfloat16().requires_grad_()
    lengths = full_lengths(logits)
    value = loss(logits, numbers.SMALL_TARGETS, *lengths)
    value.backward()
    assert value.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert value.item() == pytest.approx(numbers.SMALL_COST, rel=1e-2)


def test_a_sampled_joint_moves_the_blank(nemo: Any) -> None:
    """NeMo's SampledRNNTJoint sets the blank of the resolved loss to 0 for one call."""
    nemo_loss.register()
    loss = nemo.RNNTLoss(4, reduction="mean_batch", loss_name="pruned_rnnt")
    loss.loss.blank = 0
    value = loss(numbers.SMALL_LOGITS, numbers.SMALL_TARGETS, *full_lengths(numbers.SMALL_LOGITS))
    assert value.item() == pytest.approx(numbers.SMALL_COST, rel=1e-6)


def test_in_place_takes_the_memory_of_the_logits() -> None:
    loss = NemoRNNTLoss(blank=0, in_place=True)
    leaf = numbers.SMALL_LOGITS.clone().requires_grad_()
    logits = 1.0 * leaf  # like a linear layer, which does not need its output
    loss(logits, numbers.SMALL_TARGETS, *full_lengths(logits)).sum().backward()
    torch.testing.assert_close(leaf.grad, numbers.SMALL_GRADIENT, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits.detach(), numbers.SMALL_GRADIENT, rtol=1e-5, atol=1e-7)
    normalised = leaf.log_softmax(-1)  # needs its output in its backward pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(normalised, numbers.SMALL_TARGETS, *full_lengths(logits)).sum().backward()


def test_without_nemo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOSS_MODULE, None)
    with pytest.raises(ImportError, match=r"needs NeMo's ASR collection.*nemo_toolkit\[asr\]"):
        nemo_loss.register()


def test_nemo_without_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOSS_MODULE, types.ModuleType(LOSS_MODULE))
    with pytest.raises(ImportError, match="has no RNNT_LOSS_RESOLVER"):
        nemo_loss.register()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fastemit_lambda": True}, "fastemit_lambda is True; it must be a number"),
        ({"fastemit_lambda": -1}, "fastemit_lambda is -1.0; it must be at least 0"),
        ({"clamp": float("nan")}, "clamp is nan; it must be finite"),
        ({"clamp": "1"}, "clamp is '1'; it must be a number"),
        ({"delay_penalty": float("inf")}, "delay_penalty is inf; it must be finite"),
        *(
            ({name: "no"}, f"{name} is 'no', needs True or False")
            for name in ("fastemit_scales_value", "in_place", "validate")
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        NemoRNNTLoss(6, **options)


def test_no_clamp() -> None:
    assert NemoRNNTLoss(6, clamp=None).clamp == NemoRNNTLoss(6).clamp


def test_fused_is_true_or_false() -> None:
    for module in (nemo_loss, transformers_loss):
        with pytest.raises(TypeError, match="fused is 'no', needs True or False"):
            module.use(None, fused="no")
