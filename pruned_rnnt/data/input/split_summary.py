"""Summarises a split for `inspect CONFIG`: hours, durations, lattices, utterances left out.

Cuts are streamed; two numbers of each stay in memory. For language models it summarises the texts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from rich.console import Console

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import lattice_size
from pruned_rnnt.data.input.filters import CutFilter
from pruned_rnnt.data.input.lm_texts import TextFiles
from pruned_rnnt.data.input.prepared_folder import PreparedFolder

_BAR_WIDTH = 40
_BINS = 10


def show_split(folder: PreparedFolder, config: DataConfig, console: Console) -> None:
    """Prints counts and histograms of the training split of a prepared folder."""
    tokenizer = folder.tokenizer()
    size = lattice_size(config, tokenizer)
    cut_filter = CutFilter(config.filters, tokenizer)
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


def show_texts(texts: TextFiles, split: str, console: Console) -> None:
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
