"""mp3 files are read to their end, also without a header that has the length, or with a part's.

Axes: S samples, C channels.
"""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, Recording
from lhotse.audio.backend import audio_backend, get_current_audio_backend

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.audio import mp3_length
from pruned_rnnt.data.audio.audio_file import read_audio, seconds_in_header
from pruned_rnnt.data.audio.audio_stream import short_or_blocks
from pruned_rnnt.data.audio.mp3_length import with_mp3_length
from pruned_rnnt.data.audio.recordings import (
    UnusableUtterance,
    _read_mp3_to_the_end,
    open_recording,
    read_samples,
)
from tests.data.recorded_speech import audio_blocks

RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


def first_frame(data: bytes) -> int:
    """The size of the Xing header, as the distance of the first two equal starts of frames."""
    places = [i for i in range(2000) if data[i] == 0xFF and data[i + 1] | 1 == data[1] | 1]
    return next(b - a for a, b in pairwise(places))


def encoded(seconds: int, rate: int = 16000, mode: str = "VARIABLE") -> bytes:
    """Noise, behind a header that has the length."""
    noise = np.random.default_rng(seconds).uniform(-0.9, 0.9, seconds * rate)
    file = io.BytesIO()
    options = {"bitrate_mode": mode, "compression_level": 0.5}
    soundfile.write(file, noise, rate, format="MP3", **options)
    return file.getvalue()


def tagged(body: bytes) -> bytes:
    return b"ID3\x04\0\0" + bytes((len(body) >> 7 * i) & 127 for i in (3, 2, 1, 0)) + body


def write_without_header(
    path: Path, rate: int = 16000, channels: int = 1, mode: str = "VARIABLE", tag: int = 0
) -> int:
    """Three seconds of noise, three of silence; returns the number of samples."""
    noise = np.random.default_rng(0).uniform(-0.9, 0.9, (3 * rate, channels))
    samples_SC = np.concatenate([noise, np.zeros_like(noise)])
    soundfile.write(path, samples_SC, rate, bitrate_mode=mode, compression_level=0.5)
    written = path.read_bytes()
    frame = first_frame(written)
    assert any(name in written[:frame] for name in (b"Xing", b"Info"))
    path.write_bytes((tagged(bytes(tag)) if tag else b"") + written[frame:])
    return len(samples_SC)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("tag", [0, 5000])
