"""Audio piece by piece is the audio at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import soundfile
import torch

from pruned_rnnt.data.audio.audio_file import FloatArray, read_audio
from pruned_rnnt.data.audio.audio_stream import (
    FeatureStream,
    ResampledStream,
    short_or_blocks,
)
from pruned_rnnt.data.audio.features import audio_features, batch_features
from pruned_rnnt.data.audio.waveform import resample
from tests.data.recorded_speech import audio_blocks


def sound(samples: int, seed: int = 0) -> FloatArray:
    return 0.1 * np.random.default_rng(seed).standard_normal(samples, dtype=np.float32)


@pytest.mark.parametrize("piece", [1, 160, 399, 1600, 7777, 50000])
def test_features_of_blocks_equal_features_of_whole(piece: int) -> None:
    samples = sound(3200 if piece == 1 else 27200)
    stream = FeatureStream()
    frames = [stream.accept(samples[i : i + piece]) for i in range(0, len(samples), piece)]
    whole = audio_features(samples)
    assert len(whole) - 2 <= sum(map(len, frames)) <= len(whole)
    frames.append(stream.finish())
    torch.testing.assert_close(torch.cat(frames), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 12345])
@pytest.mark.parametrize("piece", [37, 4410, 100000])
def test_resampled_blocks_equal_resampled_whole(rate: int, piece: int) -> None:
    samples = sound(3000 if piece == 37 else 30011)
    stream = ResampledStream(rate, 16000)
    pieces = [stream.accept(samples[i : i + piece]) for i in range(0, len(samples), piece)]
    pieces.append(stream.finish())
    whole = resample(samples, rate, 16000)
    found = np.concatenate(pieces)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, whole, atol=1e-5)


def test_resampled_stream_keeps_few_samples(tmp_path: Path) -> None:
    stream = ResampledStream(44100, 16000)
    for _ in range(20):
        stream.accept(sound(44100))
        assert len(stream._samples_S) < 1500


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3", "opus"])
@pytest.mark.parametrize("rate", [8000, 48000])
def test_blocks_equal_the_whole_file(suffix: str, rate: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    channels = np.stack([sound(3 * rate), sound(3 * rate, seed=1)], axis=1)
    how = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    soundfile.write(path, channels, rate, **how)
    blocks = list(audio_blocks(path, 0.7))
    assert len(blocks) > 4
    whole = read_audio(path)
    np.testing.assert_allclose(np.concatenate(blocks), whole, atol=1e-5)
    stream = FeatureStream()
    features = torch.cat([*map(stream.accept, blocks), stream.finish()])
    torch.testing.assert_close(features, audio_features(whole), rtol=1e-3, atol=1e-3)


def test_ten_minutes_are_read_in_blocks(tmp_path: Path) -> None:
    """What is held at once does not depend on the length of the file."""
    path = tmp_path / "long.flac"
    with soundfile.SoundFile(path, "w", samplerate=8000, channels=1) as file:
        for minute in range(10):
            file.write(sound(60 * 8000, seed=minute))
    total = 0
    for block in audio_blocks(path, 10.0):
        assert len(block) <= 161000
        total += len(block)
    assert total == 600 * 16000


def test_files_that_are_not_audio_are_refused_in_blocks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not found"):
        list(audio_blocks(tmp_path / "absent.wav", 10.0))
    text = tmp_path / "a.wav"
    text.write_text("no sound")
    with pytest.raises(ValueError, match="cannot be read as audio"):
        list(audio_blocks(text, 10.0))
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, dtype=np.float32), 16000)
    with pytest.raises(ValueError, match="no samples"):
        list(audio_blocks(tmp_path / "empty.wav", 10.0))


@pytest.mark.parametrize(
    ("name", "rate", "channels", "subtype"),
    [
        ("a.wav", 16000, 1, "PCM_16"),
        ("a.flac", 16000, 1, "PCM_16"),
        ("a.wav", 16000, 1, "PCM_24"),
        ("a.wav", 16000, 2, "PCM_16"),
        ("a.wav", 8000, 1, "PCM_16"),
    ],
)
def test_short_files_of_integers_stay_integers(
    name: str, rate: int, channels: int, subtype: str, tmp_path: Path
) -> None:
    samples = sound(4000 * channels).reshape(-1, channels)
    samples[:2] = [-1.0], [1.0]
    soundfile.write(tmp_path / name, samples, rate, subtype=subtype)
    expected = read_audio(tmp_path / name)
    stored = np.concatenate(list(short_or_blocks(tmp_path / name, 4000, pytest.fail)))
    are_integers = (rate, channels, subtype) == (16000, 1, "PCM_16")
    assert stored.dtype == (np.int16 if are_integers else np.float32)
    as_floats = stored * np.float32(2**-15) if are_integers else stored
    assert np.array_equal(as_floats, expected)
    longer = np.concatenate(list(short_or_blocks(tmp_path / name, 3999, pytest.fail)))
    assert longer.dtype == np.float32
    cpu = torch.device("cpu")
    features, lengths = batch_features([stored, sound(9000)], cpu)
    alone, _ = batch_features([as_floats, sound(9000)], cpu)
    integers, _ = batch_features([stored, stored], cpu, frames=100)
    for n in range(2):
        assert torch.equal(features[n, : lengths[n]], alone[n, : lengths[n]])
    assert integers.size(1) == 100
    torch.testing.assert_close(integers[1, : lengths[0]], alone[0, : lengths[0]])


def check_batch_features(device: torch.device) -> None:
    sizes = (1, 239, 240, 400, 4000, 4079, 4080, 4081, 16000)
    samples = [sound(size, seed=size) for size in sizes] + [np.zeros(8000, np.float32)]
    features_NTF, lengths_N = batch_features(samples, device)
    assert features_NTF.device.type == device.type
    for samples_S, of_batch_TF, length in zip(
        samples, features_NTF.cpu(), lengths_N.tolist(), strict=True
    ):
        alone_TF = audio_features(samples_S)
        assert len(alone_TF) == length
        torch.testing.assert_close(of_batch_TF[:length], alone_TF, rtol=0, atol=1e-3)


@pytest.mark.parametrize("most_frames", [100_000, 250])
def test_features_of_a_batch_equal_those_of_each(
    most_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pruned_rnnt.data.audio.features._MOST_FRAMES", most_frames)
    check_batch_features(torch.device("cpu"))


@pytest.mark.gpu
def test_features_on_a_gpu_equal_those_of_the_cpu() -> None:
    check_batch_features(torch.device("cuda"))


@pytest.mark.parametrize("rates", [(44100, 16000), (8000, 16000), (113, 100)])
def test_resampling_equals_the_default_of_scipy(rates: tuple[int, int]) -> None:
    samples = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    source, target = rates
    expected = scipy.signal.resample_poly(samples, target, source)
    np.testing.assert_array_equal(resample(samples, source, target), expected)
