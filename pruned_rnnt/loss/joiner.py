"""The joiner, which combines the outputs of encoder and predictor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_at_least, check_finite, check_one_of
from pruned_rnnt.ops.common.plain_layers import hook_of, linear_parameters
from pruned_rnnt.ops.joiner.fused_joiner import OutputLayers
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS

# Bound of initial biases at a scale of one, whatever the number of inputs.
_BIAS_BOUND = 0.1
# Attribute of the tensors that a loss gives any callable: no projection of a Joiner has seen them.
_UNPROJECTED = "_pruned_rnnt_unprojected"


@torch.no_grad()
def scale_initial(layer: nn.Linear, scale: float) -> None:
    """Change torch's initial values, as icefall's Zipformer recipes: weights by `scale`, biases to
    uniform in +-0.1 * scale."""
    layer.weight.mul_(scale)
    # torch's bound is 1 / sqrt(inputs).
    layer.bias.mul_(_BIAS_BOUND * scale * math.sqrt(layer.in_features))


class Joiner(nn.Module):
    """logits = output_linear(act(encoder_proj(encoder) + decoder_proj(predictor))).

    The losses use its three layers separately; `forward` takes inputs that are already projected,
    so that a search projects each frame and each predictor state once.

    Args:
        encoder_dim, predictor_dim, joiner_dim, vocab_size: E, P, D and V.
        activation: `tanh`, `relu` or `none`.
        initial_scale: initial weights of the two projections as a fraction of torch's default;
            biases start within a tenth of it. None keeps torch's default for both.
        duration_count: outputs of a second output layer, duration_linear, for a token-and-duration
            transducer; with 0, that is None.

    Raises:
        TypeError, ValueError: an option of another type or out of range.
    """

    def __init__(
        self,
        encoder_dim: int,
        predictor_dim: int,
        joiner_dim: int,
        vocab_size: int,
        activation: str = "tanh",
        initial_scale: float | None = None,
        duration_count: int = 0,
    ):
        super().__init__()
        sizes = {"encoder_dim": encoder_dim, "predictor_dim": predictor_dim}
        sizes |= {"joiner_dim": joiner_dim, "vocab_size": vocab_size}
        for name, size in sizes.items():
            check_at_least(name, size, 1)
        check_at_least("duration_count", duration_count, 0)
        check_one_of("activation", activation, ACTIVATIONS)
        self.activation = activation
        self.encoder_proj = nn.Linear(encoder_dim, joiner_dim)
        self.decoder_proj = nn.Linear(predictor_dim, joiner_dim)
        self.output_linear = nn.Linear(joiner_dim, vocab_size)
        self.duration_linear = nn.Linear(joiner_dim, duration_count) if duration_count > 0 else None
        if initial_scale is not None:
            for projection in (self.encoder_proj, self.decoder_proj):
                scale_initial(projection, check_finite("initial_scale", initial_scale))

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        """am, lm (..., D) that broadcast, the projected inputs -> logits (..., V).

        Raises:
            ValueError: inputs of another width, for example those that are not projected; a loss
                calls a function around this Joiner; activation was set to another value.
        """
        logits: Tensor = self.output_linear(self.hidden(am, lm))
        return logits

    def with_durations(self, am: Tensor, lm: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (..., V) as `forward`, and duration logits (..., duration_count).

        Raises:
            ValueError: the joiner has no layer for durations, and as `forward`.
        """
        if self.duration_linear is None:
            raise ValueError(
                "this Joiner has no durations: build it with duration_count=len(durations)"
            )
        hidden = self.hidden(am, lm)
        return self.output_linear(hidden), self.duration_linear(hidden)

    def hidden(self, am: Tensor, lm: Tensor) -> Tensor:
        """(..., D), the input of the output layers."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            _check_call(self, am, lm)
        width = getattr(self.output_linear, "in_features", None)
        for name, x, layer in (("am", am, "encoder_proj"), ("lm", lm, "decoder_proj")):
            if width is not None and x.shape[-1] != width:
                raise ValueError(
                    f"{name} has {x.shape[-1]} columns, needs the joiner_dim of {width} that "
                    f"joiner.{layer} has projected it to: pass joiner.{layer}({name})"
                )
        hidden = am + lm
        if self.activation == "tanh":
            return torch.tanh(hidden)
        return torch.relu(hidden) if self.activation == "relu" else hidden


def _check_call(joiner: Joiner, am: Tensor, lm: Tensor) -> None:
    """ValueError for an unknown activation, and for arguments that a loss gave a callable around
    the joiner."""
    check_one_of("joiner.activation", joiner.activation, ACTIVATIONS)
    for name, x, layer in (("am", am, "encoder_proj"), ("lm", lm, "decoder_proj")):
        if hasattr(x, _UNPROJECTED):
            raise ValueError(
                f"{name} is not projected: PrunedTransducerLoss has a callable around this Joiner, "
                f"and calls it without joiner.{layer}, which would not be trained: give the loss "
                "the Joiner itself (joiner.compile() compiles it in place), or call "
                "joiner(joiner.encoder_proj(am), joiner.decoder_proj(lm)) there"
            )


def logits_of_callable(
    joiner: Callable[[Tensor, Tensor], Tensor], am: Tensor, lm: Tensor
) -> Tensor:
    """joiner(am, lm), of a callable that is no Joiner and tensors that nothing else has.

    Raises:
        TypeError, ValueError: it calls a Joiner with them, as a wrapper does.
    """
    _check_unwrapped(joiner)
    for x in (am, lm):
        setattr(x, _UNPROJECTED, True)
    return joiner(am, lm)


def output_parameters(joiner: Joiner) -> OutputLayers | str:
    """Parameters of the output layers, for a loss that computes logits in chunks without a call of
    the joiner; or why the joiner has to be called, for a message: it or a layer was changed."""
    changed = changed_part(joiner)
    if changed is not None:
        return changed
    tokens = linear_parameters(joiner.output_linear)
    if isinstance(tokens, str):
        return f"joiner.output_linear {tokens}"
    if joiner.duration_linear is None:
        return OutputLayers(*tokens)
    durations = linear_parameters(joiner.duration_linear)
    if isinstance(durations, str):
        return f"joiner.duration_linear {durations}"
    return OutputLayers(*tokens, *durations)


def changed_part(joiner: Joiner) -> str | None:
    """What of the joiner itself, without its layers, is not Joiner's own, for a message."""
    kind = type(joiner)
    for name in ("forward", "hidden", "with_durations"):
        if getattr(kind, name) is not getattr(Joiner, name) or name in joiner.__dict__:
            return f"joiner is a {kind.__name__} with a {name} of its own"
    if joiner.activation not in ACTIVATIONS:
        return f"joiner has the activation {joiner.activation!r}"  # its call refuses it
    hook = hook_of(joiner)
    return None if hook is None else f"joiner {hook}"


