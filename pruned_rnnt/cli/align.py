"""`pruned-rnnt align`: times of the words of a known text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    EXIT_FAILED,
    OVERRIDES_HELP,
    Parsers,
    add_command,
    data_of_run,
    prepare_process,
    run_inputs,
    split_arguments,
)
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


_HELP = """\
  pruned-rnnt align RUN --split test --format ctm
  pruned-rnnt align RUN talk.wav --text "the words of the talk"
Times are those of the CTC head, corrected by RUN/calibration.json if there is one
(pruned-rnnt decode RUN decode.split=dev --calibrate). Utterances without an alignment
are listed with the reason; the exit code is then 1. Without --output, each set and model gets a
folder in RUN/alignments; --output refuses a folder with alignments of another model or other data.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, align, _HELP + OVERRIDES_HELP)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="AUDIO | section.key=value",
        help="one audio file to align instead of a split of the run's data; settings of the run",
    )
    parser.add_argument("--text", help="the transcript of AUDIO")
    parser.add_argument(
        "--split", metavar="NAME", help="split of the run's data (default: decode.split)"
    )
    parser.add_argument(
        "--format",
        choices=("textgrid", "ctm", "lhotse"),
        default="textgrid",
        help="TextGrid for Praat, CTM for scoring tools, cuts for lhotse (default: textgrid)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: a folder in RUN/alignments"
    )


def align(options: argparse.Namespace, console: Console) -> int:
    """Find the times of the words of a known text."""
    from dataclasses import replace

    from pruned_rnnt.align.align_command import run_align
    from pruned_rnnt.align.output import AlignmentPlace
    from pruned_rnnt.decode.calibration import read_calibration
    from pruned_rnnt.decode.encode import choose_passes
    from pruned_rnnt.train.engine.run_files import read_p99_duration
    from pruned_rnnt.train.run import load_model, run_config

    settings, audio = split_arguments(options.arguments)
    config = run_config(options.run, settings)
    if len(audio) > 1 or bool(audio) != (options.text is not None):
        raise UsageError(
            "an audio file needs its --text: pass one of each, or neither to align a set"
        )
    if audio and options.split is not None:
        raise UsageError(
            "--split, which names a set of the run's data, cannot be combined with an audio file"
        )
    split = options.split or config.decode.split
    if not audio and len(config.decode.splits) > 1 and options.split is None:
        raise UsageError(f"align needs one split, got decode.split={split}")
    loaded = load_model(config)
    choose_passes(config.decode, loaded.model)
    prepare_process(loaded.model)
    calibration = read_calibration(options.run, loaded.model.vocab_size)
    inputs = run_inputs(config, loaded, calibration)
    place = AlignmentPlace(
        run=config.folder,
        inputs=(
            replace(inputs, split=Path(audio[0]).stem, own_data=True)
            if audio
            else replace(inputs, split=split)
        ),
        output=options.output,
    )
    tokenizer = loaded.tokenizer
    longest = read_p99_duration(options.run)
    done = run_align(
        loaded.model,
        tokenizer,
        (Path(audio[0]), options.text) if audio else (data_of_run(config, tokenizer), split),
        place,
        options.format,
        p99_duration=longest,
        calibration=calibration,
        console=console,
    )
    return 0 if done else EXIT_FAILED
