"""`pruned-rnnt prepare lm DATA`: texts for a language model, with the symbols of a speech model."""

from __future__ import annotations

import argparse
import gzip
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from pruned_rnnt.config.written import as_override
from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.lm_texts import write_texts
from pruned_rnnt.data.input.prepared_folder import (
    REPORT_NAME,
    PreparedFolder,
    building,
    write_report,
)
from pruned_rnnt.data.prepare.corpus_options import (
    add_replace_argument,
    check_replaceable,
    options_for_json,
)
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer

SYMBOLS_NAME = "train-symbols.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare lm`."""
    parser.add_argument(
        "data",
        type=Path,
        metavar="DATA",
        help="prepared data of the speech model, with its tokens and texts",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="more texts to train on, one per line, .gz accepted; in the same spelling (case, "
        "punctuation) as the texts of DATA",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("data/lm"),
        metavar="DIR",
        help="folder to write (default data/lm)",
    )
    add_replace_argument(parser)
    for name, split, purpose in (("train", "train", "train on"), ("valid", "dev", "validate on")):
        parser.add_argument(
            f"--{name}",
            default=split,
            metavar="SPLIT",
            help=f"split of DATA to {purpose} (default {split})",
        )
    parser.add_argument(
        "--max-symbols",
        type=int,
        default=500,
        metavar="N",
        help="leave out texts of more than N symbols (default 500)",
    )
    parser.add_argument(
        "--symbols-text",
        action="store_true",
        help=f"also write {SYMBOLS_NAME} with the symbols of the training texts, one text per "
        "line, from which n-gram tools make the ARPA file of decode.fusion.ngram",
    )


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Writes the folder at `options.output`."""
    check_replaceable("lm", options)
    # Only texts are read here, so no command runs.
    data = PreparedFolder(options.data, allow_commands=True)
    tokenizer = data.tokenizer()
    for path in options.text:
        if not path.is_file():
            raise FileNotFoundError(f"no text at {path}")
    with building(options.output) as folder:
        tokenizer.save(folder / "tokens")
        counts: dict[str, dict[str, int]] = {}
        for split, name, files in (
            ("train", options.train, options.text),
            ("dev", options.valid, []),
        ):
            encoder = _Encoder(tokenizer, options.max_symbols)
            ids = encoder.encode(_texts(data, name, files))
            if options.symbols_text and split == "train":
                ids = _also_write_symbols(ids, tokenizer.symbols, folder / SYMBOLS_NAME)
            if write_texts(folder, split, ids) == 0:
                raise ValueError(f"no usable texts for the {split} split in {options.data}")
            counts[split] = encoder.counts
        report = {"recipe": "lm", "options": options_for_json(options), "splits": counts}
        write_report(folder, report)
    for split, found in counts.items():
        console.print(
            f"{split}: {found['texts']:,} texts, {found['symbols']:,} symbols "
            f"({found['unknown']:,} unknown); left out: {found['too_long']:,} longer than "
            f"{options.max_symbols} symbols"
        )
    console.print(
        f"wrote {options.output}\nTrain: pruned-rnnt train --config lm "
        + shlex.quote(as_override("data.path", options.output)),
        markup=False,
        soft_wrap=True,
    )


class _Encoder:
    """Encodes texts and counts them; leaves out empty texts and texts that are too long."""

    def __init__(self, tokenizer: Tokenizer, max_symbols: int) -> None:
        self.tokenizer = tokenizer
        self.max_symbols = max_symbols
        self.counts = dict.fromkeys(("texts", "symbols", "unknown", "too_long"), 0)

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        for text in texts:
            ids = self.tokenizer.encode(text)
            if len(ids) > self.max_symbols:
                self.counts["too_long"] += 1
            elif ids:
                self.counts["texts"] += 1
                self.counts["symbols"] += len(ids)
                self.counts["unknown"] += ids.count(UNKNOWN_ID)
                yield ids


def _texts(data: PreparedFolder, split: str, files: Sequence[Path]) -> Iterator[str]:
    # The copies at other speeds, which `prepare --speeds` made, have the same texts.
    report = data.report() if (data.path / REPORT_NAME).is_file() else {}
    copies = tuple(f"_sp{speed}" for speed in report.get("options", {}).get("speeds", ()))
    for cut in data.cuts(split, lazy=True):
        if not cut.id.endswith(copies):
            yield cut_text(cut)
    for path in files:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number} is not UTF-8") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {error}") from error


def _also_write_symbols(
    texts: Iterable[list[int]], symbols: Sequence[str], path: Path
) -> Iterator[list[int]]:
    with path.open("w", encoding="utf-8") as file:
        for ids in texts:
            file.write(" ".join(symbols[index] for index in ids) + "\n")
            yield ids


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog="pruned-rnnt prepare lm", description=__doc__)
    add_arguments(parser)
    prepare(parser.parse_args(arguments), Console())
