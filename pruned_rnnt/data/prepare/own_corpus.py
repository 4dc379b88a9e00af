"""`pruned-rnnt prepare own`: a user's own audio and texts, in any of the usual shapes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pruned_rnnt.data.prepare.corpus_builder import build_corpus
from pruned_rnnt.data.prepare.corpus_options import (
    add_corpus_arguments,
    build_config,
    train_options,
)
from pruned_rnnt.data.prepare.own_sources import open_source
from pruned_rnnt.data.prepare.recipe_folder import PrepareReport
from pruned_rnnt.data.prepare.repeated_ids import IdCheck
from pruned_rnnt.data.prepare.replacement import plain_options
from pruned_rnnt.data.prepare.splits import OneSplit, SplitPlan, plan_splits
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare own`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a folder of audio with .txt files beside; a .tsv or .csv table of path and text, "
        "SpeechBrain's as well; a Kaldi data directory; a manifest of NeMo or lhotse (.json, "
        ".jsonl, .gz); a Hugging Face audio folder with metadata.csv or metadata.jsonl; LJSpeech's "
        "metadata.csv beside wavs/",
    )
    parser.add_argument(
        "--supervisions",
        type=Path,
        metavar="FILE",
        help="when SOURCE is a lhotse manifest of recordings",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="the folder that $data_root (or another $NAME) at the beginning of paths of a "
        "SpeechBrain table stands for",
    )
    parser.add_argument(
        "--allow-commands",
        action="store_true",
        help="run the shell commands that SOURCE has instead of audio files (wav.scp entries which "
        "end in |, lhotse sources of type command); only for a SOURCE which you trust",
    )
    for split, share in (("dev", 0.05), ("test", 0.05)):
        parser.add_argument(
            f"--{split}-share",
            type=float,
            default=share,
            metavar="P",
            help=f"share of the utterances for {split}, when the source has no splits "
            f"(default {share})",
        )
    parser.add_argument(
        "--held-out-most",
        type=int,
        default=5000,
        metavar="N",
        help="utterances drawn for dev and for test, whatever the shares (default 5000)",
    )
    parser.add_argument(
        "--only-test",
        action="store_true",
        help="everything is test, for a model of other data: with --tokenizer-from its data",
    )
    tokenizer = TokenizerConfig(kind="bpe", vocab_size=500)
    add_corpus_arguments(parser, output="data/own", tokenizer=tokenizer, text=TextConfig())


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Makes the prepared folder at `options.output`."""
    config = build_config("own", options)
    if options.only_test and options.tokenizer_from is None:
        raise ValueError(
            "--only-test needs --tokenizer-from: the data that the model was trained on"
        )
    kind, source = open_source(
        options.source,
        options.supervisions,
        data_root=options.data_root,
        allow_commands=options.allow_commands,
    )
    entries = IdCheck(source)
    console.print(
        f"{options.source}: {kind}, counting utterances ...", markup=False, soft_wrap=True
    )
    plan: SplitPlan | OneSplit
    if options.only_test:
        plan, config = OneSplit("test"), replace(config, needed_split="test")
    else:
        plan = plan_splits(
            entries,
            dev_share=options.dev_share,
            test_share=options.test_share,
            most=options.held_out_most,
            seed=options.seed,
        )
    report = PrepareReport(
        recipe="own",
        options=plain_options(options),
        details={"kind": kind, "splits_by": plan.describe()},
        train_options=train_options(options),
    )
    note = f"from {options.source} ({kind})"
    build_corpus(
        options.output,
        entries.distinct(),
        plan,
        config,
        report,
        console,
        notes=[note],
        total=entries.count,
    )
    where = f"{options.output}/report.txt"
    console.print(
        f"{where} says what was found and what was left out", markup=False, soft_wrap=True
    )
