"""Audio that a tiny model learns in seconds: every word is one tone followed by another.

Axes: S samples.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.input.prepared_folder import write_report
from pruned_rnnt.data.prepare.generated_corpus import Utterance, UtteranceWriter, write_cuts
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer

TONES = {
    "rise": (400, 3000),
    "fall": (3000, 400),
    "low": (250, 700),
    "high": (1700, 5000),
    "mid": (1200, 800),
}


def make_corpus(folder: Path, seed: int = 0) -> Path:
    """Prepare a folder with audio: 160 train utterances of one to four words, 8 dev, 16 test."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    texts = []
    with UtteranceWriter(folder, "tones") as writer:
        for split, count in (("train", 160), ("dev", 8), ("test", 16)):
            begin = len(writer.cuts)
            for index in range(count):
                words = [str(word) for word in rng.choice(list(TONES), size=rng.integers(1, 5))]
                texts.append(" ".join(words))
                samples_S = sing(words, rng)
                writer.add(
                    Utterance(
                        id=f"{split}-{index}", samples_S=samples_S, text=texts[-1], speaker="tones"
                    )
                )
            write_cuts(folder, split, writer.cuts[begin:])
    train_tokenizer(texts, TokenizerConfig(kind="bpe", vocab_size=24)).save(folder / "tokens")
    write_report(folder, {"command": "tests"})
    return folder


def sing(words: list[str], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Words between stretches of faint noise."""
    pieces = [np.zeros(int(0.1 * SAMPLING_RATE))]
    for word in words:
        for tone in TONES[word]:
            time_S = np.arange(int(rng.uniform(0.08, 0.14) * SAMPLING_RATE)) / SAMPLING_RATE
            pieces.append(0.3 * np.sin(2 * np.pi * tone * time_S) * np.hanning(len(time_S)))
        pieces.append(np.zeros(int(rng.uniform(0.08, 0.2) * SAMPLING_RATE)))
    samples_S = np.concatenate(pieces)
    return (samples_S + 0.003 * rng.standard_normal(len(samples_S))).astype(np.float32)
