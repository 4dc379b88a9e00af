"""Parts that several commands share: parsers, exit codes, and the run that arguments name, with its
data and the inputs of its results.

A module of this folder has the options of its command and the function that runs it. Their imports
within functions are deliberate: `pruned-rnnt --help` must not load libraries that it does not use.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from pruned_rnnt.system.allocator import keep_freed_memory
from pruned_rnnt.system.optional_packages import PACKAGES_OF_EXTRA
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.data.input.datamodule import DataModule
    from pruned_rnnt.data.tokens.tokenizer import Tokenizer
    from pruned_rnnt.decode.calibration import Calibration
    from pruned_rnnt.model.speech_model import SpeechModel
    from pruned_rnnt.run.result_inputs import ResultInputs
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.run import LoadedModel

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
Parsers = argparse._SubParsersAction
OVERRIDES_HELP = """\
section.key=value changes one setting, e.g. train.steps=500 model.encoder.dim=144
decode.method=modified_beam. `pruned-rnnt inspect CONFIG --keys` lists them all.
"""


def add_command(
    parsers: Parsers[argparse.ArgumentParser],
    command: Callable[[argparse.Namespace, Console], int],
    details: str,
    packages: Sequence[str] = PACKAGES_OF_EXTRA["train"],
    name: str = "",
) -> argparse.ArgumentParser:
    """The parser of a new command.

    Args:
        command: function with the name of the command, and a docstring that is its summary; takes
            the parsed options and the console of the log, and returns the exit code.
        details: printed below the options.
        packages: optional packages that the command cannot do without.
        name: of the command, if the function cannot have it.
    """
    name = name or command.__name__.replace("_", "-")
    summary = (command.__doc__ or name).rstrip(".")
    parser = parsers.add_parser(
        name,
        help=summary[0].lower() + summary[1:],
        description=f"{summary}.",
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of any error")
    parser.set_defaults(command=command, packages=packages, parser=parser)
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The run to use, by its folder or its configuration, and settings; see `config_of_run`."""
    parser.add_argument(
        "--config", type=Path, metavar="CONFIG", help="configuration of the run, instead of RUN"
    )
    parser.add_argument("arguments", nargs="*", metavar="RUN | section.key=value")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of the form `section.key=value`, and the other ones: existing paths, too.

    Raises:
        UsageError: one is a setting without a value.
    """
    # os.path.exists takes texts that are too long for a path.
    absent = [each for each in arguments if not os.path.exists(each)]  # noqa: PTH110
    settings = [each for each in absent if "=" in each]
    for each in absent:
        if "=" not in each and is_setting(each):
            raise UsageError(f"{each} is a setting: write {each}=VALUE, without spaces")
    return settings, [argument for argument in arguments if argument not in settings]


def refuse_settings(settings: Sequence[str], purposes: Mapping[str, str]) -> None:
    """Refuse settings that have no effect in a command.

    Args:
        settings: `section.key=value`.
        purposes: by `section.key`, what such a setting is for.

    Raises:
        UsageError: one of the settings is among them.
    """
    for each in settings:
        purpose = purposes.get(each.partition("=")[0])
        if purpose is not None:
            raise UsageError(f"{each} is for {purpose}; leave it out")


def is_setting(key: str) -> bool:
    """Whether a recogniser has the setting `section.key`."""
    section, dot, _ = key.partition(".")
    # Most paths have another form, and nothing needs to be imported for them.
    return bool(dot) and section.isalpha() and key in _settings()


@cache
def _settings() -> frozenset[str]:
    from pruned_rnnt.config.files import leaves
    from pruned_rnnt.config.load import to_dict
    from pruned_rnnt.train.experiment import ExperimentConfig

    return frozenset(leaves(to_dict(ExperimentConfig())))


def config_of_run(options: argparse.Namespace) -> ExperimentConfig:
    """The configuration of the run that the options of `add_run_arguments` name.

    Raises:
        UsageError: they name no run, or more than one.
        ConfigError: there is no such run, or a setting is wrong.
    """
    from pruned_rnnt.train.run import run_config

    return run_config(*run_and_settings(options))


def run_and_settings(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """The folder of the run that the options of `add_run_arguments` name, and the settings.

    Raises:
        UsageError: they name no run, or more than one.
        ConfigError: a setting of the configuration is wrong.
    """
    from pruned_rnnt.train.tasks.registry import load_experiment

    overrides, runs = split_arguments(options.arguments)
    if len(runs) + (options.config is not None) != 1:
        raise UsageError("name one run: the folder RUN, or --config CONFIG of the experiment")
    if runs:
        return Path(runs[0]), overrides
    config, _ = load_experiment(options.config, overrides)
    return Path(config.train.folder), overrides


def start_driver() -> None:
    """Let a thread initialise CUDA's driver, while this one imports torch, which waits for it."""
    # As torch has it; the driver reads it here.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    Thread(target=_start_driver, name="driver start", daemon=True).start()


def _start_driver() -> None:
    # torch reports a missing or broken driver.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def prepare_process(model: SpeechModel) -> None:
    """Choose how this process manages memory for the model."""
    if next(model.parameters()).device.type == "cpu":
        keep_freed_memory()


def data_of_run(config: ExperimentConfig, tokenizer: Tokenizer) -> DataModule:
    """The data of a run; a fine-tuned run may have symbols that differ from those of its data."""
    from pruned_rnnt.data.input.datamodule import DataModule

    return DataModule(
        config.data,
        tokenizer=tokenizer if config.train.init else None,
        kind=config.feature_kind,
    )


def run_inputs(
    config: ExperimentConfig, loaded: LoadedModel, calibration: Calibration | None = None
) -> ResultInputs:
    """The inputs of a result of `config.decode.split`, without its utterances and the search.

    Args:
        calibration: of the times in the result.
    """
    from pruned_rnnt.model.parameter_values import fingerprint
    from pruned_rnnt.run.result_inputs import ResultInputs
    from pruned_rnnt.system.code_version import code_version
    from pruned_rnnt.train.run import run_config

    decode = config.decode
    data = Path(config.data.path).resolve()
    own = Path(run_config(config.folder).data.path).resolve()
    return ResultInputs(
        split=decode.split,
        data=data.name,
        # The run's own may have been moved.
        own_data=data.name == own.name and (data == own or not own.exists()),
        utterances="",
        checkpoint=loaded.name,
        model=fingerprint(loaded.model),
        label="",
        settings={"chunk": decode.chunk, "left": decode.left},
        computation={
            "device": next(loaded.model.parameters()).device.type,
            "fused_kernels": decode.fused_kernels,
            "cuda_graphs": decode.cuda_graphs,
            "valid_max_duration": str(config.data.valid_max_duration),
            "code": str(code_version()),
            "calibration": "" if calibration is None else calibration.digest,
        },
    )
