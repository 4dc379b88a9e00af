"""`pruned-rnnt prepare synthetic`: spoken commands by espeak-ng, many voices, times of all words.

Speakers are variants of the engine (other formants, pitch and timbre), each with every accent.
Those of dev and test are not among those of train.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pruned_rnnt.recipes.synthetic.commands import draw_command, vocabulary
from rich.console import Console

from pruned_rnnt.data.audio.waveform import add_white_noise, scale_to_level
from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.input.prepared_folder import building
from pruned_rnnt.data.prepare.corpus_writer import Utterance, UtteranceWriter
from pruned_rnnt.data.prepare.recipe_folder import (
    PrepareReport,
    add_common_arguments,
    add_count_arguments,
    save_tokenizer,
    write_splits,
)
from pruned_rnnt.data.prepare.replacement import check_replaceable, plain_options
from pruned_rnnt.data.prepare.shard_workers import run_shards
from pruned_rnnt.data.prepare.speech_synthesis import ACCENTS, VARIANTS, SpeechEngine, Voice
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig, train_tokenizer

SAMPLING_RATE = 16000
SHARD_SIZE = 500
DEV_VARIANTS = ("m6", "Denis", "belinda", "quincy")
TEST_VARIANTS = ("m2", "f4", "Michael", "linda", "adam", "paul", "steph", "Hugo")
HELD_OUT = (*DEV_VARIANTS, *TEST_VARIANTS)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Utterances first .. first + count - 1 of a split, made by one process."""

    folder: Path
    split: str
    first: int
    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.first:05d}"


def split_variants(split: str) -> tuple[str, ...]:
    """The speakers of a split: no speaker is in two splits."""
    if split == "dev":
        return DEV_VARIANTS
    if split == "test":
        return TEST_VARIANTS
    return tuple(variant for variant in VARIANTS if variant not in HELD_OUT)


def make_shard(shard: Shard) -> list[Any]:
    """Speaks and writes the utterances of a shard; returns their cuts."""
    engine = SpeechEngine()
    with UtteranceWriter(shard.folder, shard.name) as writer:
        for index in range(shard.first, shard.first + shard.count):
            writer.add(make_utterance(engine, shard.split, index, shard.seed))
        return writer.cuts


def make_utterance(engine: SpeechEngine, split: str, index: int, seed: int) -> Utterance:
    """Utterance number `index` of a split; sentence, voice, level and noise follow from `seed`."""
    utterance_seed = derived_seed("synthetic", seed, split, index)
    rng = random.Random(utterance_seed)
    text = draw_command(rng)
    variants = split_variants(split)
    voice = Voice(
        # In turn, so that every speaker says as much as any other.
        variant=variants[index % len(variants)],
        accent=rng.choice(ACCENTS),
        rate=rng.randint(150, 210),
        pitch=rng.randint(25, 75),
        pitch_range=rng.randint(30, 70),
    )
    speech = engine.speak(text, voice, sampling_rate=SAMPLING_RATE)
    silence_before, silence_after = rng.uniform(0.1, 0.3), rng.uniform(0.15, 0.3)
    samples_S = np.pad(
        scale_to_level(speech.samples_S, rng.uniform(-30.0, -18.0)),
        (int(silence_before * SAMPLING_RATE), int(silence_after * SAMPLING_RATE)),
    )
    samples_S = add_white_noise(
        samples_S, rng.uniform(-75.0, -50.0), np.random.default_rng(utterance_seed)
    )
    shift = int(silence_before * SAMPLING_RATE) / SAMPLING_RATE
    return Utterance(
        id=f"{split}-{index:05d}-{voice.accent}-{voice.variant}",
        samples_S=samples_S,
        text=text,
        speaker=voice.variant,
        words=tuple(
            AlignedWord(word=word.word, start=word.start + shift, duration=word.duration)
            for word in speech.words
        ),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare synthetic`."""
    tokenizer = TokenizerConfig(kind="unigram", vocab_size=120)
    add_common_arguments(parser, output="data/synthetic", tokenizer=tokenizer)
    add_count_arguments(parser, {"train": 2400, "dev": 120, "test": 300})


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Makes the corpus at `options.output`."""
    counts = {split: getattr(options, split) for split in ("train", "dev", "test")}
    for split, count in counts.items():
        if count < 1:
            raise ValueError(f"--{split} must be at least 1, got {count}")
    check_replaceable("synthetic", options)
    report = PrepareReport(recipe="synthetic", options=plain_options(options))
    with building(options.output) as folder:
        shards = [
            Shard(
                folder=folder,
                split=split,
                first=first,
                count=min(SHARD_SIZE, count - first),
                seed=options.seed,
            )
            for split, count in counts.items()
            for first in range(0, count, SHARD_SIZE)
        ]
        made = run_shards(
            make_shard,
            shards,
            sizes=[shard.count for shard in shards],
            num_jobs=options.num_jobs,
            description="speaking",
            console=console,
            fresh_processes=True,
        )
        parts = ((shard.split, cuts) for shard, cuts in zip(shards, made, strict=True))
        train = write_splits(folder, counts, parts, report)["train"]
        texts = [cut.supervisions[0].text for cut in train]
        config = TokenizerConfig(kind=options.tokens, vocab_size=options.vocab_size)
        # The whole vocabulary, so that no word of the grammar is ever unknown.
        save_tokenizer(folder, train_tokenizer([*texts, *vocabulary()], config), report)
        report.details["tokenizer"] = asdict(config)
        report.write(folder)
    report.show(options.output, console)


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(
        prog="pruned-rnnt prepare synthetic", description=__doc__.splitlines()[0]
    )
    add_arguments(parser)
    prepare(parser.parse_args(arguments), Console())
