"""Joints of transformers' Parakeet models that hand their inputs to the loss in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetRNNTJointNetwork,
    ParakeetTDTJointNetwork,
)

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.pruned_joint import (
    ACTIVATIONS,
    PrunedJointLoss,
    PrunedOptions,
    UnstoredLogits,
    change_pruned,
)
from pruned_rnnt.ops.common.plain_layers import LayerParameters, hook_of, linear_parameters

# The model has projected both inputs of its joint.
_PROJECTED = nn.Identity(), nn.Identity()


class _Unstored(UnstoredLogits):
    """Calls the joint's own forward in evaluation, for single frames, and where hooks, adapters or
    other layers take part in it."""

    head: nn.Linear
    activation: nn.Module

    def forward(
        self, decoder_hidden_states: Tensor, encoder_hidden_states: Tensor
    ) -> Tensor | JointInputs:
        is_lattice = encoder_hidden_states.dim() == decoder_hidden_states.dim() == 4
        if self.training and is_lattice:
            self.count_call()
            inputs = self.inputs(
                encoder_hidden_states[:, :, 0],
                decoder_hidden_states[:, 0],
                projections=_PROJECTED,
            )
            if inputs is not None:
                return inputs
        logits: Tensor = super().forward(decoder_hidden_states, encoder_hidden_states)
        return logits

    def layers(self) -> tuple[LayerParameters, nn.Module] | str:
        hook = hook_of(self)
        if hook is not None:
            return f"joint {hook}"
        head = linear_parameters(self.head)
        if isinstance(head, str):
            return f"joint.head {head}"
        if type(self.activation) not in ACTIVATIONS:
            return f"joint.activation is {self.activation!r}"
        return head, self.activation


class UnstoredJoint(_Unstored, ParakeetRNNTJointNetwork):  # type: ignore[misc]
    """The joint of an RNN-T model."""


class UnstoredTdtJoint(_Unstored, ParakeetTDTJointNetwork):  # type: ignore[misc]
    """The joint of a TDT model."""


_KINDS: dict[Any, type[nn.Module]] = {
    ParakeetRNNTJointNetwork: UnstoredJoint,
    ParakeetTDTJointNetwork: UnstoredTdtJoint,
}


def prepare(
    model: Any, *, fused: bool, pruned: PrunedOptions | None, durations: Sequence[int] | None
) -> None:
    """Let the joint of a model store its logits in training, or not; and train with the pruned
    loss, or not.

    Raises:
        TypeError, ValueError: its joint is of another class, or has another activation; or as
            `PrunedJointLoss`.
    """
    joint: Any = getattr(model, "joint", None)
    if not fused and pruned is None:
        plain = {unstored: kind for kind, unstored in _KINDS.items()}
        if type(joint) in plain:
            change_pruned(joint, None)
            joint.__class__ = plain[type(joint)]
        return
    option = "fused=True" if pruned is None else "pruned=..."
    if type(joint) not in (*_KINDS, *_KINDS.values()):
        kinds = [kind.__name__ for kind in _KINDS]
        raise ValueError(f"{option} needs model.joint to be one of {kinds}, not {joint!r}")
    if type(joint.activation) not in ACTIVATIONS:
        raise ValueError(
            f"{option} needs a joint with ReLU or tanh; this one has {joint.activation!r}"
        )
    loss = None
    if pruned is not None:
        weight = joint.head.weight
        widths = weight.shape[1], weight.shape[1]
        loss = PrunedJointLoss(pruned, widths, weight, durations)
    joint.__class__ = _KINDS.get(type(joint), type(joint))
    change_pruned(joint, loss)
