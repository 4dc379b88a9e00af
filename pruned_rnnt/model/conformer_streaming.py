"""The causal Conformer for streams: a chunk of features and a state in, frames and a state out.

Axes: N streams, T feature frames of a chunk, F mel bins, C encoder frames of a chunk, P past
encoder frames, S = P + C frames attended to, K past frames of a convolution, L layers,
E encoder width.

The whole state is in tensors, so that streams can be batched and unbatched, saved, or passed
through an exported graph. The output of a stream equals that of the causal encoder for the whole
utterance, if both have the same chunk_size and P = left_chunks * chunk_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.attention import Positions
from pruned_rnnt.model.conformer_layer import ConformerLayer
from pruned_rnnt.model.conformer_stack import ConformerStack
from pruned_rnnt.model.encoder import StreamingEncoder


class ConformerState(NamedTuple):
    """The state of N streams, which are on axis 2, as sherpa-onnx expects.

    attention_LPNE: float, input of each layer's attention for the last P frames; frames before
        the start of the stream are zero and masked.
    convolution_LKNE: float, input of each layer's convolution for the last K = kernel_size - 1.
    processed_N: int64, feature frames by which the stream has advanced.
    features_NBF: float, the last B feature frames, zero before the start of the stream, for
        subsampling that needs earlier frames; else None.
    """

    attention_LPNE: Tensor
    convolution_LKNE: Tensor
    processed_N: Tensor
    features_NBF: Tensor | None = None


class StreamingConformer(StreamingEncoder):
    """Runs a causal Conformer chunk by chunk.

    Args:
        encoder: causal; its modules are used, not copied.
        chunk_size: C, encoder frames of a chunk.
        left_frames: P, encoder frames of left context for attention.

    Raises:
        ValueError: the encoder is not causal, chunk_size is below 1, or left_frames below 0.

    Attributes:
        input_frames: feature frames of a chunk; with subsampling by four, 4 C + 3, of which the
            last three are also in the next chunk.
        shift: feature frames from one chunk to the next, 4 C or 8 C.
    """

    def __init__(self, encoder: ConformerStack, chunk_size: int, left_frames: int) -> None:
        super().__init__()
        encoder.check_causal()
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}, needs at least 1")
        if left_frames < 0:
            raise ValueError(f"left_frames is {left_frames}, needs at least 0")
        self.encoder = encoder
        self.chunk_size = chunk_size
        self.left_frames = left_frames
        self.shift = encoder.subsampling_factor * chunk_size
        overlap = encoder.receptive_field - encoder.subsampling_factor
        self.input_frames = self.shift + max(overlap, 0)

    def start(self, streams: int) -> ConformerState:
        """The state at the start of streams."""
        config = self.encoder.config
        like = next(self.encoder.parameters())
        return ConformerState(
            like.new_zeros(config.layers, self.left_frames, streams, config.dim),
            like.new_zeros(config.layers, config.kernel_size - 1, streams, config.dim),
            torch.zeros(streams, dtype=torch.int64, device=like.device),
        )

    def pack(self, state: ConformerState) -> tuple[Tensor, ...]:
        attention_LPNE, convolution_LKNE, *rest = state
        packed = attention_LPNE.movedim(2, 0), convolution_LKNE.movedim(2, 0), *rest
        return tuple(part for part in packed if part is not None)

    def unpack(self, packed: Sequence[Tensor]) -> ConformerState:
        attention_NLPE, convolution_NLKE, *rest = packed
        return ConformerState(attention_NLPE.movedim(0, 2), convolution_NLKE.movedim(0, 2), *rest)

    def forward(
        self, features_NTF: Tensor, state: ConformerState, lengths: Tensor | None = None
    ) -> tuple[Tensor, ConformerState]:
        """Encode the next chunk of every stream.

        Args:
            features_NTF: (N, input_frames, F), from frame processed_N of each stream.
            state: from `start`, or from the chunk before.
            lengths: (N,) valid feature frames, if streams end in this chunk; None: all are valid.
                Encoder frames beyond `output_length(lengths)` are undefined.

        Returns:
            (N, C, E), and the state for the next chunk.
        """
        device = features_NTF.device
        x_NCE = self.embed(features_NTF, state, lengths)
        frames_C = torch.arange(self.chunk_size, device=device)
        past_P = torch.arange(self.left_frames, device=device)
        past_N1 = torch.div(
            state.processed_N, self.encoder.subsampling_factor, rounding_mode="floor"
        )[:, None]
        seen_NS = torch.cat(
            (past_P >= self.left_frames - past_N1, (frames_C >= 0).expand(x_NCE.size(0), -1)), 1
        )
        mask_N1CS = seen_NS[:, None, None]
        padding_NC1 = None
        if lengths is not None:
            padding_NC = frames_C >= self.output_length(lengths.to(device))[:, None]
            padding_NC1 = padding_NC.unsqueeze(-1)
            x_NCE = x_NCE.masked_fill(padding_NC1, 0.0)
            # As in whole utterances, padding attends to itself, so that no softmax is empty.
            real_NS = torch.cat((torch.ones_like(seen_NS[:, : self.left_frames]), ~padding_NC), 1)
            itself_CS = torch.cat(
                (
                    torch.zeros(self.chunk_size, self.left_frames, dtype=torch.bool, device=device),
                    torch.eye(self.chunk_size, dtype=torch.bool, device=device),
                ),
                dim=1,
            )
            mask_N1CS = (mask_N1CS & real_NS[:, None, None]) | itself_CS
        positions = self.encoder.positions(
            self.left_frames + self.chunk_size, device, self.encoder.layer_dtype(x_NCE)
        )
        attention_past, convolution_past, before = [], [], state.features_NBF
        for index, layer in enumerate(self.encoder.layers):
            assert isinstance(layer, ConformerLayer)
            stream = _LayerStream(
                layer,
                state.attention_LPNE[index].transpose(0, 1),
                state.convolution_LKNE[index].transpose(0, 1),
                mask_N1CS,
                positions,
                padding_NC1,
            )
            x_NCE = layer.run_branches(x_NCE, stream.attend, stream.convolve)
            attention_past.append(stream.attention_NPE.transpose(0, 1))
            convolution_past.append(stream.convolution_NKE.transpose(0, 1))
        return x_NCE, ConformerState(
            torch.stack(attention_past),
            torch.stack(convolution_past),
            state.processed_N + self.shift,
            None if before is None else _last_frames(before, features_NTF),
        )

    def output_length(self, lengths: Tensor) -> Tensor:
        """Valid encoder frames of a chunk with `lengths` valid feature frames."""
        return self.encoder.output_lengths(lengths)

    def embed(self, features_NTF: Tensor, state: ConformerState, lengths: Tensor | None) -> Tensor:
        """The input of the first layer (N, C, E); arguments as for `forward`."""
        return self.encoder.embed(features_NTF, state.processed_N)


@dataclass
class _LayerStream:
    """Attention and convolution of one layer, with past frames that each call updates."""

    layer: ConformerLayer
    attention_NPE: Tensor
    convolution_NKE: Tensor
    mask_N1CS: Tensor
    positions: Positions
    padding_NC1: Tensor | None

    def attend(self, x_NCE: Tensor) -> Tensor:
        attended: Tensor = self.layer.attention(
            x_NCE, self.mask_N1CS, self.positions, past_NPE=self.attention_NPE
        )
        self.attention_NPE = _last_frames(self.attention_NPE, x_NCE)
        return attended

    def convolve(self, x_NCE: Tensor) -> Tensor:
        gated_NCE = self.layer.convolution.gate(x_NCE)
        if self.padding_NC1 is not None:
            gated_NCE = gated_NCE.masked_fill(self.padding_NC1, 0.0)
        mixed = self.layer.convolution.mix(torch.cat((self.convolution_NKE, gated_NCE), dim=1))
        self.convolution_NKE = _last_frames(self.convolution_NKE, gated_NCE)
        return mixed


def _last_frames(past: Tensor, new: Tensor) -> Tensor:
    """The last frames of `past` and `new` together, as many as `past` has."""
    return torch.cat((past, new), dim=1)[:, new.size(1) :]
