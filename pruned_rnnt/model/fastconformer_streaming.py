"""Cache-aware streaming of a causal FastConformer.

Axes: N streams, T feature frames of a chunk, B cached feature frames, F mel bins, C encoder frames
of a chunk, E encoder width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.conformer_streaming import ConformerState, StreamingConformer
from pruned_rnnt.model.fastconformer import FastConformer
from pruned_rnnt.model.feature_norm import centre_features
from pruned_rnnt.model.striding_subsampling import PAST_FRAMES


class StreamingFastConformer(StreamingConformer):
    """Runs a causal FastConformer chunk by chunk, as `StreamingConformer`.

    A chunk has 8 C feature frames. A whole utterance may end with a frame for padding; in a stream,
    that frame is left out where it would need another chunk.
    """

    encoder: FastConformer

    def start(self, streams: int) -> ConformerState:
        state = super().start(streams)
        shape = streams, PAST_FRAMES, self.encoder.config.num_mel_bins
        return state._replace(features_NBF=state.attention_LPNE.new_zeros(shape))

    def output_length(self, lengths: Tensor) -> Tensor:
        return super().output_length(lengths).clamp(max=self.chunk_size)

    def embed(self, features_NTF: Tensor, state: ConformerState, lengths: Tensor | None) -> Tensor:
        """The input of the first layer (N, C, E); arguments as for `forward`."""
        encoder = self.encoder
        assert state.features_NBF is not None
        seen_NTF = torch.cat((state.features_NBF, features_NTF), dim=1)
        normed_NTF = centre_features(seen_NTF, state.processed_N, encoder.config.feature_norm)
        ends_N = None
        if lengths is not None:
            ends_N = state.processed_N + lengths.to(features_NTF.device)
        return encoder.scaled(encoder.subsampling.chunk(normed_NTF, state.processed_N, ends_N))
