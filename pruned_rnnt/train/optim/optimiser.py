"""The optimisers: their configuration, groups of parameters that are trained alike, and state.

Learning rates may fall from layer to layer of the encoder, from the top downwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pruned_rnnt.config.checks import Removed, check_at_least, check_types
from pruned_rnnt.model.lora import is_adapter
from pruned_rnnt.system.optional_packages import require
from pruned_rnnt.train.optim.conditional import AdamW, FusedAdamW, leave_dynamo_unloaded
from pruned_rnnt.train.optim.scaled_adam import ScaledAdam, change_clip_scale

# The root mean square that ScaledAdam takes for parameters that start at zero.
_ZERO_RMS = 0.02
_LAYER = re.compile(r"^(encoder\..*?layers\.\d+)\.")
# The module of the transformers library in its encoder.
_PRETRAINED = "encoder.network."


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """The optimiser and gradient clipping.

    name: adamw; adamw_8bit, whose moments take 2 instead of 8 bytes for each parameter (extra
        bitsandbytes); or scaled_adam, as icefall trains Zipformers, with the eden schedule from
        random parameters; fine-tuning, whose steps are short, keeps its cosine schedule.
    learning_rate: peak of the schedule; about 1e-3 for adamw, 0.045 for scaled_adam.
    betas: decay per step of the running means of the gradient and of its square.
    eps: added to the root of the latter, against division by zero.
    weight_decay: for adamw and adamw_8bit; applies to matrices, not to biases and norms.
    clip_norm: for adamw and adamw_8bit; limit of the norm of the whole gradient of the loss per
        frame; 0 switches clipping off.
    clip_scale: for scaled_adam; limit of the norm of the gradients, each times the root mean square
        of its parameter, as a multiple of the median norm of the last 100 steps; 0 switches
        clipping off.
    """

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "name": Removed(
            "use scaled_adam, which trains better models, in a new train.folder; train.init=RUN "
            "starts from the parameters of a run",
            replacements={"paper_scaled_adam": "scaled_adam"},
        )
    }

    name: Literal["adamw", "adamw_8bit", "scaled_adam"] = "adamw"
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    clip_norm: float = 1.0
    clip_scale: float = 2.0

    def __post_init__(self) -> None:
        check_types("optimiser", self)
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimiser.{name} is {getattr(self, name)}, needs > 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimiser.betas is {list(self.betas)}, needs two, 0 <= x < 1")
        check_at_least("optimiser", self, weight_decay=0, clip_norm=0, clip_scale=0)

    @property
    def norm_limit(self) -> float:
        """The trainer's limit of the norm; 0 for none, as scaled_adam clips by itself."""
        return 0.0 if self.name == "scaled_adam" else self.clip_norm


def load_optimiser_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments and counts of a checkpoint; settings keep the values that they have here.

    Raises:
        ValueError: the state is that of another optimiser or of other groups of parameters.
    """
    # ScaledAdam's count of steps and its norms are entries of its groups, too. The trainer sets the
    # learning rate before each step: a checkpoint that is saved again keeps that of its last step.
    names = optimiser.defaults.keys() - {"step", "lr"} | {"rate"}
    own = [
        {name: value for name, value in group.items() if name in names}
        for group in optimiser.param_groups
    ]
    optimiser.load_state_dict(state)
    for group, settings in zip(optimiser.param_groups, own, strict=True):
        if "clip_scale" in settings:
            change_clip_scale(group, settings["clip_scale"])
        group.update(settings)


def parameter_options(
    model: nn.Module, config: OptimiserConfig, groups: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """The optimiser's groups of all trained parameters, in its order; see `build_optimiser`."""
    options = [group.options(config.name) for group in groups or _trained_parameters(model)]
    if config.name == "scaled_adam":
        return options
    by_decay = []
    for each in options:
        matrices = [p for p in each["params"] if p.dim() >= 2]
        vectors = [p for p in each["params"] if p.dim() < 2]
        by_decay.append({**each, "params": matrices, "weight_decay": config.weight_decay})
        by_decay.append({**each, "params": vectors, "weight_decay": 0.0})
    return by_decay


