"""Windows have the encoder frames of the whole audio, and end at quiet frames."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.transcribe.windows import WindowEncoder
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer


def make_model() -> TransducerModel:
    """A model that sees 5 + 5 frames back and to the end of its chunk."""
    return tiny_model(tiny_conformer(causal=True, chunk_size=5, left_chunks=1))


@pytest.mark.parametrize("piece", [1, 37, 5000])
@pytest.mark.parametrize(("window", "overlap"), [(40, 20), (8, 15), (1, 12)])
def test_windows_equal_the_whole(piece: int, window: int, overlap: int) -> None:
    model = make_model()
    features = torch.randn(403, 80) * 5 - 7
    with torch.inference_mode():
        whole, _ = model.encode(features[None], torch.tensor([403]))
    found = list(WindowEncoder(model, window, overlap)(features.split(piece)))
    assert len(found) > 1
    assert max(part.encoded_NTE.size(1) for part in found[:-1]) <= window
    assert [part.is_start for part in found] == [True] + [False] * (len(found) - 1)
    encoded = torch.cat([part.encoded_NTE for part in found], dim=1)
    torch.testing.assert_close(encoded, whole, rtol=1e-4, atol=1e-4)


def test_memory_does_not_grow_with_the_audio() -> None:
    model = make_model()
    seen = []
    model.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].size(1)))
    pieces = (torch.randn(100, 80) for _ in range(100))
    frames = sum(part.encoded_NTE.size(1) for part in WindowEncoder(model, 50, 10)(pieces))
    assert frames == (10000 - 7) // 4 + 1
    # The overlap on both sides, rounding to a chunk, and the last window with one more piece.
    assert max(seen) <= 4 * (50 + 2 * 10 + 5) + 100 + 7


@pytest.mark.parametrize(("depth", "is_pause"), [(10.0, True), (2.0, False)])
def test_windows_end_at_quiet_frames(depth: float, is_pause: bool) -> None:
    model = make_model()
    features = torch.zeros(1200, 80)
    for pause in (170, 310, 520):
        features[pause - 15 : pause + 15] = -depth
    found = list(WindowEncoder(model, 50, 10)([features]))
    places, cut = [], 0
    for part in found[:-1]:
        cut += part.encoded_NTE.size(1)
        places.append(4 * cut)
    assert places[0] == pytest.approx(170, abs=8)
    assert places[1] == pytest.approx(310, abs=8)
    assert places[2] == pytest.approx(510, abs=15)
    assert [part.is_start for part in found[:4]] == [True, is_pause, is_pause, is_pause]
    assert sum(part.encoded_NTE.size(1) for part in found) == (1200 - 7) // 4 + 1


def test_windows_after_a_pause_have_no_left_context() -> None:
    model = make_model()
    features = torch.randn(400, 80)
    features[150:190] = -10.0
    first, second, *_ = WindowEncoder(model, 50, 10)([features])
    assert second.is_start
    begin = 4 * first.encoded_NTE.size(1)
    with torch.inference_mode():
        alone, _ = model.encode(features[None, begin:], torch.tensor([400 - begin]))
    length = min(20, second.encoded_NTE.size(1))
    torch.testing.assert_close(
        second.encoded_NTE[:, :length], alone[:, :length], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_a_zipformer_have_all_frames(causal: bool) -> None:
    model = tiny_model(tiny_zipformer(causal=causal))
    features = torch.randn(611, 80)
    with torch.inference_mode():
        whole, lengths = model.encode(features[None], torch.tensor([611]))
    found = list(WindowEncoder(model, 40, 16)(features.split(100)))
    assert len(found) > 2
    encoded = torch.cat([part.encoded_NTE for part in found], dim=1)
    assert encoded.size(1) == whole.size(1) == int(lengths)
    if causal:  # The first chunk sees what it sees in the whole.
        torch.testing.assert_close(encoded[:, :8], whole[:, :8], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frames", [1, 6, 7, 8])
def test_short_audio_gives_one_frame(frames: int) -> None:
    ((encoded, *_),) = WindowEncoder(make_model(), 50, 10)([torch.zeros(frames, 80)])
    assert encoded.shape == (1, 1, 16)


def test_no_features_give_no_window() -> None:
    assert list(WindowEncoder(make_model(), 50, 10)([])) == []
