"""`pruned-rnnt export`: files for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    EXIT_FAILED,
    OVERRIDES_HELP,
    Parsers,
    add_command,
    add_run_arguments,
    config_of_run,
)
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.export.precision import QuantisedPrecision
    from pruned_rnnt.quantise.contract import Contract, MeasuredSet
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.run import LoadedModel


_HELP = """\
Writes RUN/export/FORMAT with a README. The format onnx needs
pip install 'pruned_rnnt[export]'.
decode.checkpoint and decode.use_average choose the parameters. The README is a model card:
it has the error rates that `pruned-rnnt decode` measured with these parameters, and the
values of card.license, card.data and the other settings of card. A licence that contradicts
those of the data and weights that the model was made from is refused.

"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, export, _HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
    parser.add_argument(
        "--format",
        choices=("onnx", "torch", "icefall", "nemo"),
        default="onnx",
        help="(default: onnx)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: RUN/export/FORMAT[-streaming]"
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="export for streams of audio, transcribed chunk by chunk (causal models only)",
    )
    for option, what in (
        ("--chunk", "encoder frames (40 ms, of a FastConformer 80 ms) in a chunk"),
        ("--left", "encoder frames of left context"),
    ):
        parser.add_argument(
            option,
            type=int,
            default=0,
            metavar="N",
            help=f"with --streaming: {what} (default: as trained)",
        )
    parser.add_argument(
        "--precision",
        choices=("int8", "int4"),
        nargs="+",
        default=(),
        help="also write files with weights of eight or four bits",
    )
    parser.add_argument("--int8", action="store_true", help="as --precision int8")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="DATA/SPLIT",
        help="measure the error rate of the quantised files on prepared data, such as "
        "data/calls/train; beyond --max-wer-increase, the layers that change the output on this "
        "split most get higher precision",
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="DATA/SPLIT",
        help="where error rates are measured (default: split data.valid of the data of "
        "--calibrate)",
    )
    parser.add_argument(
        "--max-wer-increase",
        type=float,
        metavar="PERCENT",
        help="largest increase of the error rate, in percent of that of float32 "
        "(default: 1 for int8, 3 for int4)",
    )
    parser.add_argument("--fp16", action="store_true", help="also write half-precision files")
    parser.add_argument(
        "--verify",
        type=Path,
        nargs="+",
        metavar="AUDIO",
        help="compare outputs of the ONNX files with torch, and texts of sherpa-onnx with those of "
        "greedy search; exit code 1 if they differ",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the folder to this repository of the Hugging Face hub (created if it "
        "does not exist); log in first with `hf auth login`",
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: create the repository as private"
    )


def export(options: argparse.Namespace, console: Console) -> int:
    """Export a model for sherpa-onnx, icefall or NeMo, or as one file for PyTorch."""
    from pruned_rnnt.data.input.training_durations import read_p99_duration
    from pruned_rnnt.decode.timing.calibration import read_calibration
    from pruned_rnnt.export.export_command import check_export, chosen_precisions, run_export
    from pruned_rnnt.export.model_file import ModelFile
    from pruned_rnnt.export.readme import use_of_export
    from pruned_rnnt.pretrained.hub import hub_name, push
    from pruned_rnnt.pretrained.run_card import card_of_run
    from pruned_rnnt.system.optional_packages import require
    from pruned_rnnt.train.run import load_model
    from pruned_rnnt.train.run_chain import chain_of_run

    check_export(options)
    repository = None
    if options.push is not None:
        require("huggingface_hub")
        repository = hub_name(options.push)
    elif options.private:
        raise UsageError("--private needs --push OWNER/NAME")
    config = config_of_run(options)
    chain = chain_of_run(config)
    chain.check()
    loaded = load_model(config)
    name = options.format + ("-streaming" if options.streaming else "")
    folder = options.output or RunFolder(config.folder).export / name
    source = f"{config.folder.name}, {loaded.name}"
    parts = ModelFile(
        loaded.model,
        loaded.tokenizer,
        read_p99_duration(config.folder),
        read_calibration(config.folder, loaded.model.vocab_size),
        chain,
    )
    card = card_of_run(config, loaded, chain)  # before the model is moved and changed
    check = None
    if options.calibrate is not None:
        contract = _contract(options, config, loaded)
        check = partial(_keep_contract, contract, chosen_precisions(options))
    exact = run_export(options, parts, folder, source, config.decode, check_quantised=check)
    card.write(folder, use_of_export(folder, options.format))
    chain.write(folder)
    if repository is not None and exact:
        print(f"pushed to {push(folder, repository, private=options.private, message=source)}")
    return 0 if exact else EXIT_FAILED


def _keep_contract(
    contract: Contract, precisions: Sequence[QuantisedPrecision], folder: Path
) -> None:
    for result in contract.apply(folder, precisions):
        print("\n".join(result.lines()))


def _contract(
    options: argparse.Namespace, config: ExperimentConfig, loaded: LoadedModel
) -> Contract:
    """The data of --calibrate and --measure, and the bound."""
    from pruned_rnnt.quantise.contract import CALIBRATION_UTTERANCES, Contract

    calibrate: Path = options.calibrate
    measure: Path = options.measure or calibrate.parent / config.data.valid
    increase = options.max_wer_increase
    return Contract(
        calibration=_measured_set("--calibrate", calibrate, config, loaded, CALIBRATION_UTTERANCES),
        measured=_measured_set("--measure", measure, config, loaded),
        increase=None if increase is None else increase / 100,
    )


def _measured_set(
    option: str,
    path: Path,
    config: ExperimentConfig,
    loaded: LoadedModel,
    sample: int | None = None,
) -> MeasuredSet:
    """The utterances of a split, named as DATA/SPLIT."""
    from pruned_rnnt.data.audio.feature_kinds import FBANK, FeatureKind
    from pruned_rnnt.data.input.datamodule import DataModule
    from pruned_rnnt.export.tdt_graphs import has_nemo_layout
    from pruned_rnnt.quantise.contract import MeasuredSet
    from pruned_rnnt.quantise.measured_files import utterances

    settings, kind = replace(config.data, path=str(path.parent)), FBANK
    needs_samples = has_nemo_layout(loaded.model)
    if needs_samples:  # sherpa-onnx computes features of its own for such models
        settings, kind = replace(settings, features="waveform"), FeatureKind("samples")
    data = DataModule(settings, tokenizer=loaded.tokenizer, kind=kind)
    try:
        data.folder.manifests(path.name)
    except FileNotFoundError as error:
        raise UsageError(f"{option} {path}: {error}") from error
    loader = data.test_loader(path.name, sample=sample)
    return MeasuredSet(
        f"{path.parent.resolve().name} {path.name}", utterances(loader, are_samples=needs_samples)
    )
