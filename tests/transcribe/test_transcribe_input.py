"""Inputs of `pruned-rnnt transcribe`: folders, files for which memory runs out, standard input."""

from __future__ import annotations

import errno
import io
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.prepare.own_sources import FolderSource
from pruned_rnnt.transcribe import recordings
from pruned_rnnt.transcribe.live import open_samples
from pruned_rnnt.transcribe.transcribe_command import audio_inputs
from tests.transcribe.random_model import save_random_model, sound, transcribe_stdin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Audio at several depths, among other files."""
    for name in ("b.wav", "deep/er/a.FLAC", "deep/b.ogg"):
        path = tmp_path / "audio" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, sound(1.0), 16000)
    (tmp_path / "audio/notes.txt").write_text("no audio")
    (tmp_path / "audio/odd.wav").mkdir()
    return tmp_path / "audio"


def test_all_audio_files_of_a_folder_are_transcribed(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["transcribe", str(model), str(folder)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("\t")[0] for line in lines] == [
        str(folder / name) for name in ("b.wav", "deep/b.ogg", "deep/er/a.FLAC")
    ]
    assert all(line.partition("\t")[2] for line in lines)
    output = tmp_path / "out"
    assert main([*command, "--format", "ctm", "--output", str(output)]) == 0
    found = sorted(str(path.relative_to(output)) for path in output.rglob("*.ctm"))
    assert found == ["b.ctm", "deep/b.ctm", "deep/er/a.ctm"]
    assert (output / "deep/b.ctm").read_text().startswith("deep/b 1 0.")
    soundfile.write(folder / "b.flac", sound(1.0), 16000)
    assert main([*command, "--output", str(output)]) == EXIT_USAGE
    assert "2 audio files are called b" in capsys.readouterr().err
    (folder / "b.flac").unlink()
    (folder / "b.txt").mkdir()
    soundfile.write(folder / "b.txt" / "c.wav", sound(1.0), 16000)
    assert main([*command, "--output", str(output)]) == EXIT_USAGE
    message = f"{output}/b.txt and {output}/b.txt/c.txt cannot both be written"
    assert message in capsys.readouterr().err
    assert main(["transcribe", str(model), str(model)]) == EXIT_USAGE
    message = f"no audio files below {model}: expected files that end in .wav"
    assert message in capsys.readouterr().err


def test_folders_that_cannot_be_listed_are_named(
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As lost+found at the top of a disk."""
    listed, closed = os.scandir, [folder / "lost+found"]
    closed[0].mkdir()

    def scandir(path: Any) -> Any:
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert main(["transcribe", str(model), str(folder)]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    message = f"audio in {folder}/lost+found is not transcribed: Permission denied"
    assert message in "".join(shown.err.split("\n"))
    with pytest.raises(PermissionError):
        audio_inputs([str(folder / "lost+found")])
    with pytest.raises(PermissionError):
        list(FolderSource(folder))


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    for name in ("audio/b.wav", "disk/2024/a.wav"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "audio/calls").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/up").symlink_to(tmp_path / "audio")
    found = audio_inputs([str(tmp_path / "audio")]).files
    assert [item.name for item in found] == ["b", "calls/2024/a"]
    # A link beside its folder does not rename the recordings, wherever it is in the order.
    (tmp_path / "disk/1-newest").symlink_to(tmp_path / "disk/2024")
    found = audio_inputs([str(tmp_path / "audio")]).files
    assert [item.name for item in found] == ["b", "calls/2024/a"]


@pytest.mark.parametrize("output", [False, True])
def test_names_that_are_no_utf8_are_transcribed(
    output: bool, model: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind in ("wav", "flac"):
        (folder / f"{kind}_caf\udce9.{kind}").write_bytes(encoded(kind))
    (folder / "broken_caf\udce9.flac").write_text("no sound")
    rest = ["--output", str(tmp_path / "out")] if output else []
    assert main(["transcribe", str(model), str(folder), *rest]) == EXIT_FAILED
    shown = capfd.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert "wav_caf\\udce9." in shown.out
    assert "flac_caf\\udce9." in shown.out
    (error,) = shown.err.splitlines()
    assert "broken_caf" in error
    assert "cannot be read as audio: " in error


def test_other_transcripts_are_written_if_one_cannot_be(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = folder / f"{'a' * 251}.wav"  # The name of its transcript is too long.
    soundfile.write(long, sound(1.0), 16000)
    output = tmp_path / "out"
    for _ in range(2):
        command = ["transcribe", str(model), str(folder), "--format", "jsonl"]
        assert main([*command, "--output", str(output)]) == EXIT_FAILED
        shown = capsys.readouterr()
        assert len(shown.out.splitlines()) == len(list(output.rglob("*.jsonl"))) == 3
        assert f"transcribe: {long}: its transcript cannot be written: [Errno 36]" in shown.err


def test_a_full_disk_ends_the_command(
    model: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    command = ["transcribe", str(model), str(folder), "--output", str(tmp_path / "out")]
    assert main(command) == EXIT_FAILED
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_other_files_are_transcribed_if_one_runs_out_of_memory(
    error: Exception,
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = recordings.short_or_blocks

    def failing(path: Path, *rest: Any) -> object:
        if path.name == "b.wav":
            raise error
        return blocks(path, *rest)

    monkeypatch.setattr(recordings, "short_or_blocks", failing)
    assert main(["transcribe", str(model), str(folder)]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert f"transcribe: {folder}/b.wav: out of memory: " in shown.err
    error.args = ("something else",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="something else"):
            main(["transcribe", str(model), str(folder)])


def encoded(kind: str, subtype: str | None = None, rate: int = 16000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    samples_SC = np.stack([sound(1.0)] * channels, axis=1)
    soundfile.write(file, samples_SC, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["flac", "ogg", "mp3", "aiff", "au", "caf"])
def test_encoded_audio_on_standard_input_is_an_error(
    kind: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transcribe_stdin(model, encoded(kind), monkeypatch) == EXIT_FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"standard input is {kind}" in shown.err
    assert "ffmpeg -i pipe: -f s16le" in shown.err


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"ID3\x04" + bytes(3000), "mp3"),
        (b"\x00\x00\x00\x20ftypM4A " + bytes(3000), "m4a or mp4"),
        (b"\x1aE\xdf\xa3" + bytes(3000), "webm"),
        (b"\xff\xf1\x60\x40\x02\x00\xfc\xde\x04Lavc" + bytes(3000), "mp3 or aac"),
        (encoded("wav", rate=500), "wav, PCM: 1 channels of 16 bits at 500 Hz (sampling rate is"),
        (
            encoded("wav", channels=33),
            "33 channels of 16 bits at 16,000 Hz, needs 1 to 32 channels",
        ),
        (encoded("wav", "PCM_24"), "wav, PCM: 1 channels of 24 bits"),
        (sound(1.0).astype("<f4").tobytes(), "32-bit floats"),
        (encoded("wav")[:44], "no samples"),
        (encoded("wav", "FLOAT"), "wav, format 3: 1 channels of 32 bits"),
        (b"RIFF\0\0\0\0WAVEfmt ", "a broken wav file"),
        (b"RIFF\0\0\0\0WAVEdata" + bytes(100), "a broken wav file"),
        (b"", "no samples"),
        (b"a", "no samples"),
    ],
    # Not of the data, into which libsndfile writes the time.
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unusable_standard_input_is_an_error(
    data: bytes,
    name: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert transcribe_stdin(model, data, monkeypatch) == EXIT_FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert name in shown.err


def test_wav_header_of_the_right_rate_is_skipped(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = (sound(1.5) * 32767).astype("<i2").tobytes()
    assert transcribe_stdin(model, samples, monkeypatch) == 0
    expected = capsys.readouterr().out
    assert len(expected) > 5
    layout = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    head = b"WAVE" + b"LIST\x03\0\0\0abc\0" + b"fmt " + layout
    for size, tail in ((len(samples), b"LIST" + bytes(range(100))), (0xFFFFFFFF, b""), (0, b"")):
        data = b"RIFF" + struct.pack("<I", size) + head + b"data" + struct.pack("<I", size)
        assert transcribe_stdin(model, data + samples + tail, monkeypatch) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(("rate", "channels"), [(16000, 2), (48000, 1), (48000, 2), (8000, 1)])
def test_wav_header_gives_the_rate_and_the_channels(
    rate: int,
    channels: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = encoded("wav", rate=rate, channels=channels)
    assert transcribe_stdin(model, data, monkeypatch) == 0
    shown = capsys.readouterr().out
    stream = load(model).stream(chunk=8, left=8)
    integers_S = np.frombuffer(data[-2 * channels * 16000 :], dtype="<i2")
    stream.accept_waveform(integers_S.reshape(-1, channels), rate)
    stream.finish()
    while load(model).step([stream]):
        pass
    expected = " ".join(final.text for final in stream.take_finals())
    assert len(expected) > 5
    assert shown.split() == expected.split()


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_audio_goes_on_after_the_largest_size(size: int) -> None:
    """Programs that write a wav header to a pipe state it."""
    layout = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    header = b"RIFF\xff\xff\xff\xffWAVEfmt " + layout + b"data" + struct.pack("<I", size)
    begin = io.BytesIO(header + b"\1\0" * 1000)
    samples = open_samples(SimpleNamespace(read=lambda size: begin.read(size) or bytes(size)))
    read = sum(len(samples.read(2**28)) for _ in range(17))
    assert read > 2**32


def test_end_before_the_header_says_is_a_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = encoded("wav")
    assert transcribe_stdin(model, data, monkeypatch) == 0
    assert caplog.text == ""
    assert transcribe_stdin(model, data[:20001], monkeypatch) == 0
    assert caplog.text.count("ended before its wav header says") == 1


def test_samples_that_look_like_a_frame_header_are_accepted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin in (b"\xff\xfb\x90\x64", b"\xff\xf1\x60\x40\x02\x00\xfc\x00"):
        data = begin + (sound(0.5) * 32767).astype("<i2").tobytes()
        assert transcribe_stdin(model, data, monkeypatch) == 0


def test_digital_silence_gives_no_words(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "silent.wav"
    soundfile.write(path, np.zeros(32000), 16000)
    assert main(["transcribe", str(model), str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\t\n"
    result = load(model).transcribe(np.zeros(32000, dtype=np.float32))
    assert (result.text, result.words, result.seconds) == ("", (), 2.0)
    assert transcribe_stdin(model, bytes(64000), monkeypatch) == 0
    assert capsys.readouterr().out == ""
    # Without this rule, the model emits words for it.
    with torch.inference_mode():
        assert load(model).transcribe_features(torch.full((200, 80), -15.0)).text
    # Sound after the silence is transcribed.
    samples = np.concatenate([np.zeros(32000), sound(1.5)])
    assert transcribe_stdin(model, (samples * 32767).astype("<i2").tobytes(), monkeypatch) == 0
    assert len(capsys.readouterr().out) > 5
