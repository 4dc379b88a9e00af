"""Running statistics of batch normalisations, which skipped steps leave as they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruned_rnnt.model.captured_gradients import new_flat, views_of


class RunningStatistics:
    """The buffers of a model's batch normalisations, whose passes change them.

    A skipped step must leave them as they were, as NaN would never leave a running mean.
    """

    def __init__(self, model: nn.Module) -> None:
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                for buffer in module.buffers(recurse=False):
                    of_dtype.setdefault(buffer.dtype, []).append(buffer)
        # One vector for those of a dtype: few launches, and no wait for a decision of the device.
        self._groups = [
            (buffers, flat, views_of(flat, buffers))
            for buffers in of_dtype.values()
            for flat in [new_flat(buffers)]
        ]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy their values, before the passes of a step."""
        for buffers, _, kept in self._groups:
            torch._foreach_copy_(kept, buffers)

    @torch.no_grad()
    def put_back(self, applies: Tensor | None = None) -> None:
        """Undo the changes since `keep`, in place; not if `applies`, () bool on the device."""
        for buffers, flat, kept in self._groups:
            if applies is not None:
                changed = flat.clone()
                torch._foreach_copy_(views_of(changed, buffers), buffers)
                torch.where(applies, changed, flat, out=flat)
            torch._foreach_copy_(buffers, kept)
