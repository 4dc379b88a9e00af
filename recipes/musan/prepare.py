"""`pruned-rnnt prepare musan`: music, speech and noise to mix into training data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lhotse.utils import fastcopy
from rich.console import Console

from pruned_rnnt.data.prepare.corpus_builder import BuildConfig, build_corpus
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_options import (
    add_output_arguments,
    check_replaceable,
    options_for_json,
)
from pruned_rnnt.data.prepare.corpus_recipe import (
    Manifests,
    add_source_arguments,
    corpus_folder,
    lhotse_download,
    read_manifests,
)
from pruned_rnnt.data.prepare.prepare_report import PrepareReport
from pruned_rnnt.data.prepare.shard_writer import ShardConfig
from pruned_rnnt.data.prepare.splits import NamedSplits
from pruned_rnnt.data.prepare.toolkit_sources import with_absolute_paths
from pruned_rnnt.licences.chain import Licence

SPLIT = "noise"
PARTS = ("music", "speech", "noise")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser, "musan")
    add_output_arguments(parser, "data/musan")
    parser.add_argument(
        "--window",
        type=float,
        default=10.0,
        metavar="S",
        help="cut recordings into windows of S seconds (default 10)",
    )
    parser.add_argument(
        "--features",
        choices=("stored", "waveform"),
        default="stored",
        help="the same choice as for the speech that the noise is mixed into (default stored)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts of MUSAN to use (default: all three)",
    )


def _manifests(folder: Path, options: argparse.Namespace) -> Manifests:
    from lhotse.recipes.musan import prepare_musan

    manifests: Manifests = prepare_musan(folder, parts=options.parts)
    return manifests


class _Windows:
    """Entries for consecutive windows of all recordings; a rest of less than 1 s is dropped."""

    def __init__(self, recordings: Mapping[str, Sequence[Any]], seconds: float) -> None:
        self.recordings = recordings
        self.seconds = seconds

    def __iter__(self) -> Iterator[CorpusEntry]:
        for part, recordings in self.recordings.items():
            # lhotse lists them in the order of the file system.
            for recording in sorted(recordings, key=lambda recording: recording.id):
                whole = with_absolute_paths(recording.to_cut(), Path.cwd())
                for index, cut in enumerate(whole.cut_into_windows(self.seconds)):
                    if cut.duration >= 1:
                        name = f"{part}-{recording.id}-{index}"
                        yield CorpusEntry(
                            id=name,
                            origin=f"{part}:{recording.id}",
                            split=SPLIT,
                            cut=fastcopy(cut, id=name),
                        )


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog="pruned-rnnt prepare musan", description=__doc__)
    _add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.window < 1:
        raise ValueError(f"--window must be at least 1 second, got {options.window}")
    check_replaceable("musan", options)
    console = Console()
    folder = corpus_folder(lhotse_download("musan"), options, console)
    manifests = read_manifests("musan", _manifests, folder, options)
    recordings = {part: manifest["recordings"] for part, manifest in manifests.items()}
    config = BuildConfig(
        shard=ShardConfig(features=options.features, needs_text=False),
        num_jobs=options.num_jobs,
        required_split=SPLIT,
    )
    report = PrepareReport(
        recipe="musan",
        options=options_for_json(options),
        licence=Licence(id="CC-BY-4.0", source="https://www.openslr.org/17/"),
    )
    entries = _Windows(recordings, options.window)
    build_corpus(options.output, entries, NamedSplits(), config, report, console)
