"""Sums over the steps between two log lines, and the averages that the log shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import PER_UTTERANCE
from pruned_rnnt.train.engine.step_report import StepReport


class MetricAccumulator:
    """Adds up step reports of this process; averages are over all processes."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}
        self.steps = 0
        self.utterances = 0
        self.frames = 0
        self.symbols = 0
        self.audio_seconds = 0.0
        self.step_seconds = 0.0
        self.gradient_norm = 0.0
        self._started = time.perf_counter()
        self._paused = 0.0

    def add(self, report: StepReport) -> None:
        """Add the report of a step that updated the parameters."""
        for name, value in report.sums.items():
            self.losses[name] = self.losses.get(name, 0.0) + value
        self.steps += 1
        self.utterances += report.size.utterances
        self.frames += report.size.frames
        self.symbols += report.size.symbols
        self.audio_seconds += report.size.audio_seconds
        self.step_seconds += report.seconds
        self.gradient_norm += report.gradient_norm

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the context (a validation) from the speeds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def averages(self, ranks: Ranks) -> dict[str, float]:
        """Losses per encoder frame and per symbol, means of measures, throughput, gradient norm."""
        elapsed = max(time.perf_counter() - self._started - self._paused, 1e-9)
        # A process without a batch has no losses.
        everywhere = ranks.gather(self.losses)
        losses = {
            name: sum(own.get(name, 0.0) for own in everywhere)
            for name in sorted({name for own in everywhere for name in own})
        }
        frames, symbols, utterances, audio_seconds = ranks.sum(
            [self.frames, self.symbols, self.utterances, self.audio_seconds]
        )
        values = {}
        for name, loss in losses.items():
            if name.endswith(PER_UTTERANCE):
                values[name] = loss / max(utterances, 1.0)
                continue
            values[f"{name}_per_frame"] = loss / max(frames, 1.0)
            values[f"{name}_per_symbol"] = loss / max(symbols, 1.0)
        return {
            **values,
            "gradient_norm": self.gradient_norm / max(self.steps, 1),
            "seconds_per_step": self.step_seconds / max(self.steps, 1),
            "steps_per_second": self.steps / elapsed,
            "utterances_per_second": utterances / elapsed,
            "audio_hours_per_second": audio_seconds / 3600 / elapsed,
        }
