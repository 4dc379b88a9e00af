"""The audio of a live stream: features equal to those of the whole audio, and bad samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FBANK, FeatureKind, audio_features
from pruned_rnnt.data.audio.samples import LiveAudio
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from tests.transcribe.random_model import sound


def window_features(audio: LiveAudio, kind: FeatureKind, frames: int) -> Tensor:
    """The next features as a stream computes them, beside another stream."""
    windows = [audio.window(frames), sound(0.3)]
    return kind.of_windows(windows, torch.device("cpu"), kind.frames_before, frames)[0]


def chunks(audio: LiveAudio, kind: FeatureKind, frames: int, shift: int) -> Iterator[Tensor]:
    """The features of the chunks that are complete now."""
    while audio.frames >= frames:
        yield window_features(audio, kind, frames)[:shift]
        audio.advance(shift)


def streamed(
    samples: FloatArray, piece: int, kind: FeatureKind = FBANK, frames: int = 19, shift: int = 16
) -> Tensor:
    """The features of a stream that gets `piece` samples at a time."""
    audio, parts = LiveAudio(kind), []
    for begin in range(0, len(samples), piece):
        audio.accept(samples[begin : begin + piece], 16000)
        parts += chunks(audio, kind, frames, shift)
    audio.finish()
    parts += chunks(audio, kind, frames, shift)
    while audio.frames:
        left = audio.frames
        parts.append(window_features(audio, kind, frames)[: min(left, shift)])
        audio.advance(shift)
    return torch.cat(parts) if parts else torch.zeros(0, kind.num_mel_bins)


@pytest.mark.parametrize("piece", [160, 1001, 100_000])
@pytest.mark.parametrize("size", [100, 399, 3240, 16079, 16080])
def test_features_equal_those_of_the_whole_audio(piece: int, size: int) -> None:
    samples = sound(2.0)[:size]
    torch.testing.assert_close(streamed(samples, piece), audio_features(samples))


@pytest.mark.parametrize("piece", [160, 1001, 100_000])
@pytest.mark.parametrize("size", [100, 160, 399, 3240, 16079, 16080])
@pytest.mark.parametrize("shift", [1, 16])
def test_nemo_features_equal_those_of_the_whole_audio(piece: int, size: int, shift: int) -> None:
    samples, kind = sound(2.0)[:size], FeatureKind("nemo", 64)
    found = streamed(samples, piece, kind, frames=shift, shift=shift)
    assert found.shape == (size // 160, 64)
    torch.testing.assert_close(found, kind.of_recording(samples), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_stereo_at_any_rate(rate: int) -> None:
    seconds = np.arange(rate) / rate
    left = (0.3 * np.sin(2 * np.pi * 440 * seconds) + 0.1).astype(np.float32)
    right = (0.2 * np.sin(2 * np.pi * 700 * seconds)).astype(np.float32)
    audio = LiveAudio()
    integers = np.round(np.stack((left, right), axis=1) * 32767).astype(np.int16)
    for begin in range(0, rate, 441):
        audio.accept(integers[begin : begin + 441], rate)
    audio.finish()
    expected = resample((integers / 32768).mean(axis=1).astype(np.float32), rate, 16000)
    assert audio.frames == 100
    np.testing.assert_allclose(audio.window(200)[160:], expected, atol=1e-6)


def test_types_of_samples() -> None:
    expected = sound(0.5)
    integers = (expected * 2**15).round().clip(-(2**15), 2**15 - 1)
    for samples in (
        integers.astype(np.int16),
        (integers * 2**16).astype(np.int32),
        (integers / 2**15).astype(np.float64),
        torch.tensor(integers / 2**15, requires_grad=True),
        (integers / 2**15).tolist(),
    ):
        audio = LiveAudio()
        audio.accept(samples, 16000)
        audio.accept([], 16000)
        audio.accept(np.zeros((0, 2), dtype=np.int16), 16000)
        audio.finish()
        np.testing.assert_array_equal(audio.window(99)[160:], integers / 2**15)


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros((2, 16000)), 16000, r"shape \(2, 16000\), needs \(S,\)"),
        (np.zeros((2, 2, 2)), 16000, "shape"),
        (np.zeros(5, dtype=np.int64), 16000, "samples of int64, needs floats"),
        (["a"], 16000, "samples of str"),
        (bytes(64), 16000, r"audio is bytes, needs an array .* np.frombuffer"),
        (bytearray(64), 16000, r"audio is bytearray, needs an array"),
        (sound(0.1) * 32768, 16000, "needs floats in \\[-1, 1\\]: divide"),
        ([[1.0], [1.0, 2.0]], 16000, "audio is no array of samples: "),
        (np.zeros(5), 0, "sampling rate is 0 Hz, needs 1,000 to"),
        (np.zeros(5), 44100.5, "sampling_rate is 44100.5, needs"),
        (np.zeros(5), float("nan"), "sampling_rate is nan, needs"),
        (np.zeros(5), "16000", "sampling_rate is '16000', needs"),
    ],
)
def test_wrong_samples_raise_and_change_nothing(samples: Any, rate: Any, message: str) -> None:
    audio = LiveAudio()
    audio.accept(sound(0.5), 16000)
    before = audio.window(100).copy()
    with pytest.raises(ValueError, match=message):
        audio.accept(samples, rate)
    np.testing.assert_array_equal(audio.window(100), before)


def test_bad_samples_are_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = sound(0.5)
    samples[[4000, 5000, 6000]] = np.nan, np.inf, -np.inf
    samples[[4500, 4501]] = 1e30, -3.0
    audio = LiveAudio()
    with caplog.at_level(logging.WARNING):
        audio.accept(samples, 16000)
        audio.accept(samples[4000:], 16000)
        audio.accept(np.array([1e300, 0.5]), 16000)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "NaN or infinite samples" in caplog.text
    assert "outside [-1, 1]" in caplog.text
    assert (audio.replaced, audio.clipped) == (7, 4)
    window = audio.window(100)[160:]
    assert np.isfinite(window).all()
    assert window[[4000, 5000, 6000]].tolist() == [0, 0, 0]
    assert window[[4500, 4501]].tolist() == [1, -1]


def test_rate_of_another_type() -> None:
    one, other = LiveAudio(), LiveAudio()
    for audio, rate in ((one, 44100), (other, np.float64(44100.0))):
        audio.accept(sound(0.5), rate)
        audio.finish()
    np.testing.assert_array_equal(one.window(100), other.window(100))


def test_end_of_a_stream_without_sound() -> None:
    audio = LiveAudio()
    audio.accept(np.zeros(8000), 16000)
    audio.finish()
    assert (audio.frames, audio.begin) == (0, 0.5)


def test_silence_at_the_beginning_is_dropped() -> None:
    audio = LiveAudio()
    for _ in range(1000):
        audio.accept(np.zeros(1600), 16000)
    assert (audio.frames, audio.begin) == (0, 0)
    audio.gap(1.005)
    audio.accept(sound(0.5), 16000)
    assert audio.begin == pytest.approx(100.8)
    expected = np.concatenate((np.zeros(round(16000 * (101.005 - 100.8))), sound(0.5)))
    np.testing.assert_allclose(audio.window(100)[160:], expected)


def test_gap_keeps_the_rate() -> None:
    audio = LiveAudio()
    audio.accept(resample(sound(1.0), 16000, 48000), 48000)
    audio.gap(0.5)
    audio.accept(resample(sound(1.0), 16000, 48000), 48000)
    audio.finish()
    assert audio.frames == 250
    for seconds in (-1.0, 61.0, float("nan")):
        with pytest.raises(ValueError, match=r"gap is .* s, needs 0 to 60"):
            audio.gap(seconds)


def test_memory_is_constant() -> None:
    audio = LiveAudio()
    for _ in range(500):
        audio.accept(sound(0.1), 16000)
        while audio.frames >= 19:
            audio.advance(16)
        assert audio._size < 8000
