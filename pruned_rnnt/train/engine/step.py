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
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.system.device import HostCopy
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.gradients import gradients_of
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY, out_of_memory_in
from pruned_rnnt.train.engine.report import (
    PER_UTTERANCE,
    BatchSize,
    StepReport,
    Utterance,
    total_size,
)
from pruned_rnnt.train.engine.running_statistics import RunningStatistics
from pruned_rnnt.train.engine.task import Task
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.conditional import ConditionalOptimiser
from pruned_rnnt.train.optim.sharded import ShardedOptimiser

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# If gradients overflow float16 at a smaller loss scale, the values themselves are broken.
_SMALLEST_SCALE = 2.0**-10
# Problem of a step that only calibrates the scale.
SCALE_HALVED = "gradient beyond float16; the loss scale is halved"


@dataclass(kw_only=True, eq=False)
class Step:
    """A step whose work is launched; the device may still be busy with it.

    batches: those of this process.
    started: when the step began, by time.perf_counter.
    read: makes the report of a step when it is first asked for.
    losses: total losses of each finished batch, (N,) on the device.
    names, sums_K: names of losses and measures, the total first, and their sums over all
        utterances; None before the first batch.
    out_of_memory: the allocator's message if the next batch did not fit, else empty.
    stop_requested: some process received a request to stop.
    result: the copy to the host of the norm of the gradients, the scale of the loss, the number of
        processes that ran out of memory, NaN or 0 for bad or good losses, and sums_K. None if this
        is the only process and it ran out of memory.
    """

    batches: Sequence[Any]
    size: BatchSize
    started: float
    read: Callable[[Step], StepReport]
    losses: list[Tensor] = field(default_factory=list)
    names: tuple[str, ...] = ()
    sums_K: Tensor | None = None
    out_of_memory: str = ""
    stop_requested: bool = False
    result: HostCopy | None = None
    _report: StepReport | None = None

    @property
    def is_finished(self) -> bool:
        """Whether `report` need not wait."""
        return self._report is not None

    def report(self) -> StepReport:
        """The result; waits for it if necessary."""
        if self._report is None:
            self._report = self.read(self)
        return self._report


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
        owners = optimiser.owners if isinstance(optimiser, ShardedOptimiser) else None
        graphs = getattr(task.model, "encoder_graphs", None)
        captured = graphs.gradients if isinstance(graphs, EncoderGraphs) else None
        self.gradients = gradients_of(self.parameters, ranks, owners, captured)
        self._statistics = RunningStatistics(task.model)
        self._copies = BatchCopies(self.device)
        self.reads_late = self.device.type == "cuda" and isinstance(optimiser, ConditionalOptimiser)
        self._last: Step | None = None
        self._known_at = 0.0

    def __call__(
        self,
        batches: Sequence[Any],
        step: int,
        *,
        stop_requested: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> Step:
        """Train on `batches`; `step` is the number of steps done before.

        Args:
            before_update: called between the passes and the update, when the report of the
                previous step can be read without stopping the device.

        Raises:
            TrainingStopped: memory ran out in the update itself, which cannot be undone.
        """
        started = time.perf_counter()
        size = total_size(self.task.size(batch) for batch in batches)
        this = Step(batches=batches, size=size, started=started, read=self._read)
        # Not in the passes, which a process leaves out without a batch or memory.
        self.task.begin_step(step)
        # All processes reach the same decision about the step, as they compute it from sums.
        sums = self.ranks.start_sum([size.frames, float(stop_requested)])
        self.gradients.start()
        self._statistics.keep()

        def passes() -> None:
            for index, batch in enumerate(batches):
                if index == len(batches) - 1:
                    self.gradients.expect_last_pass()
                self._pass(batch, step, this, sums)

        this.out_of_memory = out_of_memory_in(passes, self.task.release_memory)
        this.stop_requested = sums()[1] > 0

        # Filled in place: a copy from the host would wait for the device.
        flags_K = torch.zeros(2, device=self.device)
        if this.out_of_memory:
            flags_K[0].fill_(1.0)
        if this.sums_K is not None:
            # NaN if a loss is infinite or NaN; 0 times any other number is 0.
            torch.mul(this.sums_K[0], 0.0, out=flags_K[1])
        flags_K = self.gradients.finish(flags_K)
        # If the only process ran out of memory, there may be no gradient at all, which scaler and
        # clipping do not support.
        has_gradients = self.ranks.world_size > 1 or not this.out_of_memory
        if has_gradients:
            scale = self.scaler.scale(torch.ones(1, device=self.device))
            self.scaler.unscale_(self.optimiser)
            norm = self.gradients.norm()
            if self.clip_norm > 0:
                nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
            known = [norm.reshape(1), scale, flags_K]
            values_K = torch.cat(known if this.sums_K is None else [*known, this.sums_K])

        before_update()
        if self._last is not None:
            # The update needs to know how many updates there were.
            self._last.report()
        if has_gradients:
            this.result = HostCopy([values_K])
            if self.reads_late:
                applies = values_K[0].isfinite() & (values_K[2:4].sum() == 0)
                self._update(applies)
                self._statistics.put_back(applies)
            elif self._problem(this):
                self.gradients.start()
                self._statistics.put_back()
            else:
                self._update(None)
            self.scaler.update()
        else:
            self.gradients.start()
            self._statistics.put_back()
        self._last = this
        if not self.reads_late:
            this.report()
        return this

    def _pass(self, batch: Any, step: int, this: Step, sums: Callable[[], Sequence[float]]) -> None:
        """Forward and backward of a batch."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            losses = self.task.losses(self._copies(batch), step)
        # The frames of all processes are awaited after the first forward pass only.
        self.scaler.scale(losses.objective * (1 / sums()[0])).backward()
        values = (losses.total, *losses.parts.values(), *losses.measures.values())
        values_KN = torch.stack(values)
        # Sums over many utterances are beyond float16, and coarse in bfloat16.
        sums_K = values_KN.sum(dim=1, dtype=torch.promote_types(values_KN.dtype, torch.float32))
        measures = [name + PER_UTTERANCE for name in losses.measures]
        this.names = ("total", *losses.parts, *measures)
        this.sums_K = sums_K if this.sums_K is None else this.sums_K + sums_K
        this.losses.append(losses.total)

    def _update(self, applies: Tensor | None) -> None:
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

    def _values(self, this: Step) -> list[float]:
        """The values of `Step.result`; waits for them."""
        if this.result is None:
            sums = [] if this.sums_K is None else this.sums_K.tolist()
            return [math.nan, 1.0, 1.0, 0.0, *sums]
        (values_K,) = this.result.tensors()
        values: list[float] = values_K.tolist()
        return values

    def _problem(self, this: Step) -> str:
        """Why a step has no update, else empty; waits for its result."""
        gradient_norm, scale, out_of_memory, bad_losses, *_ = self._values(this)
        if out_of_memory:
            return f"{OUT_OF_MEMORY} ({this.out_of_memory or 'in another process'})"
        if bad_losses:
            return "infinite or NaN loss"
        if math.isfinite(gradient_norm):
            return ""
        if self.scaler.is_enabled() and scale > _SMALLEST_SCALE:
            return SCALE_HALVED
        return "infinite or NaN gradient"

    def _read(self, this: Step) -> StepReport:
        """The report of a step; waits for its result."""
        gradient_norm, _, _, _, *sums = self._values(this)
        problem = self._problem(this)
        if problem and self.reads_late and this.result is not None:
            assert isinstance(self.optimiser, ConditionalOptimiser)
            self.optimiser.take_back()
        known_at = time.perf_counter()
        seconds = known_at - max(this.started, self._known_at)
        self._known_at = known_at
        return StepReport(
            sums=dict(zip(this.names, sums, strict=True)),
            size=this.size,
            seconds=seconds,
            gradient_norm=gradient_norm,
            problem=problem,
            suspects=self._suspects(this, problem) if problem else (),
        )

    def _suspects(self, this: Step, problem: str) -> tuple[Utterance, ...]:
        """The utterances that may have caused the problem of a step, if this process did."""
        if this.out_of_memory:
            return tuple(self.task.utterances(this.batches[len(this.losses)]))
        everything = [
            dataclasses.replace(utterance, loss=loss)
            for batch, loss_N in zip(this.batches, this.losses, strict=True)
            for utterance, loss in zip(self.task.utterances(batch), loss_N.tolist(), strict=True)
        ]
        bad = tuple(u for u in everything if not math.isfinite(u.loss))
        return bad or (tuple(everything) if "gradient" in problem else ())


class BatchCopies:
    """Copies batches to a device.

    On CUDA the device still computes the step before when the host launches a step. A copy on the
    stream of the kernels would wait for that, and then the kernels would wait for the copy; so
    copies have a stream of their own, and run while the device computes.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """`batch.to(device)`; on CUDA the current stream waits for the copies, the host does not.

        Args:
            batch: a dataclass with a method `to`; its tensors should be in page-locked memory.
        """
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
        kernels = torch.cuda.current_stream(self._device)
        kernels.wait_stream(self._stream)
        for each in dataclasses.fields(moved):
            value = getattr(moved, each.name)
            if isinstance(value, Tensor) and value.is_cuda:
                # The allocator must not give its memory to the next copy before the kernels end.
                value.record_stream(kernels)
        return moved
