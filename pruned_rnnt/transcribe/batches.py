"""Decode the segments of many recordings together; results in the order of the recordings.

Segments wait until there is audio for a few batches. Batches then have segments of similar length,
because padding takes as long as audio. A recording is done when all of its segments are decoded,
and no later one is returned before it.

Axes: N batch, T feature frames, F mel bins.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import batch_features, frame_count
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.timing.head_paths import HeadPath
from pruned_rnnt.out_of_memory import is_out_of_memory
from pruned_rnnt.transcribe.joined_path import JoinedPath
from pruned_rnnt.transcribe.recordings import WholeRecording
from pruned_rnnt.transcribe.segments import Segment
from pruned_rnnt.transcribe.silence import is_digital_silence

logger = logging.getLogger(__name__)

# Features (T, F) of segments -> the best path through each, and that of the CTC head.
BestPaths = Callable[[Sequence[Tensor]], list[tuple[Hypothesis, HeadPath | None]]]
# Segments wait for this many batches: more audio to choose from means less padding.
_BATCHES_WAITING = 2


@dataclass
class RecordingPath:
    """What is known of one recording.

    error: why it could not be read or decoded.
    frames: feature frames; known at the end.
    waiting: segments that are not decoded yet.
    """

    path: JoinedPath
    error: Exception | None = None
    frames: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A segment that is not decoded yet, or a recording without features."""

    recording: RecordingPath
    part: Segment | WholeRecording

    @property
    def frames(self) -> int:
        if isinstance(self.part, WholeRecording):
            return frame_count(len(self.part.samples_S))
        return len(self.part.features_TF)


class SegmentBatches:
    """Collects segments and decodes them in batches.

    Args:
        most_frames: feature frames of a batch, with padding; 0: each segment by itself, at once.
        device: where segments are decoded, and the features of whole recordings computed.
    """

    def __init__(self, best_paths: BestPaths, most_frames: float, device: torch.device) -> None:
        self._best_paths = best_paths
        self._most_frames = most_frames
        self._device = device
        self._recordings: deque[RecordingPath] = deque()
        self._waiting: list[_Waiting] = []
        self._frames = 0

    def start(self, path: JoinedPath) -> RecordingPath:
        """The next recording."""
        recording = RecordingPath(path)
        self._recordings.append(recording)
        return recording

    def add(self, recording: RecordingPath, part: Segment | WholeRecording) -> None:
        """Add the next segment of the newest recording; may decode those that wait."""
        recording.waiting += 1
        self._waiting.append(_Waiting(recording, part))
        self._frames += self._waiting[-1].frames
        if self._frames >= _BATCHES_WAITING * self._most_frames:
            self.decode()

    def done(self) -> Iterator[RecordingPath]:
        """Yield the recordings that are decoded, in order, up to the first one that waits.

        The newest recording must have ended.
        """
        while self._recordings and not self._recordings[0].waiting:
            yield self._recordings.popleft()

    def decode(self) -> None:
        """Decode all segments that wait."""
        waiting = self._waiting
        self._waiting, self._frames = [], 0
        order = sorted(range(len(waiting)), key=lambda i: waiting[i].frames)
        found: dict[int, tuple[Segment, Hypothesis, HeadPath | None]] = {}
        for batch in self._batches(order, waiting):
            self._decode_batch(batch, waiting, found)
        for index, item in enumerate(waiting):
            item.recording.waiting -= 1
            if index in found:
                segment, hypothesis, head = found[index]
                item.recording.path.append(hypothesis, head, segment)

    def _batches(self, order: Iterable[int], waiting: Sequence[_Waiting]) -> Iterator[list[int]]:
        """Divide segments, shortest first, into batches of limited size."""
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) + 1) * waiting[index].frames > self._most_frames:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _decode_batch(
        self,
        batch: Sequence[int],
        waiting: Sequence[_Waiting],
        found: dict[int, tuple[Segment, Hypothesis, HeadPath | None]],
    ) -> None:
        """Find the paths of some segments.

        Where the memory is too small for all together, halves are decoded one after the other.
        """
        batch = [index for index in batch if waiting[index].recording.error is None]
        try:
            segments = self._segments(batch, waiting)
            best = (
                self._best_paths([segment.features_TF for segment in segments.values()])
                if segments
                else []
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) == 1:
                waiting[batch[0]].recording.error = error
                return
            best = None  # outside of this block, the error no longer holds its tensors
        if best is None:
            logger.warning(
                "%d segments do not fit in memory together: decode.batch_seconds is too large",
                len(batch),
            )
            self._decode_batch(batch[: len(batch) // 2], waiting, found)
            self._decode_batch(batch[len(batch) // 2 :], waiting, found)
            return
        for (index, segment), (hypothesis, head) in zip(segments.items(), best, strict=True):
            found[index] = (segment, hypothesis, head)

    def _segments(self, batch: Sequence[int], waiting: Sequence[_Waiting]) -> dict[int, Segment]:
        """Segments with features, by index; whole recordings of digital silence are left out."""
        segments: dict[int, Segment] = {}
        whole: dict[int, WholeRecording] = {}
        for index in batch:
            part = waiting[index].part
            if isinstance(part, WholeRecording):
                whole[index] = part
            else:
                segments[index] = part._replace(features_TF=part.features_TF.to(self._device))
        if whole:
            features_NTF, lengths_N = batch_features(
                [recording.samples_S for recording in whole.values()], self._device
            )
            frame_T = torch.arange(features_NTF.size(1), device=features_NTF.device)
            beyond_NT = frame_T >= lengths_N.to(features_NTF.device)[:, None]
            silent_NT = is_digital_silence(features_NTF.flatten(0, 1)).view_as(beyond_NT)
            is_silent = (silent_NT | beyond_NT).all(dim=1).tolist()
            for n, index in enumerate(whole):
                if not is_silent[n]:
                    segments[index] = Segment(features_NTF[n, : int(lengths_N[n])], 0, 0)
        return segments
