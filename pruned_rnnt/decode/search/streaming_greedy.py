"""Greedy search for streams: a chunk of features and a state in, symbols and a state out.

Axes: N streams, T feature frames, F mel bins, C encoder frames of a chunk, M symbols per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.search.ctc_greedy import CtcGreedySearch
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, hypotheses_of_frames
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.rows import Rows
from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS, TdtGreedySearch
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.transducer_model import TransducerModel


class StreamState(NamedTuple):
    """The state of N streams.

    encoder: state of the streaming encoder, a named tuple of tensors.
    search: state of greedy search: the predictor's state (and the number of frames that the last
        duration skips), or the last symbol of CTC.
    score_N: float32, log-probability of the path so far.
    """

    encoder: Any
    search: Rows
    score_N: Tensor


def new_greedy_search(
    model: SpeechModel, silent_symbols: Sequence[int] = (), max_symbols_per_frame: int = 0
) -> GreedySearch | TdtGreedySearch | CtcGreedySearch:
    """Greedy search of any model.

    Args:
        silent_symbols: as for the search.
        max_symbols_per_frame: as for the search; 0 chooses the value of sherpa-onnx: 5 for a
            transducer with durations, else 1.
    """
    if not isinstance(model, TransducerModel):
        return CtcGreedySearch(model, silent_symbols=silent_symbols)
    if model.loss_config.durations:
        most = max_symbols_per_frame or SHERPA_MAX_SYMBOLS
        return TdtGreedySearch(model, max_symbols_per_frame=most, silent_symbols=silent_symbols)
    most = max_symbols_per_frame or 1
    return GreedySearch(model, max_symbols_per_frame=most, silent_symbols=silent_symbols)


class StreamingGreedySearch(nn.Module):
    """A causal model that decodes audio chunk by chunk, with the search of `new_greedy_search`.

    Args:
        model: with a causal encoder; its modules are used, not copied.
        chunk_size: C, encoder frames (40 ms) of a chunk.
        left_frames: encoder frames of left context for attention.
        silent_symbols: ids that are treated as blank (such as `<unk>`).

    Raises:
        ValueError: as `stream_encoder`.
    """

    def __init__(
        self,
        model: SpeechModel,
        chunk_size: int,
        left_frames: int,
        silent_symbols: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.encoder = stream_encoder(model.encoder, chunk_size, left_frames)
        self.search = new_greedy_search(model, silent_symbols)

    def start(self, streams: int) -> StreamState:
        """The state at the start of streams."""
        encoder = self.encoder.start(streams)
        device = next(self.model.parameters()).device
        search = self.search.start(streams, device)
        return StreamState(encoder, search, torch.zeros(streams, device=device))

    @torch.inference_mode()
    def forward(
        self, features_NTF: Tensor, state: StreamState, lengths: Tensor | None = None
    ) -> tuple[Tensor, StreamState]:
        """Decode the next chunk of every stream.

        Args:
            features_NTF: (N, T, F) with T = `encoder.input_frames`; chunks start `encoder.shift`
                frames apart.
            lengths: (N,) valid feature frames, if streams end in this chunk; None: all are valid.

        Returns:
            (N, C, M) int64: the symbols emitted at each frame, or -1; and the state after them.
        """
        found, state = self._chunk(features_NTF, state, lengths)
        return found.symbols_NTM, state

    def _chunk(
        self, features_NTF: Tensor, state: StreamState, lengths: Tensor | None
    ) -> tuple[GreedyFrames, StreamState]:
        encoded_NCE, encoder_state = self.encoder(features_NTF, state.encoder, lengths)
        frames_N = (
            torch.full_like(state.score_N, self.encoder.chunk_size, dtype=torch.int64)
            if lengths is None
            else self.encoder.output_length(lengths)
        )
        found = self.search.frames(encoded_NCE, frames_N, state.search)
        score_N = state.score_N + found.score_N
        return found, StreamState(encoder_state, found.state, score_N)

    @torch.inference_mode()
    def recognise(self, features_NTF: Tensor, feature_lengths: Tensor) -> list[Hypothesis]:
        """Decode whole utterances (N, T, F) chunk by chunk; frames count from their start."""
        streams, num_frames, _ = features_NTF.shape
        device = features_NTF.device
        lengths = feature_lengths.to(device)
        state = self.start(streams)
        chunks = []
        for begin in range(0, max(num_frames, 1), self.encoder.shift):
            chunk_NTF = features_NTF[:, begin : begin + self.encoder.input_frames]
            missing = self.encoder.input_frames - chunk_NTF.size(1)
            chunk_NTF = nn.functional.pad(chunk_NTF, (0, 0, 0, missing))
            left = (lengths - begin).clamp(0, self.encoder.input_frames)
            found, state = self._chunk(chunk_NTF, state, left)
            chunks.append(found)
        return hypotheses_of_frames(chunks)
