"""Settings for the length of a training that fit the amount of speech."""

from __future__ import annotations

import math
from dataclasses import dataclass

# icefall trains Zipformers for 50 epochs on LibriSpeech, which has 2,900 hours with its copies at
# other speeds; larger corpora need fewer epochs.
_EPOCHS = 50
_MOST_HOURS = 145_000
# Seconds of speech in a step; fewer for small corpora, so that an epoch has many steps.
_BATCH_SECONDS = (60, 600)
_STEPS_PER_EPOCH = 100
_FEWEST_STEPS = 2000
_VALIDATIONS = 20
_VALIDATE_EVERY = (100, 5000)


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """Suggestions for one process; the fields after epochs are settings.

    epochs: passes over the training set, copies at other speeds included.
    """

    epochs: float
    max_duration: int
    steps: int
    validate_every: int
    warm_up_steps: int
    loss_warm_up_steps: int

    def settings(self) -> tuple[str, ...]:
        """As `section.key=value`."""
        return (
            f"data.max_duration={self.max_duration}",
            f"train.steps={self.steps}",
            f"train.validate_every={self.validate_every}",
            f"schedule.warm_up_steps={self.warm_up_steps}",
            f"loss.warm_up_steps={self.loss_warm_up_steps}",
        )

    def advice(self, hours: float) -> list[str]:
        """Lines for the summary of prepare."""
        return [
            f"Settings for {hours:,.3g} hours on one GPU: {' '.join(self.settings())}",
            f"  This is a rule of thumb ({self.epochs:,.2g} epochs). With several GPUs divide "
            "train.steps and train.validate_every by their number;",
            "  train.early_stopping_patience=5 ends training when the error rate stops falling.",
        ]


def training_length(hours: float) -> TrainingLength:
    """Suggestions for this many hours of training speech, copies at other speeds included.

    Raises:
        ValueError: hours is not above 0.
    """
    if not hours > 0:
        raise ValueError(f"hours is {hours}, needs > 0")
    seconds = 3600 * hours
    batch = _within(_BATCH_SECONDS, _rounded(seconds / _STEPS_PER_EPOCH))
    epochs = min(_EPOCHS, _MOST_HOURS / hours)
    steps = max(_FEWEST_STEPS, _rounded(epochs * seconds / batch))
    return TrainingLength(
        epochs=steps * batch / seconds,
        max_duration=batch,
        steps=steps,
        validate_every=_within(_VALIDATE_EVERY, _rounded(steps / _VALIDATIONS)),
        warm_up_steps=min(500, steps // 10),
        loss_warm_up_steps=min(2000, steps // 5),
    )


def _within(bounds: tuple[int, int], value: int) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _rounded(value: float) -> int:
    """To two significant digits, or to an integer below 10."""
    digits = max(0, math.floor(math.log10(max(value, 1))) - 1)
    return round(round(value, -digits))
