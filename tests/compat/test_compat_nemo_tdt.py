"""compat.nemo_loss for TDT models: values, gradients, NeMo's calling convention, registration."""

import functools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import nemo_loss
from pruned_rnnt.compat.nemo_loss_modules import NemoTDTLoss, extra_outputs
from tests.compat import nemo_stand_in
from tests.compat.nemo_stand_in import Made
from tests.tdt_paths import tdt_scores, tdt_total

LOSS_MODULE = "nemo.collections.asr.losses.rnnt"
SYMBOLS, DURATIONS = 4, [0, 1, 2, 3]
FRAMES, LENGTHS = torch.tensor([5, 3]), torch.tensor([2, 1])
LABELS = torch.tensor([[1, 3], [2, 0]])


@pytest.fixture
def nemo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new, importable replacement for NeMo's loss module."""
    module = nemo_stand_in.loss_module()
    monkeypatch.setitem(sys.modules, LOSS_MODULE, module)
    return module


def logits() -> Tensor:
    """(2, 5, 3, V + 1 + K) float64: symbols, the blank, durations."""
    generator = torch.Generator().manual_seed(4)
    shape = (2, 5, 3, SYMBOLS + 1 + len(DURATIONS))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def all_paths(acts: Tensor, sigma: float = 0.0) -> Tensor:
    """The losses (2,), from every path."""
    totals = []
    for n, (frames, symbols) in enumerate(zip(FRAMES.tolist(), LENGTHS.tolist(), strict=True)):
        own = acts[n, :frames, : symbols + 1]
        targets = LABELS[n, :symbols].tolist()
        heads = own[..., : SYMBOLS + 1], own[..., SYMBOLS + 1 :]
        scores = tdt_scores(*heads, targets, SYMBOLS, sigma)
        totals.append(-tdt_total(scores, frames, symbols, DURATIONS))
    return torch.stack(totals)


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_values_and_gradients_are_those_of_all_paths(nemo: Any, sigma: float) -> None:
    nemo_loss.register()
    kwargs = {"durations": DURATIONS, "sigma": sigma}
    # NeMo subtracts the durations from the classes only for the name `tdt`.
    for classes in (SYMBOLS, SYMBOLS + len(DURATIONS)):
        loss = nemo.RNNTLoss(classes, "mean_batch", "pruned_rnnt_tdt", kwargs)
        acts = logits()
        value = loss(acts, LABELS, FRAMES, LENGTHS)
        expected = all_paths(acts, sigma).mean()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, acts)[0] for each in (value, expected)), rtol=0, atol=1e-5
        )


def test_log_probabilities_of_any_normalisation_are_the_same() -> None:
    """On CPUs NeMo's joint normalises over all of its outputs."""
    loss = NemoTDTLoss(SYMBOLS, durations=DURATIONS, sigma=0.02)
    arguments = LABELS, FRAMES, LENGTHS
    found = loss(logits().log_softmax(-1), *arguments)
    torch.testing.assert_close(found, loss(logits(), *arguments))


def test_omega_one_is_the_rnnt_loss_of_symbols_and_blank() -> None:
    import pruned_rnnt

    found = NemoTDTLoss(SYMBOLS, durations=DURATIONS, omega=1.0)(logits(), LABELS, FRAMES, LENGTHS)
    tokens = logits()[..., : SYMBOLS + 1]
    expected = pruned_rnnt.rnnt_loss(
        tokens, LABELS, FRAMES, LENGTHS, blank=SYMBOLS, reduction="none"
    )
    torch.testing.assert_close(found, expected)


def test_wrong_durations_are_refused(nemo: Any) -> None:
    nemo_loss.register()
    loss = nemo.RNNTLoss(SYMBOLS, None, "pruned_rnnt_tdt", {"durations": [0, 1]})
    with pytest.raises(ValueError, match="acts has 9 columns and durations 2 elements"):
        loss(logits(), LABELS, FRAMES, LENGTHS)
    with pytest.raises(ValueError, match="pruned_rnnt_tdt_kwargs has no durations"):
        nemo.RNNTLoss(SYMBOLS, None, "pruned_rnnt_tdt", {"sigma": 0.1})
    with pytest.raises(ValueError, match="unknown key 'duration'; did you mean 'durations'"):
        nemo.RNNTLoss(SYMBOLS, None, "pruned_rnnt_tdt", {"duration": [0, 1]})
    with pytest.raises(ValueError, match="durations is empty"):
        NemoTDTLoss(SYMBOLS, durations=[])


def test_the_name_tdt_can_use_it(nemo: Any) -> None:
    nemo.RNNT_LOSS_RESOLVER["tdt"] = nemo.RNNTLossConfig("tdt", "numba", is_available=True)
    nemo_loss.register(tdt=True)
    kwargs = {"durations": DURATIONS, "sigma": 0.02, "omega": 0.1, "clamp": -1.0}
    loss = nemo.RNNTLoss(SYMBOLS, None, "tdt", {**kwargs, "fastemit_lambda": 0.0}).loss
    assert isinstance(loss, NemoTDTLoss)
    assert (loss.sigma, loss.omega, loss.durations) == (0.02, 0.1, tuple(DURATIONS))


