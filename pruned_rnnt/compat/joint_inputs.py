"""The inputs of a joint in place of its logits, for losses that never store all of these.

Axes: N batch, T frames, U symbols, D joint width, V outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS, activated

_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class JointInputs:
    """Stands for the logits act(am(t) + lm(u)) weight^T + bias, of shape (N, T, U+1, V).

    A model may take frames, `logits[:, :frames]`, and outputs, `logits[..., begin:end]`, of it,
    read its shape, and give it to a loss. Everything else needs logits, which `stored` computes.

    am: (N, T, D); lm: (N, U+1, D); weight: (V, D); bias: (V,) or None; activation: see
    `rnnt_loss_fused`.
    """

    am: Tensor
    lm: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str

    # Of `use`, for messages.
    option: ClassVar[str] = "fused=True"

    @property
    def device(self) -> torch.device:
        return self.am.device

    @property
    def shape(self) -> torch.Size:
        """That of the logits, (N, T, U+1, V)."""
        return torch.Size((*self.am.shape[:2], self.lm.shape[1], self.weight.shape[0]))

    def stored(self) -> Tensor:
        """The logits (N, T, U+1, V)."""
        sums = self.am[:, :, None] + self.lm[:, None]
        hidden = activated(sums, ACTIVATIONS[self.activation])
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def rnnt_loss(self, *batch: Tensor, **options: Any) -> Tensor:
        """The RNN-T loss of the logits; arguments as in the function of that name."""
        targets, *lengths = batch
        return pruned_rnnt.rnnt_loss_fused(
            *self._layer_and_inputs, targets, None, *lengths, activation=self.activation, **options
        )

    def rnnt_loss_tdt(self, duration_logits: JointInputs, *batch: Tensor, **options: Any) -> Tensor:
        """The TDT loss of the logits; arguments as in the function of that name."""
        targets, *lengths = batch
        return pruned_rnnt.rnnt_loss_tdt_fused(
            *self._layer_and_inputs,
            duration_logits.weight,
            duration_logits.bias,
            targets,
            None,
            *lengths,
            activation=self.activation,
            **options,
        )

    @property
    def _layer_and_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.am, self.lm, self.weight, self.bias

    def squeeze(self, dim: int) -> JointInputs:
        """Itself; models call it for an axis that is not 1 wide in training."""
        return self

    def contiguous(self) -> JointInputs:
        """Itself; models call it after `narrow`."""
        return self

    def narrow(self, dim: int, start: int, length: int | Tensor) -> JointInputs:
        """Frames, as `logits.narrow(1, start, length)`."""
        if dim != 1:
            raise self._missing(f"narrow({dim}, ...)")
        return replace(self, am=self.am.narrow(1, start, int(length)))

    def __iter__(self) -> NoReturn:
        # nn.DataParallel does it, which the Trainer of transformers uses for several GPUs.
        raise TypeError(
            f"logits cannot be iterated over, nor gathered by nn.DataParallel, because "
            f"{self.option} does not store them in training; with several GPUs start one process "
            f"for each (torchrun), or leave {self.option} out"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(str(self._missing(name)))

    def __getitem__(self, key: Any) -> JointInputs:
        if isinstance(key, tuple) and len(key) == 2:
            first, second = key
            if first is Ellipsis and isinstance(second, slice):
                bias = None if self.bias is None else self.bias[second]
                return replace(self, weight=self.weight[second], bias=bias)
            if first == _ALL and isinstance(second, slice):
                return replace(self, am=self.am[:, second])
        raise self._missing(f"[{key!r}]")

    def _missing(self, use: str) -> TypeError:
        use = use if use.startswith("[") else f".{use}"
        return TypeError(
            f"logits{use} needs the logits of the joint, which {self.option} does not store in "
            f"training; use logits.stored(), the model in eval mode, or leave {self.option} out"
        )


def rnnt_loss(logits: Tensor | JointInputs, *batch: Tensor, **options: Any) -> Tensor:
    """`pruned_rnnt.rnnt_loss`, or that of the logits that the inputs stand for.

    Args:
        batch: targets, logit_lengths, target_lengths.
        options: keywords that `rnnt_loss` and `rnnt_loss_fused` have.
    """
    if isinstance(logits, JointInputs):
        return logits.rnnt_loss(*batch, **options)
    return pruned_rnnt.rnnt_loss(logits, *batch, **options)


def rnnt_loss_tdt(
    logits: Tensor | JointInputs,
    duration_logits: Tensor | JointInputs,
    *batch: Tensor,
    **options: Any,
) -> Tensor:
    """`pruned_rnnt.rnnt_loss_tdt`, as `rnnt_loss`; the duration logits are of the same joint."""
    if isinstance(logits, JointInputs) and isinstance(duration_logits, JointInputs):
        return logits.rnnt_loss_tdt(duration_logits, *batch, **options)
    if isinstance(logits, JointInputs) or isinstance(duration_logits, JointInputs):
        raise TypeError("logits and duration_logits must both be tensors, or both joint inputs")
    return pruned_rnnt.rnnt_loss_tdt(logits, duration_logits, *batch, **options)
