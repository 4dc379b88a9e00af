"""Streams that are decoded together, in batches, and their states on the device.

Axes: N streams, T feature frames of a chunk, F mel bins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FBANK
from pruned_rnnt.decode.search.states import Rows, take_rows
from pruned_rnnt.system.device import DeviceLock, HostCopy, to_device
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.idle_streams import IdleStreams
from pruned_rnnt.transcribe.stream import Slot, Stream, StreamModel
from pruned_rnnt.transcribe.stream_marks import run_together


class StreamGroup:
    """Streams of one model with the same chunk and left context.

    Streams join and leave at any time. A step takes those with a full chunk of audio through
    features, encoder and search in one batch; the result of a stream does not depend on the others.
    Device memory grows to the most streams at a time. In long digital silence, streams cost only
    features and search (`IdleStreams`).

    Args:
        lock: held while states are used, because streams of several threads share their tensors.
    """

    def __init__(self, model: StreamModel, lock: DeviceLock) -> None:
        self._model = model
        self._lock = lock
        with torch.inference_mode():
            searched = len(model.decoder.start_search(1))
            self._slots = _StateSlots(model.decoder.start(1), searched)
        self._idle = IdleStreams(model.decoder)

    @torch.inference_mode()
    def stream(self, endpoints: EndpointConfig) -> Stream:
        """A new stream. One that is dropped before its end leaves, too."""
        with self._lock:
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
        with self._lock:
            return self._step(streams)

    def _step(self, streams: list[Stream]) -> list[Stream]:
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
        frames = decoder.output_lengths(lengths, len(ready)).tolist()
        paths = found.result()
        copied_NTF, copied_NC = copy.tensors()
        # Only now: if the search failed, the chunk is decoded again from the same states.
        self._slots.write(slots_N, (*encoder_state, *search_state))
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

    Raises:
        ValueError: streams is no list of streams.
    """
    if not isinstance(streams, Iterable):
        raise ValueError(f"streams is {streams!r}, needs a list of streams: step([stream])")
    streams = list(streams)
    for stream in streams:
        if not isinstance(stream, Stream):
            raise ValueError(
                f"streams has {stream!r}, needs streams that recogniser.stream() returned"
            )
    groups: dict[Callable[[list[Stream]], list[Stream]], list[Stream]] = {}
    for stream in dict.fromkeys(streams):
        groups.setdefault(stream.slot.step, []).append(stream)
    return [stream for step_together, own in groups.items() for stream in step_together(own)]


class _StateSlots:
    """Tensors with one row for each stream; they grow to the most streams at a time.

    Args:
        start: the state of one stream at its start, with the stream on axis 0.
        restarted: the last tensors of these, which `restart` sets.
    """

    def __init__(self, start: Rows, restarted: int) -> None:
        self._start = start
        self._restarted = restarted
        self._tensors = tuple(x[:0] for x in start)
        self._free: list[int] = []

    def take(self) -> int:
        """A slot for a new stream, with the state at its start."""
        if not self._free:
            used = len(self._tensors[0])
            added = max(used, 1)
            self._tensors = tuple(
                torch.cat((own, one.expand(added, *one.shape[1:])))
                for own, one in zip(self._tensors, self._start, strict=True)
            )
            # Garbage collection meanwhile may have freed streams, whose slots are in the list now.
            self._free += range(used + added - 1, used - 1, -1)
            return self._free.pop()
        slot = self._free.pop()
        self._set([slot], 0)
        return slot

    def release(self, slot: int) -> None:
        """Return the slot of a stream that has left."""
        self._free.append(slot)

    def restart(self, slots: Sequence[int]) -> None:
        """Set the last tensors to those at the start of a stream."""
        self._set(slots, len(self._start) - self._restarted)

    def read(self, slots_N: Tensor) -> Rows:
        """The states of streams, with N on axis 0."""
        return take_rows(self._tensors, slots_N)

    def write(self, slots_N: Tensor, state: Rows) -> None:
        """Set the states of streams."""
        for own, new in zip(self._tensors, state, strict=True):
            own.index_copy_(0, slots_N, new.to(own.dtype))

    def _set(self, slots: Sequence[int], first: int) -> None:
        slots_N = torch.tensor(slots, device=self._start[0].device)
        for own, one in zip(self._tensors[first:], self._start[first:], strict=True):
            own.index_copy_(0, slots_N, one.expand(len(slots), *one.shape[1:]))
