"""The LSTM predictor: step by step, for all targets, and in every search."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.model.language_model import LanguageModel, LanguageModelConfig
from pruned_rnnt.model.predictor import (
    LstmPredictor,
    LstmPredictorConfig,
    Predictor,
    PredictorConfig,
    StatelessPredictor,
)
from pruned_rnnt.model.speech_model import TransducerModel
from tests.tiny_models import tiny_conformer, tiny_model

VOCAB = 7
CONFIG = LstmPredictorConfig(dim=8, layers=2)


def make_model() -> TransducerModel:
    """A model whose decisions are never close."""
    model = tiny_model(tiny_conformer(num_mel_bins=20), VOCAB, predictor=CONFIG, kind="full")
    with torch.no_grad():
        model.joiner.decoder_proj.weight.mul_(3)
    return model


def encode_noise(model: TransducerModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(3, 163, 20, generator=generator) * 6 - 7
    with torch.inference_mode():
        return model.encode(features, torch.tensor([163, 120, 9]))


each_predictor = pytest.mark.parametrize(
    "predictor",
    [LstmPredictor(CONFIG, VOCAB), StatelessPredictor(PredictorConfig(dim=8), VOCAB)],
    ids=["lstm", "stateless"],
)


@each_predictor
def test_steps_equal_forward_targets(predictor: Predictor) -> None:
    predictor.eval()
    targets = torch.tensor([[3, 0, 5, 2], [6, 6, 1, 4]], dtype=torch.int32)
    expected = predictor.forward_targets(targets)
    output, state = predictor.start(2, targets.device)
    torch.testing.assert_close(output, expected[:, 0])
    for u in range(4):
        output, state = predictor.step(targets[:, u].long(), state)
        torch.testing.assert_close(output, expected[:, u + 1])
    assert all(part.size(0) == 2 for part in state)


@each_predictor
def test_padding_of_targets_may_be_negative(predictor: Predictor) -> None:
    predictor.eval()
    expected = predictor.forward_targets(torch.tensor([[3, 5, 0, 0]]))
    got = predictor.forward_targets(torch.tensor([[3, 5, -1, -100]]))
    torch.testing.assert_close(got[:, :3], expected[:, :3])


def test_padding_of_texts_may_be_negative() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(dim=8), VOCAB).eval()
    lengths = torch.tensor([4, 2])
    zeros, negative = (
        model(torch.tensor([[3, 5, 1, 2], [6, 4, value, value]]), lengths).total
        for value in (0, -1)
    )
    assert torch.equal(zeros, negative)


def test_the_first_symbol_is_never_forgotten() -> None:
    predictor = LstmPredictor(CONFIG, VOCAB).eval()
    last = [predictor.forward_targets(torch.tensor([[first, 2, 3, 4]]))[0, -1] for first in (1, 5)]
    assert not torch.equal(*last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_on_a_cpu_is_float32(dtype: torch.dtype) -> None:
    predictor = LstmPredictor(CONFIG, VOCAB).eval()
    targets = torch.tensor([[3, 0, 5, 2]])
    expected = predictor.forward_targets(targets)
    with torch.autocast("cpu", dtype=dtype):
        output = predictor.forward_targets(targets)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.sum().backward()
    assert predictor.lstm.weight_hh_l1.grad is not None


def path_score(model: TransducerModel, encoded_TE: Tensor, symbols: list[int]) -> float:
    """Log-probability of one path, straight from the lattice; symbols with -1 for blank."""
    emitted = torch.tensor([[symbol for symbol in symbols if symbol >= 0]], dtype=torch.int32)
    predicted_UP = model.predictor.forward_targets(emitted)[0]
    score, u = 0.0, 0
    for t, symbol in enumerate(symbols):
        logits_V = model.joiner(
            model.joiner.encoder_proj(encoded_TE[t]), model.joiner.decoder_proj(predicted_UP[u])
        )
        score += float(logits_V.log_softmax(dim=-1)[max(symbol, 0)])
        u += symbol >= 0
    return score


@torch.inference_mode()
def test_greedy_search() -> None:
    model = make_model()
    encoded, lengths = encode_noise(model)
    together = greedy_search(model, encoded, lengths)
    assert sum(len(found.symbols) for found in together) > 10
    for n, found in enumerate(together):
        count = int(lengths[n])
        (alone,) = greedy_search(model, encoded[n : n + 1, :count], lengths[n : n + 1])
        assert (alone.symbols, alone.frames) == (found.symbols, found.frames)
        path = dict(zip(found.frames, found.symbols, strict=True))
        score = path_score(model, encoded[n], [path.get(t, -1) for t in range(count)])
        assert found.score == pytest.approx(score, rel=1e-4, abs=1e-4)


@torch.inference_mode()
def test_modified_beam_search() -> None:
    model = make_model()
    encoded, lengths = encode_noise(model)
    narrow = ModifiedBeamSearch(model, beam_size=1)(encoded, lengths)
    greedy = greedy_search(model, encoded, lengths)
    assert [found[0].symbols for found in narrow] == [found.symbols for found in greedy]
    # With all sequences in the beam, the best one has the largest probability over its paths.
    short = encoded[:1, :2]
    search = ModifiedBeamSearch(model, beam_size=64, length_norm=False)
    (found,) = search(short, torch.tensor([2]))
    symbols = [-1, *range(1, VOCAB)]
    totals: dict[tuple[int, ...], Tensor] = {}
    for first in symbols:
        for second in symbols:
            emitted = tuple(symbol for symbol in (first, second) if symbol >= 0)
            score = torch.tensor(path_score(model, short[0], [first, second]))
            totals[emitted] = torch.logaddexp(totals.get(emitted, torch.tensor(-torch.inf)), score)
    best = max(totals, key=lambda emitted: float(totals[emitted]))
    assert found[0].symbols == best
    assert found[0].score == pytest.approx(float(totals[best]), rel=1e-4, abs=1e-4)


def test_every_parameter_learns() -> None:
    model = make_model().train()
    torch.manual_seed(3)
    batch = (torch.randn(2, 60, 20), torch.tensor([60, 41]), torch.tensor([[3, 4], [5, 0]]))
    model(batch[0], batch[1], batch[2].int(), torch.tensor([2, 1]), 0).objective.backward()
    for name, parameter in model.predictor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_wrong_settings_are_errors() -> None:
    with pytest.raises(ValueError, match=r"model\.predictor\.layers is 0"):
        LstmPredictorConfig(layers=0)
    with pytest.raises(ValueError, match=r"model\.predictor\.dropout is 1"):
        LstmPredictorConfig(dropout=1.0)


@pytest.mark.gpu
@torch.inference_mode()
def test_searches_on_the_gpu_match_the_cpu() -> None:
    model = make_model()
    encoded, lengths = encode_noise(model)
    greedy = greedy_search(model, encoded, lengths)
    beams = ModifiedBeamSearch(model)(encoded, lengths)
    model.cuda()
    there = greedy_search(model, encoded.cuda(), lengths)
    assert [found.symbols for found in there] == [found.symbols for found in greedy]
    beams_there = ModifiedBeamSearch(model)(encoded.cuda(), lengths)
    assert [found[0].symbols for found in beams_there] == [found[0].symbols for found in beams]
