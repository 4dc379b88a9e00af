"""Final texts of live streams have marks where a model loses speech, or has text without any."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.streaming import Arc
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import LostSpeech, SegmentConfig
from pruned_rnnt.transcribe.stream import FinalText
from pruned_rnnt.transcribe.stream_marks import NeedsSpeech, StreamMarks, run_together
from pruned_rnnt.transcribe.transcribe_command import print_live
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model
from tests.transcribe.random_model import babble
from tests.transcribe.test_lost_speech import audio

_T = TypeVar("_T")
NEVER = EndpointConfig(pause=0, silence=0, longest=0)
KINDS: list[tuple[dict[str, Any], DecodeConfig]] = [
    ({}, DecodeConfig()),
    ({}, DecodeConfig(method="modified_beam")),
    ({"durations": (0, 1, 2, 4)}, DecodeConfig()),
]


def recogniser_of(
    loss: dict[str, Any] | None = None,
    decode: DecodeConfig | None = None,
    lost_speech: LostSpeech = "retry",
    encoder: EncoderConfig | None = None,
) -> Recogniser:
    """A model that emits symbols for any sound, without a CTC head."""
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    encoder = encoder or tiny_conformer(causal=True)
    model = tiny_model(encoder, len(tokenizer), **(loss or {}))
    model.ctc_head = None
    segments = SegmentConfig(lost_speech=lost_speech)
    return Recogniser(model, tokenizer, segments=segments, decode=decode)


def lose_speech(recogniser: Recogniser, loses: bool) -> None:
    """Let the model emit nothing but blanks, or symbols again."""
    blank = recogniser.model.joiner.output_linear.bias
    with torch.no_grad():
        blank[0] += 1e3 if loses else -1e3


def decoded(
    recogniser: Recogniser, samples: np.ndarray, endpoints: EndpointConfig | None = None
) -> list[FinalText]:
    """The texts of a stream whose model loses speech from 3 to 6 s."""
    stream, finals = recogniser.stream(endpoints=endpoints), list[FinalText]()
    loses = False
    for begin in range(0, len(samples), 1600):
        if loses != (3.0 <= begin / 16000 < 6.0):
            loses = not loses
            lose_speech(recogniser, loses)
        stream.accept_waveform(samples[begin : begin + 1600])
        while recogniser.step([stream]):
            finals += stream.take_finals()
    stream.finish()
    while recogniser.step([stream]):
        finals += stream.take_finals()
    return finals


def alone(computation: NeedsSpeech[_T]) -> _T:
    (result,) = run_together([computation], torch.device("cpu"))
    return result


def pause(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (1e-4 * rng.standard_normal(round(16000 * seconds))).astype(np.float32)


SOUND = np.concatenate((pause(0.5), babble(8.0), pause(2.0), babble(2.0), pause(1.5)))


@pytest.mark.parametrize("endpoints", [EndpointConfig(), NEVER])
@pytest.mark.parametrize(("loss", "decode"), KINDS)
def test_lost_speech_is_marked(
    loss: dict[str, Any], decode: DecodeConfig, endpoints: EndpointConfig
) -> None:
    finals = decoded(recogniser_of(loss, decode), SOUND, endpoints)
    assert all(final.text for final in finals[:2])
    marks = [mark for final in finals for mark in final.marks]
    lost = [mark for mark in marks if mark.kind == "speech without text"]
    # The symbols up to 3 s have sound up to 0.3 s later, and those from 6 s on from 0.5 s earlier.
    assert [mark[1:] for mark in lost] == [pytest.approx((3.3, 5.5), abs=0.25)]
    for final in finals:
        for mark in final.marks:
            assert mark.end <= final.end


def test_mark_comes_with_the_text_after_the_loss() -> None:
    finals = decoded(recogniser_of(), SOUND)
    assert len(finals) > 2
    (second,) = [final for final in finals if final.marks]
    (mark,) = second.marks
    # The text before ends within a second after the beginning of the loss.
    assert second.start - 1 <= mark.start < mark.end <= second.end


def test_nothing_is_marked_without_reason_or_if_unwanted() -> None:
    whole = recogniser_of()
    stream = whole.stream()
    stream.accept_waveform(SOUND)
    stream.finish()
    while whole.step([stream]):
        pass
    assert [final.marks for final in stream.take_finals()] == [()] * 3
    unwanted = decoded(recogniser_of(lost_speech="ignore"), SOUND)
    assert [final.marks for final in unwanted] == [()] * len(unwanted)
    assert [final.text for final in unwanted] == [
        final.text for final in decoded(recogniser_of(), SOUND)
    ]


def test_marks_have_times_of_the_stream() -> None:
    """Also after digital silence, and although other streams are decoded in the same batch."""
    recogniser = recogniser_of()
    lose_speech(recogniser, True)
    streams = [recogniser.stream(endpoints=NEVER) for _ in range(3)]
    for stream, seconds in zip(streams, (0.0, 5.0, 1.0), strict=True):
        stream.gap(seconds)
        stream.accept_waveform(SOUND[: 16000 * 8 if seconds == 1 else None])
        stream.finish()
    while recogniser.step(streams):
        pass
    first, second, short = ([m for f in s.take_finals() for m in f.marks] for s in streams)
    assert [mark[1:] for mark in first] == [
        pytest.approx((0.5, 8.5), abs=0.15),
        pytest.approx((10.5, 12.5), abs=0.15),
    ]
    for mark, later in zip(first, second, strict=True):
        assert later[1:] == pytest.approx([mark.start + 5, mark.end + 5], abs=0.05)
    assert [mark[1:] for mark in short] == [pytest.approx((1.5, 9.0), abs=0.15)]


def test_marks_do_not_depend_on_the_features_of_the_model() -> None:
    """Those of NeMo hide speech as quiet as this."""
    found = []
    for encoder in (None, tiny_fastconformer(causal=True, feature_norm="fixed")):
        recogniser = recogniser_of(encoder=encoder)
        lose_speech(recogniser, True)
        stream = recogniser.stream(endpoints=NEVER)
        stream.accept_waveform(0.01 * SOUND)
        stream.finish()
        while recogniser.step([stream]):
            pass
        (final,) = stream.take_finals()
        found.append(final.marks)
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_long_losses_are_marked_as_they_go_on() -> None:
    """Each text marks the speech up to a second before its end; no speech is marked twice."""
    recogniser = recogniser_of()
    lose_speech(recogniser, True)
    stream = recogniser.stream()
    stream.accept_waveform(np.concatenate((pause(0.5), babble(30.0), pause(2.0))))
    stream.finish()
    marks = []
    while recogniser.step([stream]):
        for final in stream.take_finals():
            marks += final.marks
            assert not final.marks or final.end - 4.5 < final.marks[-1].end <= final.end
    assert len(marks) > 8
    assert marks[0].start == pytest.approx(0.5, abs=0.15)
    for one, other in pairwise(marks):
        assert 0 <= other.start - one.end < 0.35
    assert marks[-1].end == pytest.approx(30.5, abs=0.2)


def test_memory_is_constant_without_endpoints() -> None:
    marks = StreamMarks()
    features, sizes = audio(("speech", 5.0), ("noise", 1.0)), []
    for n in range(60):
        if n < 59:  # The symbols of the last part are missing.
            marks.add(Arc(3, frame, -0.1, None) for frame in range(150 * n, 150 * n + 125))
        if marks.accept(features):
            alone(marks.check(()))
        sizes.append(sum(len(part) for part in marks._features_TF))
    assert max(sizes) < 5000
    assert len(marks._symbols) < 5000 // 4
    (mark,) = alone(marks.take((), is_end=True))
    assert mark[1:] == pytest.approx((354.0, 359.0), abs=0.2)


@pytest.mark.parametrize("chunk", [10, 16, 50])
@pytest.mark.parametrize("takes", [True, False])
def test_symbols_of_a_chunk_belong_to_where_the_head_hears_them(chunk: int, takes: bool) -> None:
    """A stream emits at the beginning of a chunk what is said at its end."""
    features = audio(("speech", 1.0), ("noise", 2.6), ("speech", 6.0))
    frames = [2, 8, 14, 20, *range(92, 236, 9)]
    arcs = [Arc(3 + n, frame // chunk * chunk, -0.1, None) for n, frame in enumerate(frames)]
    head = [0] * 240
    for arc, frame in zip(arcs, frames, strict=True):
        head[frame] = head[frame + 1] = arc.symbol

    def marks(arcs: list[Arc], head: list[int]) -> list[Mark]:
        checked, found = StreamMarks(), list[Mark]()
        for begin in range(0, 240, chunk):
            own = slice(begin, begin + chunk)
            checked.accept(features[4 * begin : 4 * begin + 4 * chunk], head[own])
            checked.add(arc for arc in arcs if arc.frame == begin)
            if takes:
                found += alone(checked.take((), is_end=False))
        return [*found, *alone(checked.take((), is_end=True))]

    assert marks(arcs, head) == []
    if chunk == 50:
        assert marks(arcs, [])
    # Symbols of the head alone are lost speech.
    lost = marks([*arcs[:4], *arcs[7:]], head)
    assert {mark.kind for mark in lost} == {"speech without text"}
    assert lost[0].start == pytest.approx(0.04 * 92, abs=0.15)
    assert lost[-1].end == pytest.approx(0.04 * 111, abs=0.15)
    assert all(one.end <= other.start for one, other in pairwise(lost))
    # Where the search has others, the text is wrong, not missing.
    wrong = [
        arc._replace(symbol=90) if n == 5 else arc for n, arc in enumerate(arcs) if n not in (6, 7)
    ]
    assert "text unlike the speech" in {mark.kind for mark in marks(wrong, head)}


def test_bad_samples_do_not_stop_the_marks() -> None:
    recogniser = recogniser_of()
    lose_speech(recogniser, True)
    stream = recogniser.stream()
    spoiled = SOUND.copy()
    spoiled[16000:17000] = np.nan
    spoiled[17000:18000] = np.inf
    stream.accept_waveform(spoiled[:100000])
    with pytest.raises(ValueError, match="needs floats in"):
        stream.accept_waveform(1e6 * SOUND[:100])
    stream.gap(0.1)
    stream.accept_waveform(np.stack([np.repeat(spoiled[100000:], 3)] * 2, axis=1), 48000)
    stream.finish()
    while recogniser.step([stream]):
        pass
    marks = [mark for final in stream.take_finals() for mark in final.marks]
    assert marks[0].start == pytest.approx(0.5, abs=0.15)
    assert marks[-1].end == pytest.approx(12.6, abs=0.2)


def test_live_marks_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    recogniser = recogniser_of()
    lose_speech(recogniser, True)
    integers = (SOUND[:160000] * 32767).astype(np.int16)
    print_live(recogniser.stream(endpoints=NEVER), io.BytesIO(integers.tobytes()))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"0\.\d\d to 8\.\d\d s: speech without text\n", shown.err)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_streams_are_checked_together(device: str) -> None:
    def streams() -> list[NeedsSpeech[list[Mark]]]:
        checks = []
        for n in range(70):
            marks = StreamMarks()
            marks.accept(audio(("noise", 0.5 + 0.01 * n), ("speech", 1 + n % 7), ("noise", 1.0)))
            if n % 3:
                marks.add(Arc(3, frame, -0.1, None) for frame in range(15, 50 + 25 * (n % 7), 10))
            checks.append(marks.take((), is_end=n % 5 > 0))
        return checks

    found = run_together(streams(), torch.device(device))
    assert found == [alone(each) for each in streams()]
    assert 10 < sum(bool(marks) for marks in found) < 60
