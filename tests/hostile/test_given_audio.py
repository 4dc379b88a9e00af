"""Samples of every type, audio that is too short, and truncated files: right or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.audio.audio_stream import short_or_blocks
from pruned_rnnt.data.audio.file_headers import describe_truncation
from pruned_rnnt.data.audio.recordings import UnusableUtterance, open_recording, read_samples
from pruned_rnnt.data.audio.samples import samples_at_16_khz
from pruned_rnnt.transcribe.recogniser import Recogniser
from tests.data.recorded_speech import truncate
from tests.transcribe.random_model import save_random_model, sound, transcribe_stdin

SOUND_S = sound(2.0)
FORMATS = {
    "wav": "PCM_16",
    "float.wav": "FLOAT",
    "adpcm.wav": "MS_ADPCM",
    "mp3": "MPEG_LAYER_III",
    "ogg": "VORBIS",
    "opus": "OPUS",
    "sph": "PCM_16",
    "ulaw.sph": "ULAW",
    "flac": "PCM_16",
    "aiff": "PCM_16",
    "float.aiff": "FLOAT",
    "au": "PCM_16",
    "rf64": "PCM_16",
    "w64": "PCM_16",
    "ulaw.w64": "ULAW",
    "voc": "PCM_16",
}


def write(path: Path, samples_S: Any = SOUND_S) -> Path:
    container = {"opus": "OGG", "sph": "NIST"}.get(path.suffix[1:], path.suffix[1:].upper())
    soundfile.write(path, samples_S, 16000, FORMATS[path.name.partition(".")[2]], format=container)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recogniser(model: Path) -> Recogniser:
    found = load(model)
    assert isinstance(found, Recogniser)
    return found


@pytest.mark.parametrize(
    "kind", ["float16", "float32", "float64", "int8", "uint8", "int16", "int32"]
)
def test_samples_of_every_type_are_scaled(kind: str) -> None:
    bits = np.iinfo(kind).bits if "int" in kind else 0
    if not bits:
        given_S, step = SOUND_S.astype(kind), np.finfo(kind).eps
    else:
        step = 2.0 ** (1 - bits)
        zero = 128 if kind == "uint8" else 0
        given_S = np.rint(SOUND_S.astype(np.float64) / step + zero).astype(kind)
    for audio in (given_S, torch.from_numpy(given_S)):
        got_S = samples_at_16_khz(audio, 16000)
        assert got_S.dtype == np.float32
        np.testing.assert_allclose(got_S, SOUND_S, rtol=0, atol=max(step, 1e-6))
    assert len(samples_at_16_khz(given_S, 48000)) == math.ceil(len(given_S) / 3)


def test_integers_are_transcribed_as_their_file(recogniser: Recogniser, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav")
    stored_S, _ = soundfile.read(path, dtype="int16")
    expected = recogniser.transcribe(path)
    assert expected.text
    for audio in (stored_S, torch.from_numpy(stored_S), stored_S / 32768):
        assert recogniser.transcribe(audio).text == expected.text


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (np.zeros((48000, 2), np.float32), 48000, r"the shape \(48000, 2\), needs \(S,\) samples"),
        (np.zeros((2, 48000), np.int16), 48000, r"the shape \(2, 48000\), needs \(S,\) samples"),
        (np.zeros(0, np.float32), 16000, "audio has no samples"),
        (np.float32(1.0), 16000, "audio is a single number"),
        ([0.0] * 9, 16000, "audio is a single number, needs an array"),
        (np.ones(9, np.complex64), 16000, "samples of complex64, needs floats"),
        (np.ones(9, np.int64), 16000, "samples of int64, needs floats"),
        (np.ones(9, np.uint16), 16000, "samples of uint16, needs floats"),
        (np.ones(9, bool), 16000, "samples of bool, needs floats"),
        (np.array(["a"] * 9), 16000, "samples of str"),
        (np.array([0.0, np.nan]), 16000, "NaN or infinite samples"),
        (np.array([0.0, -np.inf]), 16000, "NaN or infinite samples"),
        (np.array([0.0, 1e300]), 16000, "NaN or infinite samples"),
        (np.array([0.0, -12000.0]), 16000, "samples up to 12000, needs floats in"),
        (SOUND_S, 0, "sampling rate is 0 Hz, needs 1,000 to 768,000 Hz"),
        (SOUND_S, -16000, "sampling rate is -16,000 Hz"),
        (SOUND_S, 10**9, "sampling rate is 1,000,000,000 Hz"),
        (SOUND_S, 44100.5, "sampling_rate is 44100.5, needs a whole number"),
        (SOUND_S, "16000", "sampling_rate is '16000', needs a whole number"),
        (torch.zeros(2, 48000), 48000, r"features, \(T, 80\) of floats, but got \(2, 48000\)"),
        (torch.zeros(2, 3, 80), 16000, r"the shape \(2, 3, 80\)"),
        (torch.zeros(9, 80, dtype=torch.int16), 16000, "of torch.int16"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_other_samples_are_refused(
    recogniser: Recogniser, audio: Any, rate: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        recogniser.transcribe(audio, sampling_rate=rate)


def test_audio_of_no_output_frame_has_no_text(
    recogniser: Recogniser,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Padding it to a frame made a word of 25 ms of anything."""
    assert recogniser.model is not None
    frames = recogniser.model.encoder.receptive_field
    for samples, has_text in ((1, False), (400, False), (160 * frames, True)):
        audio_S = SOUND_S[4000 : 4000 + samples]
        result = recogniser.transcribe(audio_S)
        assert bool(result.text) is has_text, samples
        assert bool(result.words) is has_text
        in_file = recogniser.transcribe(write(tmp_path / "a.float.wav", audio_S))
        assert in_file.text == result.text
        if not has_text:
            assert result.score == 0.0
        data = (audio_S * 32767).astype("<i2").tobytes()
        assert transcribe_stdin(model, data, monkeypatch) == 0
        assert bool(capsys.readouterr().out.strip()) is has_text


