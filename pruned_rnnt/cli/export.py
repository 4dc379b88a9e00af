"""`pruned-rnnt export`: files for other programs."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from collections.abc import Callable, Sequence
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
from pruned_rnnt.run.folder import RunFolder, require_writable
from pruned_rnnt.system.optional_packages import ONNX_PACKAGES, VERIFY_PACKAGES, require
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import appearing_together

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.decode.decode_config import DecodeConfig
    from pruned_rnnt.export.graphs import Graph
    from pruned_rnnt.export.model_file import ModelFile
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

# What to do with the folder, by format; {shell} is the folder as a shell takes it.
_USES = {
    "onnx": "to use it: python {shell}/recognise.py a.wav",
    "torch": 'to use it: pruned_rnnt.load("{folder}").transcribe("a.wav")',
    "icefall": "for icefall's scripts: --checkpoint {shell}/pretrained.pt",
    "nemo": "for NeMo: {folder}/model.nemo",
}


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
        "--output",
        type=Path,
        metavar="FOLDER",
        help="a new folder, or one of an earlier export in this format (default: "
        "RUN/export/FORMAT[-streaming])",
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
        "greedy search; exit code 1 if the float32 files differ",
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
    from pruned_rnnt.decode.calibration import read_calibration
    from pruned_rnnt.export.model_file import ModelFile
    from pruned_rnnt.export.readme import use_of_export
    from pruned_rnnt.export.stream_sizes import stream_sizes
    from pruned_rnnt.pretrained.export_folder import EXPORTED_FILES
    from pruned_rnnt.pretrained.hub import hub_name, push
    from pruned_rnnt.pretrained.model_card import card_of_run
    from pruned_rnnt.train.engine.run_files import read_p99_duration
    from pruned_rnnt.train.run import load_model
    from pruned_rnnt.train.run_chain import chain_of_run

    _check_export(options)
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
    # As `appearing_together` chooses between them.
    require_writable(
        folder if folder.is_dir() else folder.parent, "--output FOLDER writes the files elsewhere"
    )
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
        check = partial(_keep_contract, contract, _chosen_precisions(options))
    parts = parts._replace(model=parts.model.cpu().eval())
    # Others stay: the folder may hold archives that the model came from.
    with appearing_together(folder, replacing=EXPORTED_FILES[options.format]) as unfinished:
        graphs = _write_files(options, parts, unfinished, source, config.decode, check)
        needed: list[str] = []
        if options.format == "icefall":
            from pruned_rnnt.interop.icefall_model import import_settings

            needed = import_settings(parts.model)
        sizes = None
        if options.format == "torch" and options.streaming:
            sizes = stream_sizes(parts.model, options.chunk, options.left)
        use = use_of_export(unfinished, options.format, settings=needed, stream_sizes=sizes)
        card.write(unfinished, use)
        chain.write(unfinished)
    use = _USES[options.format].format(folder=folder, shell=shlex.quote(str(folder)))
    print(f"wrote {folder}; {use}")
    if needed:
        print(f"an import needs these settings, which the files do not hold: {' '.join(needed)}")
    exact = True
    if options.format == "onnx":
        exact = _compare(options, parts, folder, graphs, config.decode)
    if repository is not None and exact:
        print(f"pushed to {push(folder, repository, private=options.private, message=source)}")
    return 0 if exact else EXIT_FAILED


def _check_export(options: argparse.Namespace) -> None:
    """Check the options before the model is loaded.

    Raises:
        UsageError: options exclude each other, an audio file does not exist, or as `check_output`.
        MissingPackageError: a package of the `export` extra is not installed.
    """
    precisions = _chosen_precisions(options)
    if options.format != "onnx" and (precisions or options.fp16 or options.verify):
        raise UsageError("--int8, --precision, --fp16 and --verify need --format onnx")
    if options.calibrate is None and (options.measure or options.max_wer_increase is not None):
        raise UsageError("--measure and --max-wer-increase need --calibrate DATA/SPLIT")
    if options.calibrate is not None and not precisions:
        raise UsageError("--calibrate needs --precision int8 or int4")
    increase = options.max_wer_increase
    if increase is not None and not 0 <= increase < math.inf:
        raise UsageError(f"--max-wer-increase is {increase}, needs a percentage of at least 0")
    if options.format == "onnx":
        require(*ONNX_PACKAGES, *(VERIFY_PACKAGES if options.verify else ()))
    for path in options.verify or ():
        if not path.is_file():
            raise UsageError(f"audio file not found: {path}")
    if options.output is not None:
        from pruned_rnnt.pretrained.export_folder import check_output

        check_output(options.output, options.format)


def _chosen_precisions(options: argparse.Namespace) -> tuple[QuantisedPrecision, ...]:
    """The quantised precisions that the options name."""
    from pruned_rnnt.export.precision import QUANTISED

    named = {*options.precision, *(["int8"] if options.int8 else [])}
    return tuple(name for name in QUANTISED if name in named)


def _write_files(
    options: argparse.Namespace,
    parts: ModelFile,
    folder: Path,
    source: str,
    decode: DecodeConfig,
    check_quantised: Callable[[Path], None] | None,
) -> tuple[Graph, ...]:
    """Write the files of a format into an empty folder; returns the graphs of ONNX files.

    Args:
        parts: with a model on the CPU in evaluation mode.
        source: name of the run and checkpoint, for README and metadata.
        check_quantised: measures and repairs the quantised files.
    """
    from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
    from pruned_rnnt.export.torch_folder import export_torch
    from pruned_rnnt.interop.icefall_model import export_icefall
    from pruned_rnnt.interop.nemo.exported_model import archive_differences, export_model
    from pruned_rnnt.model.build_model import as_transducer

    # The exporters log remarks about operators that our models do not have.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model, tokenizer, *_ = parts
    precisions = _chosen_precisions(options)
    sizes = OnnxOptions(
        streaming=options.streaming,
        chunk=options.chunk,
        left=options.left,
        int8="int8" in precisions,
        int4="int4" in precisions,
        fp16=options.fp16,
    )
    if options.format == "torch":
        export_torch(parts, folder, sizes, source)
    elif options.format == "icefall":
        export_icefall(as_transducer(model, "--format icefall"), tokenizer, folder)
    elif options.format == "nemo":
        most = decode.max_symbols_per_frame
        export_model(model, tokenizer, folder / "model.nemo", max_symbols_per_frame=most)
        for line in archive_differences(model, decode):
            print(f"may decode differently: {line}")
    if options.format != "onnx":
        return ()
    graphs = export_onnx(parts, folder, sizes, source, decode)
    if check_quantised is not None:
        check_quantised(folder)
    elif precisions:
        print(
            f"{', '.join(precisions)}: nothing was measured: the error rate of these files is "
            "unknown; --calibrate DATA/SPLIT measures it"
        )
    return graphs


def _compare(
    options: argparse.Namespace,
    parts: ModelFile,
    folder: Path,
    graphs: Sequence[Graph],
    decode: DecodeConfig,
) -> bool:
    """Print where ONNX files may decode differently; verify them if requested.

    Returns:
        False if the float32 files do. Others round differently, which is printed.
    """
    from pruned_rnnt.export.differences import differences
    from pruned_rnnt.export.verify import verify

    for line in differences(parts.model, decode, streaming=options.streaming):
        print(f"may decode differently: {line}")
    if not options.verify:
        return True
    inexact = []
    for result in verify(parts.model, parts.tokenizer, graphs, folder, options.verify):
        print("\n".join(result.lines()))
        if not result.exact:
            inexact.append(result.precision)
    if "fp32" in inexact:
        print("NOT VERIFIED: the exported model differs, see above")
    elif inexact:
        print(f"verified in fp32; {' and '.join(inexact)} differ, as rounding may do: see above")
    else:
        print("verified")
    return "fp32" not in inexact


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
    from pruned_rnnt.data.audio.features import FBANK, FeatureKind
    from pruned_rnnt.data.input.datamodule import DataModule
    from pruned_rnnt.export.nemo_graphs import has_nemo_layout
    from pruned_rnnt.quantise.contract import MeasuredSet
    from pruned_rnnt.quantise.measurements import utterances

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
