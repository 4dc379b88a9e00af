"""The options of `pruned-rnnt prepare` that recipes share.

They protect a finished folder: only the same command, or --replace, replaces it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pruned_rnnt.config.load import ConfigError, value_of
from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.input.prepared_folder import REPORT_NAME, PreparedFolder, check_output
from pruned_rnnt.data.prepare.corpus_builder import BuildConfig
from pruned_rnnt.data.prepare.corpus_entry import UtteranceLimits
from pruned_rnnt.data.prepare.shard_writer import ShardConfig
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import (
    DEFAULT_VOCAB_SIZE,
    TOKENIZER_KINDS,
    TokenizerConfig,
    train_tokenizer,
)
from pruned_rnnt.system.json_file import read_json

# Options that do not change the contents of the folder.
_WITHOUT_EFFECT = frozenset(
    {"output", "num_jobs", "replace", "license", "license_note", "license_source"}
)
# An error message lists at most this many differences.
_MAX_DIFFERENCES = 3


class NumberOption(NamedTuple):
    """An option whose value is an int or a float, as its default is."""

    name: str
    default: float
    metavar: str
    help: str


def add_number_arguments(parser: argparse._ActionsContainer, *options: NumberOption) -> None:
    """Add them, with their defaults in the help."""
    for name, default, metavar, text in options:
        parser.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            metavar=metavar,
            help=f"{text} (default {default:g})",
        )


def add_allow_commands_argument(parser: argparse.ArgumentParser, source: str, which: str) -> None:
    """--allow-commands, to read a source whose texts name shell commands; which: where they are."""
    parser.add_argument(
        "--allow-commands",
        action="store_true",
        help=f"run the shell commands that {source} contains instead of audio files ({which}); use "
        f"it only if you trust {source}",
    )


def add_output_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """--output, --replace and --num-jobs of every recipe."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(output),
        metavar="DIR",
        help=f"folder to write (default {output})",
    )
    add_replace_argument(parser)
    parser.add_argument(
        "--num-jobs",
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="number of worker processes (default 2)",
    )


def add_common_arguments(
    parser: argparse.ArgumentParser, *, output: str, tokenizer: TokenizerConfig
) -> None:
    """The output options, --seed and those of the tokenizer of every recipe of speech."""
    add_output_arguments(parser, output)
    add_number_arguments(parser, NumberOption("seed", 42, "N", "seed of all random draws"))
    parser.add_argument(
        "--tokens",
        type=_token_kind,
        choices=TOKENIZER_KINDS,
        default=tokenizer.kind,
        help=f"kind of symbols that the model emits (default {tokenizer.kind})",
    )
    size = tokenizer.vocab_size
    default = f"{DEFAULT_VOCAB_SIZE}, more if the texts have many characters"
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=size,
        metavar="N",
        help="largest number of symbols, for unigram and bpe "
        f"(default {default if size is None else size})",
    )
    parser.add_argument(
        "--tokenizer-from",
        type=Path,
        metavar="DIR",
        help="copy the tokenizer of this prepared folder or run instead of training one",
    )


def _token_kind(text: str) -> str:
    if text in ("byte", "bytes"):
        raise argparse.ArgumentTypeError(
            f"{text} is none of {', '.join(TOKENIZER_KINDS)}: recipes of recorded speech have "
            "--byte-fallback, which adds bytes to any of these but word"
        )
    return text


def check_before_work(recipe: str, options: argparse.Namespace) -> None:
    """Raise now, not after hours of work, if the output folder must not be replaced, if
    --tokenizer-from names a folder without a tokenizer, or if --vocab-size is too small."""
    check_replaceable(recipe, options)
    if options.tokenizer_from is not None:
        PreparedFolder(options.tokenizer_from).tokenizer()
    else:
        _tokenizer_config(options)


def _tokenizer_config(options: argparse.Namespace) -> TokenizerConfig:
    try:
        return TokenizerConfig(
            kind=options.tokens,
            vocab_size=options.vocab_size,
            byte_fallback=getattr(options, "byte_fallback", False),  # not of every recipe
        )
    except ValueError as error:
        raise ValueError(f"{error}; change --vocab-size") from error


