"""Ensembles: the logits are the mean of those of the members, and searches run them as any model.

Axes: N batch, T encoder frames, E encoder width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.config.load import ConfigError, from_dict
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.model.build_model import build_model
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.ensemble_encoder import EnsembleConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig, PredictorConfig
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel
from pruned_rnnt.pretrained.ensemble import ensemble
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer

VOCAB = 7
FEATURES, LENGTHS, FRAMES = (3, 60, 80), torch.tensor([60, 40, 23]), 13


def _models(loss: LossConfig | None = None, **config: Any) -> list[SpeechModel]:
    """A Conformer and a Zipformer, with joiners and predictors of different widths."""
    made: list[SpeechModel] = []
    for seed, encoder in enumerate((tiny_conformer(), tiny_zipformer(causal=False))):
        torch.manual_seed(seed)
        settings = {"joiner_dim": 12 + 4 * seed, **config}
        if "predictor" in settings:
            dim = settings["predictor"].dim + 4 * seed
            settings["predictor"] = dataclasses.replace(settings["predictor"], dim=dim)
        model = build_model(ModelConfig(encoder=encoder, **settings), VOCAB, loss or LossConfig())
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        made.append(model.eval())
    return made


def _features() -> Tensor:
    return torch.randn(FEATURES, generator=torch.Generator().manual_seed(7))


def _encoded(model: SpeechModel) -> Tensor:
    """(N, T, E), without the last frame of a Conformer, which needs fewer features."""
    encoded_NTE, lengths = model.encode(_features(), LENGTHS)
    assert int(lengths.max()) == encoded_NTE.size(1)
    return encoded_NTE[:, :FRAMES]


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(dim=0)


@torch.no_grad()
def _logits_after(model: TransducerModel, symbols: list[int]) -> tuple[Tensor, ...]:
    """Logits (N, T, V) of all frames after the symbols, and those of durations."""
    encoded_NTE = _encoded(model)
    output_RP, state = model.predictor.start(1, torch.device("cpu"))
    for symbol in symbols:
        output_RP, state = model.predictor.step(torch.tensor([symbol]), state)
    joiner = model.joiner
    inputs = joiner.encoder_proj(encoded_NTE), joiner.decoder_proj(output_RP)
    if joiner.duration_linear is not None:
        return joiner.with_durations(*inputs)
    return (joiner(*inputs),)


@pytest.mark.parametrize(
    ("predictor", "loss"),
    [
        (PredictorConfig(dim=8), LossConfig()),
        (PredictorConfig(dim=8, context_size=1), LossConfig(hat=True)),
        (LstmPredictorConfig(dim=8, layers=2), LossConfig(ctc_scale=0.0)),
        (LstmPredictorConfig(dim=8), LossConfig(durations=(0, 1, 2), kind="full")),
    ],
    ids=["stateless", "one symbol", "lstm", "durations"],
)
def test_logits_are_the_mean(predictor: Any, loss: LossConfig) -> None:
    models = _models(loss, predictor=predictor)
    joined = ensemble(models, ["a", "b"])
    assert isinstance(joined, TransducerModel)
    for symbols in ([], [3], [3, 1, 6]):
        members = [_logits_after(m, symbols) for m in models if isinstance(m, TransducerModel)]
        for found, *own in zip(_logits_after(joined, symbols), *members, strict=True):
            torch.testing.assert_close(found, _mean(own))
    assert (joined.ctc_head is None) == (loss.ctc_scale == 0)


@pytest.mark.parametrize("loss", [LossConfig(kind="ctc"), LossConfig()], ids=["ctc", "transducer"])
@torch.no_grad()
def test_ctc_logits_are_the_mean(loss: LossConfig) -> None:
    models = _models(loss)
    joined = ensemble(models, ["a", "b"])
    outputs = []
    for model in (joined, *models):
        assert model.ctc_head is not None
        outputs.append(model.ctc_head(_encoded(model)))
    torch.testing.assert_close(outputs[0], _mean(outputs[1:]))


@pytest.mark.parametrize("kind", ["stateless", "lstm", "durations"])
def test_a_model_with_itself_decodes_as_alone(kind: str) -> None:
    durations = (0, 1, 2) if kind == "durations" else ()
    predictor = LstmPredictorConfig(dim=8) if kind == "lstm" else PredictorConfig(dim=8)
    model, _ = _models(LossConfig(durations=durations), predictor=predictor)
    joined = ensemble([model, model, model], ["a", "b", "c"])
    found = []
    for each in (model, joined):
        assert isinstance(each, TransducerModel)
        encoded = each.encode(_features(), LENGTHS)
        results = list(new_greedy_search(each)(*encoded))
        if kind != "durations":
            beams = ModifiedBeamSearch(each, beam_size=4, num_best=3)(*encoded)
            results += [hypothesis for beam in beams for hypothesis in beam]
        found.append(results)
    assert any(hypothesis.symbols for hypothesis in found[0])
    for alone, together in zip(*found, strict=True):
        assert together.symbols == alone.symbols
        assert together.score == pytest.approx(alone.score, rel=1e-4, abs=1e-4)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    models = _models(predictor=PredictorConfig(dim=8))
    joined = ensemble(models, ["a", "b"])
    assert isinstance(joined, TransducerModel)
    expected = greedy_search(joined, *joined.encode(_features(), LENGTHS))
    joined.cuda()
    found = greedy_search(joined, *joined.encode(_features().cuda(), LENGTHS))
    assert any(hypothesis.symbols for hypothesis in expected)
    assert [h.symbols for h in found] == [h.symbols for h in expected]


@torch.no_grad()
def test_an_ensemble_of_ensembles() -> None:
    models = _models()
    pair = ensemble(models, ["a", "b"])
    joined = ensemble([pair, pair], ["c", "d"])
    assert isinstance(pair, TransducerModel)
    assert isinstance(joined, TransducerModel)
    torch.testing.assert_close(_logits_after(joined, [3]), _logits_after(pair, [3]))


def test_models_that_differ_are_refused() -> None:
    first, _ = _models()
    with pytest.raises(ValueError, match="at least 2 models, got 1"):
        ensemble([first], ["a"])
    for loss, config, message in (
        (LossConfig(hat=True), {}, "exp/b has loss.hat=True, and exp/a has False"),
        (LossConfig(kind="ctc"), {}, "exp/b has loss.kind=ctc, and exp/a has pruned or full"),
        (None, {"joiner_activation": "relu"}, "joiner_activation=relu"),
        (None, {"predictor": LstmPredictorConfig(dim=8)}, "predictor.kind=lstm"),
        (None, {"predictor": PredictorConfig(dim=8, context_size=1)}, "context_size=1"),
    ):
        _, other = _models(loss, **config)
        with pytest.raises(ValueError, match=message):
            ensemble([first, other], ["exp/a", "exp/b"])


def test_output_lengths_are_those_of_the_output() -> None:
    causal = tiny_fastconformer(causal=True, feature_norm="none", convolution_norm="layer")
    joined = ensemble([tiny_model(causal).eval() for _ in range(2)], ["a", "b"])
    features_NTF = torch.randn(3, 40, causal.num_mel_bins)
    lengths = torch.tensor([40, 32, 25])
    _, encoded_lengths = joined.encoder(features_NTF, lengths)
    assert joined.encoder.output_lengths(lengths).tolist() == encoded_lengths.tolist() == [6, 5, 4]


def test_the_encoder_is_not_trained_and_does_not_stream() -> None:
    joined = ensemble(_models(), ["a", "b"])
    with pytest.raises(ValueError, match="train its members"):
        joined.encoder.check_trainable()
    with pytest.raises(ValueError, match="cannot stream"):
        joined.encoder.set_chunks(4, 8)


def test_settings_of_members_are_checked() -> None:
    with pytest.raises(ConfigError, match="members is empty"):
        build_encoder(EnsembleConfig())
    for member in ("zipformer", {"layers": 1}, {"kind": "none"}):
        config = from_dict(ModelConfig, {"encoder": {"kind": "ensemble", "members": [member]}})
        with pytest.raises(ConfigError, match=r"members\[0\] is .*needs the settings"):
            build_encoder(config.encoder)
    with pytest.raises(ConfigError, match="layerz"):
        build_encoder(EnsembleConfig(members=({"kind": "conformer", "layerz": 1},)))
