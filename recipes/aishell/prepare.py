"""`pruned-rnnt prepare aishell`: read Mandarin of 400 speakers; symbols are characters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pruned_rnnt.data.corpus_recipe import CorpusRecipe, Manifests, run_recipe
from pruned_rnnt.data.text import TextConfig
from pruned_rnnt.data.tokens import TokenizerConfig


def _download(target: Path, options: argparse.Namespace) -> Path:
    from lhotse.recipes.aishell import download_aishell

    return Path(download_aishell(target))


def _manifests(folder: Path, options: argparse.Namespace) -> Manifests:
    from lhotse.recipes.aishell import prepare_aishell

    manifests: Manifests = prepare_aishell(folder)
    return manifests


RECIPE = CorpusRecipe(
    name="aishell",
    download=_download,
    manifests=_manifests,
    splits={"train": ["train"], "dev": ["dev"], "test": ["test"]},
    tokenizer=TokenizerConfig(kind="char", vocab_size=5000),
    text=TextConfig(spaces="remove"),
)


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    run_recipe(RECIPE, __doc__, arguments)
