"""`pruned-rnnt prepare yesno`: a man says yes and no, eight words a recording."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pruned_rnnt.data.corpus_recipe import CorpusRecipe, Manifests, run_recipe
from pruned_rnnt.data.tokens import TokenizerConfig


def _download(target: Path, options: argparse.Namespace) -> Path:
    from lhotse.recipes.yesno import download_yesno

    return Path(download_yesno(target))


def _manifests(folder: Path, options: argparse.Namespace) -> Manifests:
    from lhotse.recipes.yesno import prepare_yesno

    manifests: Manifests = prepare_yesno(folder)
    return manifests


RECIPE = CorpusRecipe(
    name="yesno",
    download=_download,
    manifests=_manifests,
    splits={"train": ["train"], "test": ["test"]},
    tokenizer=TokenizerConfig(kind="word", vocab_size=5),
    dev_share=0.2,
)


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    run_recipe(RECIPE, __doc__, arguments)