def durations_of_call(joiner: Joiner, am: Tensor, lm: Tensor) -> tuple[Tensor, Tensor]:
    """joiner.with_durations(am, lm), of a joiner whose changes that call runs.

    Raises:
        ValueError: for changes of forward or __call__ alone, and hooks of the joiner itself.
    """
    kind = type(joiner)
    own = [kind.with_durations is not Joiner.with_durations, "with_durations" in joiner.__dict__]
    forward = [kind.forward is not Joiner.forward, "forward" in joiner.__dict__]
    forward.append(kind.__call__ is not Joiner.__call__)
    if any(forward) and not any(own):
        name = "forward" if any(forward[:2]) else "__call__"
        raise ValueError(
            f"joiner is a {kind.__name__} with a {name} of its own, which a loss with durations "
            "does not call: define with_durations(am, lm) -> (logits, duration logits), too"
        )
    hook = hook_of(joiner)
    if hook is not None and not any(forward):
        raise ValueError(
            f"joiner {hook}, and a loss with durations calls joiner.with_durations, which hooks do "
            "not see: register them on joiner.output_linear and joiner.duration_linear"
        )
    return joiner.with_durations(am, lm)


def check_joiner(
    joiner: Joiner | Callable[[Tensor, Tensor], Tensor],
    encoder_dim: int,
    predictor_dim: int,
    vocab_size: int,
) -> None:
    """TypeError for what cannot be called with am and lm, and wrappers of a Joiner; ValueError for
    a Joiner of other widths, where layers without in_features and out_features pass."""
    if not isinstance(joiner, Joiner):
        _check_callable(joiner)
        _check_unwrapped(joiner)
        return
    for name, wanted, layer, size in (
        ("encoder_dim", encoder_dim, "encoder_proj", "in_features"),
        ("predictor_dim", predictor_dim, "decoder_proj", "in_features"),
        ("vocab_size", vocab_size, "output_linear", "out_features"),
    ):
        got = getattr(getattr(joiner, layer), size, wanted)
        if got != wanted:
            raise ValueError(
                f"{name} is {wanted} but joiner.{layer}.{size} is {got}; they must be equal: give "
                f"Joiner and PrunedTransducerLoss the same {name}"
            )


def _check_callable(joiner: Callable[[Tensor, Tensor], Tensor]) -> None:
    try:
        call = joiner.forward if isinstance(joiner, nn.Module) else joiner
        inspect.signature(call).bind(None, None)
    except ValueError:
        pass  # Functions in C have no signature.
    except TypeError as error:
        raise TypeError(
            f"joiner is a {type(joiner).__name__}, needs a pruned_rnnt.Joiner or a callable of am "
            "and lm that returns logits"
        ) from error


def _check_unwrapped(joiner: Callable[[Tensor, Tensor], Tensor]) -> None:
    """TypeError for torch's wrappers of a Joiner."""
    if isinstance(joiner, nn.Module) and _wraps_joiner(joiner):
        raise TypeError(
            f"joiner is a {type(joiner).__name__} of a pruned_rnnt.Joiner, whose encoder_proj and "
            "decoder_proj its call leaves out; give the Joiner itself, whose layers the loss runs "
            "without storing logits: joiner.compile() compiles it in place, and other wrappers may "
            "take the loss or the whole model"
        )


def _wraps_joiner(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        # Its class is not Joiner, but the type of its self is named after it.
        return f"{Joiner.__module__}." in str(next(module.graph.inputs()).type())
    # Other modules with a Joiner inside may well project what they give it.
    return type(module).__module__.startswith("torch.") and any(
        isinstance(child, Joiner) or _wraps_joiner(child) for child in module.children()
    )
