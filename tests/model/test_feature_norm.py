"""What is subtracted from the features, and what silence changes of it."""

from __future__ import annotations

import torch

from pruned_rnnt.model.feature_norm import centre_features


def speech(frames: int = 100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(frames, 80, generator=generator) - 5


def centred(features_TF: torch.Tensor, kind: str, padding: int = 0) -> torch.Tensor:
    padded = torch.nn.functional.pad(features_TF, (0, 0, 0, padding), value=7.0)
    return centre_features(padded[None], torch.tensor([len(features_TF)]), kind)[0]


def test_the_speech_norm_ignores_silence_and_level() -> None:
    alone = centred(speech(), "speech")
    for silence in (torch.full((200, 80), -15.94), torch.randn(200, 80) - 14):
        both = centred(torch.cat((silence, speech())), "speech")[len(silence) :]
        assert (both - alone).abs().max() < 0.3
        shifted = centred(torch.cat((silence, speech())), "utterance")[len(silence) :]
        assert (shifted - centred(speech(), "utterance")).abs().mean() > 5
    torch.testing.assert_close(centred(speech() + 3, "speech"), alone, rtol=0, atol=1e-4)


def test_a_click_does_not_decide_the_speech_norm() -> None:
    click = torch.cat((speech()[:50], torch.full((1, 80), 0.0), speech()[50:]))
    difference = centred(click, "speech")[:50] - centred(speech(), "speech")[:50]
    assert difference.abs().max() < 0.7


def test_padding_and_empty_utterances() -> None:
    torch.testing.assert_close(centred(speech(), "speech", 30)[:100], centred(speech(), "speech"))
    for kind in ("utterance", "speech", "bins"):
        empty = centre_features(torch.zeros(1, 4, 80), torch.tensor([0]), kind)
        assert empty.isfinite().all()


def test_bins_get_zero_mean_and_unit_deviation_in_the_utterance() -> None:
    normed = centred(speech() * 3, "bins", 30)[:100]
    torch.testing.assert_close(normed.mean(0), torch.zeros(80), rtol=0, atol=1e-5)
    torch.testing.assert_close(normed.std(0), torch.ones(80), rtol=0, atol=1e-4)
    assert centred(speech(1), "bins").abs().max() == 0
