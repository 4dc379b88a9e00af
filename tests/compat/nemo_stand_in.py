"""The parts of NeMo's losses and joints that compat.nemo_loss touches, in its calling convention.

NeMo resolves a name and a blank to a module, sets that module's reduction to None, calls it with
acts, labels, act_lens, label_lens, and reduces the values itself. NeMo's own resolver is a chain of
fixed names, so a name that is only in the table is refused. A batch for its joint, and the loss and
gradients of it; the fixture model_of makes the model.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SYMBOLS, DURATIONS = 5, [0, 1, 2, 3]
TARGETS = torch.tensor([[1, 2, 3], [3, 4, 0], [4, 2, 2]])
FRAMES, LENGTHS = torch.tensor([5, 4, 6]), torch.tensor([3, 2, 3])
Made = Callable[..., Any]


@dataclasses.dataclass
class RNNTLossConfig:
    loss_name: str
    lib_name: str
    is_available: bool = False
    installation_msg: str = ""
    min_version: str | None = None
    force_float32: bool = True


class RecordedLoss(torch.nn.Module):
    """A loss of NeMo's own; it only stores its arguments."""

    def __init__(self, loss_name: str, blank: int, kwargs: dict[str, Any] | None) -> None:
        super().__init__()
        self.loss_name, self.blank, self.kwargs = loss_name, blank, kwargs


def loss_module() -> types.ModuleType:
    """A fresh module with NeMo's names."""
    module: Any = types.ModuleType("nemo.collections.asr.losses.rnnt")
    numba = RNNTLossConfig("warprnnt_numba", "numba", is_available=True, force_float32=False)
    module.RNNTLossConfig = RNNTLossConfig
    module.RNNT_LOSS_RESOLVER = {"warprnnt_numba": numba, "default": numba}

    def resolve_rnnt_loss(
        loss_name: str, blank_idx: int, loss_kwargs: dict[str, Any] | None = None
    ) -> torch.nn.Module:
        known = module.RNNT_LOSS_RESOLVER[loss_name].loss_name
        if known != "warprnnt_numba":
            raise ValueError(f"Invalid value of `loss_name`: {loss_name}")
        return RecordedLoss(known, blank_idx, loss_kwargs)

    class RNNTLoss(torch.nn.Module):
        def __init__(
            self,
            num_classes: int,
            reduction: str | None = "mean_batch",
            loss_name: str = "default",
            loss_kwargs: dict[str, Any] | None = None,
        ) -> None:
            super().__init__()
            self.reduction = reduction
            self.loss = module.resolve_rnnt_loss(loss_name, num_classes, loss_kwargs)
            self.force_float32 = module.RNNT_LOSS_RESOLVER[loss_name].force_float32

        def forward(
            self, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
        ) -> Tensor:
            if self.force_float32:
                log_probs = log_probs.float()
            if log_probs.shape[1] != input_lengths.max():
                log_probs = log_probs.narrow(1, 0, input_lengths.max()).contiguous()
            targets = targets[:, : int(target_lengths.max())].contiguous()
            kept, self.loss.reduction = self.loss.reduction, None
            loss = self.loss(
                acts=log_probs, labels=targets, act_lens=input_lengths, label_lens=target_lengths
            )
            self.loss.reduction = kept
            return self.reduce(loss, target_lengths)

        def reduce(self, losses: Tensor, target_lengths: Tensor) -> Tensor:
            if self.reduction == "mean_batch":
                return losses.mean()
            if self.reduction == "mean_volume":
                return losses.sum() / target_lengths.sum()
            return losses

    module.resolve_rnnt_loss = resolve_rnnt_loss
    module.RNNTLoss = RNNTLoss
    return module


def joint_module() -> types.ModuleType:
    """A fresh module with NeMo's joint."""
    module: Any = types.ModuleType("nemo.collections.asr.modules.rnnt")

    class RNNTJoint(torch.nn.Module):
        fuse_loss_wer = False
        temperature = 1.0
        masking_prob = -1.0

        def __init__(
            self, symbols: int, extra: int = 0, activation: str = "relu", dropout: float = 0.0
        ) -> None:
            super().__init__()
            self.num_extra_outputs, self.num_classes_with_blank = extra, symbols + 1 + extra
            self.enc, self.pred = torch.nn.Linear(7, 8), torch.nn.Linear(6, 8)
            kinds = {"relu": torch.nn.ReLU(inplace=True), "sigmoid": torch.nn.Sigmoid()}
            between = [torch.nn.Dropout(dropout)] if dropout else []
            last = torch.nn.Linear(8, self.num_classes_with_blank)
            self.joint_net = torch.nn.Sequential(kinds[activation], *between, last)
            self.log_softmax: bool | None = None

        def is_adapter_available(self) -> bool:
            return False

        def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
            """(N, D, T) and (N, D, U + 1) -> (N, T, U + 1, V)."""
            return self.joint(encoder_outputs.transpose(1, 2), decoder_outputs.transpose(1, 2))

        def joint(self, f: Tensor, g: Tensor) -> Tensor:
            return self.joint_after_projection(self.enc(f), self.pred(g))

        def joint_after_projection(self, f: Tensor, g: Tensor) -> Tensor:
            logits: Tensor = self.joint_net(f[:, :, None] + g[:, None])
            is_normalised = not logits.is_cuda if self.log_softmax is None else self.log_softmax
            return logits.log_softmax(-1) if is_normalised else logits

    module.RNNTJoint = RNNTJoint
    return module


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs of encoder (N, D, T + 1) and predictor (N, D, U + 1)."""
    generator = torch.Generator().manual_seed(2)
    shapes = (3, 7, 7), (3, 6, 4)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def loss_and_gradients(model: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    given = inputs(dtype)
    value = model.loss(model.joint(*given), TARGETS, FRAMES, LENGTHS)
    return [value.detach(), *torch.autograd.grad(value, [*given, *model.joint.parameters()])]
