"""The whole model: losses do not depend on the batch, and every parameter learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt import PrunedTransducerLoss, rnnt_loss, rnnt_loss_tdt
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import ModelLosses, TransducerModel
from tests.tiny_models import tiny_conformer, tiny_model

VOCAB = 9


def make_model(**loss: object) -> TransducerModel:
    return tiny_model(tiny_conformer(num_mel_bins=20), VOCAB, **loss).train()


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 70, 20, generator=generator)
    targets = torch.randint(3, VOCAB, (3, 6), generator=generator, dtype=torch.int32)
    return features, torch.tensor([70, 41, 55]), targets, torch.tensor([6, 0, 3])


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ({}, {"simple", "pruned", "ctc"}),
        ({"ctc_scale": 0.0}, {"simple", "pruned"}),
        ({"kind": "full"}, {"full", "ctc"}),
        ({"kind": "full", "hat": True, "ctc_scale": 0.0}, {"full"}),
        ({"rnnt_type": "modified"}, {"simple", "pruned", "ctc"}),
        ({"hat": True, "delay_penalty": 0.01, "exact_bounds": True}, {"simple", "pruned", "ctc"}),
        ({"durations": (0, 1, 2, 3, 4), "sigma": 0.05}, {"simple", "pruned", "ctc"}),
        ({"durations": (1, 0, 4), "kind": "full", "ctc_scale": 0.0}, {"full"}),
    ],
)
def test_losses_of_a_batch_are_those_of_its_utterances(
    loss: dict[str, object], parts: set[str]
) -> None:
    model = make_model(**loss).eval()
    features, lengths, targets, target_lengths = make_batch()
    together: ModelLosses = model(features, lengths, targets, target_lengths, 5000)
    assert set(together.parts) == parts
    assert together.total.shape == (3,)
    for n in range(3):
        frames, symbols = int(lengths[n]), int(target_lengths[n])
        alone = model(
            features[n : n + 1, :frames],
            lengths[n : n + 1],
            targets[n : n + 1, :symbols],
            target_lengths[n : n + 1],
            5000,
        )
        torch.testing.assert_close(alone.total[0], together.total[n], rtol=1e-4, atol=1e-4)
        assert alone.frame_lengths.tolist() == [together.frame_lengths[n]]


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"kind": "full"},
        {"ctc_scale": 0.0},
        {"durations": (0, 1, 2), "fastemit_lambda": 0.01, "delay_penalty": 0.01},
        {"durations": (0, 1, 2), "kind": "full"},
    ],
)
def test_every_parameter_gets_a_gradient(loss: dict[str, object]) -> None:
    model = make_model(**loss)
    model(*make_batch(), 0).objective.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


OF_BOTH_KINDS = [
    {"rnnt_type": "modified"},
    {"hat": True},
    {"delay_penalty": 0.3},
    {"fastemit_lambda": 0.2},
    {"sigma": 0.05, "durations": (0, 1, 2)},
]
OF_PRUNED_ALONE = [
    {"s_range": 3},
    {"lm_only_scale": 0.1},
    {"am_only_scale": 0.7},
    {"exact_bounds": True, "s_range": 2},
]


def loss_by_hand(model: TransducerModel, **options: Any) -> Tensor:
    """The loss of the batch with these options, without those of `model`."""
    features, lengths, targets, target_lengths = make_batch()
    encoded, frames = model.encode(features, lengths)
    texts = targets, frames.int(), target_lengths.int()
    predicted = model.predictor.forward_targets(targets)
    joiner = model.joiner
    if model.pruned_loss is not None:
        widths = encoded.shape[2], predicted.shape[2], VOCAB
        loss = PrunedTransducerLoss(joiner, *widths, reduction="sum", **options).eval()
        loss.load_state_dict(model.pruned_loss.state_dict())
        found: Tensor = loss(encoded, predicted, *texts).loss
        return found
    am, lm = joiner.encoder_proj(encoded)[:, :, None], joiner.decoder_proj(predicted)[:, None]
    if "durations" in options:
        return rnnt_loss_tdt(*joiner.with_durations(am, lm), *texts, reduction="sum", **options)
    return rnnt_loss(joiner(am, lm), *texts, reduction="sum", **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("full", options) for options in OF_BOTH_KINDS]
    + [("pruned", options) for options in OF_BOTH_KINDS + OF_PRUNED_ALONE],
)
def test_each_setting_reaches_the_loss(kind: str, options: dict[str, Any]) -> None:
    """Values and gradients, because FastEmit changes the gradients alone."""
    model = make_model(kind=kind, ctc_scale=0.0, **options).eval()
    setting, *others = options
    without = {name: options[name] for name in others}
    losses = (
        model(*make_batch(), 5000).objective,
        loss_by_hand(model, **options),
        loss_by_hand(model, **without),
    )
    weight = model.joiner.output_linear.weight
    got, expected, other = (
        torch.cat([loss.view(1), torch.autograd.grad(loss, weight)[0].flatten()]) for loss in losses
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(got, other, rtol=1e-4, atol=1e-3), setting


def test_scales_follow_the_step() -> None:
    model = make_model(ctc_scale=0.0, warm_up_steps=100).eval()
    start = model(*make_batch(), 0)
    torch.testing.assert_close(start.total, start.parts["simple"] + 0.1 * start.parts["pruned"])
    middle = model(*make_batch(), 50)
    wanted = 0.75 * middle.parts["simple"] + 0.55 * middle.parts["pruned"]
    torch.testing.assert_close(middle.total, wanted)
    end = model(*make_batch(), 100)
    torch.testing.assert_close(end.total, 0.5 * end.parts["simple"] + end.parts["pruned"])


def test_ctc_part_is_added_with_its_scale() -> None:
    losses = make_model(kind="full", ctc_scale=0.3).eval()(*make_batch(), 0)
    torch.testing.assert_close(losses.total, losses.parts["full"] + 0.3 * losses.parts["ctc"])


@pytest.mark.parametrize("kind", ["pruned", "full"])
def test_models_of_a_negative_fastemit_load_but_do_not_train(kind: str) -> None:
    model = make_model(kind=kind, fastemit_lambda=-0.1)
    with pytest.raises(ValueError, match=r"fastemit_lambda is -0\.1; it must be at least 0"):
        model(*make_batch(), 0)


def test_ctc_dropout_acts_in_training_alone() -> None:
    model = make_model(kind="full", ctc_dropout=0.9)
    batch = make_batch()
    model.encoder.eval()
    first, second = (model(*batch, 0).parts for _ in range(2))
    assert not torch.equal(first["ctc"], second["ctc"])
    torch.testing.assert_close(first["full"], second["full"])
    model.eval()
    assert torch.equal(model(*batch, 0).parts["ctc"], model(*batch, 0).parts["ctc"])


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_impossible_ctc_dropout_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"loss\.ctc_dropout"):
        LossConfig(ctc_dropout=value)


def test_initial_scale_of_the_joiner_is_that_of_its_projections() -> None:
    encoder = tiny_conformer(num_mel_bins=20)
    layers = {}
    for scale in (None, 0.25):
        torch.manual_seed(0)
        config = ModelConfig(encoder=encoder, joiner_dim=64, joiner_initial_scale=scale)
        layers[scale] = TransducerModel(config, VOCAB).joiner
    for name in ("encoder_proj", "decoder_proj"):
        default, scaled = (getattr(joiner, name) for joiner in layers.values())
        torch.testing.assert_close(scaled.weight, 0.25 * default.weight)
        assert 0.02 < scaled.bias.abs().max() <= 0.025
    default, scaled = (joiner.output_linear for joiner in layers.values())
    assert torch.equal(scaled.weight, default.weight)


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4)])
def test_wide_band_pruned_loss_is_the_full_loss(durations: tuple[int, ...]) -> None:
    batch = make_batch()
    full = make_model(kind="full", ctc_scale=0.0, durations=durations).eval()
    pruned = make_model(s_range=7, ctc_scale=0.0, durations=durations).eval()
    pruned.load_state_dict(full.state_dict(), strict=False)
    torch.testing.assert_close(
        pruned(*batch, 0).parts["pruned"], full(*batch, 0).total, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["pruned", "full"])
def test_omega_chooses_the_loss_without_durations_in_training_alone(kind: str) -> None:
    """All durations still get a gradient, of zeros, which other processes wait for."""
    batch = make_batch()
    plain, tdt = (
        make_model(kind=kind, durations=(0, 1, 2), omega=omega, ctc_scale=0.0) for omega in (1, 0)
    )
    without = make_model(kind=kind, ctc_scale=0.0)
    names = dict(without.named_parameters())
    without.load_state_dict({n: p for n, p in plain.state_dict().items() if n in names}, False)
    for model in (plain, without):
        model.encoder.eval()
    losses = plain(*batch, 0)
    torch.testing.assert_close(losses.total, without(*batch, 0).total)
    losses.objective.backward()
    assert plain.joiner.duration_linear is not None
    assert plain.joiner.duration_linear.weight.grad is not None
    assert not plain.joiner.duration_linear.weight.grad.any()
    torch.testing.assert_close(plain.eval()(*batch, 0).total, tdt.eval()(*batch, 0).total)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"durations": (0, 2)}, r"loss\.durations is \[0, 2\], needs a 1"),
        ({"durations": (0, 1, 1)}, "needs different numbers"),
        ({"durations": (-1, 1)}, "from 0 on"),
        ({"durations": tuple(range(17))}, "at most 16"),
        ({"durations": (0, 1), "rnnt_type": "modified"}, r"needs loss\.rnnt_type=regular"),
        ({"durations": (0, 1), "hat": True}, r"needs loss\.hat=false"),
        ({"durations": (0, 1), "kind": "ctc"}, r"loss\.kind=ctc has no joiner"),
        ({"durations": (0, 1), "omega": 1.5}, r"loss\.omega"),
        ({"sigma": 0.05}, r"loss\.sigma is 0\.05, which needs loss\.durations"),
        ({"omega": 0.1}, r"loss\.omega is 0\.1, which needs loss\.durations"),
    ],
)
def test_durations_that_do_not_fit_are_refused(loss: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**loss)


def test_lengths_beyond_the_features_are_an_error() -> None:
    model = make_model().eval()
    features, _, _, _ = make_batch()
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="feature_lengths has 400, but features has 70 frames"),
    ):
        model.encode(features, torch.tensor([70, 400, 55]))
