"""What the joints of NeMo and transformers share that hand their inputs to the loss in training.

Axes: as of pruned_joint.
"""

from __future__ import annotations

import logging
from typing import cast

from torch import Tensor, nn

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.pruned_joint import PrunedJointInputs, PrunedJointLoss
from pruned_rnnt.ops.common.plain_layers import LayerParameters

logger = logging.getLogger(__name__)
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh"}


class UnstoredLogits(nn.Module):
    """A joint whose logits are stored only where more than its plain layers take part in it."""

    _reason = ""

    @property
    def pruned(self) -> PrunedJointLoss | None:
        """The submodule `pruned_loss`; None if the joint trains with the exact loss."""
        # Or what PEFT's modules_to_save wraps it in, which has its attributes.
        return cast("PrunedJointLoss | None", self._modules.get("pruned_loss"))

    def count_call(self) -> None:
        """A training call of the joint begins, by which the pruned loss counts steps."""
        if self.training and self.pruned is not None:
            self.pruned.count_call()

    def layers(self) -> tuple[LayerParameters, nn.Module] | str:
        """Output layer and activation, or what else takes part in the joint, for a message."""
        raise NotImplementedError

    def inputs(
        self, am: Tensor, lm: Tensor, projections: tuple[nn.Module, nn.Module] | None = None
    ) -> JointInputs | None:
        """What stands for the logits of (N, T, ...) and (N, U+1, ...); None if these are needed.

        projections: of am and lm to D, for the pruned loss.

        Raises:
            ValueError: the pruned loss needs logits that plain layers do not compute.
        """
        layers = self.layers()
        if not isinstance(layers, str):
            (weight, bias), activation = layers
            given = am, lm, weight, bias, ACTIVATIONS[type(activation)]
            if projections is None or self.pruned is None:
                return JointInputs(*given)
            return PrunedJointInputs(*given, projections, self.pruned)
        if self.pruned is not None:
            raise ValueError(
                f"{layers}, so that the pruned loss cannot compute the joint's logits: remove "
                "that, or train with the exact loss (use(model) without pruned)"
            )
        if layers != self._reason:
            logger.warning("fused=True: the logits are stored, because %s", layers)
            self._reason = layers
        return None


def change_pruned(joint: nn.Module, pruned: PrunedJointLoss | None) -> None:
    """Give a joint the submodule of the pruned loss in place of an earlier one, or take it away."""
    joint._modules.pop("pruned_loss", None)
    if pruned is not None:
        joint.pruned_loss = pruned
