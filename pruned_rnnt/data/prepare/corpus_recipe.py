"""What recipes of public corpora share: lhotse downloads and reads them, the rest is here.

A recipe says how lhotse's functions are called, which parts of the corpus make which split, and
which texts and symbols are usual for it; see `recipes/`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pruned_rnnt.data.audio.recordings import last_line
from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.prepare.corpus_builder import build_corpus
from pruned_rnnt.data.prepare.corpus_options import (
    add_corpus_arguments,
    build_config,
    train_options,
)
from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.manifest_source import paired_entries
from pruned_rnnt.data.prepare.recipe_folder import PrepareReport
from pruned_rnnt.data.prepare.replacement import plain_options
from pruned_rnnt.data.prepare.splits import NamedSplits
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.tokenizer import TokenizerConfig

# Of each part of a corpus: {"recordings": ..., "supervisions": ...}, as lhotse's functions give it.
Manifests = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """A public corpus.

    name: of the recipe, its folder and its configuration.
    splits: the parts of each split, in lhotse's names. Parts that are not there are left out.
    download: (target folder, options) -> folder of the corpus; lhotse's of this name by default.
    manifests: (folder of the corpus, options) -> manifests by part; lhotse's by default.
    dev_share: share of the training utterances that becomes dev, for a corpus without a dev part.
    add_arguments: adds options of the recipe's own.
    """

    name: str
    splits: Mapping[str, Sequence[str]]
    tokenizer: TokenizerConfig
    download: Callable[[Path, argparse.Namespace], Path] | None = None
    manifests: Callable[[Path, argparse.Namespace], Manifests] | None = None
    text: TextConfig = field(default_factory=TextConfig)
    dev_share: float = 0.0
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None


def lhotse_download(name: str) -> Callable[[Path, argparse.Namespace], Path]:
    """A download by a function of lhotse's that takes nothing but the folder."""

    def download(target: Path, options: argparse.Namespace) -> Path:
        return Path(_lhotse_function("download", name)(target))

    return download


def _lhotse_manifests(name: str) -> Callable[[Path, argparse.Namespace], Manifests]:
    def manifests(folder: Path, options: argparse.Namespace) -> Manifests:
        found: Manifests = _lhotse_function("prepare", name)(folder)
        return found

    return manifests


def _lhotse_function(verb: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"lhotse.recipes.{name}")
    function: Callable[..., Any] = getattr(module, f"{verb}_{name}")
    return function


def run_recipe(recipe: CorpusRecipe, description: str, arguments: Sequence[str]) -> None:
    """The command line of a recipe; `arguments` follow its name."""
    parser = argparse.ArgumentParser(
        prog=f"pruned-rnnt prepare {recipe.name}", description=description
    )
    add_source_arguments(parser, recipe.name)
    add_corpus_arguments(
        parser, output=f"data/{recipe.name}", tokenizer=recipe.tokenizer, text=recipe.text
    )
    if recipe.add_arguments is not None:
        recipe.add_arguments(parser)
    prepare(recipe, parser.parse_args(arguments), Console())


def prepare(recipe: CorpusRecipe, options: argparse.Namespace, console: Console) -> None:
    """Makes the prepared folder at `options.output`."""
    config = build_config(recipe.name, options)
    folder = corpus_folder(recipe.download or lhotse_download(recipe.name), options, console)
    read = recipe.manifests or _lhotse_manifests(recipe.name)
    manifests = read_manifests(recipe.name, read, folder, options)
    known = {part for parts in recipe.splits.values() for part in parts}
    if not known & manifests.keys():
        raise ValueError(
            f"{folder} has none of the parts {', '.join(sorted(known))}: "
            f"recipes/{recipe.name}/README.md says what --source is"
        )
    report = PrepareReport(
        recipe=recipe.name,
        options=plain_options(options),
        details={"parts": sorted(known & manifests.keys())},
        train_options=train_options(options),
    )
    entries = _Entries(recipe, manifests, folder, options.seed)
    build_corpus(options.output, entries, NamedSplits(), config, report, console)


def add_source_arguments(
    parser: argparse.ArgumentParser, name: str, source: str = "the corpus, unpacked"
) -> None:
    """--source and --download, of which one is needed."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--source", type=Path, metavar="DIR", help=source)
    where.add_argument(
        "--download",
        type=Path,
        nargs="?",
        const=Path("data/download") / name,
        metavar="DIR",
        help=f"fetch it into DIR (default data/download/{name}), unless it is there already",
    )


def corpus_folder(
    download: Callable[[Path, argparse.Namespace], Path],
    options: argparse.Namespace,
    console: Console,
) -> Path:
    """--source, or where the download went.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the download failed, with what to do instead.
    """
    if options.download is None:
        if not options.source.is_dir():
            raise FileNotFoundError(f"--source {options.source} is not a folder")
        return Path(options.source)
    console.print(f"downloading into {options.download}", markup=False)
    try:
        return Path(download(options.download, options))
    except OSError as error:  # urllib's and tarfile's are of this kind
        raise ValueError(
            f"the download failed ({last_line(error)}): run again to go on, or fetch the corpus by "
            "other means and give its folder with --source"
        ) from error


def read_manifests(
    name: str,
    function: Callable[[Path, argparse.Namespace], Manifests],
    folder: Path,
    options: argparse.Namespace,
) -> Manifests:
    """What lhotse finds in `folder`; ValueError when it is not laid out as lhotse expects.

    name: of the recipe, whose README describes the folder.
    """
    try:
        return function(folder, options)
    except Exception as error:  # lhotse asserts, looks up and opens what should be there
        said = ": ".join(dict.fromkeys((type(error).__name__, last_line(error))))
        raise ValueError(
            f"{folder} is not laid out as lhotse expects ({said}): recipes/{name}/README.md says "
            "what --source is"
        ) from error


class _Entries:
    """Entries of a corpus, split by split."""

    def __init__(self, recipe: CorpusRecipe, manifests: Manifests, folder: Path, seed: int) -> None:
        self.recipe = recipe
        self.manifests = manifests
        self.folder = folder
        self.seed = seed

    def __iter__(self) -> Iterator[Entry]:
        for split, parts in self.recipe.splits.items():
            for part in parts:
                if part not in self.manifests:
                    continue
                manifest = self.manifests[part]
                supervisions = ((f"{part}:{s.id}", s) for s in manifest["supervisions"])
                for entry in paired_entries(manifest["recordings"], supervisions, self.folder):
                    yield replace(entry, split=self._split(split, entry.id))

    def _split(self, split: str, name: str) -> str:
        if (
            split == "train"
            and derived_seed("dev", self.seed, name) < self.recipe.dev_share * 2**32
        ):
            return "dev"
        return split