def tokenizer_of(options: argparse.Namespace, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the common options ask for: copied, or trained with these texts."""
    if options.tokenizer_from is not None:
        return PreparedFolder(options.tokenizer_from).tokenizer()
    return train_tokenizer(texts, _tokenizer_config(options))


def add_count_arguments(parser: argparse.ArgumentParser, counts: Mapping[str, int]) -> None:
    """--train, --dev and --test of recipes that generate their utterances.

    counts: the default of each split.
    """
    for split, count in counts.items():
        text = f"utterances in the {split} split"
        add_number_arguments(parser, NumberOption(split, count, "N", text))


def add_corpus_arguments(
    parser: argparse.ArgumentParser, *, output: str, tokenizer: TokenizerConfig, text: TextConfig
) -> None:
    """All options of a recipe of recorded speech; `text` holds the recipe's defaults for texts."""
    add_common_arguments(parser, output=output, tokenizer=tokenizer)
    parser.add_argument(
        "--byte-fallback",
        action="store_true",
        help="write rare characters as bytes, so that no character of any language is unknown",
    )
    parser.add_argument(
        "--language-tags",
        action="store_true",
        help="the model writes a tag of the language first, such as <|tr|>, which transcripts do "
        "not show; needs utterances with a language",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--features",
        choices=("stored", "waveform"),
        default="stored",
        help="stored: compute features now; waveform: compute them during training "
        "(default stored)",
    )
    data.add_argument(
        "--speeds",
        type=_speeds,
        default=(),
        metavar="A,B",
        help="add copies of the training data at these speeds, for example 0.9,1.1",
    )
    data.add_argument(
        "--shar",
        action="store_true",
        help="store features or audio in tar files (lhotse Shar), which training streams: for "
        "large corpora",
    )
    limits = UtteranceLimits()
    channel = (
        "channel to use of files with several channels; supervisions of lhotse manifests have "
        "their own, and N only chooses among several of one supervision"
    )
    shorter, longer = (f"leave out utterances {x} than S seconds" for x in ("shorter", "longer"))
    add_number_arguments(
        data,
        NumberOption("shard-size", 1000, "N", "utterances in a shard"),
        NumberOption("min-duration", limits.min_duration, "S", shorter),
        NumberOption("max-duration", limits.max_duration, "S", longer),
        NumberOption("channel", limits.channel, "N", channel),
    )
    for name, choices, chosen, what in (
        ("case", ("keep", "lower", "upper"), text.case, "case of the texts"),
        ("punctuation", ("keep", "remove"), text.punctuation, "punctuation in the texts"),
        ("spaces", ("keep", "remove"), text.spaces, "spaces in the texts"),
    ):
        data.add_argument(
            f"--{name}", choices=choices, default=chosen, help=f"{what} (default {chosen})"
        )
    data.add_argument(
        "--language",
        default=text.language,
        metavar="CODE",
        help="language of the texts, for example tr, unless SOURCE names those of its utterances: "
        "for rules of spelling, and for results by language"
        + (f" (default {text.language})" if text.language else ""),
    )


def build_config(recipe: str, options: argparse.Namespace) -> BuildConfig:
    """The configuration of `build_corpus` for parsed options of `recipe`.

    Raises:
        ValueError: values are out of range or contradict each other, or the output folder must
            not be replaced.
    """
    if options.shard_size < 1:
        raise ValueError(f"--shard-size must be at least 1, got {options.shard_size}")
    if options.num_jobs < 1:
        raise ValueError(f"--num-jobs must be at least 1, got {options.num_jobs}")
    for option in ("language_tags", "byte_fallback"):
        if getattr(options, option) and options.tokenizer_from is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} needs a new tokenizer, and --tokenizer-from copies "
                "one: leave one out"
            )
    if options.byte_fallback and options.tokens == "word":
        raise ValueError("--byte-fallback needs --tokens unigram, bpe or char, got word")
    check_before_work(recipe, options)
    return BuildConfig(
        shard=ShardConfig(
            features=options.features,
            shar=options.shar,
            speeds=options.speeds,
            limits=UtteranceLimits(
                min_duration=options.min_duration,
                max_duration=options.max_duration,
                channel=options.channel,
            ),
            text=TextConfig(
                case=options.case,
                punctuation=options.punctuation,
                spaces=options.spaces,
                language=options.language,
            ),
        ),
        shard_size=options.shard_size,
        tokenizer=_tokenizer_config(options),
        language_tags=options.language_tags,
        tokenizer_from=options.tokenizer_from,
        seed=options.seed,
        num_jobs=options.num_jobs,
    )


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(speed) for speed in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"needs speeds like 0.9,1.1, got {text}") from error


def add_replace_argument(parser: argparse.ArgumentParser) -> None:
    """--replace, the same in every recipe."""
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace a finished folder at --output even if it was prepared by another recipe, "
        "from another source, or with other options",
    )


def check_replaceable(recipe: str, options: argparse.Namespace) -> None:
    """Checks that `options.output` may be written.

    Raises:
        ValueError: no setting can name it; it contains files other than prepared data; or, without
            `options.replace`, data prepared by another recipe, from another source, or with other
            options.
    """
    output: Path = options.output
    try:
        value_of("data.path", overrides=[as_override("data.path", output)])
    except ConfigError as error:
        raise ValueError(f"choose another --output: {error}") from error
    check_output(output)
    if options.replace or not (output / REPORT_NAME).is_file():
        return
    differences = _differences(output / REPORT_NAME, recipe, options_for_json(options))
    if differences:
        raise ValueError(
            f"output {output} contains data prepared differently ({differences}); choose another "
            "--output, or add --replace to replace them"
        )


def options_for_json(options: argparse.Namespace) -> dict[str, Any]:
    """Parsed options as JSON values; paths become absolute."""
    return {name: _plain(value) for name, value in vars(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, range):
        return f"{value.start}-{value.stop - 1}"
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _differences(report_path: Path, recipe: str, options: Mapping[str, Any]) -> str:
    """Describes how a new command differs from a report; "" for no difference.

    Options that the report does not have were added in a later version and are ignored.
    """
    try:
        report = read_json(report_path)
        old_recipe, old = report["recipe"], report.get("options", {})
    except (ValueError, KeyError):
        return f"{REPORT_NAME} cannot be read"
    if old_recipe != recipe:
        return f"recipe {old_recipe}, now {recipe}"
    changed = [
        f"{name} {_shown(old[name])}, now {_shown(value)}"
        for name, value in options.items()
        if name not in _WITHOUT_EFFECT and name in old and old[name] != value
    ]
    more = len(changed) - _MAX_DIFFERENCES
    return "; ".join(changed[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) and value != "" else json.dumps(value)
