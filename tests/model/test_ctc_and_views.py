"""Losses of models with a CTC head alone, of two views (CR-CTC), and of a masked predictor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.model.build_model import as_transducer, build_model
from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import CtcModel, ModelLosses, SpeechModel, ctc_log_probs
from tests.tiny_models import tiny_conformer

VOCAB = 9
KINDS = [
    {"kind": "ctc", "cr_ctc_scale": 0.2},
    {"kind": "full", "cr_ctc_scale": 0.02},
    {"kind": "pruned", "cr_ctc_scale": 0.02, "simple_scale": 0.3},
]


def make_model(**loss: object) -> SpeechModel:
    torch.manual_seed(0)
    config = ModelConfig(encoder=tiny_conformer(num_mel_bins=20))
    return build_model(config, VOCAB, LossConfig(**loss)).eval()  # type: ignore[arg-type]


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 70, 20, generator=generator)
    targets = torch.randint(3, VOCAB, (3, 6), generator=generator, dtype=torch.int32)
    return features, torch.tensor([70, 41, 55]), targets, torch.tensor([6, 0, 3])


def second_view() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return make_batch()[0] + torch.randn(3, 70, 20, generator=generator)


def losses_of(model: SpeechModel, features: Tensor, second: Tensor | None = None) -> ModelLosses:
    losses: ModelLosses = model(features, *make_batch()[1:], 5000, second)
    return losses


def gradients(model: SpeechModel, objective: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss["kind"])
def test_losses_of_two_views(loss: dict[str, float]) -> None:
    """Means of the losses of both views, plus the divergence of their CTC outputs."""
    model = make_model(**loss)
    first_view, other_view = make_batch()[0], second_view()
    both = losses_of(model, first_view, other_view)
    one, two = losses_of(model, first_view), losses_of(model, other_view)
    assert set(both.parts) == {*one.parts, "consistency"}
    for name, part in one.parts.items():
        torch.testing.assert_close(both.parts[name], (part + two.parts[name]) / 2)
    scale = loss["cr_ctc_scale"]
    mean = (one.total + two.total) / 2
    torch.testing.assert_close(both.total, mean + scale * both.parts["consistency"])
    torch.testing.assert_close(both.objective.detach(), both.total.sum())
    assert both.frame_lengths.tolist() == one.frame_lengths.tolist()
    assert model.ctc_head is not None
    logits = [model.ctc_head(model.encode(x, make_batch()[1])[0]) for x in (first_view, other_view)]
    divergence = pruned_rnnt.ctc_consistency_loss(*logits, one.frame_lengths, reduction="none")
    torch.testing.assert_close(both.parts["consistency"], divergence.detach())
    expected = gradients(model, (one.objective + two.objective) / 2 + scale * divergence.sum())
    found = gradients(model, losses_of(model, first_view, other_view).objective)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def test_ctc_model_is_its_ctc_loss() -> None:
    model = make_model(kind="ctc", ctc_scale=0.3)
    assert isinstance(model, CtcModel)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {
        "encoder",
        "ctc_head",
    }
    features, lengths, targets, target_lengths = make_batch()
    losses = losses_of(model, features)
    encoded, frames = model.encode(features, lengths)
    expected = pruned_rnnt.ctc_loss(
        ctc_log_probs(model, encoded), targets, frames, target_lengths, reduction="none"
    )
    assert set(losses.parts) == {"ctc"}
    torch.testing.assert_close(losses.total, expected)
    for grad in gradients(model, losses.objective).values():
        assert grad.abs().max() > 0


def test_loss_kinds_have_the_same_first_encoder() -> None:
    models = [make_model(kind=kind) for kind in ("ctc", "full", "pruned")]
    for model in models[1:]:
        for name, parameter in model.encoder.named_parameters():
            assert torch.equal(parameter, models[0].encoder.get_parameter(name)), name


def test_configurations_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"loss\.cr_ctc_scale is 0\.02, which needs a CTC head"):
        LossConfig(cr_ctc_scale=0.02, ctc_scale=0)
    with pytest.raises(ValueError, match=r"decode\.method=x needs a transducer"):
        as_transducer(make_model(kind="ctc"), "decode.method=x")


@pytest.mark.gpu
@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss["kind"])
def test_two_views_in_cuda_graphs_train_as_without(loss: dict[str, float]) -> None:
    """The graphs see one batch of both views."""
    torch.manual_seed(0)
    config = ModelConfig(encoder=tiny_conformer(num_mel_bins=20, dropout=0.0))
    model = build_model(config, VOCAB, LossConfig(**loss)).cuda().train()  # type: ignore[arg-type]
    features, lengths, targets, target_lengths = make_batch()
    batch = features.cuda(), lengths, targets.cuda(), target_lengths
    second = second_view().cuda()
    plain = gradients(model, model(*batch, 5000, second).objective)
    model.encoder_graphs = EncoderGraphs(model.encoder)
    gradients(model, model(*batch, 5000, second).objective)
    model.zero_grad()
    model(*batch, 5000, second).objective.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-3, atol=1e-4, msg=name)
