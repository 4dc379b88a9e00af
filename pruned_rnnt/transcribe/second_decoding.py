"""Decode again what a first decoding of a batch perhaps lost.

Speech without text is decoded by itself (`lost_speech`), and segments with far quieter speech are
decoded with that as loud as the rest (`quiet_speech`). All methods yield before they wait for the
device.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pruned_rnnt.system.device import HostCopy
from pruned_rnnt.transcribe.batch_input import BatchDecoder, BatchInput, amplified, parts_of_batch
from pruned_rnnt.transcribe.head_evidence import disagreements, may_be_invented
from pruned_rnnt.transcribe.joined_path import SegmentPlace
from pruned_rnnt.transcribe.lost_speech import (
    LEAST_FRAMES,
    RETRIED_FRAMES,
    FoundPath,
    Stretch,
    part_to_retry,
    spoken_places,
    stretches,
    with_retried,
    without_text,
)
from pruned_rnnt.transcribe.quiet_speech import Compared, compared
from pruned_rnnt.transcribe.speech_energy import speech_frames


class _Retry(NamedTuple):
    """A gap without text in a row of a batch, and the part of that row that is decoded again."""

    row: int
    gap: Stretch
    part: Stretch

    @property
    def frames(self) -> int:
        return self.part.end - self.part.begin

    def wider(self, step: int) -> _Retry:
        """This gap with twice the context before it."""
        begin = max(0, 2 * self.part.begin - self.gap.begin) // step * step
        return self._replace(part=Stretch(begin, self.part.end))


class SecondDecoding:
    """Finds speech in the segments of a batch, and decodes parts of these again."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self._decoder = decoder

    def speech(
        self, batch: BatchInput, rows: Sequence[int], places: Sequence[SegmentPlace]
    ) -> Generator[None, None, dict[int, list[Stretch]]]:
        """The speech of some rows of a batch."""
        if not rows:
            return {}
        whole = [(row, Stretch(0, places[row].frames)) for row in rows]
        parts = parts_of_batch(batch, whole, self._decoder)
        copy = HostCopy([speech_frames(parts.features_NTF, parts.lengths_N)])
        yield
        (speech_NT,) = copy.tensors()
        return {
            row: stretches(speech_T[: places[row].frames])
            for row, speech_T in zip(rows, speech_NT, strict=True)
        }

    def retried(
        self,
        batch: BatchInput,
        paths: Sequence[FoundPath],
        speech: Mapping[int, list[Stretch]],
        places: Sequence[SegmentPlace],
    ) -> Generator[None, None, list[FoundPath]]:
        """The paths, after speech that has no text in them was decoded by itself."""
        retries = []
        for row, path in enumerate(paths):
            own = speech.get(row, ())
            for gap in _gaps(path, own):
                end = max(own[-1].end, gap.end) if own else places[row].frames
                part = part_to_retry(gap, end, self._decoder.frame_step)
                retries.append(_Retry(row, gap, part))
        found = yield from self._decoded(batch, retries)
        # A part without its context may invent words: with more context it invents others.
        unsure = [
            retry
            for retry, again in zip(retries, found, strict=True)
            if may_be_invented(
                paths[retry.row],
                retry.gap,
                with_retried(paths[retry.row], retry.gap, retry.part, again),
            )
        ]
        wider = [retry.wider(self._decoder.frame_step) for retry in unsure]
        repeated = yield from self._decoded(batch, wider)
        repeats = {
            retry: (longer.part, again)
            for retry, longer, again in zip(unsure, wider, repeated, strict=True)
        }
        results = list(paths)
        for retry, again in zip(retries, found, strict=True):
            path = results[retry.row]
            longer = with_retried(path, retry.gap, retry.part, again)
            if retry in repeats:
                repeat = with_retried(path, retry.gap, *repeats[retry])
                if repeat.hypothesis.symbols != longer.hypothesis.symbols:
                    continue
            results[retry.row] = longer
        return results

    def louder(
        self,
        batch: BatchInput,
        paths: Sequence[FoundPath],
        gain_NT: Tensor,
        is_quiet_NT: Tensor,
        places: Sequence[SegmentPlace],
    ) -> Generator[None, None, dict[int, Compared]]:
        """Rows with speech far quieter than the rest, compared with what they are when it is not.

        is_quiet_NT: where the gain is not 0, on the CPU.
        """
        rows = is_quiet_NT.any(dim=1).nonzero()[:, 0].tolist()
        if not rows:
            return {}
        # Padding, which other rows of the batch may need, is not part of the row.
        wholes = [_Retry(row, Stretch(0, 0), Stretch(0, places[row].frames)) for row in rows]
        found = yield from self._decoded(amplified(batch, gain_NT), wholes)
        return {
            row: compared(paths[row], louder, stretches(is_quiet_NT[row]))
            for row, louder in zip(rows, found, strict=True)
        }

    def _decoded(
        self, batch: BatchInput, retries: Sequence[_Retry]
    ) -> Generator[None, None, list[FoundPath]]:
        """The best paths through parts of a batch."""
        ordered = sorted(range(len(retries)), key=lambda n: retries[n].frames)
        most = batch.features_NTF.shape[:2].numel()
        paths: dict[int, FoundPath] = {}
        while ordered:
            count = 1
            while count < len(ordered) and (count + 1) * retries[ordered[count]].frames <= most:
                count += 1
            now, ordered = ordered[:count], ordered[count:]
            found = yield from self._decoder.best_paths(
                parts_of_batch(
                    batch,
                    [(retries[n].row, retries[n].part) for n in now],
                    self._decoder,
                    self._decoder.least_frames,
                ),
                True,
            )
            paths |= {
                n: FoundPath(*again, self._decoder.frame_step)
                for n, again in zip(now, found, strict=True)
            }
        return [paths[n] for n in range(len(retries))]


def _gaps(path: FoundPath, speech: Sequence[Stretch]) -> list[Stretch]:
    """Where a path perhaps lacks symbols, by the energy or by the CTC head."""
    least = LEAST_FRAMES if path.head is None else RETRIED_FRAMES
    quiet = without_text(speech, spoken_places(path, speech), least)
    known = [each.stretch for each in disagreements(path) if each.is_lost and each.is_empty]
    return quiet + [
        gap for gap in known if not any(gap.begin < q.end and q.begin < gap.end for q in quiet)
    ]
