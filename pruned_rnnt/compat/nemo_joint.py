"""NeMo's joint with the choice to hand its inputs to the loss in training, instead of logits.

Axes: N batch, T frames, U symbols, E and P widths of encoder and predictor, D joint width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo.collections.asr.modules.rnnt import RNNTJoint
from torch import Tensor, nn

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.pruned_joint import (
    ACTIVATIONS,
    PrunedJointLoss,
    PrunedOptions,
    UnstoredLogits,
    change_pruned,
)
from pruned_rnnt.ops.common.plain_layers import LayerParameters, hook_of, linear_parameters


class UnstoredJoint(UnstoredLogits, RNNTJoint):  # type: ignore[misc]
    """Calls NeMo's own methods in evaluation, and where more than its plain layers take part."""

    enc: nn.Linear
    pred: nn.Linear
    joint_net: nn.Sequential

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Once for all parts of a batch that fused_batch_size makes.
        self.count_call()
        return super().forward(*args, **kwargs)

    def joint(self, f: Tensor, g: Tensor) -> Tensor | JointInputs:
        """The outputs of a lattice.

        Args:
            f: (N, T, E) frames.
            g: (N, U+1, P) predictor outputs.
        """
        if self.training and self.pruned is not None:
            inputs = self.inputs(f, g, projections=(self.enc, self.pred))
            if inputs is not None:
                return inputs
        outputs: Tensor | JointInputs = super().joint(f, g)
        return outputs

    def joint_after_projection(self, f: Tensor, g: Tensor) -> Tensor | JointInputs:
        """The outputs of a lattice.

        Args:
            f: (N, T, D) projected frames.
            g: (N, U+1, D) projected predictor outputs.
        """
        if self.training and self.pruned is None:
            inputs = self.inputs(f, g)
            if inputs is not None:
                return inputs
        logits: Tensor = super().joint_after_projection(f, g)
        return logits

    def layers(self) -> tuple[LayerParameters, nn.Module] | str:
        changed = _changed(self)
        if changed:
            return changed
        parameters = _output_layer(self.joint_net)
        return parameters if isinstance(parameters, str) else (parameters, self.joint_net[0])


def prepare(
    joint: Any, *, fused: bool, pruned: PrunedOptions | None, durations: Sequence[int] | None
) -> None:
    """Let a joint store its logits in training, or not; and train with the pruned loss, or not.

    Raises:
        TypeError, ValueError: it is of another class, or has layers between its inputs and the
            output layer that need each node of the lattice; or as `PrunedJointLoss`.
    """
    if not fused and pruned is None:
        if type(joint) is UnstoredJoint:
            change_pruned(joint, None)
            joint.__class__ = RNNTJoint
        return
    option = "fused=True" if pruned is None else "pruned=..."
    if type(joint) not in (RNNTJoint, UnstoredJoint):
        raise ValueError(f"{option} needs model.joint to be an RNNTJoint, not {joint!r}")
    for index, layer in enumerate(joint.joint_net):
        if isinstance(layer, nn.Dropout) and layer.p > 0:
            raise ValueError(
                f"{option} does not support dropout between the joint's layers, which is "
                f"{layer.p}: set model.joint.joint_net[{index}].p = 0, or leave {option} out"
            )
    if type(joint.joint_net[0]) not in ACTIVATIONS:
        raise ValueError(
            f"{option} needs a joint with relu or tanh; this one has {joint.joint_net[0]!r}"
        )
    if joint.masking_prob > 0:
        raise ValueError(
            f"{option} does not support masked predictor outputs: model.joint.masking_prob is "
            f"{joint.masking_prob}; set it to 0, or leave {option} out"
        )
    loss = None
    if pruned is not None:
        widths = joint.enc.in_features, joint.pred.in_features
        loss = PrunedJointLoss(pruned, widths, joint.joint_net[-1].weight, durations)
    joint.__class__ = UnstoredJoint
    change_pruned(joint, loss)


def _changed(joint: Any) -> str:
    """What takes part in a call of the joint besides its layers; empty if nothing does."""
    hook = hook_of(joint)
    if hook is not None:
        return f"joint {hook}"
    if joint.is_adapter_available():
        return "joint has adapters"
    if joint.masking_prob > 0:
        return f"joint.masking_prob is {joint.masking_prob}"
    # It divides the logits where NeMo normalises them.
    return "" if joint.temperature == 1.0 else f"joint.temperature is {joint.temperature}"


def _output_layer(joint_net: nn.Sequential) -> LayerParameters | str:
    """The parameters of the last layer, or why the layers have to be called."""
    name = "joint.joint_net"
    if type(joint_net) is not nn.Sequential:
        return f"{name} is a {type(joint_net).__name__}"
    *before, last = joint_net
    for module in (joint_net, *before):
        hook = hook_of(module)
        if hook is not None:
            return f"{name} has a {type(module).__name__} that {hook}"
    activation, *others = before
    if type(activation) not in ACTIVATIONS:
        return f"{name} begins with a {type(activation).__name__}"
    for layer in others:
        if type(layer) is not nn.Dropout or layer.p > 0:
            return f"{name} has {layer!r}"
    parameters = linear_parameters(last)
    if isinstance(parameters, str):
        return f"{name} ends with a layer that {parameters}"
    return parameters
