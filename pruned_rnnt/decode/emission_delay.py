"""How long after the end of a word a model emits its last symbol.

The delay of a word is the end of the encoder frame that emits its last symbol, minus the end of the
word in the audio; it is negative if the model knows the word before its end. Only correct words
count. In a stream, a frame is decoded when its chunk has arrived, which adds the wait for the rest
of the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.scoring.error_statistics import align_words, can_align
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import FEATURE_SECONDS, FRAME_SECONDS, frame_seconds, word_spans
from pruned_rnnt.model.conformer_settings import ConformerSettings
from pruned_rnnt.model.encoder import WHOLE, Encoder, StreamingEncoder
from pruned_rnnt.model.encoder_kinds import stream_encoder

# The window of 25 ms of a feature frame ends this long after the start of the frame's 10 ms.
_WINDOW_END = 0.0175
# Files of earlier versions lack this field.
_LENGTH = "frame_seconds"
PERCENTILES = (50, 90, 95, 99)
# Of six causal models of one recipe, those that emitted earlier made more errors in streams: those
# beyond this two to five times as many as those at -30 ms (docs/lost_speech.md).
_EARLY_SECONDS = -0.15


class WordDelay(NamedTuple):
    """A correct word.

    frame: that emits its last symbol; end: of the word in the audio, in seconds.
    first, last: of its utterance.
    frame_seconds: of an encoder frame.
    """

    word: str
    frame: int
    end: float
    first: bool
    last: bool
    frame_seconds: float = FRAME_SECONDS

    @property
    def seconds(self) -> float:
        return (self.frame + 1) * self.frame_seconds - self.end

    def in_stream(self, encoder: StreamingEncoder) -> float:
        """The delay in seconds with the chunks of this encoder."""
        chunk_begin = self.frame // encoder.chunk_size * encoder.shift
        last_frame = chunk_begin + encoder.input_frames - 1
        return last_frame * FEATURE_SECONDS + _WINDOW_END - self.end


class SpokenWord(NamedTuple):
    """A word as the tokenizer spells it, and its end in the audio in seconds."""

    word: str
    end: float


def spoken_words(words: Sequence[AlignedWord], tokenizer: Tokenizer) -> list[SpokenWord]:
    """Reference words with times, without those that have no text, such as silence."""
    normal = (tokenizer.normalise(each.word) for each in words)
    return [
        SpokenWord(word, each.start + each.duration)
        for word, each in zip(normal, words, strict=True)
        if word
    ]


def word_delays(
    found: Hypothesis,
    spoken: Sequence[AlignedWord],
    tokenizer: Tokenizer,
    frame_seconds: float = FRAME_SECONDS,
) -> list[WordDelay]:
    """The delays of an utterance; empty if the times of its words are unknown, or if its texts are
    too long to align."""
    references = spoken_words(spoken, tokenizer)
    if not references:
        return []
    spans = word_spans([tokenizer.symbols[symbol] for symbol in found.symbols])
    words = tokenizer.decode_all([found.symbols[begin:end] for begin, end in spans])
    emitted = [
        (word, found.frames[end - 1]) for word, (_, end) in zip(words, spans, strict=True) if word
    ]
    texts = [each.word for each in references], [word for word, _ in emitted]
    if not can_align(*texts):
        return []
    pairs = align_words(*texts)
    places, frames = iter(range(len(references))), iter(frame for _, frame in emitted)
    delays = []
    for reference, hypothesis in pairs:
        place = None if reference is None else next(places)
        frame = None if hypothesis is None else next(frames)
        if place is None or frame is None or reference != hypothesis:
            continue
        word, end = references[place]
        is_last = place == len(references) - 1
        delays.append(WordDelay(word, frame, end, place == 0, is_last, frame_seconds))
    return delays


def percentile(seconds: Sequence[float], percent: float) -> float:
    """A percentile; NaN without values."""
    return float(np.percentile(seconds, percent)) if len(seconds) else float("nan")


def _delay_line(seconds: Sequence[float], first: Sequence[bool], last: Sequence[bool]) -> str:
    """The percentiles of all words, and of the first and the last words of utterances, if any of
    these is correct, in ms."""
    parts = []
    for name, chosen in (
        (f"{len(seconds)} correct words", seconds),
        ("first words", [s for s, is_first in zip(seconds, first, strict=True) if is_first]),
        ("last words", [s for s, is_last in zip(seconds, last, strict=True) if is_last]),
    ):
        if chosen:
            values = (f"p{p} {1000 * percentile(chosen, p):.0f}" for p in PERCENTILES)
            parts.append(f"{name} {', '.join(values)} ms")
    return "; ".join(parts)


def summary_lines(
    encoder: Encoder, sizes: tuple[int, int], delays: Sequence[WordDelay]
) -> list[str]:
    """The delays without waiting for chunks; for a causal encoder, the delays in streams too, and a
    warning if it emits so early that chunks cost words.

    Args:
        sizes: chunk and left context of streams, 0 as configured; a chunk of -1 is no stream.
    """
    flags = [delay.first for delay in delays], [delay.last for delay in delays]
    if not delays:
        return []
    seconds = [delay.seconds for delay in delays]
    lines = [f"emission delay: {_delay_line(seconds, *flags)}"]
    if encoder.config.causal and sizes[0] != WHOLE:
        own = encoder.config.stream_sizes
        stream = stream_encoder(
            encoder, *(size or usual for size, usual in zip(sizes, own, strict=True))
        )
        in_stream = [delay.in_stream(stream) for delay in delays]
        chunk = stream.chunk_size * frame_seconds(encoder)
        lines.append(f"in streams of {chunk:.2f} s chunks: {_delay_line(in_stream, *flags)}")
        median = percentile(seconds, 50)
        advice = _advice_if_early(encoder)
        if median < _EARLY_SECONDS and advice:
            lines.append(
                f"half of the words come {-1000 * median:.0f} ms or more before they end, so that "
                "words which a chunk cuts are guessed: such models make more errors in streams; "
                f"{advice} (docs/lost_speech.md)"
            )
    return lines


def _advice_if_early(encoder: Encoder) -> str:
    """What to do if the encoder emits early; empty if training has done that."""
    config = encoder.config
    if not isinstance(config, ConformerSettings):
        return "train longer, or another seed"
    if not config.random_first_chunk:
        return "train with model.encoder.random_first_chunk=true"
    if len(config.chunk_sizes) > 1 and not config.smallest_chunk_steps:
        return "begin training with short chunks, model.encoder.smallest_chunk_steps"
    return ""


def delay_lines(delays: Iterable[tuple[str, WordDelay]]) -> list[str]:
    """A file of the delays of words with the ids of their utterances: a JSON object a line."""
    objects = (
        {"id": name, "delay": round(delay.seconds, 4)} | delay._asdict() for name, delay in delays
    )
    return [json.dumps(each, ensure_ascii=False) for each in objects]


def read_delays(path: Path) -> list[tuple[str, WordDelay]]:
    """The delays of a file of `delay_lines`; empty if there is no such file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            values = json.loads(line)
            fields = {name: values[name] for name in WordDelay._fields if name != _LENGTH}
            fields[_LENGTH] = float(values.get(_LENGTH, FRAME_SECONDS))
            found.append((str(values["id"]), WordDelay(**fields)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error!r}): remove the file, or decode again"
            ) from error
    return found
