"""`pruned-rnnt prepare commonvoice`: volunteers read sentences, in one of many languages."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, Manifests, run_recipe
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig


def _download(target: Path, options: argparse.Namespace) -> Path:
    from lhotse.recipes.commonvoice import download_commonvoice

    download_commonvoice(target, languages=options.language, release=options.release)
    return target / str(options.release)


def _manifests(folder: Path, options: argparse.Namespace) -> Manifests:
    from lhotse.recipes.commonvoice import prepare_commonvoice

    # Accept the folder of the language as well as the folder above it.
    if not (folder / options.language).is_dir() and folder.name == options.language:
        folder = folder.parent
    # lhotse requires a folder for its own copy of the manifests.
    with tempfile.TemporaryDirectory() as scratch:
        found = prepare_commonvoice(
            folder, scratch, languages=options.language, num_jobs=options.num_jobs
        )
    manifests: Manifests = found[options.language]
    return manifests


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--language",
        default="en",
        metavar="CODE",
        help="language code, for example en, de, fr, zh-CN (default en)",
    )
    parser.add_argument(
        "--release",
        default="cv-corpus-13.0-2023-03-09",
        metavar="NAME",
        help="release that --download fetches (default cv-corpus-13.0-2023-03-09)",
    )


RECIPE = CorpusRecipe(
    name="commonvoice",
    download=_download,
    manifests=_manifests,
    splits={"train": ["train"], "dev": ["dev"], "test": ["test"]},
    tokenizer=TokenizerConfig(kind="bpe", vocab_size=500),
    text=TextConfig(case="lower", punctuation="remove"),
    add_arguments=_add_arguments,
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
