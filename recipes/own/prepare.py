"""`pruned-rnnt prepare own SOURCE`: prepares your own audio and texts for training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from pruned_rnnt.data.prepare.own_corpus import add_arguments, prepare


def main(arguments: Sequence[str]) -> None:
    """The command line; `arguments` follow the recipe's name."""
    parser = argparse.ArgumentParser(prog="pruned-rnnt prepare own", description=__doc__)
    add_arguments(parser)
    prepare(parser.parse_args(arguments), Console())
