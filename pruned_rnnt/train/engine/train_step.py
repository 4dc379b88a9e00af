"""One optimiser step: forward, backward, clip, update; or a report of why it was skipped.

On CUDA the host does not wait for the result of a step. It launches the update, which the device
skips by itself if a loss or a gradient is infinite or NaN, then the passes of the next step, and
only then reads the result:

    host    passes 1, update 1, passes 2, result 1, update 2, passes 3, result 2, ...
    device     passes 1, update 1, passes 2, update 2, passes 3, ...

So the device always has work. Elsewhere the host reads the result before the update.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.system.host_copy import HostCopy
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.batch_copies import BatchCopies
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.gradients import gradients_of
from pruned_rnnt.train.engine.log import PER_UTTERANCE
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY, out_of_memory_in
from pruned_rnnt.train.engine.step_report import LaunchedStep, StepReport
from pruned_rnnt.train.engine.task import Task, Utterance, total_size
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.conditional import ConditionalOptimiser

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


class _Verdict(NamedTuple):
    """The result of a step, read from the device; fields as in `StepReport`."""

    problem: str
    gradient_norm: float
    sums: list[float]


class Stepper:
    """Makes optimiser steps; the state of `scaler` belongs in checkpoints.

    Attributes:
        reads_late: the result of a step is read after the passes of the next one. Set it to False
            to read every result before the update.
    """

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
        self._copies = BatchCopies(self.device)
        self.reads_late = self.device.type == "cuda" and isinstance(optimiser, ConditionalOptimiser)
        self._last: LaunchedStep | None = None
        self._known_at = 0.0

    def __call__(
        self,
        batches: Sequence[Any],
        step: int,
        *,
        stop_requested: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> LaunchedStep:
        """Train on `batches`; `step` is the number of steps done before.

        Args:
            before_update: called between the passes and the update, when the report of the
                previous step can be read without stopping the device.

        Raises:
            TrainingStopped: memory ran out in the update itself, which cannot be undone.
        """
        started = time.perf_counter()
        size = total_size(self.task.size(batch) for batch in batches)
        # The sums are awaited after the first forward pass only.
        sums = self.ranks.start_sum([size.frames, float(stop_requested)])
        self.gradients.start()
        passes = self._passes(batches, step, lambda: 1 / sums()[0])
        # If the first pass ran out of memory, the sums have not been awaited yet.
        _, stop = sums()
        values_K = self._agree(passes)
        before_update()
        if self._last is not None:
            # The update needs to know how many updates there were.
            self._last.report()
        judge = self._update(values_K, passes)

        def read() -> StepReport:
            problem, norm, losses = judge()
            known_at = time.perf_counter()
            seconds = known_at - max(started, self._known_at)
            self._known_at = known_at
            return StepReport(
                sums=dict(zip(passes.names, losses, strict=True)),
                size=size,
                seconds=seconds,
                gradient_norm=norm,
                problem=problem,
                suspects=self._suspects(batches, passes, problem),
            )

        self._last = LaunchedStep(read, stop_requested=stop > 0)
        if not self.reads_late:
            self._last.report()
        return self._last

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
            losses = self.task.losses(self._copies(batch), step)
        self.scaler.scale(losses.objective * scale()).backward()
        values = (losses.total, *losses.parts.values(), *losses.measures.values())
        sums_K = torch.stack(values).sum(dim=1)
        measures = [name + PER_UTTERANCE for name in losses.measures]
        done.names = ("total", *losses.parts, *measures)
        done.sums_K = sums_K if done.sums_K is None else done.sums_K + sums_K
        done.losses.append(losses.total)

    def _agree(self, passes: _Passes) -> Tensor | None:
        """Sum gradients over processes, unscale and clip them.

        All processes reach the same decision, as they compute it from sums: flags are summed along
        with the gradients.

        Returns:
            (K,) on the device: norm of the gradients, scale of the loss, processes that ran out of
            memory, NaN or 0 for bad or good losses, sums of the losses. None if this is the only
            process and it ran out of memory.
        """
        # Filled in place: a copy from the host would wait for the device.
        flags_K = torch.zeros(2, device=self.device)
        if passes.out_of_memory:
            flags_K[0].fill_(1.0)
        if passes.sums_K is not None:
            # NaN if a loss is infinite or NaN; 0 times any other number is 0.
            torch.mul(passes.sums_K[0], 0.0, out=flags_K[1])
        flags_K = self.gradients.finish(flags_K)
        if self.ranks.world_size == 1 and passes.out_of_memory:
            # There may be no gradient at all, which scaler and clipping do not support.
            return None
        scale = self.scaler.scale(torch.ones(1, device=self.device))
        self.scaler.unscale_(self.optimiser)
        norm = nn.utils.get_total_norm(p.grad for p in self.parameters if p.grad is not None)
        if self.clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        known = [norm.reshape(1), scale, flags_K]
        return torch.cat(known if passes.sums_K is None else [*known, passes.sums_K])

    def _update(self, values_K: Tensor | None, passes: _Passes) -> Callable[[], _Verdict]:
        """Update the parameters unless there is a problem; returns a function for the result."""
        if values_K is None:
            self.gradients.start()
            sums = [] if passes.sums_K is None else passes.sums_K.tolist()
            verdict = _Verdict(_out_of_memory(passes), math.nan, sums)
            return lambda: verdict
        copy = HostCopy([values_K])
        if self.reads_late:
            self._step_optimiser(values_K[0].isfinite() & (values_K[2:4].sum() == 0))
        else:
            verdict = self._judge(copy, passes)
            if verdict.problem:
                self.gradients.start()
            else:
                self._step_optimiser(None)
        self.scaler.update()
        if not self.reads_late:
            return lambda: verdict

        def judge() -> _Verdict:
            verdict = self._judge(copy, passes)
            if verdict.problem:
                assert isinstance(self.optimiser, ConditionalOptimiser)
                self.optimiser.take_back()
            return verdict

        return judge

    def _judge(self, copy: HostCopy, passes: _Passes) -> _Verdict:
        (values_K,) = copy.tensors()
        gradient_norm, scale, failed, bad_losses, *sums = values_K.tolist()
        problem = ""
        if failed:
            problem = _out_of_memory(passes)
        elif bad_losses:
            problem = "infinite or NaN loss"
        elif not math.isfinite(gradient_norm):
            problem = "infinite or NaN gradient"
            if self.scaler.is_enabled() and scale > _SMALLEST_SCALE:
                problem = "gradient beyond float16; the loss scale is halved"
        return _Verdict(problem, gradient_norm, sums)

    def _step_optimiser(self, applies: Tensor | None) -> None:
        """Update the parameters; with `applies`, () bool on the device, only if it is true."""
        try:
            if applies is None:
                self.optimiser.step()
            else:
                assert isinstance(self.optimiser, ConditionalOptimiser)
                self.optimiser.step_if(applies)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Some parameters or moments may have changed: unlike a pass, this cannot be skipped.
            raise TrainingStopped(
                "memory ran out in the optimiser's update; continue from the last checkpoint with "
                f"smaller batches or a smaller model ({error})"
            ) from error

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
