"""Output of `inspect`: a run's history, a configuration's model and data."""

from __future__ import annotations

import math
import shlex
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from pruned_rnnt.config.load import ConfigError, value_of
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import lattice_size
from pruned_rnnt.data.input.filters import CutFilter
from pruned_rnnt.data.input.lm_texts import TextFiles, text_splits
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.licences.chain import Chain, read_chain
from pruned_rnnt.model.build_model import build_model
from pruned_rnnt.model.language_model import LanguageModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.result_file import find_results
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import run_config
from pruned_rnnt.train.run_chain import chain_of_run
from pruned_rnnt.train.tasks.lm_task import LanguageModelExperiment

_BAR_WIDTH = 40
_BINS = 10


def show_split(
    folder: PreparedFolder, config: DataConfig, console: Console, *, ctc: bool = False
) -> None:
    """Prints counts and histograms of the training split of a prepared folder.

    ctc: as in `CutFilter`.
    """
    tokenizer = folder.tokenizer()
    size = lattice_size(config, tokenizer)
    cut_filter = CutFilter(config.filters, tokenizer, ctc=ctc)
    durations, nodes = array("f"), array("f")
    left_out = 0
    for cut in folder.cuts(config.train, lazy=True):
        if cut_filter(cut):
            durations.append(cut.duration)
            nodes.append(size.nodes(cut))
        else:
            left_out += 1
    hours = sum(durations) / 3600
    shards = len(folder.manifests(config.train))
    manifests = f"in {shards} shards" if shards > 1 else "in one manifest"
    console.print(f"{config.train}: {len(durations):,} utterances, {hours:,.2f} h, {manifests}")
    if left_out:
        console.print(f"{left_out:,} more are left out: {cut_filter.describe()}", markup=False)
    if not durations:
        return
    _print_histogram(console, "duration, s", durations)
    _print_histogram(console, "lattice nodes, encoder frames x (symbols + 1)", nodes)
    bound = f"{config.max_lattice:,}" if config.max_lattice else "none"
    console.print(
        f"largest: {max(nodes):,.0f} nodes; bound for a batch (data.max_lattice): {bound}"
    )


def _show_texts(texts: TextFiles, split: str, console: Console) -> None:
    """Prints the counts and a histogram of the lengths of a language model's texts."""
    symbols = int(texts.lengths.sum())
    console.print(f"{split}: {len(texts):,} texts, {symbols:,} symbols")
    if len(texts) > 0:
        _print_histogram(console, "symbols per text", texts.lengths.tolist())


def _print_histogram(console: Console, title: str, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    width = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - low) / width), _BINS - 1)] += 1
    console.print(title)
    for index, count in enumerate(counts):
        bar = "#" * round(_BAR_WIDTH * count / max(counts))
        console.print(f"  {low + index * width:10.2f} {count:7d} {bar}")


# Measures of a validation as (heading, name, format); a run has those of its task.
_MEASURES = (
    ("WER", "wer", ".2%"),
    ("CER", "cer", ".2%"),
    ("retained mass", "retained_mass", ".2%"),
    ("band edge", "band_edge_mass", ".2%"),
    ("perplexity", "perplexity", ".3f"),
)
# For a model whose data are not prepared yet.
_ASSUMED_VOCABULARY = 500


def inspect_run(folder: Path, console: Console) -> None:
    """Print a run's history, checkpoints, results and licences.

    An imported run and an exported model have only licences.

    Raises:
        ConfigError: the folder holds neither metrics nor licences.json.
        ValueError: licences.json is damaged.
    """
    lines = read_metrics(folder)
    config = RunFolder(folder).config
    is_recogniser = config.is_file() and value_of("task", config) is None
    chain = chain_of_run(run_config(folder)) if is_recogniser else read_chain(folder)
    if not lines and chain is not None:
        show_chain(chain, console)
        return
    if not lines:
        raise ConfigError(f"{folder} is not a run: it has no metrics.jsonl with a line in it")
    train = [line for line in lines if line["group"] == "train"]
    valid = [line for line in lines if line["group"] == "valid"]
    table = Table(title=str(folder))
    measures = [m for m in _MEASURES if any(m[1] in line for line in valid)]
    columns = ["step", "epoch", "train loss", "valid loss", *(m[0] for m in measures), "steps/s"]
    for column in columns:
        table.add_column(column, justify="right")
    for line in valid or train[-1:]:
        near = [t for t in train if t["step"] <= line["step"]]
        last: Mapping[str, Any] = near[-1] if near else {}
        table.add_row(
            str(line["step"]),
            _number(last.get("epoch"), "d"),
            _number(last.get("total_per_frame"), ".4f"),
            _number(line.get("total"), ".4f"),
            *(_number(line.get(name), layout) for _, name, layout in measures),
            _number(last.get("steps_per_second"), ".2f"),
        )
    console.print(table)
    checkpoints = CheckpointFolder(RunFolder(folder).checkpoints)
    best = checkpoints.best()
    for path in checkpoints.paths():
        console.print(f"checkpoint {path}{'  (best validation)' if path == best else ''}")
    for result in reversed(find_results(folder)):
        if (found := result.summary()) is not None:
            rate = "of no words" if math.isnan(found.percent) else f"{found.percent:.2f}%"
            console.print(f"result {result.stem}: {found.metric} {rate}")
    if chain is not None:
        show_chain(chain, console)
    report = f"curves: pruned-rnnt report {shlex.quote(str(folder))}"
    console.print(report, markup=False, soft_wrap=True)


def show_chain(chain: Chain, console: Console) -> None:
    """Print a model's licence and what it was made from."""
    for line in chain.lines():
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    for line in chain.contradictions():
        console.print(f"contradicted by {line}", markup=False, soft_wrap=True, highlight=False)


def inspect_config(config: ExperimentConfig | LanguageModelExperiment, console: Console) -> None:
    """Print the sizes of a configuration's model, and histograms of its prepared data."""
    # Only texts and durations are read, so no command of the manifests runs.
    folder = PreparedFolder(Path(config.data.path), allow_commands=True)
    is_speech = isinstance(config, ExperimentConfig)
    prepared = config.data.train in (folder.splits() if is_speech else text_splits(folder.path))
    vocab_size = len(folder.tokenizer()) if prepared else _ASSUMED_VOCABULARY
    model: nn.Module
    if isinstance(config, ExperimentConfig):
        model = build_model(config.model, vocab_size, config.loss)
    else:
        model = LanguageModel(config.model, vocab_size)
    table = Table(title=f"model, vocabulary of {vocab_size}")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    for name, part in model.named_children():
        if own := sum(p.numel() for p in part.parameters()):
            table.add_row(name, f"{own:,}")
    table.add_row(
        "total (shared parameters counted once)", f"{sum(p.numel() for p in model.parameters()):,}"
    )
    console.print(table)
    if not prepared:
        console.print(f"no prepared data at {folder.path}: vocabulary of {vocab_size} assumed")
    elif isinstance(config, ExperimentConfig):
        show_split(folder, config.data, console, ctc=config.loss.kind == "ctc")
        show_chain(chain_of_run(config), console)
    else:
        _show_texts(TextFiles(folder.path, config.data.train), config.data.train, console)
        console.print(
            f"largest number of symbols in a batch (data.batch_symbols): "
            f"{config.data.batch_symbols:,}"
        )


def _number(value: float | None, layout: str) -> str:
    return "" if value is None else format(value, layout)
