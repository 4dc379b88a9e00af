"""Joints of transformers' Parakeet models that hand their inputs to the loss in training."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetRNNTJointNetwork,
    ParakeetTDTJointNetwork,
)

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.ops.common.plain_layers import hook_of, linear_parameters

logger = logging.getLogger(__name__)
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh"}


class _Unstored(nn.Module):
    """Calls the joint's own forward in evaluation, for single frames, and where hooks, adapters or
    other layers take part in it."""

    head: nn.Module
    activation: nn.Module
    _reason = ""

    def forward(
        self, decoder_hidden_states: Tensor, encoder_hidden_states: Tensor
    ) -> Tensor | JointInputs:
        is_lattice = encoder_hidden_states.dim() == decoder_hidden_states.dim() == 4
        if self.training and is_lattice:
            layer = linear_parameters(self.head)
            hook = hook_of(self)
            if hook is None and not isinstance(layer, str):
                am, lm = encoder_hidden_states[:, :, 0], decoder_hidden_states[:, 0]
                return JointInputs(am, lm, *layer, _ACTIVATIONS[type(self.activation)])
            reason = f"joint.head {layer}" if hook is None else f"joint {hook}"
            if reason != self._reason:
                logger.warning("fused=True: the logits are stored, because %s", reason)
                self._reason = reason
        logits: Tensor = super().forward(decoder_hidden_states, encoder_hidden_states)
        return logits


class UnstoredJoint(_Unstored, ParakeetRNNTJointNetwork):  # type: ignore[misc]
    """The joint of an RNN-T model."""


class UnstoredTdtJoint(_Unstored, ParakeetTDTJointNetwork):  # type: ignore[misc]
    """The joint of a TDT model."""


_KINDS: dict[Any, type[nn.Module]] = {
    ParakeetRNNTJointNetwork: UnstoredJoint,
    ParakeetTDTJointNetwork: UnstoredTdtJoint,
}


def store_logits(model: Any, *, stored: bool) -> None:
    """Let the joint of a model store its logits in training, or not.

    Raises:
        ValueError: its joint is of another class, or has another activation.
    """
    joint: Any = getattr(model, "joint", None)
    if stored:
        plain = {unstored: kind for kind, unstored in _KINDS.items()}
        if type(joint) in plain:
            joint.__class__ = plain[type(joint)]
        return
    if type(joint) in _KINDS.values():
        return
    if type(joint) not in _KINDS:
        kinds = [kind.__name__ for kind in _KINDS]
        raise ValueError(f"fused=True needs model.joint to be one of {kinds}, not {joint!r}")
    if type(joint.activation) not in _ACTIVATIONS:
        raise ValueError(
            f"fused=True needs a joint with ReLU or tanh; this one has {joint.activation!r}"
        )
    joint.__class__ = _KINDS[type(joint)]
