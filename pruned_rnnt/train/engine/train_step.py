"""One optimiser step: forward, backward, clip, update; or a report of why it was skipped.

The loss of a step is the sum over all utterances of all processes and accumulated batches divided
by all their encoder frames, so the objective depends neither on the number of processes nor on the
number of accumulated batches.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.gradients import gradients_of
from pruned_rnnt.train.engine.log import PER_UTTERANCE
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY, out_of_memory_in
from pruned_rnnt.train.engine.step_report import StepReport
from pruned_rnnt.train.engine.task import Task, Utterance, total_size
from pruned_rnnt.train.experiment import TrainConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# If gradients overflow float16 at a smaller loss scale, the values themselves are broken.
_SMALLEST_SCALE = 2.0**-10


@dataclass
class _Passes:
    """Forward and backward passes of a step.

    losses: total losses of each finished batch, (N,) on the device.
    names, sums_K: names of losses and measures, the total first, and their sums over all
        utterances; None before the first batch.
    out_of_memory: the allocator's message if the next batch did not fit, else empty.
    """

    losses: list[Tensor] = field(default_factory=list)
    names: tuple[str, ...] = ()
    sums_K: Tensor | None = None
    out_of_memory: str = ""


class Stepper:
    """Makes optimiser steps; the state of `scaler` belongs into checkpoints."""

    def __init__(
        self,
        task: Task,
        optimiser: torch.optim.Optimizer,
        config: TrainConfig,
        *,
        clip_norm: float,
        ranks: Ranks,
    ) -> None:
        self.task = task
        self.device = next(task.model.parameters()).device
        self.optimiser = optimiser
        self.clip_norm = clip_norm
        self.ranks = ranks
        self.dtype = _DTYPES.get(config.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.gradients = gradients_of(self.parameters, ranks)

    def __call__(
        self, batches: Sequence[Any], step: int, *, stop_requested: bool = False
    ) -> StepReport:
        """Train on `batches`; `step` is the number of steps done before.

        Raises:
            TrainingStopped: memory ran out in the update itself, which cannot be undone.
        """
        started = time.perf_counter()
        size = total_size(self.task.size(batch) for batch in batches)
        # The sum is awaited after the first forward pass only.
        all_frames = self.ranks.start_sum([size.frames])
        self.gradients.start()
        passes = self._passes(batches, step, lambda: 1 / all_frames()[0])
        # If the first pass ran out of memory, the sum has not been awaited yet.
        all_frames()
        problem, norm, losses, stop = self._agree(passes, stop_requested)
        if problem:
            self.gradients.start()
        else:
            self._update()
        return StepReport(
            sums=dict(zip(passes.names, losses, strict=True)),
            size=size,
            seconds=time.perf_counter() - started,
            gradient_norm=norm,
            problem=problem,
            suspects=self._suspects(batches, passes, problem),
            stop_requested=stop,
        )

    def _passes(self, batches: Sequence[Any], step: int, scale: Callable[[], float]) -> _Passes:
        """Forward and backward of each batch, up to the first that does not fit into memory."""
        done = _Passes()

        def work() -> None:
            for index, batch in enumerate(batches):
                if index == len(batches) - 1:
                    self.gradients.expect_last_pass()
                self._pass(batch, step, scale, done)

        done.out_of_memory = out_of_memory_in(work, self.task.release_memory)
        return done

    def _pass(self, batch: Any, step: int, scale: Callable[[], float], done: _Passes) -> None:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            losses = self.task.losses(batch.to(self.device), step)
        self.scaler.scale(losses.objective * scale()).backward()
        values = (losses.total, *losses.parts.values(), *losses.measures.values())
        sums_K = torch.stack(values).sum(dim=1)
        measures = [name + PER_UTTERANCE for name in losses.measures]
        done.names = ("total", *losses.parts, *measures)
        done.sums_K = sums_K if done.sums_K is None else done.sums_K + sums_K
        done.losses.append(losses.total)

    def _agree(self, passes: _Passes, stop_requested: bool) -> tuple[str, float, list[float], bool]:
        """Sum gradients over processes, unscale and clip them; returns problem, norm, losses, stop.

        All processes reach the same decision, as they compute it from sums: flags are summed along
        with the gradients.
        """
        # Filled in place: a copy from the host would wait for the device.
        flags_K = torch.zeros(3, device=self.device)
        for index, flag in ((0, bool(passes.out_of_memory)), (2, stop_requested)):
            if flag:
                flags_K[index].fill_(1.0)
        if passes.sums_K is not None:
            # NaN if a loss is infinite or NaN; 0 times any other number is 0.
            torch.mul(passes.sums_K[0], 0.0, out=flags_K[1])
        flags_K = self.gradients.finish(flags_K)
        if self.ranks.world_size == 1 and passes.out_of_memory:
            # There may be no gradient at all, which scaler and clipping do not support.
            sums = [] if passes.sums_K is None else passes.sums_K.tolist()
            return _out_of_memory(passes), math.nan, sums, stop_requested
        self.scaler.unscale_(self.optimiser)
        norm = nn.utils.get_total_norm(p.grad for p in self.parameters if p.grad is not None)
        if self.clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        # The only wait for the device in a step.
        known = [norm.reshape(1), flags_K]
        values = torch.cat(known if passes.sums_K is None else [*known, passes.sums_K]).tolist()
        gradient_norm, failed, bad_losses, stop, *sums = values
        problem = ""
        if failed:
            problem = _out_of_memory(passes)
        elif bad_losses:
            problem = "infinite or NaN loss"
        elif not math.isfinite(gradient_norm):
            problem = self._problem_of_gradient()
        if problem:
            self.scaler.update()
        return problem, gradient_norm, sums, stop > 0

    def _problem_of_gradient(self) -> str:
        if self.scaler.is_enabled() and self.scaler.get_scale() > _SMALLEST_SCALE:
            return "gradient beyond float16; the loss scale is halved"
        return "infinite or NaN gradient"

    def _update(self) -> None:
        try:
            self.scaler.step(self.optimiser)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Some parameters or moments may have changed: unlike a pass, this cannot be skipped.
            raise TrainingStopped(
                "memory ran out in the optimiser's update; continue from the last checkpoint with "
                f"smaller batches or a smaller model ({error})"
            ) from error
        self.scaler.update()

    def _suspects(
        self, batches: Sequence[Any], passes: _Passes, problem: str
    ) -> tuple[Utterance, ...]:
        if not problem:
            return ()
        if passes.out_of_memory:
            batch = batches[len(passes.losses)]
            return tuple(self.task.utterances(batch))
        everything = [
            dataclasses.replace(utterance, loss=loss)
            for batch, loss_N in zip(batches, passes.losses, strict=True)
            for utterance, loss in zip(self.task.utterances(batch), loss_N.tolist(), strict=True)
        ]
        bad = tuple(u for u in everything if not math.isfinite(u.loss))
        return bad or (tuple(everything) if "gradient" in problem else ())


def _out_of_memory(passes: _Passes) -> str:
    return f"{OUT_OF_MEMORY} ({passes.out_of_memory or 'in another process'})"
