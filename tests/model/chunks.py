"""Batches of utterances through a streaming encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.encoder import StreamingEncoder


def encode_chunks(stream: StreamingEncoder, features_NTF: Tensor, lengths: Tensor) -> Tensor:
    """All chunks of a batch of utterances, the last ones filled with garbage."""
    state = stream.start(features_NTF.size(0))
    outputs = []
    for begin in range(0, features_NTF.size(1), stream.shift):
        chunk = features_NTF[:, begin : begin + stream.input_frames]
        missing = stream.input_frames - chunk.size(1)
        chunk = torch.nn.functional.pad(chunk, (0, 0, 0, missing), value=1e3)
        encoded, state = stream(chunk, state, (lengths - begin).clamp(0, stream.input_frames))
        outputs.append(encoded)
    return torch.cat(outputs, dim=1)
