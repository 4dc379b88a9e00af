"""Short wav files read without libsndfile are what libsndfile reads; all others are left to it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from pruned_rnnt.data.audio.wav import short_wav

SAMPLES = np.random.default_rng(0).integers(-(2**15), 2**15, 4000).astype(np.int16)


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
