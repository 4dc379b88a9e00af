"""NeMo's joint with the choice to hand its inputs to the loss in training, instead of logits.

Axes: N batch, T frames, U symbols, D joint width, V outputs.
"""

from __future__ import annotations

import logging
from typing import Any

from nemo.collections.asr.modules.rnnt import RNNTJoint
from torch import Tensor, nn

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.ops.common.plain_layers import LayerParameters, hook_of, linear_parameters

logger = logging.getLogger(__name__)
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh"}


class UnstoredJoint(RNNTJoint):  # type: ignore[misc]
    """Calls NeMo's own method in evaluation, and where more than its plain layers take part."""

    _reason = ""

    def joint_after_projection(self, f: Tensor, g: Tensor) -> Tensor | JointInputs:
        """The outputs of a lattice.

        Args:
            f: (N, T, D) projected frames.
            g: (N, U+1, D) projected predictor outputs.
        """
        if self.training:
            layer = _changed(self) or _output_layer(self.joint_net)
            if not isinstance(layer, str):
                return JointInputs(f, g, *layer, _ACTIVATIONS[type(self.joint_net[0])])
            if layer != self._reason:
                logger.warning("fused=True: the logits are stored, because %s", layer)
                self._reason = layer
        logits: Tensor = super().joint_after_projection(f, g)
        return logits


def store_logits(joint: Any, *, stored: bool) -> None:
    """Let a joint store its logits in training, or not.

    Raises:
        ValueError: it is of another class, or has layers between its inputs and the output layer
            that need each node of the lattice.
    """
    if stored:
        if type(joint) is UnstoredJoint:
            joint.__class__ = RNNTJoint
        return
    if type(joint) not in (RNNTJoint, UnstoredJoint):
        raise ValueError(f"fused=True needs model.joint to be an RNNTJoint, not {joint!r}")
    for index, layer in enumerate(joint.joint_net):
        if isinstance(layer, nn.Dropout) and layer.p > 0:
            raise ValueError(
                f"fused=True does not support dropout between the joint's layers, which is "
                f"{layer.p}: set model.joint.joint_net[{index}].p = 0, or leave fused=True out"
            )
    if type(joint.joint_net[0]) not in _ACTIVATIONS:
        raise ValueError(
            f"fused=True needs a joint with relu or tanh; this one has {joint.joint_net[0]!r}"
        )
    if joint.masking_prob > 0:
        raise ValueError(
            f"fused=True does not support masked predictor outputs: model.joint.masking_prob is "
            f"{joint.masking_prob}; set it to 0, or leave fused=True out"
        )
    joint.__class__ = UnstoredJoint


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
    if type(activation) not in _ACTIVATIONS:
        return f"{name} begins with a {type(activation).__name__}"
    for layer in others:
        if type(layer) is not nn.Dropout or layer.p > 0:
            return f"{name} has {layer!r}"
    parameters = linear_parameters(last)
    if isinstance(parameters, str):
        return f"{name} ends with a layer that {parameters}"
    return parameters
