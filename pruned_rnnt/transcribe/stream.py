"""A live stream: audio in, partial and final texts out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pruned_rnnt.data.audio.features import FBANK, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.audio.samples import LiveAudio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.build_search import score_problem
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.decode.search.interface import Continuation
from pruned_rnnt.decode.search.streaming import Arc, StreamDecoder, StreamPath
from pruned_rnnt.decode.word_times import (
    FEATURE_SECONDS,
    FRAME_SECONDS,
    TimedWord,
    timed_tokens,
    timed_words,
    unit_spans,
)
from pruned_rnnt.transcribe.endpoints import EndpointConfig, Reason
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.stream_marks import NeedsSpeech, StreamMarks

logger = logging.getLogger(__name__)

# After this many times `longest`, a text is final as a whole, even without a settled word.
_MOST_LENGTHS = 2


class PartialText(NamedTuple):
    """The text since the last endpoint.

    stable: only grows until the endpoint; tentative: the rest, which may still change.
    """

    stable: str
    tentative: str

    def __str__(self) -> str:
        return self.stable + self.tentative


@dataclass(frozen=True, kw_only=True)
class FinalText:
    """The text between two endpoints.

    words: with times in the stream and confidences.
    start, end: seconds of the stream; `end` is where the endpoint was found.
    reason: `pause` by the rule `pause` of `EndpointConfig`, and by `silence` (`text` is then
        empty); `length` by the rule `longest`; `end` at the end of the stream.
    language: code of the tag that the model emitted last; "" for none.
    marks: speech without text, or text that is not to be trusted, with seconds of the stream.
        Symbols of the last second may still come, so it is left for the next final text, unless
        this is the last.
    """

    text: str
    words: tuple[TimedWord, ...]
    start: float
    end: float
    reason: Reason
    language: str = ""
    marks: tuple[Mark, ...] = ()

    def __str__(self) -> str:
        return self.text


class StreamModel(NamedTuple):
    """What streams share.

    calibration: of the model's word times and confidences.
    finds_marks: whether final texts have marks.
    frame_seconds: of an encoder frame.
    features: that the encoder reads.
    """

    decoder: StreamDecoder
    tokenizer: Tokenizer
    calibration: Calibration | None
    finds_marks: bool
    frame_seconds: float = FRAME_SECONDS
    features: FeatureKind = FBANK


class Slot(NamedTuple):
    """Where a group keeps the state of a stream.

    release: returns the slot; only the first call has an effect.
    step: decodes one chunk of each of the group's streams that has one, and returns these.
    """

    number: int
    release: Callable[[], object]
    step: Callable[[list[Stream]], list[Stream]]


class Stream:
    """One of many streams that `step` decodes together; from `Recogniser.stream`.

    Use a stream in one thread at a time.

    Attributes:
        is_done: the stream has ended and everything is decoded, or it was closed.
        audio: its samples.
        warning: why text is missing since the model gave NaN or an infinity, which is logged once;
            else empty.
    """

    slot: Slot

    def __init__(self, model: StreamModel, endpoints: EndpointConfig) -> None:
        self._model = model
        self.audio = LiveAudio(model.features)
        self.is_done = False
        self.warning = ""
        self._endpoints = endpoints
        self._path = StreamPath()
        self._finals: list[FinalText] = []
        self._first_frame = 0  # since the last endpoint
        self._has_ended = False
        self._language = ""
        self._marks = (
            StreamMarks(round(model.frame_seconds / FEATURE_SECONDS)) if model.finds_marks else None
        )

    def accept_waveform(self, samples: Any, sampling_rate: float = SAMPLING_RATE) -> None:
        """Append audio, which the next steps decode.

        Args:
            samples: an array or tensor (S,), or (S, C) with channels, which are averaged; floats in
                [-1, 1], or int8, int16, int32 or uint8. NaN and infinite samples become 0, values
                beyond 1 are clipped, and both are logged once (counts: `audio.replaced`,
                `audio.clipped`).
            sampling_rate: in Hz, a whole number; it may change.

        Raises:
            ValueError: the stream has ended; or samples of another shape, type or scale, which are
                left out. The stream goes on.
        """
        self._check_open()
        self.audio.accept(samples, sampling_rate)

    def gap(self, seconds: float) -> None:
        """Append silence in place of audio that was lost, so that later times stay right.

        Raises:
            ValueError: the stream has ended, or seconds is no number, negative or above 60.
        """
        self._check_open()
        self.audio.gap(seconds)

    def finish(self) -> None:
        """End the stream; `step` decodes the rest of its audio until `is_done`."""
        if not self._has_ended:
            self._has_ended = True
            self.audio.finish()

    def close(self) -> None:
        """Leave at once: audio that is not decoded yet is dropped."""
        self._has_ended = self.is_done = True
        self.slot.release()

    @property
    def is_ready(self) -> bool:
        """Whether `step` has something to decode."""
        if self.is_done:
            return False
        return self._has_ended or self.audio.frames >= self._model.decoder.encoder.input_frames

    @property
    def seconds(self) -> float:
        """Seconds of the stream that are decoded."""
        return self._seconds(self._path.frame)

    @property
    def partial(self) -> PartialText:
        """The text since the last endpoint."""
        symbols = [arc.symbol for arc in self._path.best]
        stable, text = self._model.tokenizer.decode_all([symbols[: self._path.stable], symbols])
        stable = self._model.tokenizer.lasting(stable)
        return PartialText(stable, text[len(stable) :])

    def take_finals(self) -> list[FinalText]:
        """The final texts since the last call, in order; a text may be empty."""
        taken, self._finals = self._finals, []
        return taken

    def extend(
        self,
        found: Sequence[Continuation],
        frames: int,
        features_TF: Tensor,
        head: Sequence[int],
    ) -> NeedsSpeech[bool]:
        """Add the paths after the next frames, fewer than a chunk at the end of the stream.

        Args:
            features_TF: (T, F) of `fbank` on the CPU, of these frames and of those that they need.
            head: the symbol that the CTC head prefers in each of the frames; empty without one.

        Returns:
            Whether the search of the stream must start again.
        """
        encoder = self._model.decoder.encoder
        if found and not self.warning and (problem := score_problem(found[0].part)):
            self.warning = f"text is missing from {self.seconds:.2f} s of the stream on: {problem}"
            logger.warning(self.warning)
        self._path.extend(found, frames)
        self.audio.advance(encoder.shift)
        is_end = frames < encoder.chunk_size
        if self._marks is not None:
            own_TF = features_TF if is_end else features_TF[: encoder.shift]
            if self._marks.accept(own_TF, head):
                yield from self._marks.check(self._path.best)
        if is_end:
            yield from self._end_text(self._path.best, "end", self._path.frame)
            self._path.restart()
            self.is_done = True
            self.slot.release()
            return False
        last = self._path.best[-1] if self._path.best else None
        symbol_end = 0 if last is None else last.frame + max(last.duration or 1, 1)
        seconds = (self._path.frame - self._first_frame) * self._model.frame_seconds
        reason = self._endpoints.reason(
            seconds=seconds,
            pause=(self._path.frame - symbol_end) * self._model.frame_seconds,
            has_text=last is not None,
        )
        if reason is None:
            return False
        if reason == "length" and seconds < _MOST_LENGTHS * self._endpoints.longest:
            count = self._settled_words()
            if count:
                ended = self._path.drop(count)
                yield from self._end_text(ended, reason, self._path.best[0].frame)
            return False
        yield from self._end_text(self._path.best, reason, self._path.frame)
        self._path.restart()
        return True

    def _settled_words(self) -> int:
        """Number of symbols in the words that cannot change any more, without the last word."""
        names = self._model.tokenizer.symbols
        spans = unit_spans([names[arc.symbol] for arc in self._path.best])
        return max((stop for _, stop in spans[:-1] if stop <= self._path.settled), default=0)

    def _end_text(self, arcs: Sequence[Arc], reason: Reason, next_frame: int) -> NeedsSpeech[None]:
        """next_frame: where the next text begins, and the words of this one end at the latest."""
        tokenizer, begin = self._model.tokenizer, self.audio.begin
        tokens = timed_tokens(
            tokenizer.symbols,
            [arc.symbol for arc in arcs],
            [arc.frame for arc in arcs],
            [arc.score for arc in arcs],
            durations=[arc.duration for arc in arcs if arc.duration is not None],
            begin=begin,
            frame_seconds=self._model.frame_seconds,
        )
        start, end = self._seconds(self._first_frame), self._seconds(self._path.frame)
        limit = self._seconds(next_frame)
        words = timed_words(tokenizer, tokens, limit, self._model.calibration, start)
        symbols = [arc.symbol for arc in arcs]
        self._language = tokenizer.language_of(symbols) or self._language
        marks: list[Mark] = []
        if self._marks is not None:
            self._marks.add(arcs)
            marks = yield from self._marks.take(self._path.best, is_end=reason == "end")
        self._finals.append(
            FinalText(
                text=tokenizer.decode(symbols),
                words=words,
                start=start,
                end=end,
                reason=reason,
                language=self._language,
                marks=tuple(
                    Mark(mark.kind, *(round(begin + second, 2) for second in mark[1:]))
                    for mark in marks
                ),
            )
        )
        self._first_frame = next_frame

    def _seconds(self, frame: int) -> float:
        return round(self.audio.begin + frame * self._model.frame_seconds, 4)

    def _check_open(self) -> None:
        if self._has_ended:
            raise ValueError("the stream has ended: start another one for more audio")
