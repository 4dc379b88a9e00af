"""Write a corpus without recordings, in the layout of a real one.

    python -m scripts.fabricate librispeech FOLDER --share 0.01
    pruned-rnnt prepare librispeech --download FOLDER

All parts have the given share of the utterances of the real corpus, in texts of made-up words,
which tones spell: this tests a recipe, but says nothing about accuracy on speech. `prepare
--download` finds a finished download in FOLDER, and needs no network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.documented_parser import documented_parser
from scripts.fabricate.corpora import CORPORA, scaled_parts, train_hours
from scripts.fabricate.layouts import fabricate


def parser() -> argparse.ArgumentParser:
    options = documented_parser("scripts.fabricate", __doc__)
    options.add_argument("corpus", choices=sorted(CORPORA))
    options.add_argument("folder", type=Path, metavar="FOLDER")
    size = options.add_mutually_exclusive_group()
    size.add_argument("--share", type=float, default=0.01, help="of the real corpus (default 0.01)")
    size.add_argument("--hours", type=float, help="of speech for training, instead of a share")
    options.add_argument("--seconds", type=float, help="mean duration of an utterance")
    options.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options.add_argument("--seed", type=int, default=0)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    share = options.share
    if options.hours is not None:
        share = options.hours / train_hours(options.corpus)
    started = time.perf_counter()
    try:
        parts = scaled_parts(options.corpus, share, options.seconds)
        hours = fabricate(
            options.corpus, options.folder, parts, jobs=options.jobs, seed=options.seed
        )
    except (ValueError, FileExistsError) as error:
        parser().error(str(error))
    seconds = time.perf_counter() - started
    for part in parts:
        print(f"{part.name}: {part.utterances} utterances of {part.speakers} speakers")
    print(f"{hours:.2f} hours in {seconds:.1f} s: {hours * 3600 / seconds:,.0f} times real time")


if __name__ == "__main__":
    main()
