"""Shared code of the recipes for public corpora, which lhotse downloads and reads.

A recipe defines how to call lhotse's functions, which parts of the corpus make each split, and the
defaults for texts and symbols; see `recipes/`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pruned_rnnt.data.audio.recordings import last_line
from pruned_rnnt.data.prepare.corpus_builder import build_corpus
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_options import (
    add_corpus_arguments,
    build_config,
    options_for_json,
)
from pruned_rnnt.data.prepare.prepare_report import PrepareReport
from pruned_rnnt.data.prepare.splits import NamedSplits, SplitPlan, plan_splits
from pruned_rnnt.data.prepare.toolkit_sources import paired_entries
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence

# Utterances of a dev set that is drawn from train.
_MAX_DEV = 5000
# Of a corpus that has no splits.
_DRAWN_SHARES = {"dev_share": 0.05, "test_share": 0.05}
# By part of the corpus: {"recordings": ..., "supervisions": ...}, as lhotse's functions return it.
Manifests = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """A public corpus.

    name: name of the recipe, of its folder and of its configuration.
    licence: of the corpus, and where it comes from.
    splits: the parts of each split, by lhotse's names. Missing parts are ignored.
    parts: options -> the parts that they ask for, of which missing ones are named. Default: all.
    download: (target folder, options) -> folder of the corpus. Default: lhotse's function for
        `name`.
    manifests: (folder of the corpus, options) -> manifests by part. Default: lhotse's function.
    entries: (folder of the corpus, options) -> its utterances, instead of manifests; those without
        a split are distributed.
    dev_share: fraction of the training utterances that become dev, if the corpus has no dev part;
        whole speakers if they are known. All splits are then named train, dev or test.
    add_arguments: adds further options to the parser.
    """

    name: str
    tokenizer: TokenizerConfig
    licence: Licence
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parts: Callable[[argparse.Namespace], Sequence[str]] | None = None
    download: Callable[[Path, argparse.Namespace], Path] | None = None
    manifests: Callable[[Path, argparse.Namespace], Manifests] | None = None
    entries: Callable[[Path, argparse.Namespace], Iterable[CorpusEntry]] | None = None
    text: TextConfig = field(default_factory=TextConfig)
    dev_share: float = 0.0
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None


def lhotse_download(name: str) -> Callable[[Path, argparse.Namespace], Path]:
    """A download function that calls lhotse's `download_NAME` with the folder alone."""

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
    """Writes the prepared folder at `options.output`."""
    config = build_config(recipe.name, options)
    folder = corpus_folder(recipe.download or lhotse_download(recipe.name), options, console)
    if recipe.entries is not None:
        utterances = recipe.entries(folder, options)
        plan = plan_splits(utterances, **_DRAWN_SHARES, max_held_out=_MAX_DEV, seed=options.seed)
        report = corpus_report(recipe.name, options, recipe.licence, splits_by=plan.describe())
        build_corpus(options.output, utterances, plan, config, report, console)
        return
    read = recipe.manifests or _lhotse_manifests(recipe.name)
    manifests = read_manifests(recipe.name, read, folder, options)
    known = {part for parts in recipe.splits.values() for part in parts}
    if not known & manifests.keys():
        raise ValueError(
            f"{folder} has none of the parts {', '.join(sorted(known))}; "
            f"recipes/{recipe.name}/README.md describes the folder that --source needs"
        )
    parts = sorted(known & manifests.keys())
    report = corpus_report(recipe.name, options, recipe.licence, parts=parts)
    entries = _Entries(recipe, manifests, folder)
    named: NamedSplits | SplitPlan = NamedSplits()
    if recipe.dev_share > 0:
        shares = {"dev_share": recipe.dev_share, "test_share": 0.0}
        named = plan_splits(entries, **shares, max_held_out=_MAX_DEV, seed=options.seed)
    wanted = known if recipe.parts is None else recipe.parts(options)
    missing = [part for part in wanted if part not in manifests]
    notes = [f"parts that {folder} does not have: {', '.join(sorted(missing))}"] if missing else []
    for note in notes:
        console.print(f"hint: {note}", markup=False, soft_wrap=True)
    build_corpus(options.output, entries, named, config, report, console, notes=notes)


def corpus_report(
    name: str, options: argparse.Namespace, licence: Licence, **details: Any
) -> PrepareReport:
    """The report of a recipe of recorded speech; details: further values of the recipe."""
    return PrepareReport(
        recipe=name,
        options=options_for_json(options),
        licence=licence,
        details=details,
        train_options=_train_options(options),
    )


def _train_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Settings that training on the result needs."""
    if options.features != "waveform":
        return ()
    # With --shar the output of the commands is already in the tar files.
    commands = getattr(options, "allow_commands", False) and not options.shar
    return ("data.features=waveform", *(("data.allow_commands=true",) if commands else ()))


def add_source_arguments(
    parser: argparse.ArgumentParser, name: str, source: str = "folder of the unpacked corpus"
) -> None:
    """--source and --download; exactly one of them is required."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--source", type=Path, metavar="DIR", help=source)
    where.add_argument(
        "--download",
        type=Path,
        nargs="?",
        const=Path("data/download") / name,
        metavar="DIR",
        help=f"download the corpus into DIR (default data/download/{name}) unless it exists there",
    )


def corpus_folder(
    download: Callable[[Path, argparse.Namespace], Path],
    options: argparse.Namespace,
    console: Console,
) -> Path:
    """The folder of the corpus: --source, or the folder of the download.

    Raises:
        FileNotFoundError: --source is not a folder.
        ValueError: the download failed.
    """
    if options.download is None:
        if not options.source.is_dir():
            raise FileNotFoundError(f"--source {options.source} is not a folder")
        return Path(options.source)
    console.print(f"downloading into {options.download}", markup=False)
    try:
        return Path(download(options.download, options))
    except OSError as error:  # the base class of urllib's and tarfile's errors
        raise ValueError(
            f"the download failed ({last_line(error)}). Run the same command again to resume it, "
            "or download the corpus in another way and pass its folder with --source"
        ) from error


def read_manifests(
    name: str,
    function: Callable[[Path, argparse.Namespace], Manifests],
    folder: Path,
    options: argparse.Namespace,
) -> Manifests:
    """Calls lhotse's `function` on `folder`; ValueError if the layout is not what lhotse expects.

    name: name of the recipe, whose README describes the folder.
    """
    try:
        return function(folder, options)
    except Exception as error:  # lhotse raises errors of many types for missing files
        cause = ": ".join(dict.fromkeys((type(error).__name__, last_line(error))))
        raise ValueError(
            f"{folder} does not have the layout that lhotse expects ({cause}); "
            f"recipes/{name}/README.md describes the folder that --source needs"
        ) from error


class _Entries:
    """The entries of a corpus, split by split."""

    def __init__(self, recipe: CorpusRecipe, manifests: Manifests, folder: Path) -> None:
        self.recipe = recipe
        self.manifests = manifests
        self.folder = folder

    def __iter__(self) -> Iterator[CorpusEntry]:
        for split, parts in self.recipe.splits.items():
            for part in parts:
                if part not in self.manifests:
                    continue
                manifest = self.manifests[part]
                supervisions = ((f"{part}:{s.id}", s) for s in manifest["supervisions"])
                for entry in paired_entries(manifest["recordings"], supervisions, self.folder):
                    yield replace(entry, split=split)
