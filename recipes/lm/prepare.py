"""`pruned-rnnt prepare lm DATA`: texts for a language model, in the symbols of a recogniser."""

from __future__ import annotations

import argparse
import gzip
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from pruned_rnnt.data.input.filters import cut_text
from pruned_rnnt.data.input.lm_texts import write_texts
from pruned_rnnt.data.input.prepared_folder import PreparedFolder, building, write_report
from pruned_rnnt.data.prepare.replacement import (
    add_replace_argument,
    check_replaceable,
    plain_options,
)
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer

SYMBOLS_NAME = "train-symbols.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pruned-rnnt prepare lm`."""
    parser.add_argument(
        "data", type=Path, metavar="DATA", help="the recogniser's prepared data: tokens and texts"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="more texts to train on, one a line, .gz as well; written as those of DATA are",
    )
    parser.add_argument("--output", type=Path, default=Path("data/lm"), metavar="DIR")
    add_replace_argument(parser)
    parser.add_argument("--train", default="train", metavar="SPLIT", help="of DATA to train on")
    parser.add_argument("--valid", default="dev", metavar="SPLIT", help="of DATA to validate with")
    parser.add_argument(
        "--max-symbols", type=int, default=500, metavar="N", help="longer texts are left out"
    )
    parser.add_argument(
        "--symbols-text",
        action="store_true",
        help=f"also write {SYMBOLS_NAME}: the training texts in symbols, one text a line, from "
        "which n-gram tools make the ARPA file of decode.fusion.ngram",
    )


def prepare(options: argparse.Namespace, console: Console) -> None:
    """Makes the folder at `options.output`."""
    check_replaceable("lm", options)
    # Only texts are read here, so that no command runs.
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
                ids = _also_written(ids, tokenizer.symbols, folder / SYMBOLS_NAME)
            if write_texts(folder, split, ids) == 0:
                raise ValueError(f"no texts for the {split} split are left in {options.data}")
            counts[split] = encoder.counts
        report = {"recipe": "lm", "options": plain_options(options), "splits": counts}
        write_report(folder, report)
    for split, found in counts.items():
        console.print(
            f"{split}: {found['texts']:,} texts, {found['symbols']:,} symbols "
            f"({found['unknown']:,} unknown); left out: {found['too_long']:,} longer than "
            f"{options.max_symbols} symbols"
        )
    console.print(
        f"wrote {options.output}\nTrain: pruned-rnnt train --config configs/lm.yaml "
        + shlex.quote(f"data.path={options.output}"),
        markup=False,
        soft_wrap=True,
    )


class _Encoder:
    """Texts to symbols, counted; empty ones and those which are too long are left out."""

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
    for cut in data.cuts(split, lazy=True):
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
        raise ValueError(f"{path} is broken after line {number}: {error}") from error


def _also_written(
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
