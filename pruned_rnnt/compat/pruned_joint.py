"""The joints of NeMo and transformers that hand their inputs to the loss in training, and the
pruned loss inside them, whose layers stay the joint's own.

Axes: see joint_inputs; E and P widths of what the joint projects, K durations.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.loss.checks import check_finite, check_flag, check_integer, check_options
from pruned_rnnt.loss.composed_losses import projection
from pruned_rnnt.loss.durations import check_omega
from pruned_rnnt.loss.joiner import Joiner, check_joiner
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.loss.simple import check_scales
from pruned_rnnt.ops.common.plain_layers import LayerParameters

logger = logging.getLogger(__name__)
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh"}


def _default(name: str) -> Any:
    return inspect.signature(PrunedTransducerLoss).parameters[name].default


@dataclass(frozen=True, kw_only=True)
class PrunedOptions:
    """How a joint of another library trains with the pruned loss.

    Args:
        s_range, lm_only_scale, am_only_scale, simple_scale, pruned_scale_start, warm_up_steps,
            exact_bounds: see `pruned_rnnt.PrunedTransducerLoss`, whose defaults they have.
        calls_per_step: training calls of the joint for each optimiser step, above 1 if gradients
            accumulate; the warm-up counts steps.
    """

    s_range: int = _default("s_range")
    lm_only_scale: float = _default("lm_only_scale")
    am_only_scale: float = _default("am_only_scale")
    simple_scale: float = _default("simple_scale")
    pruned_scale_start: float = _default("pruned_scale_start")
    warm_up_steps: int = _default("warm_up_steps")
    exact_bounds: bool = _default("exact_bounds")
    calls_per_step: int = 1


class PrunedJointLoss(PrunedTransducerLoss):
    """A PrunedTransducerLoss that is a submodule of the joint: each call brings the joint's layers.

    Its state is the projections of the simple loss and the number of training calls.

    Args:
        options: see there.
        widths: E and P.
        weight: (V + K, D) of the joint's last layer, whose device and dtype the projections get.
        durations: None for RNN-T.

    Raises:
        TypeError, ValueError: as `PrunedTransducerLoss`; options of another type.
    """

    def __init__(
        self,
        options: PrunedOptions,
        widths: tuple[int, int],
        weight: Tensor,
        durations: Sequence[int] | None,
    ) -> None:
        if not isinstance(options, PrunedOptions):
            raise TypeError(
                f"pruned is {options!r}; it must be a PrunedOptions, for example "
                "PrunedOptions(s_range=5), or None"
            )
        values = asdict(options)
        calls_per_step = check_integer("calls_per_step", values.pop("calls_per_step"))
        if calls_per_step < 1:
            raise ValueError(f"calls_per_step is {calls_per_step}; it must be at least 1")
        count = len(durations or ())
        vocab_size = weight.shape[0] - count
        with torch.device("meta"):
            checked = Joiner(*widths, weight.shape[1], vocab_size, duration_count=count)
        super().__init__(
            checked, *widths, vocab_size, durations=durations, reduction="none", **values
        )
        del self.joiner
        self.to(device=weight.device, dtype=weight.dtype)
        self.calls_per_step = calls_per_step
        # A tensor: torch.compile would compile the model anew for each value of an integer.
        self._calls = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def calls(self) -> int:
        """The number of training calls of the joint."""
        return int(self._calls)

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls = torch.tensor(value, device="cpu")

    def count_call(self) -> None:
        """The joint begins a training call."""
        if torch.is_grad_enabled():
            self._calls = self._calls + 1

    def get_extra_state(self) -> Tensor:
        # A tensor, because safetensors files hold nothing else.
        return self._calls.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def of_joint(
        self,
        inputs: PrunedJointInputs,
        duration_logits: JointInputs | None,
        *batch: Tensor,
        blank: int,
        delay_penalty: float,
        fastemit_lambda: float,
        durations: Sequence[int] | None = None,
        sigma: float = 0.0,
        omega: float = 0.0,
        reduction: str = "none",
        **others: Any,
    ) -> Tensor:
        """The loss of a batch: scaled sum of the simple and of the pruned loss.

        Args:
            batch: targets, logit_lengths, target_lengths.
            Remaining arguments: see `rnnt_loss_tdt`; those of `check_supported` must be off.

        Raises:
            ValueError: durations other than the joint's, an unsupported option, or as
                `PrunedTransducerLoss`.
        """
        check_supported(others)
        own = [] if self.tdt is None else list(self.tdt.durations)
        if own != list(durations or ()):
            raise ValueError(
                f"durations is {durations} in the loss and {own} in the joint; they must be equal: "
                "call use(model, pruned=...) again after a change of the loss"
            )
        self.options = check_options(
            blank, self.vocab_size, "regular", delay_penalty, fastemit_lambda
        )
        scales = self.simple_options.scales
        self.simple_options = check_scales(self.options, scales.lm_only_scale, scales.am_only_scale)
        if self.tdt is not None:
            self.tdt.sigma, self.tdt.omega = check_finite("sigma", sigma), check_omega(omega)
        joiner = _SharedJoiner(inputs, duration_logits)
        check_joiner(joiner, self.encoder_dim, self.predictor_dim, self.vocab_size)
        # Not as a submodule, and for this call alone: checkpoints, copies and optimisers see these
        # layers in the joint.
        self.__dict__["joiner"] = joiner
        try:
            step = max(self.calls - 1, 0) // self.calls_per_step
            losses = self(inputs.am, inputs.lm, *batch, step=step)
        finally:
            del self.__dict__["joiner"]
        return reduced(losses.loss, reduction)


def check_supported(options: Mapping[str, Any]) -> None:
    """ValueError for an option that is on and that the pruned loss does not have.

    TypeError for one that is no number or flag.
    """
    for name, check in (
        ("clamp", check_finite),
        ("in_place", check_flag),
        ("validate", check_flag),
    ):
        value = options.get(name)
        if value is not None and check(name, value) > 0:
            raise ValueError(
                f"{name} is {value}, which the pruned loss does not have: leave out {name} or "
                "pruned=..."
            )


@dataclass(frozen=True, eq=False)
class PrunedJointInputs(JointInputs):
    """Inputs of a joint that trains with the pruned loss.

    am: (N, T, E) and lm: (N, U+1, P), which projections take to D.
    """

    projections: tuple[Any, Any]
    pruned_loss: PrunedJointLoss

    option = "pruned=..."

    def stored(self) -> Tensor:
        am, lm = (
            projection(layer, x)
            for layer, x in zip(self.projections, (self.am, self.lm), strict=True)
        )
        return JointInputs(am, lm, self.weight, self.bias, self.activation).stored()

    def rnnt_loss(self, *batch: Tensor, **options: Any) -> Tensor:
        return self.pruned_loss.of_joint(self, None, *batch, **options)

    def rnnt_loss_tdt(self, duration_logits: JointInputs, *batch: Tensor, **options: Any) -> Tensor:
        return self.pruned_loss.of_joint(self, duration_logits, *batch, **options)


class _SharedLinear(nn.Linear):
    """A linear layer of parameters that belong to another one, or of some of their rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias  # type: ignore[assignment]


class _SharedJoiner(Joiner):
    """A Joiner of the layers of another joint."""

    def __init__(self, inputs: PrunedJointInputs, duration_logits: JointInputs | None) -> None:
        nn.Module.__init__(self)
        self.activation = inputs.activation
        self.encoder_proj, self.decoder_proj = inputs.projections
        self.output_linear = _SharedLinear(inputs.weight, inputs.bias)
        self.duration_linear = None
        if duration_logits is not None:
            self.duration_linear = _SharedLinear(duration_logits.weight, duration_logits.bias)


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
            arguments = am, lm, weight, bias, ACTIVATIONS[type(activation)]
            if projections is None or self.pruned is None:
                return JointInputs(*arguments)
            return PrunedJointInputs(*arguments, projections, self.pruned)
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
