"""Recordings of tones, prepared for the models of tests/interop/parakeet_models.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from pruned_rnnt.cli import main

PITCHES = {"zero": 210, "one": 300, "two": 420, "three": 590}


def wave(text: str, seed: int = 0) -> np.ndarray:
    """(S,) a tone of 0.24 s for each word, with pauses and some noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(3840) / 16000
    parts = [np.zeros(1600)]
    for word in text.split():
        tone = sum(np.sin(2 * np.pi * PITCHES[word] * k * time) / k for k in (1, 2, 3, 5))
        parts += [0.2 * tone * np.hanning(len(time)), np.zeros(960)]
    samples = np.concatenate([*parts, np.zeros(1600)])
    return (samples + 0.003 * rng.standard_normal(len(samples))).astype(np.float32)


def make_recordings(folder: Path, count: int = 12, seed: int = 0) -> Path:
    """A table of recordings of 2 to 4 words."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(count):
        text = " ".join(rng.choice(list(PITCHES), rng.integers(2, 5)))
        soundfile.write(folder / f"u{index}.wav", wave(text, index), 16000)
        lines.append(f"u{index}.wav\t{text}\n")
    (folder / "table.tsv").write_text("".join(lines))
    return folder / "table.tsv"


def prepared(source: Path, output: Path, *arguments: str) -> Path:
    """The prepared data; arguments: of `prepare own`."""
    command = ["prepare", "own", str(source), "--output", str(output), "--num-jobs", "1"]
    assert main([*command, *arguments]) == 0
    return output
