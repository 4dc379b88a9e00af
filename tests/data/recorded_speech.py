"""Little audio files of a user's own data, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import soundfile

from pruned_rnnt.data.audio.audio_stream import short_or_blocks
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from tests.data.spoken_corpus import noise

TEXTS = ("turn on the light", "stop now", "one two three four", "go")


def write_audio(path: Path, seconds: float = 0.6, rate: int = 16000, channels: int = 1) -> Path:
    """Noise that depends on the name; the suffix is the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_S = resample(noise(seconds, sum(path.stem.encode())), 16000, rate)
    soundfile.write(path, np.stack([samples_S] * channels, axis=1), rate)
    return path


def audio_blocks(path: Path, seconds: float) -> Iterator[FloatArray]:
    """The file in blocks of so many seconds, as longer ones of a long file are read."""
    blocks = short_or_blocks(path, 0, on_truncation=lambda how: None)
    with patch("pruned_rnnt.data.audio.audio_stream._BLOCK_SECONDS", seconds):
        yield from blocks  # type: ignore[misc]


def truncate(path: Path, share: float = 0.5) -> Path:
    """Keeps the first part of a file's bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def text_of(index: int) -> str:
    return TEXTS[index % len(TEXTS)]
