"""Audio files of many kinds come in as 16 kHz samples and features; short wav files that are read
without libsndfile as it reads them.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt.data.audio import audio_file, waveform
from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES, read_audio
from pruned_rnnt.data.audio.audio_stream import FeatureStream
from pruned_rnnt.data.audio.features import audio_features, batch_features, fbank_extractor
from pruned_rnnt.data.audio.file_headers import short_wav
from pruned_rnnt.data.audio.recordings import UnusableUtterance, open_recording
from pruned_rnnt.data.audio.waveform import resample
from tests.data.recorded_speech import audio_blocks

SAMPLES = np.random.default_rng(0).integers(-(2**15), 2**15, 4000).astype(np.int16)


def tone(rate: int, seconds: float = 0.5, pitch: float = 440.0) -> np.ndarray:
    time = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
@pytest.mark.parametrize("channels", [1, 2])
def test_files_become_16_khz(rate: int, suffix: str, channels: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.stack([tone(rate)] * channels, axis=1), rate)
    samples = read_audio(path)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    # An mp3 has some padding at both ends.
    assert abs(len(samples) - 8000) <= (2500 if suffix == "mp3" else 1)
    spectrum = np.abs(np.fft.rfft(samples[1000:7000]))
    pitch = np.argmax(spectrum) * 16000 / 6000
    assert abs(pitch - 440) < 5
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(
    ("second", "warns"),
    [
        ("same", False),
        ("quieter", False),
        ("silent", False),
        ("inverted", True),
        ("other voice", True),
    ],
)
def test_a_mean_of_different_channels_is_a_warning(
    second: str,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(waveform, "_named_different", False)
    dither = np.random.default_rng(1).integers(-1, 2, (8000, 2)) / 2**15
    soundfile.write(tmp_path / "pause.wav", dither, 16000)
    read_audio(tmp_path / "pause.wav")
    noise = 0.01 * np.random.default_rng(0).standard_normal((8000, 2))
    one = tone(16000)
    factors = {"same": 1.0, "quieter": 0.1, "silent": 0.0, "inverted": -0.5}
    other = factors[second] * one if second in factors else tone(16000, pitch=700.0)
    for name in "ab":
        path = tmp_path / f"{name}.wav"
        soundfile.write(path, np.stack([one, other], axis=1) + noise, 16000)
        read_audio(path)
    messages = [message for message in caplog.messages if "different sound" in message]
    assert [message.partition(" ")[0] for message in messages] == [f"{tmp_path}/a.wav"] * warns


@pytest.mark.parametrize("suffix", ["aiff", "aif", "au", "caf", "w64", "rf64", "voc", "oga", "mp2"])
def test_suffixes_of_libsndfile(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    kinds = {"aif": "AIFF", "oga": "OGG", "mp2": "MP3"}
    soundfile.write(path, tone(16000), 16000, format=kinds.get(suffix, suffix.upper()))
    assert path.suffix in AUDIO_SUFFIXES
    assert len(read_audio(path)) == pytest.approx(8000, abs=2500)
    assert open_recording(str(path), False).duration == pytest.approx(0.5, abs=0.2)


def test_resampling_keeps_samples_at_16_khz() -> None:
    samples = tone(16000)
    assert resample(samples, 16000, 16000) is samples


def test_features_are_a_frame_each_10_ms() -> None:
    assert audio_features(tone(16000)).shape == (50, 80)


@pytest.mark.parametrize("level", [1.0, 1e-4])
def test_features_equal_those_of_lhotse(level: float) -> None:
    noise_S = np.random.default_rng(0).standard_normal(8000)
    samples_S = level * (tone(16000) + 0.1 * noise_S).astype(np.float32)
    wanted_TF = fbank_extractor().extract(torch.from_numpy(samples_S), 16000)
    torch.testing.assert_close(audio_features(samples_S), wanted_TF, rtol=0, atol=1e-5)
    (batch_TF,), _ = batch_features([samples_S], torch.device("cpu"))
    torch.testing.assert_close(batch_TF, wanted_TF, rtol=0, atol=1e-5)


def test_features_of_silence_are_lhotses_least() -> None:
    silence_S = np.zeros(8000, dtype=np.float32)
    wanted_TF = fbank_extractor().extract(torch.from_numpy(silence_S), 16000)
    assert wanted_TF.isfinite().all()
    assert torch.equal(audio_features(silence_S), wanted_TF)


def test_files_that_are_not_audio_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not found"):
        read_audio(tmp_path / "absent.wav")
    for name in ("a.wav", "a.mp3"):
        text = tmp_path / name
        text.write_text("no sound")
        with pytest.raises(ValueError, match="cannot be read as audio: Format not recognised"):
            read_audio(text)
        text.write_bytes(b"")
        with pytest.raises(ValueError, match="cannot be read as audio: the file is empty"):
            read_audio(text)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, dtype=np.float32), 16000)
    with pytest.raises(ValueError, match="no samples"):
        read_audio(tmp_path / "empty.wav")
    samples = np.zeros(20000, dtype=np.float32)
    samples[12345] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, 16000, subtype="FLOAT")
    for read in (read_audio, lambda path: list(audio_blocks(path, 10.0))):
        with pytest.raises(ValueError, match=r"nan\.wav has NaN or infinite samples"):
            read(tmp_path / "nan.wav")


def test_flac_of_unknown_length_is_read(tmp_path: Path) -> None:
    """Encoders that write to a pipe leave the number of samples out."""
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(16000, 6.0), 16000)
    expected_S = read_audio(path)
    data = bytearray(path.read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
    path.write_bytes(data)
    np.testing.assert_array_equal(read_audio(path), expected_S)
    np.testing.assert_array_equal(np.concatenate(list(audio_blocks(path, 1.0))), expected_S)
    for is_command, audio in ((False, str(path)), (True, f"cat {path} |")):
        with pytest.raises(UnusableUtterance, match="header without the number of samples"):
            open_recording(audio, is_command)


@pytest.mark.parametrize("length", [1, 79, 80, 239, 240, 400])
def test_very_short_audio_gives_a_frame(length: int) -> None:
    whole = audio_features(tone(16000)[:length])
    assert 1 <= len(whole) <= 3
    stream = FeatureStream()
    pieces = torch.cat([stream.accept(tone(16000)[:length]), stream.finish()])
    torch.testing.assert_close(pieces, whole)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack("<4sI", name, len(content)) + content + b"\0" * (len(content) % 2)


def wav(
    *before: bytes, kind: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16
) -> bytes:
    size = channels * bits // 8
    fmt = chunk(b"fmt ", struct.pack("<HHIIHH", kind, channels, rate, rate * size, size, bits))
    parts = b"".join([b"WAVE", fmt, *before, chunk(b"data", SAMPLES.tobytes())])
    return chunk(b"RIFF", parts)


@pytest.mark.parametrize("before", [(), (chunk(b"LIST", b"INFOabc"), chunk(b"fact", b"1234"))])
def test_samples_are_those_of_libsndfile(before: tuple[bytes, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(*before))
    found = short_wav(path, 16000, 4000)
    assert found is not None
    assert np.array_equal(found, soundfile.read(path, dtype="int16")[0])
    assert np.array_equal(found, SAMPLES)
    assert short_wav(str(path), 16000, 3999) is None
    assert short_wav(path, 8000, 4000) is None


@pytest.mark.parametrize(
    "content",
    [
        wav(kind=3),
        wav(channels=2),
        wav(bits=24),
        wav()[:-2],
        wav()[:30],
        wav(chunk(b"LIST", bytes(5000))),
        wav().replace(b"RIFF", b"RIFX", 1),
        wav().replace(struct.pack("<4sI", b"data", 8000), struct.pack("<4sI", b"data", 0)),
        wav().replace(struct.pack("<4sI", b"data", 8000), struct.pack("<4sI", b"data", 2**32 - 1)),
        wav().replace(struct.pack("<4sI", b"data", 8000), struct.pack("<4sI", b"data", 7999)),
        b"no sound",
        b"",
    ],
)
def test_other_files_are_left_to_libsndfile(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    assert short_wav(path, 16000, 10**6) is None


def test_files_that_do_not_exist_are_left_to_libsndfile(tmp_path: Path) -> None:
    assert short_wav(tmp_path / "absent.wav", 16000, 4000) is None
    assert short_wav(tmp_path, 16000, 4000) is None


@pytest.mark.slow
def test_log_lines_survive_decoders_in_other_threads() -> None:
    program = (
        "import logging, sys; from pruned_rnnt.system.console import start_logging\n"
        "from pruned_rnnt.data.audio.audio_file import without_decoder_messages\n"
        "console = start_logging()\n"
        "with without_decoder_messages():\n"
        "    logging.warning('from another thread'); console.print('a bar')\n"
        "    print('an error', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "WARNING from another thread\n" in done.stderr
    assert "a bar\n" in done.stderr
    assert "an error\n" in done.stderr


@pytest.mark.parametrize("name", ["a.wav", "a.flac"])
def test_standard_error_stays_open_beside_other_formats(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(tmp_path / name, tone(16000), 16000)
    monkeypatch.setattr(audio_file, "_enter", lambda: pytest.fail("redirected"))
    read_audio(tmp_path / name)
    audio_file.seconds_in_header(tmp_path / name)
