"""The command line: `pruned-rnnt prepare | train | decode | average | export | ...`.

Exit codes: 0 done; 1 the task failed (bad data, no checkpoint, training diverged); 2 wrong usage
or configuration; 130 interrupted from the keyboard. `train` that saved because of a signal returns
128 plus the signal's number (143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP, 138 for SIGUSR1).
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from pruned_rnnt import __version__
from pruned_rnnt.cli import (
    align,
    average,
    check,
    decode,
    ensemble,
    export,
    import_model,
    inspect,
    prepare,
    report,
    train,
    transcribe,
)
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from pruned_rnnt.system.allocator import end_process, end_without_collection
from pruned_rnnt.system.console import naming_stdout, start_logging
from pruned_rnnt.system.openmp import limit_spinning
from pruned_rnnt.system.optional_packages import (
    MissingPackageError,
    missing_packages_named,
    require,
)
from pruned_rnnt.system.usage_errors import UsageError

_DESCRIPTION = """\
Train and use transducer speech recognisers.

  pruned-rnnt prepare synthetic                          make data
  pruned-rnnt prepare own my_recordings.tsv              or use your own
  pruned-rnnt train --config synthetic                   train
  pruned-rnnt train exp/synthetic                        continue after an interruption
  pruned-rnnt finetune exp/synthetic data/calls          start from a trained model
  pruned-rnnt decode exp/synthetic                       transcribe the test set, WER
  pruned-rnnt ensemble exp/a exp/b --output exp/c        one model of several
  pruned-rnnt inspect exp/synthetic                      history of the run
  pruned-rnnt report exp/synthetic                       a web page of curves and errors
  pruned-rnnt export exp/synthetic                       files for sherpa-onnx
  pruned-rnnt transcribe exp/synthetic a.wav             transcribe your own audio
  pruned-rnnt import parakeet.nemo exp/parakeet          a run from a model of others
  pruned-rnnt check                                      are the kernels right on this machine?
"""

_HINT = " (--debug shows where)"

_COMMANDS = (
    prepare,
    train,
    decode,
    align,
    average,
    ensemble,
    export,
    transcribe,
    import_model,
    inspect,
    report,
    check,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    limit_spinning()  # before a command imports torch
    end_without_collection()
    parser = _parser()
    options = _parse(parser, arguments)
    try:
        require(*options.packages)
        console = start_logging() if options.packages else None
        with missing_packages_named():
            code: int = options.command(options, console)
        if sys.stdout is not None:  # closed by the caller
            with naming_stdout():
                sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("pruned-rnnt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MissingPackageError as error:
        if options.debug:
            raise
        print(f"pruned-rnnt {options.name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            # Flushing the rest at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
        message = _message(error)
        if options.debug or not message:
            raise
        print(f"pruned-rnnt {options.name}: {message}", file=sys.stderr)
        return EXIT_USAGE if _is_usage_error(error) else EXIT_FAILED


def run() -> None:
    """The program `pruned-rnnt`."""
    end_process(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pruned-rnnt",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pruned-rnnt {__version__}")
    parsers = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(parsers)
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, and accept settings and files after an option too, which argparse would refuse."""
    options, rest = parser.parse_known_args(arguments)
    names = [name for name in ("overrides", "arguments", "audio") if name in vars(options)]
    only_settings = names == ["overrides"]
    wrong = [
        item
        for item in rest
        if (item.startswith("-") and item != "-") or (only_settings and "=" not in item)
    ]
    if rest and (not names or wrong):
        takes_files = bool(names) and not only_settings
        files = (item for item in wrong if os.path.exists(item))  # noqa: PTH110
        file = next(files, "") if takes_files else ""
        advice = f": write ./{file} for the file of this name" if file else ""
        options.parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}{advice}")
    if names:
        vars(options)[names[0]].extend(rest)
    return options


def _output_is_closed() -> bool:
    """Whether the reader of standard output has closed it."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))


def _is_usage_error(error: Exception) -> bool:
    if isinstance(error, UsageError):
        return True
    from pruned_rnnt.config.load import ConfigError

    return isinstance(error, ConfigError)


def _message(error: Exception) -> str:
    """The line that reports an error; empty for an error whose traceback is needed."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return f"{error} Set HOME to your home folder{_HINT}"
    if _explains_itself(error):
        return f"{error}{'' if _is_own(error) else _HINT}"
    return f"memory ran out: {error}" if _is_out_of_memory(error) else ""


def _explains_itself(error: Exception) -> bool:
    """True if the message alone tells a user what to do; other errors keep their traceback."""
    if isinstance(error, ValueError | OSError):
        return True
    from pruned_rnnt.train.engine.bad_steps import TrainingStopped

    return isinstance(error, TrainingStopped)


def _is_own(error: Exception) -> bool:
    """True if the error was raised in this package, or names a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    # Code that `exec` runs may have no module.
    module: str = last.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == __package__.partition(".")[0]


def _is_out_of_memory(error: Exception) -> bool:
    from pruned_rnnt.system.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)