def test_the_end_of_a_variable_bit_rate_is_read(
    rate: int, channels: int, tag: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.mp3"
    samples = write_without_header(path, rate, channels, tag=tag)
    # libsndfile's own estimate, without which this test would test nothing
    assert soundfile.info(path).frames < 0.7 * samples
    # The encoder pads both ends.
    most = samples + 3 * 1152
    read_S = read_audio(path)
    assert samples * 16000 // rate <= len(read_S) <= most * 16000 // rate + 1
    assert len(np.concatenate(list(audio_blocks(path, 0.5)))) == len(read_S)
    assert seconds_in_header(path) == 6
    for source in (path, io.BytesIO(path.read_bytes())):
        with soundfile.SoundFile(with_mp3_length(source)) as file:
            assert samples <= file.frames <= most
            assert (file.samplerate, file.channels) == (rate, channels)
            assert len(file.read()) == file.frames


@pytest.mark.parametrize("order", [1, -1])
def test_samples_are_those_of_the_file_with_its_header(order: int, tmp_path: Path) -> None:
    """Nothing is inserted, and the sound begins where it did."""
    path = tmp_path / "a.mp3"
    noise_S = np.random.default_rng(0).uniform(-0.9, 0.9, 48000)
    samples_S = np.concatenate([noise_S, np.zeros(48000)][::order])
    soundfile.write(path, samples_S, 16000, bitrate_mode="VARIABLE", compression_level=0.5)
    expected, _ = soundfile.read(path)
    written = path.read_bytes()
    path.write_bytes(written[first_frame(written) :])
    found, _ = soundfile.read(with_mp3_length(path))
    # The encoder's header has its delay too, which is cut off then: a frame of this version.
    np.testing.assert_allclose(found[576:][:96000], expected, atol=1e-6)


def test_lhotse_reads_the_end_too(tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    samples = write_without_header(path)
    for is_command, audio in ((False, str(path)), (True, f"cat {path} |")):
        recording = open_recording(audio, is_command)
        assert recording.num_samples >= samples
        cut = recording.to_cut()
        assert len(read_samples(cut)) == recording.num_samples
        part = cut.truncate(offset=2.0, duration=2.0)
        assert len(read_samples(part)) == 32000
    with audio_backend("LibsndfileBackend"):
        assert Recording.from_file(path).num_samples < samples


def test_prepared_data_have_the_whole_recording(tmp_path: Path) -> None:
    samples = write_without_header(tmp_path / "a.mp3")
    (tmp_path / "table.tsv").write_text("a.mp3\tgo\n")
    options = ["--output", str(tmp_path / "out"), "--num-jobs", "1", "--tokens", "char"]
    options += ["--dev-share", "0", "--test-share", "0"]
    assert pruned_rnnt(["prepare", "own", str(tmp_path / "table.tsv"), *options]) == 0
    (cut,) = CutSet.from_file(tmp_path / "out/train_cuts.jsonl.gz")
    assert cut.duration >= samples / 16000


PICTURE = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("rate", [16000, 44100])
@pytest.mark.parametrize("mode", ["VARIABLE", "CONSTANT"])
@pytest.mark.parametrize(
    "between", [b"", tagged(PICTURE), b"TAG" + bytes(125)], ids=["nothing", "picture", "old tag"]
)
def test_joined_files_are_read_to_the_end(
    rate: int, mode: str, between: bytes, tmp_path: Path
) -> None:
    """The header of the first file has the length of that file."""
    path = tmp_path / "a.mp3"
    path.write_bytes(encoded(2, rate, mode) + between + encoded(3, rate, mode))
    assert soundfile.info(path).duration == 2.0
    warnings: list[str] = []
    read = sum(map(len, short_or_blocks(path, 0, warnings.append)))
    # The encoder pads both ends, and the second header is a silent frame.
    assert 5 * 16000 <= read <= (5 + 3 * 1152 / rate) * 16000 + 1
    assert not warnings
    samples_S, _ = soundfile.read(with_mp3_length(path))
    expected_S, _ = soundfile.read(io.BytesIO(encoded(2, rate, mode)))
    np.testing.assert_allclose(samples_S[:rate], expected_S[:rate], atol=1e-6)
    cut = open_recording(str(path), False).to_cut()
    part_S = read_samples(cut.truncate(offset=3.0, duration=1.0))
    # Frames before the part are needed to decode the first one.
    np.testing.assert_allclose(part_S[1152:], samples_S[3 * rate : 4 * rate][1152:], atol=1e-6)


def test_a_part_of_another_rate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(encoded(2) + encoded(3, 44100))
    warnings: list[str] = []
    assert sum(map(len, short_or_blocks(path, 0, warnings.append))) >= 32000
    assert len(warnings) == 1
    with pytest.raises(UnusableUtterance, match="truncated"):
        read_samples(open_recording(str(path), False).to_cut())


@pytest.mark.parametrize(
    "end",
    [b"TAG" + bytes(125), b"APETAGEX" + PICTURE, bytes(9000)],
    ids=["old tag", "ape", "zeros"],
)
@pytest.mark.parametrize(
    "start",
    [b"", tagged(bytes(50)), tagged(bytes(50)) + tagged(bytes(90))],
    ids=["no tag", "tag", "two tags"],
)
def test_tags_around_a_header_change_nothing(start: bytes, end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(start + encoded(2) + end)
    assert with_mp3_length(path) is path
    assert soundfile.info(path).duration == 2.0


def test_zeros_after_a_tag_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(tagged(bytes(50)) + bytes(500) + encoded(2))
    assert len(read_audio(path)) == 32000


def test_a_length_that_libsndfile_does_not_read_is_none(tmp_path: Path) -> None:
    """Fraunhofer's encoder names it VBRI."""
    path = tmp_path / "a.mp3"
    samples = write_without_header(path)
    data = path.read_bytes()
    frame = data[: first_frame(data)]
    path.write_bytes(frame[:36] + b"VBRI" + bytes(len(frame) - 40) + data)
    assert len(read_audio(path)) >= samples


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_other_files_are_opened_by_their_names(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    soundfile.write(path, np.random.default_rng(0).uniform(-0.9, 0.9, 16000), 16000)
    assert with_mp3_length(path) is path
    assert with_mp3_length(str(path)) == str(path)


@pytest.mark.parametrize("rate", RATES)
def test_one_bit_rate_needs_no_header(rate: int, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    samples = write_without_header(path, rate, mode="CONSTANT")
    assert with_mp3_length(path) is path
    assert soundfile.info(path).frames >= samples


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\xff\xfb", b"ID3", b"ID3\x04\0\0\x7f\x7f\x7f\x7f", b"\xff\xfb\x90\0" * 900],
)
def test_damaged_files_are_left_to_libsndfile(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(data)
    assert with_mp3_length(path) is path
    memory = io.BytesIO(data)
    assert with_mp3_length(memory) is memory
    assert with_mp3_length(tmp_path) is tmp_path
    assert with_mp3_length(tmp_path / "absent.mp3") == tmp_path / "absent.mp3"


def test_a_chosen_reader_of_lhotse_stays() -> None:
    with audio_backend("LibsndfileBackend") as chosen:
        _read_mp3_to_the_end()
        assert get_current_audio_backend() is chosen


def test_frames_are_counted_once_for_all_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mp3"
    samples = write_without_header(path)
    scanned: list[int] = []
    monkeypatch.setattr(
        mp3_length, "_start", lambda data, start=mp3_length._start: scanned.append(1) or start(data)
    )
    first = with_mp3_length(path).getvalue()
    assert with_mp3_length(path).getvalue() == first
    assert len(scanned) == 1
    # Another file of this name has its own number of frames.
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert soundfile.info(with_mp3_length(path)).frames < 0.8 * samples
    assert len(scanned) == 2
