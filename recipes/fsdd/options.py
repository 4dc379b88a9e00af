"""The options of `pruned-rnnt prepare fsdd`, and the checks of their values."""

from __future__ import annotations

import argparse

from pruned_rnnt.data.prepare.corpus_options import (
    NumberOption,
    add_common_arguments,
    add_count_arguments,
    add_number_arguments,
)
from pruned_rnnt.data.prepare.corpus_recipe import add_source_arguments
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare fsdd`."""
    add_source_arguments(parser, "fsdd", "folder of {digit}_{speaker}_{index}.wav files")
    add_common_arguments(
        parser, output="data/fsdd", tokenizer=TokenizerConfig(kind="word", vocab_size=13)
    )
    add_count_arguments(parser, {"train": 4000, "dev": 200, "test": 500})
    parser.add_argument(
        "--test-speakers",
        type=_names,
        default=(),
        metavar="A,B",
        help="hold out these speakers: only the test split has them, with all their recordings",
    )
    parser.add_argument(
        "--only-test",
        action="store_true",
        help="make only a test split, from all recordings of --source (see --tokenizer-from)",
    )
    parser.add_argument(
        "--indices",
        type=_index_range,
        metavar="A-B",
        help="with --only-test: use only recordings with these indices, for example 0-4",
    )
    for name, default, what in (
        ("speed", (0.85, 1.2), "speed factor (changes tempo, pitch and formants)"),
        ("tempo", (0.85, 1.15), "tempo factor (keeps the pitch)"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_range,
            default=default,
            metavar="A,B",
            help=f"range of the {what} of training utterances (default {default[0]},{default[1]})",
        )
    recorded = "fraction of the recorded training utterances that keep speed and tempo 1"
    spoken = "fraction of the training utterances spoken by synthetic voices"
    add_number_arguments(
        parser,
        NumberOption("natural", 0.3, "P", recorded),
        NumberOption("synthetic", 0.0, "P", spoken),
        NumberOption("synthetic-speakers", 120, "N", "number of synthetic voices"),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition(",")
    values = (float(low), float(high or low))
    if not 0.5 <= values[0] <= values[1] <= 2.0:
        raise argparse.ArgumentTypeError(f"needs A,B with 0.5 <= A <= B <= 2, got {text}")
    return values


def _index_range(text: str) -> range:
    low, _, high = text.partition("-")
    return range(int(low), int(high or low) + 1)


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for fractions or counts out of range, and for options that conflict."""
    for split in ("train", "dev", "test"):
        if getattr(options, split) < 1:
            raise ValueError(f"--{split} must be at least 1, got {getattr(options, split)}")
    for name in ("natural", "synthetic"):
        if not 0.0 <= getattr(options, name) <= 1.0:
            raise ValueError(f"--{name} must lie in [0, 1], got {getattr(options, name)}")
    if options.only_test and options.test_speakers:
        raise ValueError("--only-test uses every speaker in the folder; remove --test-speakers")
    if options.indices and not options.only_test:
        raise ValueError("--indices needs --only-test")
