"""The options of `pruned-rnnt prepare` that every recipe of recorded speech has."""

from __future__ import annotations

import argparse
from pathlib import Path

from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_builder import BuildConfig
from pruned_rnnt.data.prepare.entries import Limits
from pruned_rnnt.data.prepare.recipe_folder import add_common_arguments
from pruned_rnnt.data.prepare.replacement import check_replaceable
from pruned_rnnt.data.prepare.shard_writer import ShardConfig
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig


def add_corpus_arguments(
    parser: argparse.ArgumentParser, *, output: str, tokenizer: TokenizerConfig, text: TextConfig
) -> None:
    """How audio and text become data; defaults of the text options are the recipe's."""
    add_common_arguments(parser, output=output, tokenizer=tokenizer)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--features",
        choices=("stored", "waveform"),
        default="stored",
        help="compute features now, or leave it to training (default stored)",
    )
    data.add_argument(
        "--speeds",
        type=_speeds,
        default=(),
        metavar="A,B",
        help="further copies of the training data at these speeds, e.g. 0.9,1.1",
    )
    data.add_argument(
        "--shar",
        action="store_true",
        help="features or audio into tar files (lhotse Shar): for large corpora, which training "
        "then streams",
    )
    data.add_argument(
        "--shard-size",
        type=int,
        default=1000,
        metavar="N",
        help="utterances in a shard (default 1000)",
    )
    limits = Limits()
    for name, default in (
        ("min-duration", limits.min_duration),
        ("max-duration", limits.max_duration),
    ):
        data.add_argument(
            f"--{name}",
            type=float,
            default=default,
            metavar="S",
            help=f"seconds; others are left out (default {default})",
        )
    data.add_argument(
        "--channel",
        type=int,
        default=limits.channel,
        metavar="N",
        help="of files with several (default 0)",
    )
    data.add_argument(
        "--case",
        choices=("keep", "lower", "upper"),
        default=text.case,
        help=f"of the texts (default {text.case})",
    )
    data.add_argument(
        "--punctuation",
        choices=("keep", "remove"),
        default=text.punctuation,
        help=f"in the texts (default {text.punctuation})",
    )
    data.add_argument(
        "--spaces",
        choices=("keep", "remove"),
        default=text.spaces,
        help=f"in the texts (default {text.spaces})",
    )
    data.add_argument(
        "--tokenizer-from",
        type=Path,
        metavar="DIR",
        help="copy the tokenizer of this prepared folder instead of training one",
    )


def build_config(recipe: str, options: argparse.Namespace) -> BuildConfig:
    """What the options of `recipe` ask for.

    Raises:
        ValueError: values out of range, combinations that make no sense, or an output folder that
            must not be replaced.
    """
    if options.shard_size < 1:
        raise ValueError(f"--shard-size must be at least 1, got {options.shard_size}")
    if options.num_jobs < 1:
        raise ValueError(f"--num-jobs must be at least 1, got {options.num_jobs}")
    # Now, and not after hours of work.
    check_replaceable(recipe, options)
    if options.tokenizer_from is not None:
        PreparedFolder(options.tokenizer_from).tokenizer()
    return BuildConfig(
        shard=ShardConfig(
            features=options.features,
            shar=options.shar,
            speeds=options.speeds,
            limits=Limits(
                min_duration=options.min_duration,
                max_duration=options.max_duration,
                channel=options.channel,
            ),
            text=TextConfig(
                case=options.case, punctuation=options.punctuation, spaces=options.spaces
            ),
        ),
        shard_size=options.shard_size,
        tokenizer=TokenizerConfig(kind=options.tokens, vocab_size=options.vocab_size),
        tokenizer_from=options.tokenizer_from,
        seed=options.seed,
        num_jobs=options.num_jobs,
    )


def train_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Settings that training on the result needs."""
    if options.features != "waveform":
        return ()
    # Audio in tar files has been read from its commands.
    commands = getattr(options, "allow_commands", False) and not options.shar
    return ("data.features=waveform", *(("data.allow_commands=true",) if commands else ()))


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(speed) for speed in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"needs speeds like 0.9,1.1, got {text}") from error
