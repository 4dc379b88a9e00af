"""Sounds to mix into training data: long recordings cut into windows, without texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lhotse.utils import fastcopy
from rich.console import Console

from pruned_rnnt.data.prepare.corpus_builder import BuildConfig, build_corpus
from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.manifest_source import with_paths_found
from pruned_rnnt.data.prepare.recipe_folder import PrepareReport
from pruned_rnnt.data.prepare.replacement import add_replace_argument, plain_options
from pruned_rnnt.data.prepare.shard_writer import ShardConfig
from pruned_rnnt.data.prepare.splits import NamedSplits

SPLIT = "noise"


def add_noise_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """The options of a recipe of noises, beside where they come from."""
    parser.add_argument(
        "--output", type=Path, default=Path(output), metavar="DIR", help=f"default: {output}"
    )
    parser.add_argument(
        "--window", type=float, default=10.0, metavar="S", help="seconds of a noise (default 10)"
    )
    parser.add_argument(
        "--features",
        choices=("stored", "waveform"),
        default="stored",
        help="as the speech has them (default stored)",
    )
    parser.add_argument("--num-jobs", "--jobs", type=int, default=2, metavar="N", help="default 2")
    add_replace_argument(parser)


def prepare_noises(
    name: str,
    recordings: Mapping[str, Any],
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Writes `options.output`/noise_cuts.jsonl.gz. recordings: lhotse's, by part of the corpus."""
    if options.window < 1:
        raise ValueError(f"--window must be at least 1 second, got {options.window}")
    config = BuildConfig(
        shard=ShardConfig(features=options.features, needs_text=False),
        num_jobs=options.num_jobs,
        needed_split=SPLIT,
    )
    report = PrepareReport(recipe=name, options=plain_options(options))
    entries = _Windows(recordings, options.window)
    build_corpus(options.output, entries, NamedSplits(), config, report, console)


class _Windows:
    """Windows of all recordings; what is left at an end and shorter than a second is dropped."""

    def __init__(self, recordings: Mapping[str, Sequence[Any]], seconds: float) -> None:
        self.recordings = recordings
        self.seconds = seconds

    def __iter__(self) -> Iterator[Entry]:
        for part, recordings in self.recordings.items():
            # lhotse lists them in the order of the file system.
            for recording in sorted(recordings, key=lambda recording: recording.id):
                whole = with_paths_found(recording.to_cut(), Path.cwd())
                for index, cut in enumerate(whole.cut_into_windows(self.seconds)):
                    if cut.duration >= 1:
                        name = f"{part}-{recording.id}-{index}"
                        yield Entry(
                            id=name,
                            origin=f"{part}:{recording.id}",
                            split=SPLIT,
                            cut=fastcopy(cut, id=name),
                        )
