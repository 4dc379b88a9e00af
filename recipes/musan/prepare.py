"""`pruned-rnnt prepare musan`: music, speech and noise to mix into training data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pruned_rnnt.data.prepare.corpus_recipe import (
    Manifests,
    add_source_arguments,
    corpus_folder,
    lhotse_download,
    read_manifests,
)
from pruned_rnnt.data.prepare.noise_corpus import add_noise_arguments, prepare_noises
from pruned_rnnt.data.prepare.replacement import check_replaceable


def _manifests(folder: Path, options: argparse.Namespace) -> Manifests:
    from lhotse.recipes.musan import prepare_musan

    manifests: Manifests = prepare_musan(folder, parts=options.parts)
    return manifests


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog="pruned-rnnt prepare musan", description=__doc__)
    add_source_arguments(parser, "musan")
    add_noise_arguments(parser, "data/musan")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("music", "speech", "noise"),
        default=["music", "speech", "noise"],
        help="default: all three",
    )
    options = parser.parse_args(arguments)
    check_replaceable("musan", options)
    console = Console()
    folder = corpus_folder(lhotse_download("musan"), options, console)
    manifests = read_manifests("musan", _manifests, folder, options)
    recordings = {part: manifest["recordings"] for part, manifest in manifests.items()}
    prepare_noises("musan", recordings, options, console)
