"""`pruned-rnnt prepare commonvoice`: volunteers read sentences, in one of many languages."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, run_recipe
from pruned_rnnt.data.prepare.own_sources import CommonVoiceFolders, common_voice_folders
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence


def _download(target: Path, options: argparse.Namespace) -> Path:
    from lhotse.recipes.commonvoice import download_commonvoice

    download_commonvoice(target, languages=options.language, release=options.release)
    return target / str(options.release)


def _entries(folder: Path, options: argparse.Namespace) -> Iterable[CorpusEntry]:
    # The folder of the language, or the one above it.
    of_language = folder / options.language
    folder = of_language if of_language.is_dir() else folder
    found = common_voice_folders(folder)
    if found != (folder,):
        what = "train.tsv or validated.tsv of Common Voice next to a folder clips"
        if found:
            names = ", ".join(each.name for each in found)
            what = f"folder {options.language} (--language); it has {names}"
        raise ValueError(
            f"{folder} has no {what}; "
            "recipes/commonvoice/README.md describes the folder that --source needs"
        )
    return CommonVoiceFolders(found)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--release",
        default="cv-corpus-13.0-2023-03-09",
        metavar="NAME",
        help="release that --download fetches (default cv-corpus-13.0-2023-03-09)",
    )


RECIPE = CorpusRecipe(
    name="commonvoice",
    licence=Licence(id="CC0-1.0", source="https://commonvoice.mozilla.org/"),
    download=_download,
    entries=_entries,
    tokenizer=TokenizerConfig(kind="bpe"),
    text=TextConfig(case="lower", punctuation="remove", language="en"),
    add_arguments=_add_arguments,
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
