"""A model with random parameters, which emits words for any sound, and sound for it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.model_file import ModelFile, save_model
from tests.tiny_models import tiny_conformer, tiny_model


def save_random_model(folder: Path) -> Path:
    """A causal model with random parameters in `folder`, which is returned."""
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="word"))
    model = tiny_model(tiny_conformer(causal=True), len(tokenizer), kind="full", ctc_scale=0.0)
    save_model(ModelFile(model, tokenizer), folder / "model.pt", "test")
    return folder


def transcribe_stdin(model: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of live transcription of `data`."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        monkeypatch.setattr(sys, "stdin", file)
        return main(["transcribe", str(model), "-", "--chunk", "8", "--left", "8"])


def sound(seconds: float) -> np.ndarray:
    """(S,) float32 at 16 kHz: a sweep in a little noise."""
    rng = np.random.default_rng(0)
    time = np.arange(int(16000 * seconds)) / 16000
    sweep = 0.3 * np.sin(2 * np.pi * np.cumsum(300 + 2000 * np.abs(np.sin(3 * time))) / 16000)
    return (sweep + 0.01 * rng.standard_normal(len(time))).astype(np.float32)


def babble(seconds: float) -> np.ndarray:
    """(S,) float32 at 16 kHz: noise whose level goes up and down like that of speech."""
    rng = np.random.default_rng(0)
    time = np.arange(int(16000 * seconds)) / 16000
    level = np.exp(2 * np.sin(2 * np.pi * 4 * time) - 5)
    return (level * rng.standard_normal(len(time))).astype(np.float32)
