"""Stacks of layers, each at its own frame rate.

Axes: N batch, T frames before downsampling, T' frames of the embedding (20 ms), D downsampling
rate, E encoder width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.zipformer.config import (
    OUTPUT_RATE,
    REFERENCE_WARM_UP,
    StackConfig,
    ZipformerConfig,
)
from pruned_rnnt.model.zipformer.frames import Frames
from pruned_rnnt.model.zipformer.layer import (
    DROPOUT,
    NO_MASKS,
    LayerMasks,
    LayerState,
    ZipformerLayer,
    sample_layer_masks,
)
from pruned_rnnt.model.zipformer.residual import Bypass
from pruned_rnnt.model.zipformer.schedule import Clock, ramp

_POSITION_DROPOUT = 0.15
# Probability that each of two random numbers masks upper channels of a sequence.
_MASK_PROBABILITY = 0.125
# Probabilities that a sequence skips a layer, before and after the layer's warm-up.
_SKIP_BEFORE, _SKIP_AFTER = 0.5, 0.035


class Stacks(nn.Module):
    """All stacks, and the downsampling of their output to frames of 40 ms."""

    def __init__(self, clock: Clock, config: ZipformerConfig) -> None:
        super().__init__()
        self.config = config
        self.clock = clock
        phase = REFERENCE_WARM_UP / (len(config.downsampling) + 1)
        self.encoders = nn.ModuleList()
        for index, rate in enumerate(config.downsampling):
            # The first phase of the warm-up belongs to the embedding.
            warm_up = (phase * (index + 1), phase * (index + 2))
            stack = Stack(
                clock, config.stack(index), config.layers[index], rate, warm_up, config.causal
            )
            self.encoders.append(
                stack if rate == 1 else DownsampledStack(clock, stack, config.dims[index], rate)
            )
        self.downsample_output = Downsample(OUTPUT_RATE)
        self._layers = [module for module in self.modules() if isinstance(module, ZipformerLayer)]

    def forward(
        self, x_NTE: Tensor, frames: dict[int, Frames], states: tuple[LayerState, ...] | None
    ) -> tuple[Tensor, list[LayerState]]:
        """(N, T', E of the first stack) -> (N, T' / 2, E of the widest).

        Each channel comes from the last stack that has it.
        """
        config = self.config
        lengths_N = frames[1].lengths_N
        channel_masks = self._channel_masks(x_NTE)
        layer_masks = self._layer_masks(x_NTE)
        outputs: list[Tensor] = []
        new_states: list[LayerState] = []
        done = 0
        for index, stack in enumerate(self.encoders):
            x_NTE = _to_width(x_NTE, config.dims[index])
            own = slice(done, done + config.layers[index])
            done = own.stop
            of_stack = None if states is None else states[own]
            inputs = StackInputs(frames, channel_masks[index], layer_masks[own], of_stack)
            x_NTE, of_layers = stack(x_NTE, inputs)
            outputs.append(x_NTE)
            new_states += of_layers
        pieces, width = [], 0
        for output in reversed(outputs):
            if output.size(-1) > width:
                pieces.append(output[..., width:])
                width = output.size(-1)
        joined_NTE = torch.cat(pieces, dim=-1)
        # The memory of the whole pass is at its peak here.
        del outputs, output, pieces, x_NTE
        return self.downsample_output(joined_NTE, lengths_N), new_states

    def _layer_masks(self, x_NTE: Tensor) -> list[LayerMasks]:
        """Masks of all layers, in the order in which they run."""
        if not self.training:
            return [NO_MASKS] * sum(self.config.layers)
        return sample_layer_masks(
            self.clock,
            [layer.skips() for layer in self._layers],
            [layer.hidden_dims for layer in self._layers],
            DROPOUT,
            x_NTE,
        )

    def _channel_masks(self, x_NTE: Tensor) -> list[Tensor | None]:
        """(N, 1, E) for each stack: training masks upper channels of some sequences.

        One random number per sequence masks all maskable channels, another their upper half.
        """
        config = self.config
        if not self.training:
            return [None] * len(config.dims)
        rate = self.clock.dropout_rate(_MASK_PROBABILITY)
        keep_2N = torch.rand((2, x_NTE.size(0)), device=x_NTE.device) >= rate
        keep_lower_N = keep_2N[0]
        keep_upper_N = keep_2N.all(dim=0)
        channels = list(zip(config.dims, config.unmasked_dims, strict=True))
        masks: dict[tuple[int, int], Tensor] = {}
        for dim, unmasked in set(channels):
            channel_E = torch.arange(dim, device=x_NTE.device)
            middle = unmasked + (dim - unmasked) // 2
            keep_NE = (
                (channel_E < unmasked)
                | ((channel_E < middle) & keep_lower_N[:, None])
                | keep_upper_N[:, None]
            )
            masks[dim, unmasked] = keep_NE.to(x_NTE.dtype).unsqueeze(1)
        return [masks[of_stack] for of_stack in channels]


class StackInputs(NamedTuple):
    """What a stack needs besides x.

    frames: by rate.
    mask_N1E: masks channels before and after each layer.
    layer_masks, states: of each layer of the stack.
    """

    frames: dict[int, Frames]
    mask_N1E: Tensor | None
    layer_masks: list[LayerMasks]
    states: tuple[LayerState, ...] | None


class Stack(nn.Module):
    """Layers of one width at one rate.

    Args:
        rate: downsampling factor of the stack; a higher one skips layers more often.
        warm_up: first and last step of the clock at which the layers are phased in, one by one.
    """

    def __init__(
        self,
        clock: Clock,
        config: StackConfig,
        num_layers: int,
        rate: int,
        warm_up: tuple[float, float],
        causal: bool,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.rate = rate
        begin, end = warm_up
        each = (end - begin) / num_layers
        skips = [
            ramp(
                _SKIP_BEFORE,
                _SKIP_AFTER * rate**0.5,
                steps=begin + each * (index + 1),
                begin=begin + each * index,
            )
            for index in range(num_layers)
        ]
        self.layers = nn.ModuleList(ZipformerLayer(clock, config, causal, skip) for skip in skips)

    def forward(self, x_NTE: Tensor, inputs: StackInputs) -> tuple[Tensor, list[LayerState]]:
        """(N, T, E) -> (N, T, E), at the rate of the stack."""
        frames, mask_N1E = inputs.frames[self.rate], inputs.mask_N1E
        if self.training:
            frames = _with_dropped_positions(frames, self.clock.dropout_rate(_POSITION_DROPOUT))
        x_NTE = x_NTE if mask_N1E is None else x_NTE * mask_N1E
        new_states = []
        for index, layer in enumerate(self.layers):
            past = None if inputs.states is None else inputs.states[index]
            x_NTE, state = layer(x_NTE, frames, past, inputs.layer_masks[index], mask_N1E)
            if state is not None:
                new_states.append(state)
        return x_NTE, new_states


class DownsampledStack(nn.Module):
    """A stack at a lower rate, whose output is upsampled and combined with the input."""

    def __init__(self, clock: Clock, stack: Stack, dim: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.downsample = Downsample(rate)
        self.encoder = stack
        self.out_combiner = Bypass(clock, dim)

    def forward(self, x_NTE: Tensor, inputs: StackInputs) -> tuple[Tensor, list[LayerState]]:
        """(N, T, E) -> (N, T, E), before downsampling and after upsampling."""
        slow_NTE = self.downsample(x_NTE, inputs.frames[1].lengths_N)
        slow_NTE, new_states = self.encoder(slow_NTE, inputs)
        return self.out_combiner(x_NTE, slow_NTE, rate=self.rate), new_states


class Downsample(nn.Module):
    """Mean of each group of D frames with learned weights: (N, T, E) -> (N, T / D, E).

    In a group that extends beyond the end of the utterance, the last real frame also gets the
    weights of the missing frames, so that padding has no effect.
    """

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.bias = nn.Parameter(torch.zeros(rate))

    def forward(self, x_NTE: Tensor, lengths_N: Tensor) -> Tensor:
        weights_D = functional.softmax(self.bias, dim=0)
        mean_NTE: Tensor
        if use_kernels(x_NTE, weights_D):
            mean_NTE = applied(_Downsample, x_NTE, weights_D, lengths_N)
            return mean_NTE
        end_T = torch.arange(1, x_NTE.size(1) + 1, self.rate, device=x_NTE.device)
        frame_D = torch.arange(self.rate, device=x_NTE.device)
        # Within each group: the index of the last real frame, and the source of each frame.
        last_NT = lengths_N[:, None] - end_T
        source_NTD = torch.minimum(frame_D, last_NT.unsqueeze(-1))
        taken_NTDD = source_NTD.unsqueeze(-1) == frame_D
        weights_NTD = (taken_NTDD * weights_D.unsqueeze(-1)).sum(dim=-2)
        groups_NTDE = x_NTE.unflatten(1, (-1, self.rate))
        mean_NTE = (groups_NTDE * weights_NTD.unsqueeze(-1)).sum(dim=2)
        return mean_NTE


class _Downsample(torch.autograd.Function):
    """The means by fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
        from pruned_rnnt.model.kernels.downsample import downsample

        x, lengths = x.contiguous(), lengths.contiguous()
        ctx.save_for_backward(x, weights, lengths)
        return downsample(x, weights, lengths, torch.promote_types(x.dtype, weights.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from pruned_rnnt.model.kernels.downsample import downsample_backward
        from pruned_rnnt.model.kernels.rows import sums_of_parts

        x, weights, lengths = ctx.saved_tensors
        of_x, of_weights = downsample_backward(x, weights, lengths, grad.contiguous())
        return of_x, sums_of_parts(of_weights, weights.dtype), None


def _with_dropped_positions(frames: Frames, rate: float) -> Frames:
    """Dropout of the position encodings, sampled once for all layers of a stack."""
    dropped_RD = functional.dropout(frames.positions_RD, rate)
    return Frames(
        lengths_N=frames.lengths_N,
        real_NT1=frames.real_NT1,
        blocked=frames.blocked,
        chunk_size=frames.chunk_size,
        positions_RD=dropped_RD,
    )


def _to_width(x_NTE: Tensor, dim: int) -> Tensor:
    """The first `dim` channels, padded with zeros if there are fewer."""
    return x_NTE if x_NTE.size(-1) == dim else functional.pad(x_NTE, (0, dim - x_NTE.size(-1)))
