"""Speech without text, and text without speech, in what a model made of a segment.

Transducers skip words without a sign, most often in audio unlike their training utterances. Where
a segment has speech but no symbol for about as long as words take, that part is decoded again by
itself; if it has no text then, either, and is longer than words, it is marked. Likewise text is
marked where nothing is said.

The evidence is the energy of the audio (`speech_energy.speech_frames`), not the model, so it holds
for models of any kind. Models with a CTC head have more: `head_evidence`.

Axes: N batch, T feature frames (10 ms), F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.head_paths import HeadPath, Spikes
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.word_times import FEATURE_SECONDS
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.transcribe.speech_energy import runs

# The symbol at a frame may belong to the speech of so many feature frames before and after it; the
# last one before a pause to more, because words are longer there.
_BEFORE, _AFTER, _AFTER_LAST = 50, 30, 70
# Pauses up to this are part of the speech; shorter speech without symbols is no word.
_SHORT_PAUSE, LEAST_FRAMES = 20, 30
# A shorter part is worth another look, if a CTC head judges what is found.
RETRIED_FRAMES = 5
# Symbols so far below the loudest one (13 dB) may be in silence.
_FAR_BELOW = 3.0
# A mark of a symbol without speech is as long as most encoder frames.
_SYMBOL_FRAMES = 4
# Symbols that a part has by itself are doubtful if the head gives one of them less than 0.05.
UNSURE = -3.0
# A symbol may be placed so far from its place in another window.
_SAME_FRAMES = 40
# Kept on both sides of a part that is decoded again.
_CONTEXT = 28

MarkKind = Literal["speech without text", "text without speech", "text unlike the speech"]


class Mark(NamedTuple):
    """A stretch of the audio, in seconds, in which the text is not to be trusted."""

    kind: MarkKind
    start: float
    end: float


class Stretch(NamedTuple):
    """Feature frames from `begin` to `end`."""

    begin: int
    end: int


def loudest_nearby(features_NTF: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T) on the device: the largest log-energy of the frames that a symbol may belong to."""
    real_NT = torch.arange(features_NTF.size(1), device=features_NTF.device) < lengths_N[:, None]
    # The padding is louder than speech.
    energy_NT = features_NTF.mean(dim=2).masked_fill(~real_NT, -1e4)
    energy_NT = nn.functional.pad(energy_NT, (_BEFORE, _AFTER), value=-1e4)
    return nn.functional.max_pool1d(energy_NT, _BEFORE + _AFTER + 1, stride=1)


def may_need_marks(loudest_T: Tensor, symbol_places: Sequence[int]) -> bool:
    """Whether the speech of an utterance has to be found to know if there is anything to mark.

    Almost no utterance has a long gap between symbols, or a symbol far below the loudest ones.
    """
    frames = len(loudest_T)
    places = [min(place, frames - 1) for place in symbol_places]
    if not places:
        return True
    reached = 0
    for place in places:
        if place - _BEFORE - reached >= RETRIED_FRAMES:
            return True
        reached = place + _AFTER
    if frames - (places[-1] + _AFTER_LAST) >= RETRIED_FRAMES:
        return True
    loud_U = loudest_T[places]
    return bool(loud_U.min() < loud_U.max() - _FAR_BELOW)


def stretches(is_speech_T: Tensor) -> list[Stretch]:
    """The speech of one utterance, on the CPU, across short pauses."""
    found: list[Stretch] = []
    for begin, end in runs(is_speech_T):
        if found and begin - found[-1].end <= _SHORT_PAUSE:
            begin, _ = found.pop()
        found.append(Stretch(begin, end))
    return found


def without_text(
    speech: Sequence[Stretch], symbol_places: Sequence[int], least: int = LEAST_FRAMES
) -> list[Stretch]:
    """The stretches of speech, or parts of them, that no symbol belongs to.

    symbol_places: feature frames of the symbols, in order. least: frames of such a part.
    """
    found = []
    for begin, end in speech:
        reached = begin
        for place in symbol_places:
            if _belongs(place, Stretch(begin, end)):
                if place - _BEFORE - reached >= least:
                    found.append(Stretch(reached, place - _BEFORE))
                reached = max(reached, place + _AFTER)
        if reached > begin:
            reached += _AFTER_LAST - _AFTER
        if end - reached >= least:
            found.append(Stretch(reached, end))
    return found


def without_speech(speech: Sequence[Stretch], symbol_places: Sequence[int]) -> list[Stretch]:
    """Where symbols are to which no speech belongs, one stretch for symbols in a row."""
    found: list[Stretch] = []
    was_alone = False
    for place in symbol_places:
        is_alone = not any(_belongs(place, stretch) for stretch in speech)
        if is_alone:
            stretch = Stretch(place, place + _SYMBOL_FRAMES)
            if was_alone:
                stretch = Stretch(found.pop().begin, stretch.end)
            found.append(stretch)
        was_alone = is_alone
    return found


def spoken_places(path: FoundPath, speech: Sequence[Stretch]) -> list[int]:
    """The feature frames of the symbols, as far as known.

    A transducer that sees whole utterances may emit symbols before they are spoken. Without a CTC
    head, those emitted in silence are taken to the beginning of the next speech.
    """
    if path.head is not None:
        return path.symbol_places
    places = []
    for place in path.symbol_places:
        ahead = [stretch.begin for stretch in speech if stretch.begin >= place]
        is_alone = not any(_belongs(place, stretch) for stretch in speech)
        places.append(min(ahead) if is_alone and ahead else place)
    return places


