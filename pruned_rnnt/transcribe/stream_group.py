"""Streams that are decoded together, in batches.

Axes: N streams, T feature frames of a chunk, F mel bins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from pruned_rnnt.data.audio.feature_kinds import FBANK
from pruned_rnnt.system.host_copy import HostCopy, to_device
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.idle_streams import IdleStreams
from pruned_rnnt.transcribe.stream import Slot, Stream, StreamModel
from pruned_rnnt.transcribe.stream_marks import run_together
from pruned_rnnt.transcribe.stream_states import StateSlots


class StreamGroup:
    """Streams of one model with the same chunk and left context.

    Streams join and leave at any time. A step takes those with a full chunk of audio through
    features, encoder and search in one batch; the result of a stream does not depend on the others.
    Device memory grows to the most streams at a time. In long digital silence, streams cost only
    features and search (`IdleStreams`).
    """

    def __init__(self, model: StreamModel) -> None:
        self._model = model
        with torch.inference_mode():
            searched = len(model.decoder.start_search(1))
            self._slots = StateSlots(model.decoder.start(1), searched)
        self._idle = IdleStreams(model.decoder)

    @torch.inference_mode()
    def stream(self, endpoints: EndpointConfig) -> Stream:
        """A new stream. One that is dropped before its end leaves, too."""
        slot = self._slots.take()
        self._idle.forget(slot)
        stream = Stream(self._model, endpoints)
        release = weakref.finalize(stream, self._slots.release, slot)
        release.atexit = False
        stream.slot = Slot(slot, release, self.step)
        return stream

    @torch.inference_mode()
    def step(self, streams: list[Stream]) -> list[Stream]:
        """Decode one chunk of each stream that has one; returns these streams."""
        ready = [stream for stream in streams if stream.is_ready]
        if not ready:
            return []
        decoder = self._model.decoder
        size = decoder.encoder.input_frames
        lengths_N = torch.tensor([min(stream.audio.frames, size) for stream in ready])
        lengths = None if bool((lengths_N == size).all()) else lengths_N
        windows = [stream.audio.window(size) for stream in ready]
        kind = self._model.features
        window = windows, decoder.device, kind.frames_before, size
        features_NTF = kind.of_windows(*window)
        # Speech is found by the features of `fbank`, as in files.
        is_same = kind.name == "fbank" or not self._model.finds_marks
        speech_NTF = features_NTF if is_same else FBANK.of_windows(*window)
        slots = [stream.slot.number for stream in ready]
        slots_N = to_device(torch.tensor(slots), decoder.device)
        encoder_state, search_state = decoder.parts(self._slots.read(slots_N))
        is_silent = [
            length == size and not window_S.any()
            for length, window_S in zip(lengths_N.tolist(), windows, strict=True)
        ]
        encoded_NCE, encoder_state = self._idle.encode(
            features_NTF, encoder_state, lengths, slots=slots, is_silent=is_silent
        )
        search_state, found, head_NC = decoder.search_chunk(encoded_NCE, lengths, search_state)
        if head_NC is None:
            head_NC = features_NTF.new_zeros((len(ready), 0), dtype=torch.long)
        # In half, the features take half the time and memory, and are exact to 0.03 dB.
        copy = HostCopy([speech_NTF.half(), head_NC])
        self._slots.write(slots_N, (*encoder_state, *search_state))
        frames = decoder.output_lengths(lengths, len(ready)).tolist()
        paths = found.result()
        copied_NTF, copied_NC = copy.tensors()
        results = zip(
            ready, paths, frames, copied_NTF, copied_NC.tolist(), lengths_N.tolist(), strict=True
        )
        is_restarted = run_together(
            [
                stream.extend(own_paths, count, own_TF[:length], own_C[:count])
                for stream, own_paths, count, own_TF, own_C, length in results
            ],
            decoder.device,
        )
        restarted = [n for n, again in zip(slots, is_restarted, strict=True) if again]
        if restarted:
            self._slots.restart(restarted)
        return ready


def step(streams: Iterable[Stream]) -> list[Stream]:
    """Decode one chunk of each stream that has one, in one batch for each group of streams.

    Returns:
        The streams that had one; none if all wait for more audio.
    """
    groups: dict[Callable[[list[Stream]], list[Stream]], list[Stream]] = {}
    for stream in dict.fromkeys(streams):
        groups.setdefault(stream.slot.step, []).append(stream)
    return [stream for step_together, own in groups.items() for stream in step_together(own)]
