"""The command line: `pruned-rnnt prepare | train | decode | average | export | ...`.

Exit codes: 0 done; 1 the task failed (bad data, no checkpoint, training diverged); 2 wrong usage
or configuration; 130 interrupted from the keyboard; `train` that saved at a signal: 128 and the
signal's number (143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP, 138 for SIGUSR1).
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt import __version__, commands
from pruned_rnnt.align.arguments import add_align_arguments
from pruned_rnnt.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from pruned_rnnt.console import start_logging
from pruned_rnnt.export.arguments import add_export_arguments
from pruned_rnnt.interop.icefall.arguments import IMPORT_HELP, add_import_arguments
from pruned_rnnt.optional_packages import (
    PACKAGES_OF_EXTRA,
    MissingPackageError,
    missing_packages_named,
    require,
)
from pruned_rnnt.train.engine.average import AVERAGED_CHECKPOINTS
from pruned_rnnt.train.tasks.dry_run_command import add_rehearsal_arguments
from pruned_rnnt.transcribe.arguments import add_transcribe_arguments
from pruned_rnnt.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_DESCRIPTION = """\
Train and use transducer speech recognisers.

  pruned-rnnt prepare synthetic                          make data
  pruned-rnnt prepare own my_recordings.tsv              or take yours
  pruned-rnnt train --config synthetic                   train
  pruned-rnnt train exp/synthetic                        continue after an interruption
  pruned-rnnt decode exp/synthetic                       recognise the test set, WER
  pruned-rnnt inspect exp/synthetic                      what happened
  pruned-rnnt export exp/synthetic                       files for sherpa-onnx
  pruned-rnnt transcribe exp/synthetic a.wav             your own audio to text
