"""compat.nemo_loss inside an installed NeMo: its RNNTLoss and its joints (skipped without NeMo)."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import nemo_loss
from pruned_rnnt.compat.joint_inputs import JointInputs

nemo_rnnt = pytest.importorskip(
    "nemo.collections.asr.losses.rnnt", reason="needs nemo_toolkit[asr]", exc_type=ImportError
)
joints = pytest.importorskip("nemo.collections.asr.modules.rnnt", exc_type=ImportError)
needs_numba = pytest.mark.skipif(
    not nemo_rnnt.NUMBA_RNNT_AVAILABLE, reason="needs NeMo's numba loss"
)

VOCABULARY = 5  # without blank
TARGETS = torch.tensor([[1, 2, 3], [3, 4, 0], [4, 2, 2]])  # padded with 0
LENGTHS = {"input_lengths": torch.tensor([5, 4, 6]), "target_lengths": torch.tensor([3, 2, 3])}


@pytest.fixture(autouse=True)
def registered() -> None:
    nemo_loss.register()


def logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 6, 4, VOCABULARY + 1, generator=generator).requires_grad_()


def value_and_gradient(name: str, reduction: str | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    loss = nemo_rnnt.RNNTLoss(
        num_classes=VOCABULARY, reduction=reduction, loss_name=name, loss_kwargs=kwargs or None
    )
    acts = logits()
    value = loss(log_probs=acts, targets=TARGETS, **LENGTHS)
    (gradient,) = torch.autograd.grad(value.sum(), acts)
    return value.detach(), gradient


@pytest.mark.parametrize("reduction", ["mean_batch", "mean", "sum", "mean_volume", None])
def test_the_same_as_nemos_torch_loss(reduction: str | None) -> None:
    got = value_and_gradient("pruned_rnnt", reduction)
    for ours, theirs in zip(got, value_and_gradient("pytorch", reduction), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_numba
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"fastemit_lambda": 0.5}, {"clamp": 0.05}, {"fastemit_lambda": 0.01, "clamp": 0.1}],
)
def test_the_same_as_nemos_numba_loss(kwargs: dict[str, float]) -> None:
    # On CPUs NeMo clamps after the reduction, on GPUs before it, as pruned_rnnt: compare without.
    theirs = value_and_gradient("warprnnt_numba", None, **kwargs)
    ours = value_and_gradient("pruned_rnnt", None, fastemit_scales_value=True, **kwargs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    exact, gradient = value_and_gradient("pruned_rnnt", None, **kwargs)
    factor = 1 + kwargs.get("fastemit_lambda", 0.0)
    torch.testing.assert_close(factor * exact, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, ours[1])


def fused_joint(kind: str, loss_name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    widths = {"encoder_hidden": 7, "pred_hidden": 6, "joint_hidden": 8}
    joint = getattr(joints, kind)(
        jointnet={**widths, "activation": "relu"},
        num_classes=VOCABULARY,
        fuse_loss_wer=True,
        **options,
    )
    joint.set_loss(nemo_rnnt.RNNTLoss(num_classes=VOCABULARY, loss_name=loss_name))
    joint.set_wer(torch.nn.Identity())  # required; not called without compute_wer
    return joint


def joint_loss_and_gradients(joint: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    encoder = torch.randn(3, 7, 6, generator=generator).requires_grad_()
    decoder = torch.randn(3, 6, 4, generator=generator).requires_grad_()
    torch.manual_seed(3)  # a sampled joint draws symbols
    value, *_ = joint(
        encoder_outputs=encoder,
        decoder_outputs=decoder,
        encoder_lengths=LENGTHS["input_lengths"],
        transcripts=TARGETS,
        transcript_lengths=LENGTHS["target_lengths"],
    )
    inputs = [encoder, decoder, *joint.parameters()]
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("RNNTJoint", {"fused_batch_size": 2}),
        ("RNNTJoint", {"fused_batch_size": 2, "log_softmax": False}),
        # One part: this joint takes the smallest number of a part for the blank, so that number
        # must be padding's.
        ("SampledRNNTJoint", {"fused_batch_size": 3, "n_samples": 3}),
    ],
)
def test_fused_joint(kind: str, options: dict[str, Any]) -> None:
    ours, theirs = (
        joint_loss_and_gradients(fused_joint(kind, name, **options))
        for name in ("pruned_rnnt", "pytorch")
    )
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_kwargs_of_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    kwargs = omegaconf.OmegaConf.create({"clamp": 0.5, "fastemit_lambda": "${clamp}"})
    loss = nemo_rnnt.RNNTLoss(5, loss_name="pruned_rnnt", loss_kwargs=kwargs)._loss
    assert (loss.clamp, loss.fastemit_lambda) == (0.5, 0.5)
    assert type(loss.clamp) is float


MODEL = """
labels: [a, b, c, d, e]
preprocessor:
  _target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor
  features: 16
  dither: 0.0
encoder:
  _target_: nemo.collections.asr.modules.ConformerEncoder
  feat_in: 16
  n_layers: 1
  d_model: 16
  n_heads: 2
  conv_kernel_size: 5
decoder:
  _target_: nemo.collections.asr.modules.RNNTDecoder
  vocab_size: 5
  prednet: {pred_hidden: 12, pred_rnn_layers: 1}
joint:
  _target_: nemo.collections.asr.modules.RNNTJoint
  num_classes: 5
  vocabulary: ${labels}
  fuse_loss_wer: true
  fused_batch_size: 2
  jointnet: {encoder_hidden: 16, pred_hidden: 12, joint_hidden: 10, activation: relu}