def part_to_retry(gap: Stretch, frames: int, step: int) -> Stretch:
    """The gap with some context, at a multiple of an encoder frame of `step` feature frames."""
    begin = max(0, gap.begin - _CONTEXT) // step * step
    return Stretch(begin, min(frames, gap.end + _CONTEXT))


class FoundPath(NamedTuple):
    """The best path through an utterance, and that of the CTC head through its symbols.

    step: feature frames of an encoder frame.
    """

    hypothesis: Hypothesis
    head: HeadPath | None
    step: int = SUBSAMPLING_FACTOR

    @property
    def symbol_frames(self) -> tuple[int, ...]:
        """The encoder frames nearest to the sounds."""
        return self.hypothesis.frames if self.head is None else self.head.frames

    @property
    def symbols_in_time(self) -> Spikes:
        """The symbols and these frames."""
        return Spikes(self.hypothesis.symbols, self.symbol_frames)

    @property
    def symbol_places(self) -> list[int]:
        """The feature frames at which these begin."""
        return [frame * self.step for frame in self.symbol_frames]

    def symbols_before(self, frame: int) -> int:
        """How many symbols begin before a feature frame."""
        return sum(place < frame for place in self.symbol_places)


def with_retried(path: FoundPath, gap: Stretch, part: Stretch, retried: FoundPath) -> FoundPath:
    """The path with the symbols that the part by itself has in the gap.

    Those that the path has beside the gap are left out: the part begins and ends within them.
    Unchanged, too, if the gap is short and the CTC head contradicts the symbols: a part without its
    context invents.
    """
    offset = part.begin // path.step
    inside = [
        n
        for n, place in enumerate(retried.symbol_places)
        if gap.begin - _AFTER <= part.begin + place < gap.end + _BEFORE
    ]
    place = path.symbols_before(gap.begin)
    known = path.hypothesis.symbols
    symbols = [retried.hypothesis.symbols[n] for n in inside]
    beside = (known[max(0, place - len(symbols)) : place], known[place : place + len(symbols)])
    if not symbols or tuple(symbols) in beside:
        return path
    before, after = path.symbol_places[:place], path.symbol_places[place:]
    while inside and before and symbols[0] == known[len(before) - 1]:
        if part.begin + retried.symbol_places[inside[0]] - before[-1] > _SAME_FRAMES:
            break
        del symbols[0], inside[0]
    while inside and after and symbols[-1] == known[place]:
        if after[0] - part.begin - retried.symbol_places[inside[-1]] > _SAME_FRAMES:
            break
        del symbols[-1], inside[-1]
    if not inside:
        return path
    if gap.end - gap.begin < LEAST_FRAMES and (
        retried.head is None or min(retried.head.log_probs[n] for n in inside) < UNSURE
    ):
        return path

    def inserted(own: tuple, new: tuple) -> tuple:  # type: ignore[type-arg]
        return (*own[:place], *(new[n] for n in inside), *own[place:])

    def placed(own: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
        """As `inserted`, of frames, which stay between those beside the gap."""
        least = own[place - 1] if place else 0
        within = [max(new[n] + offset, least) for n in inside]
        if place < len(own):
            within = [min(frame, own[place]) for frame in within]
        return (*own[:place], *within, *own[place:])

    old, new = path.hypothesis, retried.hypothesis
    hypothesis = replace(
        old,
        symbols=inserted(old.symbols, new.symbols),
        frames=placed(old.frames, new.frames),
        score=old.score + sum(new.symbol_scores[n] for n in inside),
        symbol_scores=inserted(old.symbol_scores, new.symbol_scores),
        durations=inserted(old.durations, new.durations) if new.durations else (),
    )
    head = None
    if path.head is not None and retried.head is not None:
        head = HeadPath(
            placed(path.head.frames, retried.head.frames),
            inserted(path.head.log_probs, retried.head.log_probs),
            path.head.spikes,
        )
    return FoundPath(hypothesis, head, path.step)


def merged(found: Iterable[Stretch]) -> list[Stretch]:
    """The stretches in order; those that overlap as one."""
    together: list[Stretch] = []
    for begin, end in sorted(found):
        if together and begin <= together[-1].end:
            begin, last = together.pop()
            end = max(end, last)
        together.append(Stretch(begin, end))
    return together


def as_marks(found: Mapping[MarkKind, Iterable[Stretch]], begin: int = 0) -> list[Mark]:
    """Marks of stretches of a segment that begins at this feature frame of its recording."""
    made = [
        Mark(kind, *(round((begin + frame) * FEATURE_SECONDS, 2) for frame in stretch))
        for kind, own in found.items()
        for stretch in merged(own)
    ]
    return sorted(made, key=lambda mark: (mark.start, mark.end))


def clipped(marks: Iterable[Mark], begin: float, end: float) -> list[Mark]:
    """The marks within these seconds; what is left of one that is cut must still be a mark."""
    found = []
    for mark in marks:
        cut = mark._replace(start=max(mark.start, begin), end=min(mark.end, end))
        least = LEAST_FRAMES * FEATURE_SECONDS if cut != mark else 0.0
        if cut.end - cut.start > least:
            found.append(cut)
    return found


def _belongs(place: int, speech: Stretch) -> bool:
    return speech.begin < place + _AFTER and place - _BEFORE < speech.end
