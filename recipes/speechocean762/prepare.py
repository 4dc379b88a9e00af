"""`pruned-rnnt prepare speechocean762`: English read by adults and children from China."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pruned_rnnt.recipes.speechocean762.corpus import NAME, CorpusPart, download, find_parts
from pruned_rnnt.recipes.speechocean762.speakers import group_of, hold_out_speakers, read_ages
from rich.console import Console

from pruned_rnnt.data.prepare.corpus_builder import build_corpus
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.corpus_options import (
    NumberOption,
    add_allow_commands_argument,
    add_corpus_arguments,
    add_number_arguments,
    build_config,
)
from pruned_rnnt.data.prepare.corpus_recipe import (
    add_source_arguments,
    corpus_folder,
    corpus_report,
)
from pruned_rnnt.data.prepare.splits import NamedSplits
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence

# The split that the corpus's own test speakers form.
CORPUS_TEST = "corpus-test"

LICENCE = Licence(id="CC-BY-4.0", source="https://www.openslr.org/101/")


@dataclass(frozen=True, kw_only=True)
class SpeakerSplits:
    """The utterances of the corpus with their splits; those of other groups are left out.

    held_out: the split of each speaker of the part train who is not for training.
    ages: in years, by speaker. speakers: all, adults or children.
    """

    parts: Mapping[str, CorpusPart]
    held_out: Mapping[str, str]
    ages: Mapping[str, int]
    speakers: str

    def __iter__(self) -> Iterator[CorpusEntry]:
        for name, part in self.parts.items():
            for entry in part.source:
                if self.speakers != "all" and not self._in_group(entry, part.folder):
                    continue
                split = CORPUS_TEST if name == "test" else "train"
                problem = entry.problem or ("" if entry.speaker else "not in utt2spk")
                yield replace(entry, split=self.held_out.get(entry.speaker, split), problem=problem)

    def _in_group(self, entry: CorpusEntry, folder: Path) -> bool:
        if not entry.speaker:
            return True  # reported as unusable
        if entry.speaker not in self.ages:
            raise ValueError(
                f"--speakers {self.speakers}: {folder / 'spk2age'} has no age for speaker "
                f"{entry.speaker}, who reads the utterance of {entry.origin}"
            )
        return group_of(self.ages[entry.speaker]) == self.speakers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare speechocean762`."""
    add_source_arguments(parser, NAME, "folder of the unpacked corpus, or a Kaldi data directory")
    add_corpus_arguments(
        parser,
        output=f"data/{NAME}",
        tokenizer=TokenizerConfig(kind="char", vocab_size=200),
        text=TextConfig(case="lower"),
    )
    parser.add_argument(
        "--speakers",
        choices=("all", "adults", "children"),
        default="all",
        help="use all speakers, those of 16 years or older, or the younger ones; the held-out "
        "speakers of both groups are the same as with all (default all)",
    )
    add_allow_commands_argument(parser, "the folder", "wav.scp entries that end in |")
    for split, count in (("test", 25), ("dev", 10)):
        text = f"speakers of the training half to hold out for {split}, before --speakers chooses"
        add_number_arguments(parser, NumberOption(f"{split}-speakers", count, "N", text))


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Writes the prepared folder at `options.output`."""
    config = build_config(NAME, options)
    folder = corpus_folder(download, options, console)
    parts = find_parts(folder, options.allow_commands)
    ages: dict[str, int] = {}
    for part in parts.values():
        path = part.folder / "spk2age"
        if path.is_file():
            ages |= read_ages(path)
        elif options.speakers != "all":
            raise ValueError(f"--speakers {options.speakers} needs {path}, which is missing")
    speakers = {entry.speaker for entry in parts["train"].source if entry.speaker}
    counts = {"test": options.test_speakers, "dev": options.dev_speakers}
    held_out = hold_out_speakers(speakers, ages, counts, options.seed)
    entries = SpeakerSplits(parts=parts, held_out=held_out, ages=ages, speakers=options.speakers)
    report = corpus_report(NAME, options, LICENCE, parts=sorted(parts))
    report.config = f"{NAME}_zipformer"
    build_corpus(options.output, entries, NamedSplits(), config, report, console)


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog=f"pruned-rnnt prepare {NAME}", description=__doc__)
    add_arguments(parser)
    prepare(parser.parse_args(arguments), Console())
