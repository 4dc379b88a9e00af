"""The joiner, which combines the outputs of encoder and predictor."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_one_of
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS

# Bound of initial biases at a scale of one, whatever the number of inputs.
_BIAS_BOUND = 0.1


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
        check_one_of("activation", activation, ACTIVATIONS)
        self.activation = activation
        self.encoder_proj = nn.Linear(encoder_dim, joiner_dim)
        self.decoder_proj = nn.Linear(predictor_dim, joiner_dim)
        self.output_linear = nn.Linear(joiner_dim, vocab_size)
        self.duration_linear = nn.Linear(joiner_dim, duration_count) if duration_count > 0 else None
        if initial_scale is not None:
            for projection in (self.encoder_proj, self.decoder_proj):
                scale_initial(projection, initial_scale)

    def forward(self, am: Tensor, lm: Tensor) -> Tensor:
        """am, lm (..., D) that broadcast, the projected inputs -> logits (..., V)."""
        logits: Tensor = self.output_linear(self.hidden(am, lm))
        return logits

    def with_durations(self, am: Tensor, lm: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and duration logits (..., duration_count)."""
        assert self.duration_linear is not None
        hidden = self.hidden(am, lm)
        return self.output_linear(hidden), self.duration_linear(hidden)

    def hidden(self, am: Tensor, lm: Tensor) -> Tensor:
        """(..., D), the input of the output layers."""
        hidden = am + lm
        if self.activation == "tanh":
            return torch.tanh(hidden)
        return torch.relu(hidden) if self.activation == "relu" else hidden


def check_joiner(joiner: Joiner, encoder_dim: int, predictor_dim: int, vocab_size: int) -> None:
    """ValueError for a joiner of other widths; layers without in_features and out_features pass."""
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
