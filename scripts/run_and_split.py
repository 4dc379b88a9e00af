"""A command line that names a run and a split of prepared data."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.train.run import LoadedModel, load_model, run_config


class RunAndSplit(NamedTuple):
    """The model of a run, and all batches of the split."""

    run: Path
    loaded: LoadedModel
    batches: list[Batch]


def load_run_and_split(description: str) -> RunAndSplit:
    """Parses RUN, --split (default test) and section.key=value, and loads what they name."""
    parser = ArgumentParser(description=description)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--split", default="test")
    options = parser.parse_intermixed_args()
    config = run_config(options.run, options.overrides)
    batches = list(DataModule(config.data).test_loader(options.split))
    return RunAndSplit(options.run, load_model(config), batches)
