"""Running statistics, such as of batch normalisations, which skipped steps leave as they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruned_rnnt.model.captured_gradients import new_flat, views_of


class RunningStatistics:
    """The saved buffers of a model that passes may change or replace.

    A skipped step must leave them as they were, as NaN would never leave a running mean. They are
    the floating-point ones, and the counters of batch normalisations, of the modules in training
    mode: a frozen part does not change, and each step would copy it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            module
            for module in model.modules()
            if any(_is_kept(module, *each) for each in module.named_buffers(recurse=False))
        ]
        # Of each dtype: module, name and buffer, and their values as one vector.
        self._kept: list[tuple[list[tuple[nn.Module, str, Tensor]], Tensor]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy their values, before the passes of a step."""
        of_dtype: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for module in filter(lambda each: each.training, self._modules):
            for name, buffer in module.named_buffers(recurse=False):
                if _is_kept(module, name, buffer):
                    of_dtype.setdefault(buffer.dtype, []).append((module, name, buffer))
        self._kept = []
        for places in of_dtype.values():
            buffers = [buffer for _, _, buffer in places]
            # One vector: few launches, and no wait for a decision of the device.
            flat = new_flat(buffers)
            torch._foreach_copy_(views_of(flat, buffers), buffers)
            self._kept.append((places, flat))

    @torch.no_grad()
    def put_back(self, applies: Tensor | None = None) -> None:
        """Undo the changes since `keep`, in place; not if `applies`, () bool on the device."""
        for places, flat in self._kept:
            buffers = [buffer for _, _, buffer in places]
            found = [getattr(module, name) for module, name, _ in places]
            # What was replaced by another size is no statistic, and stays.
            statistics = [
                now if now is not None and now.shape == buffer.shape else buffer
                for now, buffer in zip(found, buffers, strict=True)
            ]
            if applies is not None:
                changed = flat.clone()
                torch._foreach_copy_(views_of(changed, buffers), statistics)
                torch.where(applies, changed, flat, out=flat)
            torch._foreach_copy_(buffers, views_of(flat, buffers))
            for (module, name, buffer), now, statistic in zip(
                places, found, statistics, strict=True
            ):
                if now is statistic:
                    setattr(module, name, buffer)


def _is_kept(module: nn.Module, name: str, buffer: Tensor) -> bool:
    # What was made in inference mode cannot be written.
    if name in module._non_persistent_buffers_set or buffer.is_inference():
        return False
    return buffer.is_floating_point() or isinstance(getattr(module, "running_mean", None), Tensor)
