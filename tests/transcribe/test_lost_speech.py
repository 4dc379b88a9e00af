"""Speech without text is decoded again, and marked; text without speech is marked.

A stand-in for a model emits a symbol every 0.3 s of speech, but none in the parts that a test lets
it lose, as transducers do in audio unlike their training data.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.transcribe.audio_recogniser import AudioRecogniser
from pruned_rnnt.transcribe.batch_input import BatchInput, BestPaths
from pruned_rnnt.transcribe.lost_speech import (
    FoundPath,
    Mark,
    Stretch,
    loudest_nearby,
    may_need_marks,
    part_to_retry,
    spoken_places,
    stretches,
    with_retried,
    without_speech,
    without_text,
)
from pruned_rnnt.transcribe.segments import LostSpeech, SegmentConfig
from pruned_rnnt.transcribe.speech_energy import speech_frames

SYMBOL_FRAMES = 30
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def audio(*parts: tuple[str, float]) -> Tensor:
    """(T, F) features of speech (syllables of 0.2 s), room noise, noise whose level is within that
    of speech, or digital silence."""
    rng = np.random.default_rng(0)
    found = []
    for kind, seconds in parts:
        frames = round(100 * seconds)
        if kind == "zeros":
            found.append(np.full((frames, 80), -15.94))
            continue
        level = np.full((frames, 1), {"loud noise": -8.0}.get(kind, -13.0))
        if kind == "speech":
            level = -6.5 + 2.5 * np.sin(2 * np.pi * np.arange(frames) / 20)[:, None]
        found.append(level + np.log(rng.gamma(4.0, 0.25, size=(frames, 80))))
    return torch.from_numpy(np.concatenate(found).astype(np.float32))


class StandIn(AudioRecogniser):
    """Emits symbols where there is speech, unless `loses(frames, place)` of a segment with so many
    frames; with `invents`, also one in each of these frames of whole segments."""

    def __init__(
        self,
        loses: Callable[[int, int], bool],
        lost_speech: LostSpeech,
        invents: tuple[int, ...] = (),
        **segments: Any,
    ) -> None:
        tokenizer = train_tokenizer(["a b c"], TokenizerConfig(kind="word", vocab_size=10))
        super().__init__(
            tokenizer, segments=SegmentConfig(lost_speech=lost_speech, window=20.0, **segments)
        )
        self.loses, self.invents = loses, invents
        self.calls: list[int] = []

    def _best_paths(self, batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        yield
        self.calls.append(len(batch.lengths_N))
        found: list[tuple[Hypothesis, HeadPath | None]] = []
        for features_TF, length in zip(batch.features_NTF, batch.lengths_N.tolist(), strict=True):
            is_loud_T = features_TF[:length].mean(dim=1).cpu() > -10
            places = [
                place
                for place in range(SYMBOL_FRAMES // 2, length, SYMBOL_FRAMES)
                if is_loud_T[max(0, place - 10) : place + 10].any()
                and not self.loses(length, place)
            ]
            if length > 300:
                places = sorted({*places, *self.invents})
            symbols = tuple(3 + (place // SYMBOL_FRAMES) % 3 for place in places)
            frames = tuple(place // 4 for place in places)
            scores = tuple(-0.5 for _ in places)
            found.append(
                (
                    Hypothesis(
                        symbols=symbols, frames=frames, score=sum(scores), symbol_scores=scores
                    ),
                    HeadPath(frames, scores) if with_heads else None,
                )
            )
        return found


def second_half(frames: int, place: int) -> bool:
    return frames > 400 and place > 250


def always_between(frames: int, place: int) -> bool:
    return 250 < place < 450 if frames > 400 else True


EXAMPLE = (("noise", 0.4), ("speech", 5.0), ("noise", 0.4))


def test_lost_speech_is_decoded_again() -> None:
    features = audio(*EXAMPLE)
    whole = StandIn(lambda *_: False, "retry").transcribe_features(features)
    kept = StandIn(second_half, "ignore").transcribe_features(features)
    assert len(kept.words) < 0.6 * len(whole.words)
    assert kept.marks == ()
    recogniser = StandIn(second_half, "retry")
    found = recogniser.transcribe_features(features)
    assert abs(len(found.words) - len(whole.words)) <= 1
    assert found.marks == ()
    assert recogniser.calls == [1, 1]
    assert [word.start for word in found.words] == sorted(word.start for word in found.words)
    gap = max(b.start - a.start for a, b in zip(found.words, found.words[1:], strict=False))
    assert gap < 0.7
    assert found.score == pytest.approx(-0.5 * len(found.words))


class WithoutHead(StandIn):
    """Each of its symbols is the same, or depends on where the part begins."""

    is_steady = True

    def _best_paths(self, batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        found = yield from super()._best_paths(batch, False)
        if self.is_steady:
            found = [
                (replace(path, symbols=(3,) * len(path.symbols)), head) for path, head in found
            ]
        return found


@pytest.mark.parametrize("is_steady", [True, False])
def test_without_a_head_text_must_be_found_twice(is_steady: bool) -> None:
    features = audio(*EXAMPLE)
    kept = WithoutHead(second_half, "ignore").transcribe_features(features)
    recogniser = WithoutHead(second_half, "retry")
    recogniser.is_steady = is_steady
    found = recogniser.transcribe_features(features)
    assert recogniser.calls == [1, 1, 1]
    assert (len(found.words) > len(kept.words)) == is_steady
    assert [mark.kind for mark in found.marks] == ([] if is_steady else ["speech without text"])


@pytest.mark.parametrize("policy", ["mark", "retry"])
def test_speech_that_stays_without_text_is_marked(policy: LostSpeech) -> None:
    found = StandIn(always_between, policy).transcribe_features(audio(*EXAMPLE))
    (mark,) = found.marks
    assert mark.kind == "speech without text"
    # Symbols of the speech up to 2.5 s and from 4.5 s on are there.
    assert mark.start == pytest.approx(2.8, abs=0.35)
    assert mark.end == pytest.approx(4.1, abs=0.35)


def test_a_whole_recording_without_text_is_marked() -> None:
    found = StandIn(lambda *_: True, "retry").transcribe_features(audio(*EXAMPLE))
    (mark,) = found.marks
    assert mark.start == pytest.approx(0.4, abs=0.1)
    assert mark.end == pytest.approx(5.4, abs=0.1)
    assert found.text == ""


def test_text_without_speech_is_marked() -> None:
    features = audio(("speech", 2.0), ("noise", 3.0), ("speech", 2.0))
    found = StandIn(lambda *_: False, "retry", invents=(320, 350)).transcribe_features(features)
    (mark,) = found.marks
    assert mark == Mark("text without speech", 3.2, 3.52)


@pytest.mark.parametrize(
    "parts",
    [
        EXAMPLE,
        (("zeros", 2.0), ("speech", 1.5), ("zeros", 2.0)),
        (("noise", 2.0), ("speech", 1.5), ("noise", 2.0), ("speech", 3.0)),
        (("noise", 6.0),),
        (("zeros", 6.0),),
    ],
)
def test_nothing_is_marked_or_decoded_again_without_reason(parts: tuple) -> None:
    recogniser = StandIn(lambda *_: False, "retry")
    found = recogniser.transcribe_features(audio(*parts))
    assert found.marks == ()
    assert sum(recogniser.calls) <= 1


def test_steady_noise_is_no_speech() -> None:
    """Even if it is far above the quietest parts of a recording."""
    parts = [("loud noise", 2.0), ("speech", 2.0), ("noise", 1.0), ("speech", 1.0)]
    features = audio(*parts)
    (found,) = speech_frames(features[None], torch.tensor([len(features)]))
    assert not found[:150].any()
    assert found[210:390].all()
    assert found[510:590].all()


def test_marks_of_long_audio_have_its_times() -> None:
    parts = [("speech", 4.0), ("noise", 1.5)] * 8
    features = audio(*parts)

    def loses(frames: int, place: int) -> bool:
        return frames < 100

    assert StandIn(loses, "mark").transcribe_features(features).marks == ()
    found = StandIn(always_between, "retry", shortest=0).transcribe_features(features)
    starts = [mark.start for mark in found.marks]
    assert len(starts) == 8
    assert np.diff(starts) == pytest.approx(5.5, abs=0.25)


def test_windows_that_overlap_complement_each_other() -> None:
    """What one window lost and the other has is not marked."""

    def loses(frames: int, place: int) -> bool:
        return frames > 1900 and place > 1500

    features = audio(("speech", 30.0))
    found = StandIn(loses, "mark").transcribe_features(features)
    gaps = [b.start - a.start for a, b in zip(found.words, found.words[1:], strict=False)]
    for mark in found.marks:
        assert not any(mark.start <= word.start < mark.end for word in found.words)
    assert len(found.marks) == sum(gap > 1.1 for gap in gaps)


@pytest.mark.parametrize("device", DEVICES)
def test_speech_is_found_above_noise_and_silence(device: str) -> None:
    recordings = [
        EXAMPLE,
        (("zeros", 1.0), ("speech", 2.0), ("noise", 2.0), ("speech", 1.0)),
        (("zeros", 1.0),),
    ]
    features = [audio(*parts) for parts in recordings]
    padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True, padding_value=9.0)
    lengths = torch.tensor([len(each) for each in features])
    together = speech_frames(padded.to(device), lengths.to(device)).cpu()
    for found_T, parts, own in zip(together, recordings, features, strict=True):
        assert not found_T[len(own) :].any()
        spoken = [kind == "speech" for kind, seconds in parts for _ in range(round(100 * seconds))]
        is_speech = torch.tensor(spoken)
        if is_speech.any():
            assert found_T[: len(own)][is_speech].float().mean() > 0.7  # between syllables, too
        assert found_T[: len(own)][~is_speech].float().mean() < 0.1
        alone = speech_frames(own[None].to(device), torch.tensor([len(own)]).to(device))
        assert torch.equal(found_T[: len(own)], alone[0].cpu())


def test_padding_is_not_loud() -> None:
    """A symbol in the silence before the padding is far below the others."""
    features = audio(("speech", 3.0), ("zeros", 1.0)) + 3.0
    padded = torch.nn.functional.pad(features, (0, 0, 0, 60))
    for own in (features, padded):
        (loudest,) = loudest_nearby(own[None], torch.tensor([len(features)]))
        places = [20, 100, 180, 260, 330]
        assert not may_need_marks(loudest[: len(features)], places)
        assert may_need_marks(loudest[: len(features)], [*places, 380])


def test_stretches_cross_short_pauses() -> None:
    is_speech = torch.tensor([0, 1, 1] + [0] * 20 + [1] + [0] * 21 + [1, 1]).bool()
    assert stretches(is_speech) == [Stretch(1, 24), Stretch(45, 47)]
    assert stretches(torch.zeros(5).bool()) == []


def test_gaps() -> None:
    speech = [Stretch(0, 400)]
    assert without_text(speech, []) == [Stretch(0, 400)]
    assert without_text(speech, [20, 320]) == [Stretch(50, 270)]
    # The last word before a pause may be long.
    assert without_text([Stretch(0, 380)], [76, 180, 284]) == []
    assert without_text(speech, [76, 180, 220]) == [Stretch(290, 400)]
    assert without_speech([Stretch(200, 300)], [40, 80, 240, 400, 440]) == [
        Stretch(40, 84),
        Stretch(400, 444),
    ]


def path(symbols: tuple[int, ...], frames: tuple[int, ...]) -> FoundPath:
    scores = (-1.0,) * len(symbols)
    hypothesis = Hypothesis(
        symbols=symbols, frames=frames, score=-float(len(symbols)), symbol_scores=scores
    )
    return FoundPath(hypothesis, HeadPath(frames, scores))


def test_symbols_beside_the_gap_are_not_repeated() -> None:
    own = path((3, 4, 5), (5, 12, 80))
    gap, part = Stretch(80, 270), Stretch(52, 298)
    assert with_retried(own, gap, part, path((3, 4), (1, 8))) == own
    assert with_retried(own, gap, part, path((), ())) == own
    found = with_retried(own, gap, part, path((6, 7), (10, 20)))
    assert found.hypothesis.symbols == (3, 4, 6, 7, 5)
    assert found.hypothesis.frames == (5, 12, 23, 33, 80)
    assert found.head == HeadPath((5, 12, 23, 33, 80), (-1.0,) * 5)
    assert found.hypothesis.score == -5.0


def test_symbols_that_are_put_in_stay_in_order_of_time() -> None:
    own = path((5, 6, 9), (2, 48, 120))
    found = with_retried(own, Stretch(200, 300), Stretch(172, 328), path((7, 8), (3, 15)))
    assert found.hypothesis.symbols == (5, 6, 7, 8, 9)
    assert found.hypothesis.frames == (2, 48, 48, 58, 120)
    assert found.head is not None
    assert found.head.frames == found.hypothesis.frames
    last = path((5, 6, 9), (2, 48, 52))
    found = with_retried(last, Stretch(200, 300), Stretch(172, 328), path((7, 8), (3, 15)))
    assert found.hypothesis.frames == (2, 48, 48, 52, 52)


def test_frames_of_80_ms_are_placed_by_their_length() -> None:
    own = path((3, 4, 5), (2, 6, 40))._replace(step=8)
    assert own.symbol_places == [16, 48, 320]
    gap = Stretch(80, 270)
    part = part_to_retry(gap, 400, own.step)
    assert part == Stretch(48, 298)
    found = with_retried(own, gap, part, path((6, 7), (5, 10))._replace(step=8))
    assert found.hypothesis.frames == (2, 6, 11, 16, 40)
    assert found.step == 8


def test_symbols_may_come_before_their_speech() -> None:
    """Of a model without a CTC head, which then has no better times."""
    early = path((3, 4, 5, 6), (0, 1, 50, 58))
    speech = [Stretch(110, 250)]
    assert spoken_places(early, speech) == [0, 4, 200, 232]
    without_head = early._replace(head=None)
    assert spoken_places(without_head, speech) == [110, 110, 200, 232]
    assert without_text(speech, spoken_places(without_head, speech)) == []
    # Nothing is said later.
    assert spoken_places(without_head, [Stretch(0, 20)]) == [0, 4, 200, 232]


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="lost_speech is 'often'"):
        SegmentConfig(lost_speech="often")  # type: ignore[arg-type]


def test_marks_reach_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    import soundfile

    from pruned_rnnt.transcribe.transcribe_command import audio_inputs, run_transcribe

    rng = np.random.default_rng(0)
    envelope = np.abs(np.sin(np.arange(80000) * 2 * np.pi * 2.5 / 16000))
    soundfile.write(tmp_path / "a.wav", rng.standard_normal(80000) * envelope * 0.3, 16000)
    options = argparse.Namespace(format="text", times=True, output=None, channel=None)
    run_transcribe(StandIn(lambda *_: True, "mark"), audio_inputs([str(tmp_path)]).files, options)
    shown = capsys.readouterr()
    assert "[speech without text]" in shown.out
    assert "a.wav: " in shown.err
    assert "s: speech without text" in shown.err
