"""`pruned-rnnt decode`: transcribe prepared sets with a run's model."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
    add_run_arguments,
    config_of_run,
    data_of_run,
    prepare_process,
    refuse_settings,
    split_arguments,
    start_driver,
)
from pruned_rnnt.run.folder import RunFolder, require_writable
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


_OF_TRANSCRIBE = {
    "decode.batch_seconds": "`transcribe`: batches of `decode` have data.valid_max_duration seconds"
}

_HELP = """\
Writes recogs-, errs-, wer-summary-, nbest- and scores- files to RUN/results. Their names end in
digits that stand for all inputs, so results with other inputs are never overwritten.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, decode, _HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="also fit word times and confidences to this set, such as decode.split=dev, and store "
        "them in RUN/calibration.json for all commands",
    )
    parser.add_argument(
        "--plot",
        metavar="ID[,ID...]",
        help="only draw these utterances of the set, into RUN/results/plots",
    )


def decode(options: argparse.Namespace, console: Console) -> int:
    """Transcribe a prepared set with a trained model; print WER and write result files."""
    start_driver()
    from pruned_rnnt.cli.decoding import Decoding
    from pruned_rnnt.decode.encode import choose_passes
    from pruned_rnnt.pretrained.load import fusion_language_model
    from pruned_rnnt.train.run import load_model

    refuse_settings(split_arguments(options.arguments)[0], _OF_TRANSCRIBE)
    config = config_of_run(options)
    splits = config.decode.splits
    if options.calibrate and len(splits) > 1:
        raise UsageError(f"--calibrate needs one split, got decode.split={config.decode.split}")
    loaded = load_model(config)
    choose_passes(config.decode, loaded.model)
    prepare_process(loaded.model)
    data = data_of_run(config, loaded.tokenizer)
    if data.tokenizer.symbols != loaded.tokenizer.symbols:
        raise UsageError(
            f"the tokens of {config.data.path} differ from those of the run {config.folder}: "
            "prepare these data again with the run's tokens, by `pruned-rnnt prepare ... "
            f"--tokenizer-from {config.folder}`"
        )
    language_model = fusion_language_model(config.decode, loaded.model, loaded.tokenizer)
    for split in splits:
        data.folder.manifests(split)  # before any is decoded
    require_writable(
        RunFolder(config.folder).results,
        "results are stored there; copy config.yaml, tokens and checkpoints of the run to a folder "
        "of yours, and decode that",
    )
    decoding = Decoding(
        config=config, loaded=loaded, data=data, language_model=language_model, console=console
    )
    for split in splits:
        if options.plot is not None:
            decoding.plot(split, options.plot.split(","))
        else:
            decoding.decode(split, calibrating=options.calibrate)
    if options.plot is None:
        folder = shlex.quote(str(config.folder))
        print(f"web page of curves and errors: pruned-rnnt report {folder}")
    return 0