class Joint:
    fuse_loss_wer = False
    num_extra_outputs = len(DURATIONS)
    num_classes_with_blank = SYMBOLS + 1 + len(DURATIONS)


def test_use_changes_a_built_model(nemo: Any) -> None:
    kwargs = {"durations": DURATIONS, "sigma": 0.02, "omega": 0.1, "fastemit_lambda": 0.0}
    config = {"loss": {"loss_name": "tdt", "tdt_kwargs": kwargs}}
    old = nemo.RNNTLoss(SYMBOLS, reduction="mean_volume")
    model = types.SimpleNamespace(joint=Joint(), loss=old, cfg=config)
    nemo_loss.use(model, omega=0.0)
    assert isinstance(model.loss.loss, NemoTDTLoss)
    assert (model.loss.loss.blank, model.loss.loss.sigma, model.loss.loss.omega) == (4, 0.02, 0.0)
    assert model.loss.reduction == "mean_volume"


def test_use_needs_the_durations(nemo: Any) -> None:
    old = nemo.RNNTLoss(SYMBOLS)
    model = types.SimpleNamespace(joint=Joint(), loss=old)
    for given in ({}, {"durations": [0, 1]}):
        with pytest.raises(ValueError, match=r"joint has 4 outputs .*pass the durations"):
            nemo_loss.use(model, **given)
    assert model.loss is old
    nemo_loss.use(model, durations=DURATIONS)
    assert isinstance(model.loss.loss, NemoTDTLoss)


@pytest.mark.parametrize("normalised", [True, False])
def test_names_in_a_configuration_fit_the_joint(model_of: Made, normalised: bool) -> None:
    """For both names NeMo counts durations as symbols, so that the widths fit every joint."""
    nemo_loss.register()
    nemo_loss.register()
    losses = sys.modules[LOSS_MODULE]
    batch = nemo_stand_in.TARGETS, nemo_stand_in.FRAMES, nemo_stand_in.LENGTHS

    def loss_of(model: Any, name: str, **kwargs: Any) -> Tensor:
        model.joint.log_softmax = normalised
        loss = losses.RNNTLoss(model.joint.num_classes_with_blank - 1, None, name, kwargs)
        value: Tensor = loss(model.joint(*nemo_stand_in.inputs()), *batch)
        return value

    rnnt, tdt = model_of(), model_of(durations=True)
    assert loss_of(rnnt, "pruned_rnnt").shape == (3,)
    assert loss_of(tdt, "pruned_rnnt_tdt", durations=DURATIONS).shape == (3,)
    with pytest.raises(ValueError, match=r"loss_name: pruned_rnnt is .* this joint has 4 outputs"):
        loss_of(tdt, "pruned_rnnt")
    for model, outputs in ((rnnt, 0), (tdt, 4)):
        message = rf"loss_name: pruned_rnnt_tdt has 2 durations, \(0, 1\), and the joint {outputs}"
        with pytest.raises(ValueError, match=message):
            loss_of(model, "pruned_rnnt_tdt", durations=[0, 1])


def test_a_joint_that_another_library_wraps_tells_its_outputs(model_of: Made) -> None:
    joint_class = sys.modules["nemo.collections.asr.modules.rnnt"].RNNTJoint
    original = joint_class.joint_after_projection

    @functools.wraps(original)
    def traced(self: Any, f: Tensor, g: Tensor) -> Any:
        return original(self, f, g)

    joint_class.joint_after_projection = traced
    nemo_loss.register()
    noting = joint_class.joint_after_projection
    nemo_loss.register()
    assert joint_class.joint_after_projection is noting is not traced
    outputs = model_of(durations=True).joint(*nemo_stand_in.inputs())
    assert extra_outputs(outputs) == len(nemo_stand_in.DURATIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"durations": [0, 1.9]}, r"durations is \[0, 1.9\]; it must be different integers"),
        ({"durations": "01"}, "durations is 01; it must be different integers"),
        ({"sigma": True}, "sigma is True; it must be a number"),
        ({"omega": 2}, "omega is 2; it must be a probability"),
        ({"clamp": float("nan")}, "clamp is nan; it must be finite"),
        ({"fastemit_lambda": True}, "fastemit_lambda is True; it must be a number"),
        ({"fastemit_lambda": -1}, "fastemit_lambda is -1.0; it must be at least 0"),
        ({"validate": "no"}, "validate is 'no', needs True or False"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        NemoTDTLoss(SYMBOLS, **{"durations": DURATIONS, **options})


def test_no_clamp() -> None:
    losses = [NemoTDTLoss(SYMBOLS, durations=DURATIONS, **x) for x in ({}, {"clamp": None})]
    assert losses[0].clamp == losses[1].clamp
