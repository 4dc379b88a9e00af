"""What `inspect` shows: a run's history as table and curves, a configuration's model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pruned_rnnt.config import ConfigError
from pruned_rnnt.data.prepared import PreparedFolder
from pruned_rnnt.data.summary import show_split
from pruned_rnnt.model.transducer import TransducerModel
from pruned_rnnt.train.checkpoint import CheckpointFolder
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.log import read_metrics

_CURVES_NAME = "curves.png"


def inspect_run(folder: Path, console: Console) -> Path:
    """Print the history of a run and its checkpoints; draw the curves; returns the PNG's path.

    Raises:
        ConfigError: the folder holds no metrics.
    """
    lines = read_metrics(folder)
    if not lines:
        raise ConfigError(f"{folder} is not a run: it has no metrics.jsonl with a line in it")
    train = [line for line in lines if line["group"] == "train"]
    valid = [line for line in lines if line["group"] == "valid"]
    table = Table(title=str(folder))
    for column in ("step", "epoch", "train loss", "valid loss", "WER", "retained mass", "steps/s"):
        table.add_column(column, justify="right")
    for line in valid or train[-1:]:
        near = [t for t in train if t["step"] <= line["step"]]
        last: Mapping[str, Any] = near[-1] if near else {}
        table.add_row(
            str(line["step"]),
            _number(last.get("epoch"), "d"),
            _number(last.get("total_per_frame"), ".4f"),
            _number(line.get("total"), ".4f"),
            _number(line.get("wer"), ".2%"),
            _number(line.get("retained_mass"), ".2%"),
            _number(last.get("steps_per_second"), ".2f"),
        )
    console.print(table)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    best = checkpoints.best()
    for path in checkpoints.paths():
        console.print(f"checkpoint {path}{'  (best validation WER)' if path == best else ''}")
    for path in sorted(folder.glob("results/wer-summary-*.txt")):
        console.print(f"result {path.name}: {path.read_text().splitlines()[-1]}")
    curves = folder / _CURVES_NAME
    draw_curves(train, valid, curves)
    console.print(f"curves {curves}")
    return curves


def draw_curves(
    train: Sequence[Mapping[str, Any]], valid: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Losses, WER, learning rate and gradient norm over steps, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, wer_axes, rate_axes, norm_axes = figure.subplots(2, 2).flatten()
    suffix = "_per_frame"
    for name in sorted({key for line in train for key in line if key.endswith(suffix)}):
        label = f"train {name.removesuffix(suffix)}"
        loss_axes.plot(*_series(train, name), label=label, linewidth=1)
    loss_axes.plot(*_series(valid, "total"), "k.-", label="valid total")
    loss_axes.set(title="loss per encoder frame", yscale="log")
    if train or valid:
        loss_axes.legend()
    steps, rates = _series(valid, "wer")
    wer_axes.plot(steps, [100 * rate for rate in rates], "k.-")
    wer_axes.set(title="validation WER, %", ylim=(0, None))
    rate_axes.plot(*_series(train, "learning_rate"))
    rate_axes.set(title="learning rate", xlabel="step")
    norm_axes.plot(*_series(train, "gradient_norm"), linewidth=1)
    norm_axes.set(title="gradient norm before clipping", xlabel="step", yscale="log")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def inspect_config(config: ExperimentConfig, console: Console) -> None:
    """Print the sizes of a configuration's model, and histograms of its prepared data."""
    folder = PreparedFolder(Path(config.data.path))
    prepared = config.data.train in folder.splits()
    vocab_size = len(folder.tokenizer()) if prepared else 500
    model = TransducerModel(config.model, vocab_size, config.loss)
    table = Table(title=f"model, vocabulary of {vocab_size}")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    for name, part in model.named_children():
        own = sum(p.numel() for p in part.parameters())
        table.add_row(name, f"{own:,}")
    table.add_row("all, shared ones once", f"{sum(p.numel() for p in model.parameters()):,}")
    console.print(table)
    if not prepared:
        console.print(f"no prepared data at {config.data.path}: vocabulary of 500 assumed")
        return
    show_split(folder, config.data, console)


def _number(value: float | None, layout: str) -> str:
    return "" if value is None else format(value, layout)


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    kept = [line for line in lines if name in line]
    return [line["step"] for line in kept], [line[name] for line in kept]
