"""Graphs of streaming encoders, with state tensors in the layouts of sherpa-onnx.

Axes: N streams, F mel bins, C encoder frames (40 ms) of a chunk, P frames of the past, K frames of
a convolution's past, L layers, E encoder width, D width of a cache, J joiner width.

Layout `conformer`:

    x (N,4C+3,F), cached_attn (L,P,N,E), cached_conv (L,K,N,E), processed_lens (N) feature frames
        -> encoder_out (N,C,J), both caches; sherpa-onnx itself advances processed_lens

Layout `zipformer2`, for a Zipformer, where each layer has its own rate and width:

    x (N,4C+13,F), cached_key (P,N,D), cached_nonlin_attn (1,N,P,D), cached_val1, cached_val2
    (P,N,D), cached_conv1, cached_conv2 (N,E,K) for each layer, embed_states (N,128,3,F'),
    processed_lens (N) frames of 20 ms
        -> encoder_out (N,C,J), and the whole state in the same order

sherpa-onnx creates the first state: zeros, in shapes that it computes from the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.conformer_streaming import ConformerState, StreamingConformer
from pruned_rnnt.model.encoder import StreamingEncoder
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel
from pruned_rnnt.model.zipformer.embedding import EMBEDDING_RATE
from pruned_rnnt.model.zipformer.layer import LayerState
from pruned_rnnt.model.zipformer.zipformer import StreamingZipformer, ZipformerState


def output_layer(model: SpeechModel) -> nn.Module:
    """The joiner's projection of a transducer; the log-probabilities of a CTC head without one."""
    if isinstance(model, TransducerModel):
        return model.joiner.encoder_proj
    assert model.ctc_head is not None
    return nn.Sequential(model.ctc_head, nn.LogSoftmax(dim=-1))


_STATES = ("key", "nonlin_attn", "val1", "val2", "conv1", "conv2")
_STREAM_AXES = (1, 1, 1, 1, 0, 0)


class StreamingEncoderGraph(nn.Module):
    """The encoder for one chunk of each stream, in one of the layouts.

    Attributes:
        layout: sherpa-onnx's name of the layout.
        stream: the encoder with a fixed chunk size.
        state_names, stream_axes: names and stream axes of the state inputs, which follow x.
        next_names: names of the state outputs.
        frame_axis: axis of the encoder frames in the first output.
    """

    layout: str
    stream: StreamingEncoder
    state_names: tuple[str, ...]
    next_names: tuple[str, ...]
    stream_axes: tuple[int, ...]
    frame_axis = 1

    def start(self, streams: int) -> tuple[Tensor, ...]:
        """The state inputs at the start of streams."""
        raise NotImplementedError

    def inputs(self, chunk_NTF: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All inputs, of a chunk of features and the state inputs."""
        return chunk_NTF, *states

    def advance(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The state inputs of the next chunk, from state inputs and outputs of this one."""
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """The metadata that sherpa-onnx needs for the layout."""
        return {
            "model_type": self.layout,
            "T": self.stream.input_frames,
            "decode_chunk_len": self.stream.shift,
        }


class StreamingConformerGraph(StreamingEncoderGraph):
    layout = "conformer"
    state_names = ("cached_attn", "cached_conv", "processed_lens")
    next_names = ("next_cached_attn", "next_cached_conv")
    stream_axes = (2, 2, 0)
    stream: StreamingConformer

    def __init__(self, model: SpeechModel, stream: StreamingConformer) -> None:
        super().__init__()
        self.stream = stream
        self.projection = output_layer(model)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        encoded_NCE, state = self.stream(x, ConformerState(*states))
        return self.projection(encoded_NCE), state.attention_LPNE, state.convolution_LKNE

    def start(self, streams: int) -> tuple[Tensor, ...]:
        return tuple(self.stream.start(streams)[:3])

    def advance(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (*outputs[1:], inputs[-1] + self.stream.shift)

    def metadata(self) -> dict[str, Any]:
        config = self.stream.encoder.config
        return {
            **super().metadata(),
            "num_encoder_layers": config.layers,
            "left_context": self.stream.left_frames,
            "encoder_dim": config.dim,
            "pad_length": self.stream.input_frames - self.stream.shift,
            "cnn_module_kernel": config.kernel_size,
        }


class StreamingZipformerGraph(StreamingEncoderGraph):
    layout = "zipformer2"
    stream: StreamingZipformer

    def __init__(self, model: SpeechModel, stream: StreamingZipformer) -> None:
        super().__init__()
        self.stream = stream
        self.projection = output_layer(model)
        layers = sum(stream.encoder.config.layers)
        names = [f"cached_{name}_{layer}" for layer in range(layers) for name in _STATES]
        self.state_names = (*names, "embed_states", "processed_lens")
        self.next_names = tuple(f"new_{name}" for name in self.state_names)
        self.stream_axes = (*_STREAM_AXES * layers, 0, 0)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        encoded_NCE, state = self.stream(x, _from_layout(states))
        return (self.projection(encoded_NCE), *_to_layout(state))

    def start(self, streams: int) -> tuple[Tensor, ...]:
        return _to_layout(self.stream.start(streams))

    def advance(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs[1:])

    def metadata(self) -> dict[str, Any]:
        config = self.stream.encoder.config
        stacks = [config.stack(index) for index in range(len(config.downsampling))]
        left_context = EMBEDDING_RATE * self.stream.left_frames
        lists = {
            "num_encoder_layers": config.layers,
            "encoder_dims": config.dims,
            "query_head_dims": [stack.query_head_dim for stack in stacks],
            "value_head_dims": [stack.value_head_dim for stack in stacks],
            "num_heads": config.heads,
            "cnn_module_kernels": config.kernel_sizes,
            "left_context_len": [left_context // rate for rate in config.downsampling],
        }
        texts = {name: ",".join(map(str, values)) for name, values in lists.items()}
        return {**super().metadata(), **texts}


def streaming_graph(model: SpeechModel, chunk_size: int, left_frames: int) -> StreamingEncoderGraph:
    """The graph of the model's causal encoder; sizes and errors as for `stream_encoder`."""
    stream = stream_encoder(model.encoder, chunk_size, left_frames)
    if isinstance(stream, StreamingZipformer):
        return StreamingZipformerGraph(model, stream)
    assert isinstance(stream, StreamingConformer)
    return StreamingConformerGraph(model, stream)


def _to_layout(state: ZipformerState) -> tuple[Tensor, ...]:
    caches: list[Tensor] = []
    for layer in state.layers:
        caches += (
            layer.keys.transpose(0, 1),
            layer.nonlin.unsqueeze(0),
            layer.values1.transpose(0, 1),
            layer.values2.transpose(0, 1),
            layer.convolution1.transpose(1, 2),
            layer.convolution2.transpose(1, 2),
        )
    frames_N = torch.div(state.processed, EMBEDDING_RATE, rounding_mode="floor")
    return (*caches, state.embedding, frames_N)


def _from_layout(states: Sequence[Tensor]) -> ZipformerState:
    layers = []
    for begin in range(0, len(states) - 2, len(_STATES)):
        keys, nonlin, values1, values2, conv1, conv2 = states[begin : begin + len(_STATES)]
        layers.append(
            LayerState(
                keys=keys.transpose(0, 1),
                nonlin=nonlin.squeeze(0),
                values1=values1.transpose(0, 1),
                values2=values2.transpose(0, 1),
                convolution1=conv1.transpose(1, 2),
                convolution2=conv2.transpose(1, 2),
            )
        )
    return ZipformerState(
        embedding=states[-2], layers=tuple(layers), processed=states[-1] * EMBEDDING_RATE
    )
