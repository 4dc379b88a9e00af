"""`torchaudio.transforms` with this package's `RNNTLoss`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.compat.package_names import attribute_of
from pruned_rnnt.compat.torchaudio.functional import rnnt_loss

__all__ = ["RNNTLoss"]


class RNNTLoss(torch.nn.Module):
    """`functional.rnnt_loss` as a module; the arguments are those of the function."""

    def __init__(
        self,
        blank: int = -1,
        clamp: float = -1.0,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
    ) -> None:
        super().__init__()
        self.blank = blank
        self.clamp = clamp
        self.reduction = reduction
        self.fused_log_softmax = fused_log_softmax

    def forward(
        self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        """As the function `rnnt_loss`."""
        return rnnt_loss(
            logits,
            targets,
            logit_lengths,
            target_lengths,
            self.blank,
            self.clamp,
            self.reduction,
            self.fused_log_softmax,
        )


def __getattr__(name: str) -> Any:
    return attribute_of("torchaudio.transforms", name, __name__)
