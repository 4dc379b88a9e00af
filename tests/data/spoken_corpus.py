"""A prepared folder of noise with texts, written by the package's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.input.prepared_folder import building, write_report
from pruned_rnnt.data.prepare.generated_corpus import Utterance, UtteranceWriter, write_cuts
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer

TEXTS = ("turn on the light", "stop now", "one two three four")


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 0.1 * rng.standard_normal(int(16000 * seconds), dtype=np.float32)


def make_corpus(output: Path, train: int = 40) -> Path:
    """`train` good utterances of 1 to 3 s, three that filters refuse, and 7 in dev and test."""
    with building(output) as folder:
        for split, count in (("train", train), ("dev", 7), ("test", 7)):
            with UtteranceWriter(folder, split) as writer:
                for index in range(count):
                    seconds = 1.0 + 2.0 * ((index * 7) % count) / count
                    writer.add(_utterance(f"{split}-{index}", seconds, TEXTS[index % 3], index))
                if split == "train":
                    writer.add(_utterance("no-text", 1.0, " ", 100))
                    writer.add(_utterance("too-short", 0.3, TEXTS[0], 101))
                    writer.add(_utterance("too-long", 6.0, TEXTS[0], 102))
                write_cuts(folder, split, writer.cuts)
        train_tokenizer(TEXTS, TokenizerConfig(kind="char")).save(folder / "tokens")
        write_report(folder, {})
    return output


def _utterance(name: str, seconds: float, text: str, seed: int) -> Utterance:
    words = tuple(
        AlignedWord(word=word, start=0.1 * number, duration=0.05)
        for number, word in enumerate(text.split())
    )
    return Utterance(
        id=name, samples_S=noise(seconds, seed), text=text, speaker="noise", words=words
    )
