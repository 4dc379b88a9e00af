"""Errors of word times against the reference times of a prepared set.

    python -m scripts.word_time_errors RUN --split test data.path=FOLDER

Aligns the utterances with their texts as `pruned-rnnt align` does, without the run's calibration
and, if it has one of times, with it, and prints the mean absolute and the mean error of starts and
ends of words.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pruned_rnnt.align.utterance import AlignedUtterance, align_batches
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration, read_calibration
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.run import LoadedModel, load_model, run_config


class TimeErrors(NamedTuple):
    """Seconds by which the start and the end of each word are late: (W,) of W words."""

    start_W: torch.Tensor
    end_W: torch.Tensor

    def __str__(self) -> str:
        return ", ".join(
            f"{name} off by {1000 * error_W.abs().mean():.0f} ms (median "
            f"{1000 * error_W.abs().median():.0f} ms; {1000 * error_W.mean():+.0f} ms on average)"
            for name, error_W in zip(("starts", "ends"), self, strict=True)
        )


def time_errors(
    model: SpeechModel,
    tokenizer: Tokenizer,
    batches: Sequence[Batch],
    calibration: Calibration | None,
) -> TimeErrors:
    """Errors of all utterances whose alignment has the words of the reference.

    Raises:
        ValueError: no utterance has word times and an alignment.
    """
    errors: list[tuple[float, float]] = []
    for batch in batches:
        spoken = dict(zip(batch.ids, batch.words, strict=True))
        for utterance in align_batches(model, [batch], tokenizer, calibration):
            words = spoken[utterance.id]
            if not isinstance(utterance, AlignedUtterance) or len(words) != len(utterance.words):
                continue
            errors += [
                (found.start - word.start, found.end - word.start - word.duration)
                for found, word in zip(utterance.words, words, strict=True)
            ]
    if not errors:
        raise ValueError(
            "no utterance has word times and an alignment: name a set with word times, such as "
            "`pruned-rnnt align --format lhotse` writes"
        )
    return TimeErrors(*torch.tensor(errors).T)


def load_run_and_split() -> tuple[Path, LoadedModel, list[Batch]]:
    """The run that the command line names, its model, and all batches of the split."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--split", default="test")
    options = parser.parse_intermixed_args()
    config = run_config(options.run, options.overrides)
    batches = list(DataModule(config.data).test_loader(options.split))
    return options.run, load_model(config), batches


def main() -> None:
    run, loaded, batches = load_run_and_split()
    found = read_calibration(run, loaded.model.vocab_size)
    calibrations: dict[str, Calibration | None] = {"without calibration": None}
    if found is not None and found.times is not None:
        calibrations["calibrated"] = found
    for name, calibration in calibrations.items():
        errors = time_errors(loaded.model, loaded.tokenizer, batches, calibration)
        print(f"{name}: {len(errors.start_W)} words, {errors}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).stem}: {error}")
