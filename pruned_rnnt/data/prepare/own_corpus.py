"""`pruned-rnnt prepare own`: a user's own audio and texts, in any of the usual formats."""

from __future__ import annotations

import argparse
import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.prepare.corpus_builder import build_corpus
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_options import (
    NumberOption,
    add_allow_commands_argument,
    add_corpus_arguments,
    add_number_arguments,
    build_config,
)
from pruned_rnnt.data.prepare.corpus_recipe import corpus_report
from pruned_rnnt.data.prepare.own_sources import FolderSource, open_source, unread_columns
from pruned_rnnt.data.prepare.splits import SingleSplit, SplitPlan, plan_splits
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.arguments import add_licence_arguments, licence_of
from pruned_rnnt.licences.chain import Licence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare own`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a folder of audio files, each with a .txt file of the same name; a .tsv or .csv "
        "table of path and text (SpeechBrain's tables too); a Kaldi data directory; a manifest of "
        "NeMo or lhotse (.json, .jsonl, .gz); a Hugging Face audio folder with metadata.csv or "
        "metadata.jsonl; LJSpeech's metadata.csv next to wavs/; a language of Common Voice, or the "
        "folder of several of them",
    )
    parser.add_argument(
        "--supervisions",
        type=Path,
        metavar="FILE",
        help="lhotse manifest of supervisions, if SOURCE is a manifest of recordings",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="replace $data_root (or another $NAME) at the start of a SpeechBrain table's paths by "
        "DIR",
    )
    which = "wav.scp entries that end in |, lhotse sources of type command"
    add_allow_commands_argument(parser, "SOURCE", which)
    for split in ("dev", "test"):
        text = f"fraction of the utterances to draw for {split} if SOURCE has no splits"
        add_number_arguments(parser, NumberOption(f"{split}-share", 0.05, "P", text))
    text = (
        "draw at most N utterances each for dev and test, twice that if whole speakers or "
        "recordings are drawn"
    )
    add_number_arguments(parser, NumberOption("held-out-most", 5000, "N", text))
    parser.add_argument(
        "--only-test",
        action="store_true",
        help="put everything into the test split, to test a model that was trained on other data; "
        "--tokenizer-from names those data",
    )
    add_licence_arguments(parser, "the data")
    tokenizer = TokenizerConfig(kind="bpe")
    add_corpus_arguments(parser, output="data/own", tokenizer=tokenizer, text=TextConfig())


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Writes the prepared folder at `options.output`."""
    licence = licence_of(options)
    if licence == Licence():
        licence = _known_licence(options.source)
    copied = options.tokenizer_from is not None
    if options.vocab_size is not None and (copied or options.tokens in ("char", "word")):
        other = "--tokenizer-from" if copied else f"--tokens {options.tokens}"
        raise ValueError(
            f"--vocab-size {options.vocab_size} has no effect with {other}: leave it out"
        )
    config = build_config("own", options)
    if options.only_test and options.tokenizer_from is None:
        raise ValueError(
            "--only-test needs --tokenizer-from with the data that the model was trained on"
        )
    kind, source = open_source(
        options.source,
        options.supervisions,
        data_root=options.data_root,
        allow_commands=options.allow_commands,
    )
    entries = DuplicateIdMarker(source)
    hints = [f"hint: {said}" for said in unread_columns(source)]
    for line in (*hints, f"{options.source}: {kind}, counting utterances ..."):
        console.print(line, markup=False, soft_wrap=True)
    plan: SplitPlan | SingleSplit
    if options.only_test:
        plan, config = SingleSplit("test"), replace(config, required_split="test")
    else:
        plan = plan_splits(
            entries,
            dev_share=options.dev_share,
            test_share=options.test_share,
            max_held_out=options.held_out_most,
            seed=options.seed,
        )
        if plan.utterances:
            console.print(f"hint: {plan.describe()}", markup=False, soft_wrap=True)
    report = corpus_report("own", options, licence, kind=kind, splits_by=plan.describe())
    notes = [f"from {options.source} ({kind})", *hints]
    build_corpus(
        options.output,
        entries.marked(),
        plan,
        config,
        report,
        console,
        notes=notes,
        total=entries.count,
    )
    console.print(
        f"Details of the corpus and of utterances left out: {options.output}/report.txt",
        markup=False,
        soft_wrap=True,
    )


def _known_licence(source: Path) -> Licence:
    """The licence in prepare.json, if the source is a manifest of another prepared folder.

    Raises ValueError if prepare.json is damaged.
    """
    return PreparedFolder(source.parent).origin().licence if source.is_file() else Licence()


class DuplicateIdMarker:
    """Iterates over the entries of a source and can mark those whose id occurred before.

    count: number of entries; None until the first complete iteration.

    The first complete iteration collects a hash of eight bytes per id, so that large corpora need
    little memory. Afterwards only the hashes of repeated ids are kept.
    """

    def __init__(self, entries: Iterable[CorpusEntry]) -> None:
        self._entries = entries
        self.count: int | None = None
        self._repeated: frozenset[int] | None = None

    def __iter__(self) -> Iterator[CorpusEntry]:
        """The entries as they are in the source; those of `marked` once it was read."""
        if self._repeated is not None:
            yield from self.marked()
            return
        digests = array("Q")
        for entry in self._entries:
            digests.append(_digest(entry.id))
            yield entry
        self.count = len(digests)
        ordered = np.frombuffer(digests, dtype=np.uint64)
        ordered.sort()  # in place: a copy would double the memory
        self._repeated = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())

    def marked(self) -> Iterator[CorpusEntry]:
        """The entries; all but the first entry of an id have `problem` set, or, of files in a
        folder, another id.

        Reads the whole source first if no iteration was complete before.
        """
        if self._repeated is None:
            deque(self, maxlen=0)
        repeated = self._repeated or frozenset()
        first: dict[str, str] = {}
        for entry in self._entries:
            if repeated and _digest(entry.id) in repeated:
                origin = first.setdefault(entry.id, entry.origin)
                if origin == entry.origin or entry.problem:
                    pass
                elif isinstance(self._entries, FolderSource):
                    entry = replace(entry, id=self._entries.other_id(entry))
                else:
                    entry = replace(entry, problem="second entry of the same id", details=origin)
            yield entry


def _digest(name: str) -> int:
    encoded = name.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
