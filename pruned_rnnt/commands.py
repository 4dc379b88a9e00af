"""What the commands of the command line do, one function each; see `cli.py` for their options.

Every function takes the parsed options and the console of the log, and returns the exit code.
Imports are local: `pruned-rnnt --help` shall not wait for libraries that it does not need.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.usage_errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pruned_rnnt.data.tokens.tokenizer import Tokenizer
    from pruned_rnnt.decode.decode_set import DecodeConfig
    from pruned_rnnt.model.language_model import LanguageModel
    from pruned_rnnt.model.transducer_model import TransducerModel
    from pruned_rnnt.train.experiment import ExperimentConfig

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def prepare(options: argparse.Namespace, console: Console) -> int:
    module = importlib.import_module(f"pruned_rnnt.recipes.{options.recipe}.prepare")
    code: int | None = module.main(options.recipe_options)
    return code or 0


def train(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.train.engine.distributed import process_group
    from pruned_rnnt.train.engine.trainer import Trainer
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.tasks.registry import load_experiment

    config, make_task = load_experiment(*_config_to_train(options))
    if options.dry_run or options.find_max_duration:
        from rich.console import Console

        from pruned_rnnt.train.tasks.dry_run_command import rehearse

        if not isinstance(config, ExperimentConfig):
            raise UsageError("--dry-run and --find-max-duration are for recognisers only")
        return 0 if rehearse(options, config, Console()) else EXIT_FAILED
    with process_group() as ranks:
        if not ranks.is_first:
            logging.getLogger("pruned_rnnt").setLevel(logging.WARNING)
        trainer = Trainer(
            config, ranks, console, allow_changes=options.allow_changes, make_task=make_task
        )
        outcome = trainer.run()
    if outcome == "preempted":
        if ranks.is_first:
            print(
                f"pruned-rnnt train: stopped {trainer.stop_signals}, checkpoint saved",
                file=sys.stderr,
            )
        return trainer.stop_signals.exit_code
    return 0


def _config_to_train(options: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """The YAML file and the overrides of a new run, or of the run whose folder is named."""
    from pruned_rnnt.train.run import config_path

    overrides, runs = _settings_and_runs(options.arguments)
    if not runs:
        return options.config, overrides
    if options.config is not None:
        raise UsageError(
            f"--config {options.config} is for a new run, and {runs[0]} names a run to continue: "
            "pass one of them"
        )
    if len(runs) > 1:
        raise UsageError(f"name one run to continue, got {' '.join(runs)}")
    # The folder may have been moved since its configuration was saved.
    return config_path(Path(runs[0])), [*overrides, f"train.folder={runs[0]}"]


def _settings_and_runs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments `section.key=value`, and the others, which are folders of runs."""
    settings = [argument for argument in arguments if "=" in argument]
    return settings, [argument for argument in arguments if "=" not in argument]


