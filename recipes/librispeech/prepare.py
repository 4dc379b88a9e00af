"""`pruned-rnnt prepare librispeech`: audio books in English, 960 hours for training."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, Manifests, run_recipe
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence

TRAIN = ("train-clean-100", "train-clean-360", "train-other-500")
EVALUATION = ("dev-clean", "dev-other", "test-clean", "test-other")


def downloader(parts: Callable[[argparse.Namespace], Sequence[str]]) -> Callable[..., Path]:
    """A download function for the parts that `parts(options)` returns."""

    def download(target: Path, options: argparse.Namespace) -> Path:
        from lhotse.recipes.librispeech import download_librispeech

        return Path(download_librispeech(target, dataset_parts=list(parts(options))))

    return download


def reader(parts: Callable[[argparse.Namespace], Sequence[str]]) -> Callable[..., Manifests]:
    """A function that reads those parts that exist, also from the folder above `LibriSpeech`."""

    def manifests(folder: Path, options: argparse.Namespace) -> Manifests:
        from lhotse.recipes.librispeech import prepare_librispeech

        if (folder / "LibriSpeech").is_dir():
            folder = folder / "LibriSpeech"
        present = [part for part in parts(options) if (folder / part).is_dir()]
        found: Manifests = prepare_librispeech(
            folder, dataset_parts=present, num_jobs=options.num_jobs
        )
        return found

    return manifests


def _parts(options: argparse.Namespace) -> Sequence[str]:
    return (*TRAIN[: {"100": 1, "460": 2, "960": 3}[options.hours]], *EVALUATION)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hours",
        choices=("100", "460", "960"),
        default="960",
        help="hours of training data: clean 100, clean 460 or all (default 960)",
    )


RECIPE = CorpusRecipe(
    name="librispeech",
    licence=Licence(id="CC-BY-4.0", source="https://www.openslr.org/12/"),
    download=downloader(_parts),
    manifests=reader(_parts),
    parts=_parts,
    splits={
        "train": TRAIN,
        "dev": ["dev-clean", "dev-other"],
        "test": ["test-clean"],
        "test-other": ["test-other"],
    },
    tokenizer=TokenizerConfig(kind="bpe", vocab_size=500),
    add_arguments=_add_arguments,
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
