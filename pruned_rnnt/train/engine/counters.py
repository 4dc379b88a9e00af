"""How far a run has come."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Names in checkpoints that differ from those of `Counters`.
_SAVED_NAMES = {"consecutive_bad_steps": "bad_in_row"}


@dataclass
class Counters:
    """Progress of a run: steps done, epoch (from 0), batches of that epoch consumed.

    consecutive_bad_steps, bad_steps: skipped steps since the last good one, and in total.
    validation_due: the validation of this step is not finished; true in a checkpoint that is
        written before it.
    validated_step: step of the newest validation; -1 before the first.
    best_score: lowest score of a validation; infinite before the first.
    validations_since_best: validations with a score after that one.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    consecutive_bad_steps: int = 0
    bad_steps: int = 0
    validation_due: bool = False
    validated_step: int = -1
    best_score: float = math.inf
    validations_since_best: int = 0

    def add_score(self, score: float) -> None:
        """Count a validation."""
        if score < self.best_score:
            self.best_score, self.validations_since_best = score, 0
        else:
            self.validations_since_best += 1

    def state_dict(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        names = [field.name for field in dataclasses.fields(self)]
        return {_SAVED_NAMES.get(name, name): getattr(self, name) for name in names}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Counters:
        """Counters from the values of a checkpoint; absent ones have their defaults."""
        names = {saved: name for name, saved in _SAVED_NAMES.items()}
        return cls(**{names.get(key, key): value for key, value in state.items()})