def decode(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.data.input.datamodule import DataModule
    from pruned_rnnt.decode.decode_set import decode_set
    from pruned_rnnt.decode.nbest import write_hypotheses
    from pruned_rnnt.decode.scoring.result_files import write_results
    from pruned_rnnt.decode.scoring.wer import confidence_interval, count_errors
    from pruned_rnnt.progress import progress_bar
    from pruned_rnnt.train.run import load_model

    config = _config_of_run(options)
    loaded = load_model(config)
    data = DataModule(config.data)
    if data.tokenizer.symbols != loaded.tokenizer.symbols:
        raise UsageError(
            f"the tokens of {config.data.path} differ from those of the run {config.folder}: "
            "decode data that were prepared with the run's tokenizer"
        )
    language_model = _language_model(config.decode, loaded.model, loaded.tokenizer)
    if options.plot is not None:
        from pruned_rnnt.align.picture import plot_utterances

        parts = loaded.model, loaded.tokenizer
        plots = config.folder / "results/plots"
        ids = options.plot.split(",")
        for path in plot_utterances(parts, data, ids, config.decode, plots, language_model):
            print(f"drawn: {path}")
        return 0
    split, label = config.decode.split, config.decode.label
    loader = data.test_loader(split)
    with progress_bar(console, "decoding, utterances", loader.utterances) as bar:
        batches = bar.over(loader, size=len)
        decoded = decode_set(loaded.model, batches, loaded.tokenizer, config.decode, language_model)
    words = [utterance.transcript for utterance in decoded.utterances]
    characters = [transcript.characters() for transcript in words]
    transcripts = words if config.decode.metric == "wer" else characters
    suffix = f"{label}-{loaded.name}"
    folder = config.folder / "results"
    metric = config.decode.metric.upper()
    write_results(folder, split, suffix, label, transcripts, metric)
    write_hypotheses(folder / f"nbest-{split}-{suffix}.jsonl", decoded.utterances, loaded.tokenizer)
    lower, upper = confidence_interval(transcripts)
    print(
        f"{split} {label} {loaded.name}: WER {count_errors(words)}, "
        f"CER {count_errors(characters)}, 95% interval of the {metric} {lower:.2%} .. {upper:.2%}, "
        f"{len(words)} utterances, real-time factor {decoded.real_time_factor:.4f}"
    )
    print(f"results: {folder}/*-{split}-{suffix}.*")
    return 0


def _language_model(
    config: DecodeConfig, model: TransducerModel, tokenizer: Tokenizer
) -> LanguageModel | None:
    """What decode.fusion.lm names, on the device of the recogniser."""
    from pruned_rnnt.train.tasks.lm_task import load_language_model

    if not config.fusion.lm:
        return None
    folder = Path(config.fusion.lm)
    if not folder.is_dir():
        raise UsageError(f"decode.fusion.lm: no run of a language model at {folder}")
    language_model, symbols = load_language_model(folder, next(model.parameters()).device)
    if symbols.symbols != tokenizer.symbols:
        raise UsageError(
            f"the symbols of the language model {folder} are not those of the "
            "recogniser: make its texts with `pruned-rnnt prepare lm` from the same data"
        )
    return language_model


def _config_of_run(options: argparse.Namespace) -> ExperimentConfig:
    from pruned_rnnt.config import load_config
    from pruned_rnnt.train.experiment import ExperimentConfig
    from pruned_rnnt.train.run import run_config

    overrides, runs = _settings_and_runs(options.arguments)
    if len(runs) + (options.config is not None) != 1:
        raise UsageError("name one run: the folder RUN, or --config FILE of the experiment")
    if runs:
        return run_config(Path(runs[0]), overrides)
    folder = load_config(ExperimentConfig, options.config, overrides).folder
    return run_config(folder, overrides)


def align(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.align.align_command import run_align
    from pruned_rnnt.data.input.training_durations import read_usual_longest
    from pruned_rnnt.train.run import load_model, run_config

    config = run_config(options.run, [a for a in options.arguments if "=" in a])
    audio = [Path(argument) for argument in options.arguments if "=" not in argument]
    if len(audio) > 1 or bool(audio) != (options.text is not None):
        raise UsageError("one audio file goes with its --text; without them a set is aligned")
    if audio and options.split is not None:
        raise UsageError("--split names a set of the run's data; it cannot go with an audio file")
    loaded = load_model(config)
    folder = options.output or config.folder / "alignments"
    split = options.split or config.decode.split
    source = (audio[0], options.text) if audio else (config.data, split)
    longest = read_usual_longest(options.run)
    done = run_align(
        loaded.model,
        loaded.tokenizer,
        source,
        folder,
        options.format,
        p99_duration=longest,
        console=console,
    )
    return 0 if done else EXIT_FAILED


def average(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.train.run import average_checkpoints

    output = options.output or options.run / f"average-last-{options.last}.pt"
    for path in average_checkpoints(options.run, options.last, output):
        print(f"averaged {path}")
    print(f"wrote {output}; use it with decode.checkpoint={output}")
    return 0


def export(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.data.input.training_durations import read_usual_longest
    from pruned_rnnt.export.export_command import check_export, run_export
    from pruned_rnnt.train.run import load_model

    check_export(options)
    config = _config_of_run(options)
    loaded = load_model(config)
    name = options.format + ("-streaming" if options.streaming else "")
    folder = options.output or config.folder / "export" / name
    source = f"{config.folder.name}, {loaded.name}"
    longest = read_usual_longest(config.folder)
    parts = loaded.model, loaded.tokenizer
    exact = run_export(options, *parts, folder, source, config.decode, longest)
    return 0 if exact else EXIT_FAILED


def transcribe(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.config import load_config
    from pruned_rnnt.data.input.training_durations import read_usual_longest
    from pruned_rnnt.export import model_file
    from pruned_rnnt.train.experiment import CONFIG_NAME, ExperimentConfig, pick_device
    from pruned_rnnt.train.run import load_model, run_config, set_chunks
    from pruned_rnnt.transcribe.live import LiveRecogniser
    from pruned_rnnt.transcribe.microphone import microphone
    from pruned_rnnt.transcribe.recogniser import Recogniser
    from pruned_rnnt.transcribe.standard_input import open_samples
    from pruned_rnnt.transcribe.transcribe_command import (
        check_transcribe,
        print_live,
        run_transcribe,
        take_settings,
    )

    settings = take_settings(options)
    inputs = check_transcribe(options, settings)
    if not options.model.exists():
        raise UsageError(f"neither a run nor an exported model at {options.model}")
    if (options.model / CONFIG_NAME).is_file():
        config = run_config(options.model, settings)
        loaded = load_model(config)
        model, tokenizer = loaded.model, loaded.tokenizer
        longest = read_usual_longest(options.model)
    else:
        config = load_config(ExperimentConfig, None, settings)
        model, tokenizer, longest = model_file.load_model(options.model)
        set_chunks(model, config.decode)
        model = model.to(pick_device(config.train))
    recogniser = Recogniser(
        model,
        tokenizer,
        longest,
        window_seconds=options.window,
        decode=config.decode,
        language_model=_language_model(config.decode, model, tokenizer),
    )
    if not options.microphone and options.audio != ["-"]:
        return 0 if run_transcribe(recogniser, inputs, options, console) else EXIT_FAILED
    live = LiveRecogniser(recogniser.model, recogniser.tokenizer, options.chunk, options.left)
    if options.microphone:
        with microphone() as source:
            print_live(live, source)
    else:
        print_live(live, open_samples(sys.stdin.buffer))
    return 0


def import_icefall(options: argparse.Namespace, console: Console) -> int:
    from pruned_rnnt.interop.icefall.imported_run import import_run, print_import

    run = import_run(
        options.checkpoint,
        options.tokens,
        options.output,
        since=options.since,
        trust=options.trust,
        overrides=options.overrides,
    )
    print_import(run)
    return 0


def inspect(options: argparse.Namespace, console: Console) -> int:
    from rich.console import Console

    from pruned_rnnt.settings_help import settings_as_yaml
    from pruned_rnnt.train.report import inspect_config, inspect_run
    from pruned_rnnt.train.run import config_path
    from pruned_rnnt.train.tasks.registry import load_experiment

    is_run = options.target.is_dir()
    if is_run and not options.keys:
        inspect_run(options.target, Console())
        return 0
    path = config_path(options.target) if is_run else options.target
    config, _ = load_experiment(path, options.overrides)
    if options.keys:
        print(settings_as_yaml(config), end="")
    else:
        inspect_config(config, Console())
    return 0
