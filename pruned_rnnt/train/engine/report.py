"""The result of a step and the sizes of its batches, averages of steps, and lines of the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pruned_rnnt.train.engine.distributed import Ranks

# Suffix of the names of measures, whose means over utterances are logged.
PER_UTTERANCE = "_per_utterance"


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """Amount of data in one or more batches.

    frames: encoder frames, or the unit by which the task normalises its loss.
    symbols: symbols of the references; 0 leaves losses per symbol out of the logs.
    """

    utterances: int
    frames: int
    symbols: int = 0
    audio_seconds: float = 0.0


def total_size(sizes: Iterable[BatchSize]) -> BatchSize:
    """The sum of the sizes of several batches."""
    several = list(sizes)
    return BatchSize(
        utterances=sum(size.utterances for size in several),
        frames=sum(size.frames for size in several),
        symbols=sum(size.symbols for size in several),
        audio_seconds=sum(size.audio_seconds for size in several),
    )


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """An utterance of a batch in a report about it.

    frames, symbols: None if the task does not know them.
    loss: NaN if unknown.
    """

    id: str
    frames: int | None = None
    symbols: int | None = None
    loss: float = math.nan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Result of one step over the batches of this process.

    sums: losses by part, and measures with a name that ends in PER_UTTERANCE, summed over
        utterances.
    seconds: from the start of the step, or from the result of the previous one if that came later,
        to the result of this one.
    gradient_norm: norm before clipping, of the loss per frame; NaN if it was not computed.
    problem: reason why the parameters were not updated, empty if they were; all processes agree on
        whether it is empty.
    suspects: if this process caused the problem, the utterances with infinite or NaN loss, or all
        utterances if there are none.
    """

    sums: dict[str, float] = field(default_factory=dict)
    size: BatchSize
    seconds: float
    gradient_norm: float
    problem: str = ""
    suspects: tuple[Utterance, ...] = ()


def averages(reports: Sequence[StepReport], seconds: float, ranks: Ranks) -> dict[str, float]:
    """Losses per encoder frame and per symbol, means of measures, throughput, gradient norm.

    All processes call it; each gets the averages over all of them.

    Args:
        reports: of the steps of this process that updated the parameters.
        seconds: in which these steps were made.
    """
    own_sums: dict[str, float] = {}
    for report in reports:
        for name, value in report.sums.items():
            own_sums[name] = own_sums.get(name, 0.0) + value
    # A process without a batch has no losses.
    everywhere = ranks.gather(own_sums)
    sums = {
        name: sum(each.get(name, 0.0) for each in everywhere)
        for name in sorted({name for each in everywhere for name in each})
    }
    size = total_size(report.size for report in reports)
    frames, symbols, utterances, audio_seconds = ranks.sum(
        [size.frames, size.symbols, size.utterances, size.audio_seconds]
    )
    values = {}
    for name, total in sums.items():
        if name.endswith(PER_UTTERANCE):
            values[name] = total / max(utterances, 1.0)
            continue
        values[f"{name}_per_frame"] = total / max(frames, 1.0)
        if symbols > 0:
            values[f"{name}_per_symbol"] = total / symbols
    steps = len(reports)
    return {
        **values,
        "gradient_norm": sum(report.gradient_norm for report in reports) / max(steps, 1),
        "seconds_per_step": sum(report.seconds for report in reports) / max(steps, 1),
        "steps_per_second": steps / seconds,
        "utterances_per_second": utterances / seconds,
        "audio_hours_per_second": audio_seconds / 3600 / seconds,
    }


def step_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """Loss, learning rate, speed and time left, for a log of 80 columns."""
    parts = [f"step {step}/{steps}"]
    if "total_per_frame" in values:
        parts.append(f"loss {values['total_per_frame']:.4f}")
    parts.append(f"lr {values['learning_rate']:.1e}")
    parts.append(f"{values['steps_per_second']:.3g} steps/s")
    parts.append(f"{_time_left(steps - step, values['steps_per_second'])} left")
    if values["bad_steps"]:
        parts.append(f"{int(values['bad_steps'])} skipped")
    return " ".join(parts)


def _time_left(steps: int, steps_per_second: float) -> str:
    """Time for the steps, validations not counted: h:mm:ss, or days and hours."""
    if steps_per_second <= 0:
        return "?"
    minutes, seconds = divmod(round(steps / steps_per_second), 60)
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    return f"{days}d {rest}h" if days >= 2 else f"{hours}:{minutes:02d}:{seconds:02d}"


def progress_line(values: Mapping[str, float]) -> str:
    """All values of the group `train`, for the progress bar and train.log."""
    parts = [f"epoch {int(values['epoch'])}"]
    losses = _ending_in("_per_frame", values)
    if "total" in losses:
        parts.append(f"loss {losses.pop('total'):.4f}")
    if losses:
        parts.append("(" + ", ".join(f"{name} {value:.4f}" for name, value in losses.items()) + ")")
    parts += [f"{name} {v:.3f}" for name, v in _ending_in(PER_UTTERANCE, values).items()]
    parts.append(f"lr {values['learning_rate']:.2e}")
    parts.append(f"{values['steps_per_second']:.2f} steps/s")
    parts.append(f"{values['utterances_per_second']:.1f} utt/s")
    parts.append(f"{values['audio_hours_per_second']:.3f} h/s")
    if "gpu_memory_gib" in values:
        parts.append(f"GPU {values['gpu_memory_gib']:.1f} GiB")
    if values["bad_steps"]:
        parts.append(f"{int(values['bad_steps'])} skipped")
    return " ".join(parts)


def _ending_in(suffix: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values whose names have this suffix, by the names without it."""
    return {name.removesuffix(suffix): v for name, v in values.items() if name.endswith(suffix)}
