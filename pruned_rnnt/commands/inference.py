"""Commands that use a trained model: decode, align, export and transcribe.

Imports within functions are deliberate, as in `training`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.align.arguments import ALIGN_HELP, add_align_arguments
from pruned_rnnt.allocator import keep_freed_memory
from pruned_rnnt.commands import EXIT_FAILED
from pruned_rnnt.commands.command import (
    OVERRIDES_HELP,
    Parsers,
    add_command,
    add_run_arguments,
    config_of_run,
    split_arguments,
)
from pruned_rnnt.decode.arguments import DECODE_HELP, add_decode_arguments
from pruned_rnnt.export.arguments import EXPORT_HELP, add_export_arguments
from pruned_rnnt.garbage import without_garbage_collection
from pruned_rnnt.transcribe.arguments import add_transcribe_arguments
from pruned_rnnt.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.data.input.datamodule import DataModule
    from pruned_rnnt.data.tokens.tokenizer import Tokenizer
    from pruned_rnnt.model.speech_model import SpeechModel
    from pruned_rnnt.train.experiment import ExperimentConfig


def add_decode(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, decode, DECODE_HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
    add_decode_arguments(parser)


def decode(options: argparse.Namespace, console: Console) -> int:
    """Transcribe a prepared set with a trained model; print WER and write result files."""
    from pruned_rnnt.commands.decoding import Decoding
    from pruned_rnnt.decode.encoder_passes import choose_passes
    from pruned_rnnt.pretrained.load import fusion_language_model
    from pruned_rnnt.train.run import load_model

    config = config_of_run(options)
    splits = config.decode.splits
    if options.calibrate and len(splits) > 1:
        raise UsageError(f"--calibrate needs one split, got decode.split={config.decode.split}")
    loaded = load_model(config)
    choose_passes(config.decode, loaded.model)
    _prepare_process(loaded.model)
    data = _data_of(config, loaded.tokenizer)
    if data.tokenizer.symbols != loaded.tokenizer.symbols:
        raise UsageError(
            f"the tokens of {config.data.path} differ from those of the run {config.folder}: "
            "prepare these data again with the run's tokens, by `pruned-rnnt prepare ... "
            f"--tokenizer-from {config.folder}`"
        )
    language_model = fusion_language_model(config.decode, loaded.model, loaded.tokenizer)
    for split in splits:
        data.folder.manifests(split)  # before any is decoded
    decoding = Decoding(
        config=config, loaded=loaded, data=data, language_model=language_model, console=console
    )
    for split in splits:
        if options.plot is not None:
            decoding.plot(split, options.plot.split(","))
        else:
            decoding.decode(split, calibrating=options.calibrate)
    if options.plot is None:
        print(f"web page of curves and errors: pruned-rnnt report {config.folder}")
    return 0


def _prepare_process(model: SpeechModel) -> None:
    """Choose how this process manages memory for the model."""
    if next(model.parameters()).device.type == "cpu":
        keep_freed_memory()


def _data_of(config: ExperimentConfig, tokenizer: Tokenizer) -> DataModule:
    """The data of a run; a fine-tuned run may have symbols that differ from those of its data."""
    from pruned_rnnt.data.input.datamodule import DataModule

    return DataModule(config.data, tokenizer=tokenizer if config.train.init else None)


def add_align(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, align, ALIGN_HELP + OVERRIDES_HELP)
    add_align_arguments(parser)


def align(options: argparse.Namespace, console: Console) -> int:
    """Find the times of the words of a known text."""
    from dataclasses import replace

    from pruned_rnnt.align.align_command import run_align
    from pruned_rnnt.commands.run_inputs import run_inputs
    from pruned_rnnt.data.input.training_durations import read_p99_duration
    from pruned_rnnt.decode.encoder_passes import choose_passes
    from pruned_rnnt.decode.timing.calibration import read_calibration
    from pruned_rnnt.run.alignments import AlignmentPlace
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
    _prepare_process(loaded.model)
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
        (Path(audio[0]), options.text) if audio else (_data_of(config, tokenizer), split),
        place,
        options.format,
        p99_duration=longest,
        calibration=calibration,
        console=console,
    )
    return 0 if done else EXIT_FAILED


def add_export(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, export, EXPORT_HELP + OVERRIDES_HELP)
    add_run_arguments(parser)
    add_export_arguments(parser)


def export(options: argparse.Namespace, console: Console) -> int:
    """Export a model for sherpa-onnx or icefall, or as one file for PyTorch."""
    from pruned_rnnt.data.input.training_durations import read_p99_duration
    from pruned_rnnt.decode.timing.calibration import read_calibration
    from pruned_rnnt.export.export_command import check_export, run_export
    from pruned_rnnt.export.model_file import ModelFile
    from pruned_rnnt.export.readme import use_of_export
    from pruned_rnnt.optional_packages import require
    from pruned_rnnt.pretrained.hub import hub_name, push
    from pruned_rnnt.pretrained.run_card import card_of_run
    from pruned_rnnt.train.run import load_model

    check_export(options)
    repository = None
    if options.push is not None:
        require("huggingface_hub")
        repository = hub_name(options.push)
    elif options.private:
        raise UsageError("--private needs --push OWNER/NAME")
    config = config_of_run(options)
    loaded = load_model(config)
    name = options.format + ("-streaming" if options.streaming else "")
    folder = options.output or config.folder / "export" / name
    source = f"{config.folder.name}, {loaded.name}"
    parts = ModelFile(
        loaded.model,
        loaded.tokenizer,
        read_p99_duration(config.folder),
        read_calibration(config.folder, loaded.model.vocab_size),
    )
    card = card_of_run(config, loaded)  # before the model is moved and changed
    exact = run_export(options, parts, folder, source, config.decode)
    card.write(folder, use_of_export(folder, options.format))
    if repository is not None and exact:
        print(f"pushed to {push(folder, repository, private=options.private, message=source)}")
    return 0 if exact else EXIT_FAILED


_TRANSCRIBE_HELP = (
    "MODEL is the folder of a run, a model that `pruned-rnnt export` wrote (torch or onnx),\n"
    "an icefall checkpoint with its bpe.model or tokens.txt beside it, or owner/name, a\n"
    "repository of the Hugging Face hub with one of these.\n"
    "AUDIO is a file or a folder: wav, flac, ogg, opus, mp3 and sph, with ffmpeg also m4a,\n"
    "aac, wma and webm. Unreadable files are named, and the exit code is then 1.\n"
    "Settings of `pruned-rnnt decode` choose the search: decode.method=modified_beam.\n"
    "With --microphone or - for AUDIO, a causal model transcribes live. - reads raw 16-bit\n"
    "samples, one channel at 16 kHz; a wav header before them is skipped:\n"
    "  arecord -q -f S16_LE -r 16000 -c 1 | pruned-rnnt transcribe MODEL -"
)


def add_transcribe(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, transcribe, _TRANSCRIBE_HELP)
    add_transcribe_arguments(parser)


def transcribe(options: argparse.Namespace, console: Console) -> int:
    """Transcribe audio files of any length and sampling rate."""
    # The libraries and the model make hundreds of thousands of objects, none of them garbage.
    with without_garbage_collection():
        from pruned_rnnt.pretrained.load import load
        from pruned_rnnt.transcribe.microphone import microphone
        from pruned_rnnt.transcribe.standard_input import open_samples
        from pruned_rnnt.transcribe.transcribe_command import (
            check_transcribe,
            print_live,
            run_transcribe,
            segment_config,
            start_live,
            take_settings,
        )

        settings = take_settings(options)
        inputs = check_transcribe(options, settings)
        recogniser = load(
            options.model, device="auto", settings=settings, segments=segment_config(options)
        )
    if recogniser.model is not None:
        _prepare_process(recogniser.model)
    if not options.microphone and options.audio != ["-"]:
        return 0 if run_transcribe(recogniser, inputs, options, console) else EXIT_FAILED
    stream = start_live(recogniser, options)
    if options.microphone:
        with microphone() as source:
            print_live(stream, source)
    else:
        print_live(stream, open_samples(sys.stdin.buffer))
    return 0
