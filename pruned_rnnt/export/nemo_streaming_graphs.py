"""The encoder of a causal model of NeMo for one chunk, in the form of NeMo's cache-aware exports.

Axes: N streams, F mel bins, C encoder frames of a chunk, T = 8 C its feature frames, L layers,
P encoder frames of the past, K frames of a convolution's past, B feature frames of the past,
E encoder width, J joiner width, V vocabulary.

    audio_signal (N,F,T), length (N), cache_last_channel (N,L,P,E), cache_last_time (N,1,1,S),
    cache_last_channel_len (N) feature frames
        -> outputs (N,J,C), encoded_lengths (N), and the three caches

The S numbers of a stream are the past of the convolutions (L,K,E), then that of the features (B,F).
The output of a CTC model is logprobs (N,C,V). sherpa-onnx creates the first caches: zeros, in the
shapes of the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.streaming_graphs import StreamingEncoderGraph
from pruned_rnnt.export.tdt_graphs import NemoFeatures, NemoOutput, tdt_metadata
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.fastconformer import StreamingFastConformer
from pruned_rnnt.model.speech_model import SpeechModel


class StreamingNemoGraph(StreamingEncoderGraph):
    layout = "nemo_transducer"
    state_names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
    next_names = tuple(f"{name}_next" for name in state_names)
    stream_axes = (0, 0, 0)
    stream: StreamingFastConformer

    def __init__(self, model: SpeechModel, stream: StreamingFastConformer) -> None:
        super().__init__()
        self.stream = stream
        self.features = NemoFeatures()
        self.output = NemoOutput(model)
        self.frame_axis = self.output.frame_axis
        self.own_metadata = tdt_metadata(model)

    def forward(self, audio_signal: Tensor, length: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        state = self.stream.unpack(self._packed(*states))
        encoded_NCE, after = self.stream(self.features(audio_signal), state)
        lengths_N = length // self.stream.encoder.subsampling_factor
        return self.output(encoded_NCE), lengths_N, *self._caches(*self.stream.pack(after))

    def start(self, streams: int) -> tuple[Tensor, ...]:
        return self._caches(*self.stream.pack(self.stream.start(streams)))

    def inputs(self, chunk_NTF: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        frames_N = torch.full((len(chunk_NTF),), chunk_NTF.size(1))
        return chunk_NTF.transpose(1, 2).contiguous(), frames_N, *states

    def advance(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs[2:])

    def metadata(self) -> dict[str, Any]:
        channel, time, _ = self.start(1)
        values = {
            **self.own_metadata,
            "window_size": self.stream.input_frames,
            "chunk_shift": self.stream.shift,
        }
        for name, cache in (("channel", channel), ("time", time)):
            for axis in range(1, cache.dim()):
                values[f"cache_last_{name}_dim{axis}"] = cache.size(axis)
        return values

    def _caches(
        self, attention_NLPE: Tensor, convolution_NLKE: Tensor, frames_N: Tensor, past_NBF: Tensor
    ) -> tuple[Tensor, ...]:
        numbers_NS = torch.cat((convolution_NLKE.flatten(1), past_NBF.flatten(1)), dim=1)
        return attention_NLPE, numbers_NS[:, None, None], frames_N

    def _packed(
        self, attention_NLPE: Tensor, time_N11S: Tensor, frames_N: Tensor
    ) -> tuple[Tensor, ...]:
        """The state of the streaming encoder, packed."""
        _, convolution_LKNE, _, past_NBF = self.stream.start(1)
        assert past_NBF is not None
        layers, frames, _, width = convolution_LKNE.shape
        convolution_NS, past_NS = time_N11S[:, 0, 0].split(
            (layers * frames * width, past_NBF[0].numel()), dim=1
        )
        return (
            attention_NLPE,
            convolution_NS.unflatten(1, (layers, frames, width)),
            frames_N,
            past_NS.unflatten(1, past_NBF.shape[1:]),
        )


def nemo_stream(model: SpeechModel, chunk_size: int, left_frames: int) -> Graph:
    """The graph of the causal encoder, or of a whole CTC model; errors as for `stream_encoder`."""
    streams = torch.export.Dim("N")
    stream = stream_encoder(model.encoder, chunk_size, left_frames)
    assert isinstance(stream, StreamingFastConformer)
    module = StreamingNemoGraph(model, stream)
    chunk_NTF = torch.full((2, stream.input_frames, model.encoder.config.num_mel_bins), -5.0)
    return Graph(
        name=module.output.graph_name,
        module=module,
        inputs=module.inputs(chunk_NTF, module.start(2)),
        input_names=("audio_signal", "length", *module.state_names),
        output_names=(module.output.name, "encoded_lengths", *module.next_names),
        dynamic_axes=({0: streams}, {0: streams}, ({0: streams},) * len(module.state_names)),
    )