decoding: {strategy: greedy_batch, greedy: {max_symbols: 3, use_cuda_graph_decoder: false}}
model_defaults: {enc_hidden: 16, pred_hidden: 12}
"""


def training_step(model: Any) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one of NeMo's own training steps, without a trainer."""
    model.eval()  # no dropout
    model._optimizer = types.SimpleNamespace(param_groups=[{"lr": 0.1}])
    model._trainer = types.SimpleNamespace(global_step=0, log_every_n_steps=100)
    model.log_dict = lambda values: None
    audio = torch.randn(3, 16000, generator=torch.Generator().manual_seed(1))
    seconds = torch.tensor([16000, 14000, 12000])
    loss = model.training_step((audio, seconds, TARGETS, LENGTHS["target_lengths"]), batch_nb=0)[
        "loss"
    ]
    used = [p for p in model.parameters() if p.requires_grad]
    return loss.item(), list(torch.autograd.grad(loss, used, materialize_grads=True))


@needs_numba
def test_training_step_of_a_model() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    models = pytest.importorskip("nemo.collections.asr.models", exc_type=ImportError)

    def built(name: str) -> Any:
        torch.manual_seed(0)
        config = omegaconf.OmegaConf.create(MODEL)
        config.loss = {"loss_name": name, f"{name}_kwargs": {"fastemit_lambda": 0.5}}
        return models.EncDecRNNTModel(config)

    theirs, their_gradients = training_step(built("warprnnt_numba"))
    changed = built("warprnnt_numba")
    nemo_loss.use(changed, fastemit_lambda=0.5)
    for model in (built("pruned_rnnt"), changed):
        value, gradients = training_step(model)
        assert 1.5 * value == pytest.approx(theirs, rel=1e-5)
        for got, expected in zip(gradients, their_gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


TDT: dict[str, Any] = {"durations": [0, 1, 2, 3], "sigma": 0.05, "omega": 0.0}


def model_of(durations: bool, fuse_loss_wer: bool, activation: str = "relu") -> Any:
    """NeMo's whole model, with its own loss."""
    omegaconf = pytest.importorskip("omegaconf")
    models = pytest.importorskip("nemo.collections.asr.models", exc_type=ImportError)
    torch.manual_seed(0)
    config = omegaconf.OmegaConf.create(MODEL)
    config.loss = {"loss_name": "warprnnt_numba"}
    config.joint.fuse_loss_wer = fuse_loss_wer
    config.joint.jointnet.activation = activation
    if durations:
        config.loss = {"loss_name": "tdt", "tdt_kwargs": TDT}
        config.joint.num_extra_outputs = len(TDT["durations"])
        config.model_defaults.tdt_durations = TDT["durations"]
        config.model_defaults.num_tdt_durations = len(TDT["durations"])
        config.decoding.model_type = "tdt"
        config.decoding.durations = TDT["durations"]
    return models.EncDecRNNTModel(config)


def training_step_in_training_mode(model: Any) -> tuple[float, list[Tensor]]:
    """As `training_step`, with the joint in training mode, which has no dropout."""
    model.eval = lambda: torch.nn.Module.train(model, mode=False).joint.train()
    return training_step(model)


@needs_numba
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("fuse_loss_wer", [False, True])
@pytest.mark.parametrize("durations", [False, True], ids=["rnnt", "tdt"])
def test_training_step_without_stored_logits(
    durations: bool, fuse_loss_wer: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(durations, fuse_loss_wer, activation)
    if durations:
        # Their TDT loss on CPUs, a reference in torch that moves its tensors to a GPU.
        monkeypatch.setattr(Tensor, "cuda", lambda self: self)
        kwargs = {key: TDT[key] for key in ("durations", "sigma")}
        model.loss = nemo_rnnt.RNNTLoss(VOCABULARY, "mean_batch", "tdt_pytorch", kwargs)
        if fuse_loss_wer:
            model.joint.set_loss(model.loss)
    theirs, their_gradients = training_step_in_training_mode(model)
    nemo_loss.use(model, fused=True)
    found = []
    original = type(model.joint).joint_after_projection

    def recorded(joint: Any, f: Tensor, g: Tensor) -> Any:
        found.append(original(joint, f, g))
        return found[-1]

    model.joint.joint_after_projection = types.MethodType(recorded, model.joint)
    value, gradients = training_step_in_training_mode(model)
    assert found
    assert all(isinstance(each, JointInputs) for each in found)
    assert value == pytest.approx(theirs, rel=1e-5)
    for got, expected in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@needs_numba
def test_a_fused_model_decodes_and_is_saved_as_before(tmp_path: Any) -> None:
    models = pytest.importorskip("nemo.collections.asr.models", exc_type=ImportError)
    model = model_of(durations=False, fuse_loss_wer=True)
    encoded = torch.randn(2, 16, 9, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([9, 7])
    decode = model.decoding.rnnt_decoder_predictions_tensor
    expected = [each.text for each in decode(encoded, lengths)]
    nemo_loss.use(model, fused=True)
    # NeMo decodes in training for the error rate of a batch.
    model.train()
    assert [each.text for each in decode(encoded, lengths)] == expected
    model.save_to(str(tmp_path / "model.nemo"))
    again = models.EncDecRNNTModel.restore_from(str(tmp_path / "model.nemo"))
    assert type(again.joint) is joints.RNNTJoint
    assert again.state_dict().keys() == model.state_dict().keys()