@pytest.mark.parametrize("tag_bytes", [0, 35, 5000])
def test_an_mp3_file_without_its_length_is_not_truncated(
    recogniser: Recogniser, tmp_path: Path, tag_bytes: int
) -> None:
    """libsndfile takes the bytes of tags for audio."""
    path = tmp_path / "a.mp3"
    options = {"bitrate_mode": "CONSTANT", "compression_level": 0.5}
    soundfile.write(path, SOUND_S, 16000, **options)
    written = path.read_bytes()
    # 80,000 bits a second, of frames of 576 samples: the first one has the length.
    first, others = written[:360], written[360:]
    assert b"Info" in first
    assert others[:2] == first[:2]
    size = bytes((tag_bytes >> 7 * i) & 127 for i in (3, 2, 1, 0))
    path.write_bytes(b"ID3\x04\0\0" + size + bytes(tag_bytes) + others)
    assert soundfile.info(path).frames >= 576 * (len(others) // 360)
    assert recogniser.transcribe(path).warning == ""


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_files_are_described(
    recogniser: Recogniser, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / f"a.{name}")
    whole = recogniser.transcribe(path)
    assert whole.warning == describe_truncation(path) == ""
    assert not caplog.records
    read_audio(truncate(path, 0.95))
    assert f"{path} is truncated: it " in caplog.text
    part = recogniser.transcribe(path)
    assert part.warning.startswith("the file is truncated: it ")
    assert 0 < part.seconds < whole.seconds
    with pytest.raises(UnusableUtterance, match="truncated: fewer samples than the header says"):
        read_samples(open_recording(str(truncate(path)), False).to_cut())


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("most", [0, 10**6])
def test_a_flac_file_is_read_up_to_its_end(tmp_path: Path, most: int, has_length: bool) -> None:
    """As float32, and as the integers that it stores."""
    path = write(tmp_path / "a.flac")
    (whole_S,) = short_or_blocks(path, 10**6, pytest.fail)
    if not has_length:
        data = bytearray(path.read_bytes())
        data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
        path.write_bytes(data)
    warnings: list[str] = []
    part_S = np.concatenate(list(short_or_blocks(truncate(path), most, warnings.append)))
    assert len(part_S) == 3 * 4096  # whole frames
    scale = 1 if part_S.dtype == np.int16 else 32768
    np.testing.assert_array_equal(part_S * scale, whole_S[: len(part_S)])
    expected = "it has 12,288 of 32,000 samples" if has_length else "it cannot be read to its end: "
    assert [warning[: len(expected)] for warning in warnings] == [expected]
    with pytest.raises(ValueError, match=r"a\.flac cannot be read as audio: .+ lost sync"):
        list(short_or_blocks(truncate(path, 0.1), most, warnings.append))


def test_a_truncated_caf_file_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.caf", SOUND_S, 16000)
    with pytest.raises(ValueError, match=r"a\.caf cannot be read as audio: .+"):
        read_audio(truncate(tmp_path / "a.caf"))


def test_headers_without_a_size_are_no_truncation(recogniser: Recogniser, tmp_path: Path) -> None:
    """Programs that write to a pipe leave the largest number."""
    path = write(tmp_path / "a.wav")
    content = bytearray(path.read_bytes())
    for size in (0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000):
        content[40:44] = size.to_bytes(4, "little")
        path.write_bytes(content)
        assert describe_truncation(path) == ""
    path.write_bytes(content[:12] + b"LIST\xff\xff\xff\x7f" + content[12:])
    assert describe_truncation(path) == ""
    unknown = {
        "a.aiff": (4, b"\x7f\0\0\x2e"),
        "a.au": (8, b"\xff" * 4),
        "a.rf64": (20, bytes(8)),
        "a.w64": (16, b"\xff" * 8),
    }
    for name, (place, none) in unknown.items():
        path = truncate(write(tmp_path / name))
        content = bytearray(path.read_bytes())
        content[place : place + len(none)] = none
        path.write_bytes(content)
        assert describe_truncation(path) == "", name


def test_counted_bytes_at_the_end_may_be_missing(tmp_path: Path) -> None:
    """Some writers leave out what fills up the last chunk."""
    path = write(tmp_path / "a.aiff")
    path.write_bytes(path.read_bytes()[:-1])
    assert describe_truncation(path) == ""


def test_samples_behind_a_size_of_0_are_named(recogniser: Recogniser, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav")
    content = bytearray(path.read_bytes())
    content[40:44] = bytes(4)
    path.write_bytes(content)
    message = (
        r"a\.wav has no samples: its header says 0 bytes of samples, .* and 64,000 bytes follow"
    )
    for read in (read_audio, recogniser.transcribe):
        with pytest.raises(ValueError, match=message):
            read(path)
    with pytest.raises(UnusableUtterance) as error:
        open_recording(str(path), False)
    assert "64,000 bytes follow" in error.value.details
    path.write_bytes(content[:44])
    with pytest.raises(ValueError, match=r"a\.wav has no samples$"):
        read_audio(path)


@pytest.mark.parametrize("kind", ["ogg", "opus"])
def test_ogg_streams_one_after_the_other_are_named(
    recogniser: Recogniser, tmp_path: Path, kind: str
) -> None:
    path, other = write(tmp_path / f"a.{kind}"), write(tmp_path / f"b.{kind}")
    first = path.read_bytes()
    # The first page of a stream that runs beside the sound, as its description does.
    path.write_bytes(first[:14] + b"side" + first[18 : 28 + first[27]] + first)
    assert describe_truncation(path) == ""
    path.write_bytes(first + other.read_bytes())
    result = recogniser.transcribe(path)
    assert result.seconds == 2.0
    assert "several streams, one after the other, of which the first is read" in result.warning
    with pytest.raises(UnusableUtterance) as error:
        open_recording(str(path), False)
    assert "several streams" in error.value.details


def test_the_command_warns_of_truncated_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, cut = write(tmp_path / "a.wav"), truncate(write(tmp_path / "b.wav"))
    command = ["transcribe", str(model), str(good), str(cut), "--format", "jsonl"]
    assert main(command) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    warning = "the file is truncated: it has 31,978 of 64,000 bytes of samples"
    assert [line["warning"] for line in lines] == ["", warning]
    assert f"pruned-rnnt transcribe: warning: {cut}: {warning}\n" == shown.err
    assert main([*command, "--strict"]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert [json.loads(line)["file"] for line in shown.out.splitlines()] == [str(good)]
    assert f"pruned-rnnt transcribe: {cut}: {warning}\n" == shown.err
    assert main(["transcribe", str(model), "-", "--strict"]) == EXIT_USAGE


def test_a_name_with_a_line_break_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.wav").rename(tmp_path / "a\nb\x1b.wav")
    for kind in ("text", "ctm"):
        assert main(["transcribe", str(model), str(path), "--format", kind]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert all("a\\nb\\x1b" in line for line in shown.splitlines())
