"""Search without predictor (HAINAN) against one decision after the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.decode_set import build_search
from pruned_rnnt.decode.result_settings import label, result_settings
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.non_autoregressive import NonAutoregressiveSearch
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from tests.decode.search_model import UNKNOWN, encoded, make_model

LENGTHS = [9, 4, 1, 0]


def masked_model(hat: bool = False, lstm: bool = False) -> TransducerModel:
    model = make_model(hat=hat, lstm=lstm)
    config = model.loss_config
    model.loss_config = dataclasses.replace(config, predictor_mask_probability=0.5)
    return model


@torch.no_grad()
def decided(
    model: TransducerModel, frames: Tensor, before: list[tuple[int, ...]] | None, silent: list[int]
) -> Hypothesis:
    """Frame by frame; `before` has the symbols before each frame, None for zeros."""
    symbols, times, scores, total = [], [], [], 0.0
    for t, frame in enumerate(frames):
        predicted = torch.zeros(1, model.config.predictor.dim)
        if before is not None:
            targets = torch.tensor([before[t]], dtype=torch.int64).view(1, -1)
            predicted = model.predictor.forward_targets(targets)[:, -1]
        joiner = model.joiner
        logits = joiner(joiner.encoder_proj(frame[None]), joiner.decoder_proj(predicted))
        best, symbol = joint_log_probs(logits[0], 0, model.loss_config.hat).max(dim=0)
        total += float(best)
        if int(symbol) not in (0, *silent):
            symbols.append(int(symbol))
            times.append(t)
            scores.append(float(best))
    return Hypothesis(
        symbols=tuple(symbols), frames=tuple(times), score=total, symbol_scores=tuple(scores)
    )


def assert_same(found: Hypothesis, expected: Hypothesis) -> None:
    assert (found.symbols, found.frames) == (expected.symbols, expected.frames)
    assert found.score == pytest.approx(expected.score, abs=1e-4)
    assert found.symbol_scores == pytest.approx(expected.symbol_scores, abs=1e-5)


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("silent", [[], [UNKNOWN]])
def test_passes_with_and_without_predictor(hat: bool, lstm: bool, silent: list[int]) -> None:
    model = masked_model(hat, lstm)
    frames, lengths = encoded(LENGTHS, seed=3)
    searches = [
        NonAutoregressiveSearch(model, refinements=passes, silent_symbols=silent)
        for passes in range(3)
    ]
    found = [search(frames, lengths) for search in searches]
    assert any(hypothesis.symbols for hypothesis in found[0])
    assert [h.symbols for h in found[0]] != [h.symbols for h in found[1]]
    for n, length in enumerate(LENGTHS):
        expected = decided(model, frames[n, :length], None, silent)
        assert_same(found[0][n], expected)
        for results in found[1:]:
            before = [
                tuple(
                    s for s, t in zip(expected.symbols, expected.frames, strict=True) if t < frame
                )
                for frame in range(length)
            ]
            expected = decided(model, frames[n, :length], before, silent)
            assert_same(results[n], expected)


def test_settings_choose_the_search() -> None:
    model = masked_model()
    batch = encoded(LENGTHS)
    config = DecodeConfig(method="non_autoregressive", refinements=1, skip_unknown=False)
    found = build_search(model, config)(*batch)
    assert [[h] for h in NonAutoregressiveSearch(model, refinements=1)(*batch)] == found
    assert label(result_settings(config)) == "non_autoregressive-refinements1-no_skip_unknown"
