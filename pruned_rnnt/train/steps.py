"""One optimiser step: forward, backward, clip, update; or a report of why it was not made.

The loss of a step is the sum over all utterances of all processes and accumulated batches divided
by all their encoder frames, so neither the number of processes nor of batches changes what is
minimised.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pruned_rnnt.data.batch import Batch
from pruned_rnnt.model.subsampling import subsampled_length
from pruned_rnnt.train.distributed import Ranks
from pruned_rnnt.train.experiment import TrainConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Below this the loss scale of float16 has met values that no scale can save.
_SMALLEST_SCALE = 2.0**-10


@dataclass(frozen=True, kw_only=True)
class BadUtterance:
    """An utterance of a step that could not be used; its loss is what the model gave."""

    id: str
    frames: int
    symbols: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did, over the batches of this process.

    sums: losses by part, summed over utterances. gradient_norm: before clipping, of the loss per
    frame. problem: empty when the parameters were updated, else the reason why they were not.
    suspects: the utterances with infinite or NaN loss, or all of them when the losses are finite.
    """

    sums: dict[str, float] = field(default_factory=dict)
    utterances: int
    frames: int
    symbols: int
    audio_seconds: float
    seconds: float
    gradient_norm: float
    problem: str = ""
    suspects: tuple[BadUtterance, ...] = ()


class Stepper:
    """Holds what a step needs; `scaler` has state that belongs into checkpoints."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        config: TrainConfig,
        *,
        clip_norm: float,
        ranks: Ranks,
    ) -> None:
        self.device = next(model.parameters()).device
        self.optimiser = optimiser
        self.clip_norm = clip_norm
        self.ranks = ranks
        self.dtype = _DTYPES.get(config.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = (
            DistributedDataParallel(model, gradient_as_bucket_view=True)
            if ranks.world_size > 1
            else model
        )

    def __call__(self, batches: Sequence[Batch], step: int) -> StepReport:
        """Train on `batches`; `step` counts the steps before this one."""
        started = time.perf_counter()
        own_frames = sum(int(subsampled_length(b.feature_lengths_N).sum()) for b in batches)
        (all_frames,) = self.ranks.sum([own_frames])
        sums: dict[str, torch.Tensor] = {}
        losses_of_batches = []
        self.optimiser.zero_grad(set_to_none=True)
        for index, batch in enumerate(batches):
            with self._communication(is_last=index == len(batches) - 1):
                losses = self._forward(batch.to(self.device), step)
                # DistributedDataParallel averages gradients over processes; we want their sum.
                scale = self.ranks.world_size / all_frames
                self.scaler.scale(losses.total.sum() * scale).backward()
            for name, values in {"total": losses.total.detach(), **losses.parts}.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + values.sum()
            losses_of_batches.append(losses.total.detach())
        self.scaler.unscale_(self.optimiser)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm or math.inf)
        # The only wait for the device in a step.
        gradient_norm, *values = torch.stack(
            [norm.double(), *(s.double() for s in sums.values())]
        ).tolist()
        problem = self._problem(gradient_norm, values)
        if not problem:
            self.scaler.step(self.optimiser)
        self.scaler.update()
        return StepReport(
            sums=dict(zip(sums, values, strict=True)),
            utterances=sum(len(b) for b in batches),
            frames=own_frames,
            symbols=sum(int(b.target_lengths_N.sum()) for b in batches),
            audio_seconds=sum(sum(b.durations) for b in batches),
            seconds=time.perf_counter() - started,
            gradient_norm=gradient_norm,
            problem=problem,
            suspects=_suspects(batches, losses_of_batches) if problem else (),
        )

    def _forward(self, batch: Batch, step: int):  # type: ignore[no-untyped-def]
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            return self.model(
                batch.features_NTF,
                batch.feature_lengths_N,
                batch.targets_NU,
                batch.target_lengths_N,
                step,
            )

    def _communication(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are exchanged with the last batch of a step only."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _problem(self, gradient_norm: float, losses: Sequence[float]) -> str:
        """Why the step cannot be made, the same on every process; empty when it can."""
        own_loss_bad = not all(math.isfinite(loss) for loss in losses)
        (bad_losses,) = self.ranks.sum([float(own_loss_bad)])
        if bad_losses:
            return "infinite or NaN loss"
        if math.isfinite(gradient_norm):
            return ""
        if self.scaler.is_enabled() and self.scaler.get_scale() > _SMALLEST_SCALE:
            return "gradient beyond float16; the loss scale is halved"
        return "infinite or NaN gradient"


def _suspects(
    batches: Sequence[Batch], losses_of_batches: Sequence[torch.Tensor]
) -> tuple[BadUtterance, ...]:
    everything = [
        BadUtterance(id=name, frames=int(frames), symbols=int(symbols), loss=float(loss))
        for batch, losses in zip(batches, losses_of_batches, strict=True)
        for name, frames, symbols, loss in zip(
            batch.ids, batch.feature_lengths_N, batch.target_lengths_N, losses.cpu(), strict=True
        )
    ]
    return tuple(u for u in everything if not math.isfinite(u.loss)) or tuple(everything)
