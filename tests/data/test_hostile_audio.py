"""Audio files that ask for too much, are damaged, or need another program."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import MonoCut, Recording

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.recordings import UnusableUtterance, open_recording, read_samples
from pruned_rnnt.data.input.speech_dataset import BadAudio, SpeechDataset
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from tests.data.recorded_speech import audio_blocks, write_audio

READERS = (read_audio, lambda path: np.concatenate(list(audio_blocks(path, 0.1))))


def wav_header(rate: int, samples: int = 0) -> bytes:
    """A wav file of one channel of silence with 16 bits."""
    size = 2 * samples
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVEfmt " + head + b"data" + struct.pack("<I", size) + b"\x01" * size
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


@pytest.mark.parametrize("rate", [15_999_989, 768_001, 999])
def test_impossible_rates_are_refused_before_resampling(
    rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("audio.audio_file", "audio.audio_stream", "input.speech_dataset"):
        monkeypatch.setattr(f"pruned_rnnt.data.{module}.resample", None)
    path = tmp_path / "a.wav"
    for samples in (0, 1000):
        path.write_bytes(wav_header(rate, samples))
        for read in READERS:
            with pytest.raises(ValueError, match=rf"a\.wav: sampling rate is {rate:,} Hz, needs"):
                read(path)
    tokenizer = train_tokenizer(["go"], TokenizerConfig(kind="char", vocab_size=10))
    cut = Recording.from_file(path).to_cut()
    with pytest.raises(BadAudio, match=rf"a\.wav.*sampling rate is {rate:,} Hz"):
        SpeechDataset(tokenizer, stored=False, augmenter=None)._load(cut)


def test_prepare_leaves_impossible_rates_out(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav_header(15_999_989, 4_000_000))
    write_audio(tmp_path / "b.wav")
    (tmp_path / "table.tsv").write_text("a.wav\tgo\nb.wav\tgo\n")
    options = ["--output", str(tmp_path / "out"), "--num-jobs", "1", "--tokens", "char"]
    options += ["--dev-share", "0", "--test-share", "0"]
    assert pruned_rnnt(["prepare", "own", str(tmp_path / "table.tsv"), *options]) == 0
    (line,) = (tmp_path / "out/left_out.jsonl").read_text().splitlines()
    assert '"sampling rate above 768,000 Hz", "details": "15,999,989 Hz"' in line


def test_libmpg123_messages_are_suppressed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.mp3"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.2, 0.2, 64000), 16000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    soundfile.info(path)
    assert "Warning" in capfd.readouterr().err  # what would be printed
    for read in READERS:
        assert len(read(path)) > 16000
    recording = Recording.from_file(path)
    capfd.readouterr()
    cut = MonoCut(id="a", start=0.0, duration=recording.duration, channel=0, recording=recording)
    with suppress(UnusableUtterance):
        read_samples(cut)
    (tmp_path / "table.tsv").write_text("a.mp3\tgo\n" * 3)
    options = ["--output", str(tmp_path / "out"), "--num-jobs", "1", "--tokens", "char"]
    pruned_rnnt(["prepare", "own", str(tmp_path / "table.tsv"), *options])
    error = capfd.readouterr().err
    assert "Warning" not in error


def fake_ffmpeg(folder: Path, output: Path, code: int = 0) -> Path:
    """A program called ffmpeg which writes the bytes of a file, whatever it is asked for."""
    folder.mkdir()
    program = folder / "ffmpeg"
    program.write_text(f"#!/bin/sh\ncat {output}\necho broken frame >&2\nexit {code}\n")
    program.chmod(0o755)
    return folder


def test_m4a_is_decoded_by_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples_SC = np.random.default_rng(0).uniform(-0.5, 0.5, (16000, 2)).astype(np.float32)
    soundfile.write(tmp_path / "a.au", samples_SC, 16000, subtype="FLOAT")
    path = tmp_path / "a.m4a"
    path.write_bytes(b"anything")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError, match=r"a\.m4a cannot be read as audio: \.m4a files need the program ffmpeg"
    ):
        read_audio(path)
    with pytest.raises(UnusableUtterance) as error:
        open_recording(str(path), False)
    assert error.value.details == f"{path}: .m4a files need the program ffmpeg; install it"
    programs = fake_ffmpeg(tmp_path / "good", tmp_path / "a.au")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for read in READERS:
        np.testing.assert_allclose(read(path), samples_SC.mean(axis=1), atol=1e-6)
    blocks = audio_blocks(path, 0.1)
    assert len(next(blocks)) == 1600
    blocks.close()
    programs = fake_ffmpeg(tmp_path / "bad", tmp_path / "a.au", 1)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for read in READERS:
        with pytest.raises(ValueError, match=r"a\.m4a cannot be read as audio: broken frame"):
            read(path)