"""
_OVERRIDES = """\
section.key=value changes one setting, e.g. train.steps=500 model.encoder.dim=144
decode.method=modified_beam. `pruned-rnnt inspect CONFIG.yaml --keys` lists them all.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = _parse(parser, arguments)
    try:
        require(*PACKAGES_OF_EXTRA["train"])
        console = start_logging()
        with missing_packages_named():
            code: int = options.command(options, console)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("pruned-rnnt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output has seen enough; what is still buffered must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except MissingPackageError as error:
        if options.debug:
            raise
        print(f"pruned-rnnt {options.name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        for_people = _is_for_people(error)
        if options.debug or not (for_people or _is_out_of_memory(error)):
            raise
        about = "" if for_people else "memory ran out: "
        print(f"pruned-rnnt {options.name}: {about}{error}", file=sys.stderr)
        return EXIT_USAGE if _is_usage(error) else EXIT_FAILED


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings and files may also follow an option, where argparse would not take them."""
    options, rest = parser.parse_known_args(arguments)
    names = [name for name in ("overrides", "arguments", "audio") if name in vars(options)]
    only_settings = names == ["overrides"]
    wrong = [
        item
        for item in rest
        if (item.startswith("-") and item != "-") or (only_settings and "=" not in item)
    ]
    if rest and (not names or wrong):
        parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if names:
        vars(options)[names[0]].extend(rest)
    return options


def _is_usage(error: Exception) -> bool:
    from pruned_rnnt.config import ConfigError

    return isinstance(error, ConfigError | UsageError)


def _is_for_people(error: Exception) -> bool:
    """Whether the message alone tells a user what to do; everything else keeps its traceback."""
    from pruned_rnnt.train.engine.bad_steps import TrainingStopped

    return isinstance(error, ValueError | OSError | TrainingStopped)


def _is_out_of_memory(error: Exception) -> bool:
    from pruned_rnnt.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pruned-rnnt",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pruned-rnnt {__version__}")
    parsers = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    prepare = _command(
        parsers,
        "prepare",
        commands.prepare,
        "make a data folder: audio and texts to manifests, features and tokens",
        "Recipes: " + ", ".join(_recipes()) + ". What follows the recipe's name are its own\n"
        "options: `pruned-rnnt prepare RECIPE --help`.",
    )
    prepare.add_argument("recipe", metavar="RECIPE", choices=_recipes())
    prepare.add_argument("recipe_options", nargs=argparse.REMAINDER, metavar="...")

    train = _command(
        parsers,
        "train",
        commands.train,
        "train a model, or continue a run from its newest checkpoint",
        "Under torchrun, one process a GPU: torchrun --nproc-per-node 4 -m pruned_rnnt train ...\n"
        "(for several machines: docs/tutorials/many_gpus.md). --dry-run shows whether memory\n"
        "suffices.\n"
        "RUN, the folder of an earlier run, continues it with the configuration saved there; so\n"
        "do the --config and settings that it was started with.\n\n" + _OVERRIDES,
    )
    train.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with the settings that differ from the defaults, or the name of a packaged "
        "one, such as own",
    )
    train.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a run although its configuration has changed",
    )
    add_rehearsal_arguments(train)
    train.add_argument("arguments", nargs="*", metavar="RUN | section.key=value")

    decode = _command(
        parsers,
        "decode",
        commands.decode,
        "recognise a set with a trained model; WER and result files",
        "Writes recogs-, errs- and wer-summary- files to RUN/results.\n\n" + _OVERRIDES,
    )
    _add_run_arguments(decode)
    decode.add_argument(
        "--plot",
        metavar="ID[,ID...]",
        help="only draw these utterances of the set, into RUN/results/plots",
    )

    align = _command(
        parsers,
        "align",
        commands.align,
        "find when each word of a known text is said",
        "  pruned-rnnt align RUN --split test --format ctm\n"
        '  pruned-rnnt align RUN talk.wav --text "what is said in it"\n'
        "Times are those at which the model emits its symbols. Exit code 1 when some utterances\n"
        "have no alignment; they are listed with their reasons.\n\n" + _OVERRIDES,
    )
    add_align_arguments(align)

    average = _command(
        parsers,
        "average",
        commands.average,
        "average the last checkpoints of a run into one",
        "Decode with the result: pruned-rnnt decode RUN decode.checkpoint=FILE\n"
        f"decode.checkpoint=average averages the last {AVERAGED_CHECKPOINTS} without a file.",
    )
    average.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    average.add_argument(
        "--last",
        type=int,
        default=AVERAGED_CHECKPOINTS,
        metavar="N",
        help=f"how many (default {AVERAGED_CHECKPOINTS})",
    )
    average.add_argument(
        "--output", type=Path, metavar="FILE", help="default: RUN/average-last-N.pt"
    )

    export = _command(
        parsers,
        "export",
        commands.export,
        "write a model for sherpa-onnx, or as one file for PyTorch",
        "Writes RUN/export/FORMAT with a README; needs pip install 'pruned_rnnt[export]' for onnx."
        "\ndecode.checkpoint and decode.use_average choose the parameters.\n\n" + _OVERRIDES,
    )
    _add_run_arguments(export)
    add_export_arguments(export)

    transcribe = _command(
        parsers,
        "transcribe",
        commands.transcribe,
        "recognise audio files of any length and rate",
        "MODEL is a run's folder, or what `pruned-rnnt export --format torch` wrote. Reads wav,\n"
        "flac, ogg, opus, mp3 and sph, with ffmpeg also m4a, aac, wma and webm, in blocks; of a\n"
        "folder all audio files in it. Files that cannot be read are named; exit code 1.\n"
        "Settings as of `pruned-rnnt decode` say how to search: decode.method=modified_beam.\n"
        "With --microphone, or - for AUDIO, a causal model transcribes live (- reads raw 16-bit\n"
        "samples of one channel at 16 kHz; a wav header in front of them is skipped):\n"
        "  arecord -q -f S16_LE -r 16000 -c 1 | pruned-rnnt transcribe MODEL -",
    )
    add_transcribe_arguments(transcribe)

    importing = _command(
        parsers,
        "import-icefall",
        commands.import_icefall,
        "make a run of a model that icefall's Zipformer recipe trained",
        IMPORT_HELP,
    )
    add_import_arguments(importing)

    inspect = _command(
        parsers,
        "inspect",
        commands.inspect,
        "show a run's history and curves, or a configuration's model and data",
        "With a run's folder: a table, and curves as RUN/curves.png. With a YAML file: model size\n"
        "and histograms of durations and lattices.\n\n" + _OVERRIDES,
    )
    inspect.add_argument("target", type=Path, metavar="RUN|CONFIG.yaml")
    inspect.add_argument(
        "--keys", action="store_true", help="print every setting with its meaning, as YAML"
    )
    inspect.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def _command(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace, Console], int],
    summary: str,
    details: str,
) -> argparse.ArgumentParser:
    parser = parsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of any error")
    parser.set_defaults(command=command)
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="instead of RUN: the run this file would make"
    )
    parser.add_argument("arguments", nargs="*", metavar="RUN | section.key=value")


def _recipes() -> list[str]:
    from pruned_rnnt import recipes

    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__) if module.ispkg)