def build_optimiser(
    model: nn.Module,
    config: OptimiserConfig,
    groups: Sequence[ParameterGroup] = (),
    *,
    trains: Callable[[nn.Parameter], bool] | None = None,
) -> torch.optim.Optimizer:
    """The optimiser of the groups; without any, of all parameters that require a gradient.

    Its moments are allocated here, before the first pass: running out of memory in an update,
    unlike in a pass, ends training.

    Args:
        trains: whether the optimiser has a parameter; default: all. Groups may become empty.

    Raises:
        MissingPackageError: the package of the optimiser is not installed.
    """
    leave_dynamo_unloaded()
    options: list[Any] = parameter_options(model, config, groups)
    if trains is not None:
        options = [{**each, "params": list(filter(trains, each["params"]))} for each in options]
    of_adam: Any = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.name == "scaled_adam":
        return ScaledAdam(options, clip_scale=config.clip_scale, **of_adam)
    if config.name == "adamw_8bit":
        require("bitsandbytes")
        from pruned_rnnt.train.optim.eight_bit import AdamW8bit

        return AdamW8bit(options, **of_adam)
    ordered = [parameter for each in options for parameter in each["params"]]
    # The fused update allocates no memory. On a CPU it takes a quarter of the time of torch's
    # default update, but its results are wrong for parameters with gaps in memory.
    on_cuda = all(p.is_cuda for p in ordered)
    fused = on_cuda or all(
        p.is_cpu and p.is_contiguous() and p.is_floating_point() for p in ordered
    )
    optimiser = (FusedAdamW if on_cuda else AdamW)(options, fused=fused, **of_adam)
    moments = {
        index: {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for index, parameter in enumerate(ordered)
    }
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
    return optimiser


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained alike; at least one.

    rate: factor of the learning rate.
    start_at_zero: parameters that may be zero at first, as those of adapters are. The steps of
        ScaledAdam, which are proportional to the size of a parameter, would not move them: they are
        as long as for a small weight. Nor are they clipped, as the norm would be zero at first.
    """

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    start_at_zero: bool = False

    def options(self, optimiser: str) -> dict[str, Any]:
        """The group for a torch optimiser of this name; the trainer reads `rate`."""
        options: dict[str, Any] = {"params": list(self.parameters), "rate": self.rate}
        if self.start_at_zero and optimiser == "scaled_adam":
            options["min_rms"] = _ZERO_RMS
            options["clip_scale"] = 0.0
        return options


def _trained_parameters(model: nn.Module) -> list[ParameterGroup]:
    """One group of all parameters that require a gradient, in the model's order."""
    return [ParameterGroup(parameters=[p for p in model.parameters() if p.requires_grad])]


def layer_of(name: str) -> str | None:
    """The encoder layer of a parameter's name, for example encoder.layers.3; None outside one."""
    layer = _LAYER.match(name)
    return layer[1] if layer else None


def grouped_by_rate(
    model: nn.Module, layer_decay: float, *, pretrained_rate: float = 1.0
) -> list[ParameterGroup]:
    """The trained parameters by the depth of their encoder layer.

    The top layer, predictor and joiner have the full rate, each layer below `layer_decay` times
    the rate of the one above. Adapters have groups of their own.

    Args:
        pretrained_rate: factor of the rate of the transformers library's module.
    """
    names = [name for name, _ in model.named_parameters()]
    depths = _depths(names)
    top = max(depths.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = layer_decay ** (top - depths[name])
            if name.startswith(_PRETRAINED):
                rate *= pretrained_rate
            groups.setdefault((rate, is_adapter(name)), []).append(parameter)
    return [
        ParameterGroup(parameters=parameters, rate=rate, start_at_zero=adapter)
        for (rate, adapter), parameters in groups.items()
    ]


def _depths(names: Sequence[str]) -> dict[str, int]:
    """The encoder layer of each parameter, counted from 1; 0 for what comes before them.

    Between layers (where stacks change the frame rate), that of the layer before.
    """
    layers: dict[str, int] = {}
    depths, depth = {}, 0
    for name in names:
        if (layer := layer_of(name)) is not None:
            depth = layers.setdefault(layer, len(layers) + 1)
        depths[name] = depth if name.startswith("encoder.") else -1
    return {name: len(layers) if depth < 0 else depth for name, depth in depths.items()}
