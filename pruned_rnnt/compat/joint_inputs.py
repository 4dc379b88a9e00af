"""The inputs of a joint in place of its logits, for losses that never store all of these.

Axes: N batch, T frames, U symbols, D joint width, V outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS, activated

_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class JointInputs:
    """Stands for the logits act(am(t) + lm(u)) weight^T + bias, of shape (N, T, U+1, V).

    A model may take frames, `logits[:, :frames]`, and outputs, `logits[..., begin:end]`, of it, and
    give it to a loss. Everything else needs logits, which `stored` computes.

    am: (N, T, D); lm: (N, U+1, D); weight: (V, D); bias: (V,) or None; activation: as of
    `rnnt_loss_fused`.
    """

    am: Tensor
    lm: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str

    @property
    def device(self) -> torch.device:
        return self.am.device

    def stored(self) -> Tensor:
        """The logits (N, T, U+1, V)."""
        sums = self.am[:, :, None] + self.lm[:, None]
        hidden = activated(sums, ACTIVATIONS[self.activation])
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def squeeze(self, dim: int) -> JointInputs:
        """Itself; models call it for an axis that is not 1 wide in training."""
        return self

    def __getitem__(self, key: Any) -> JointInputs:
        if isinstance(key, tuple) and len(key) == 2:
            first, second = key
            if first is Ellipsis and isinstance(second, slice):
                bias = None if self.bias is None else self.bias[second]
                return replace(self, weight=self.weight[second], bias=bias)
            if first == _ALL and isinstance(second, slice):
                return replace(self, am=self.am[:, second])
        raise TypeError(
            f"logits[{key!r}] needs the logits of the joint, which fused=True does not store in "
            "training; use logits.stored(), the model in eval mode, or fused=False"
        )
