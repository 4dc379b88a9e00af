"""Segments contain all speech, end at pauses, and do not depend on how the audio arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from pruned_rnnt.transcribe.segments import AudioPiece, Segment, SegmentConfig, Segmenter
from pruned_rnnt.transcribe.speech_energy import EnergyDetector

NONE = np.zeros(0, dtype=np.float32)


def speech(seconds: float, level: float = 0.0, seed: int = 0) -> torch.Tensor:
    """(T, 80) features that go up and down by 4, four times a second."""
    time_T = torch.arange(round(100 * seconds)) / 100
    noise_TF = torch.randn(len(time_T), 80, generator=torch.Generator().manual_seed(seed))
    return level + 2 * torch.sin(2 * torch.pi * 4 * time_T)[:, None] + noise_TF


def silence(seconds: float, level: float = -10.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return level + torch.randn(round(100 * seconds), 80, generator=generator)


def pieces(features_TF: torch.Tensor, size: int) -> Iterator[AudioPiece]:
    return (AudioPiece(NONE, part_TF) for part_TF in features_TF.split(size))


def segments(features_TF: torch.Tensor, size: int = 1000, **config: float) -> list[Segment]:
    lengths = SegmentConfig(**config).lengths(4.0)
    found = list(Segmenter(lengths, EnergyDetector())(pieces(features_TF, size)))
    for segment in found:
        end = segment.begin + len(segment.features_TF)
        torch.testing.assert_close(segment.features_TF, features_TF[segment.begin : end])
        assert len(segment.features_TF) <= lengths.longest
    return found


def spans(found: Iterable[Segment]) -> list[tuple[int, int]]:
    return [(s.begin, s.begin + len(s.features_TF)) for s in found]


@pytest.mark.parametrize("size", [7, 100, 333, 5000])
def test_segments_are_the_speech_with_padding(size: int) -> None:
    parts = [silence(3.0), speech(2.5), silence(0.5), speech(3.0), silence(40.0), speech(2.0)]
    found = segments(torch.cat([*parts, silence(6.0)]), size)
    assert [segment.overlap for segment in found] == [0, 0, 0]
    wanted = [(280, 570), (580, 920), (4880, 5120)]
    for span, expected in zip(spans(found), wanted, strict=True):
        assert span == pytest.approx(expected, abs=12)
    assert spans(found) == spans(segments(torch.cat([*parts, silence(6.0)])))


@pytest.mark.parametrize(
    ("gap", "is_pause"),
    [
        (silence(0.5), True),
        (silence(0.5, level=-6.0), True),
        (speech(1.5, level=-6.0), False),
        (silence(0.2), False),
    ],
    ids=["pause", "pause with other noise", "quiet speaker", "too short"],
)
def test_pauses_are_quiet_and_steady(gap: torch.Tensor, is_pause: bool) -> None:
    room = [silence(1.0), speech(1.5), silence(1.0)]
    found = segments(torch.cat([*room, speech(1.5), gap, speech(1.2), *room]))
    begins = [begin for begin, _ in spans(found)]
    middle = 500 + len(gap) // 2
    cut = [begin for begin in begins if abs(begin - middle) < 40]
    assert len(cut) == is_pause
    covered = torch.zeros(2000, dtype=torch.bool)
    for begin, end in spans(found):
        covered[begin:end] = True
    if not is_pause:
        assert covered[350:620].all()


def test_a_far_quieter_sentence_is_speech() -> None:
    """30 dB quieter, in a recording with much speech and little silence."""
    parts = [silence(0.5), speech(20.0), silence(0.4), speech(1.5, level=-7.0), silence(0.4)]
    features = torch.cat([*parts, speech(5.0), silence(0.5)]).clamp(min=-11.0)
    covered_T = torch.zeros(len(features), dtype=torch.bool)
    for begin, end in spans(segments(features)):
        covered_T[begin:end] = True
    assert covered_T[2100:2230].all()


def test_other_noise_is_no_speech() -> None:
    """Silence with stronger noise than before, but far below the speech."""
    quiet, loud = silence(0.3, level=-12.0), silence(0.3, level=-6.0)
    found = segments(torch.cat([speech(2.0), quiet, loud, quiet, speech(2.0), quiet, speech(1.0)]))
    assert len(found) == 2 or spans(found)[0][1] < 300
    assert spans(found)[0][1] == pytest.approx(220, abs=12)
    assert spans(found)[1][0] == pytest.approx(270, abs=12)


def test_short_segments_are_joined() -> None:
    parts = [speech(0.7), silence(0.5), speech(0.7), silence(0.5), speech(3.0), silence(1.5)]
    features = torch.cat([*parts, speech(0.6), silence(1.5), speech(2.0)])
    assert spans(segments(features, shortest=0.0))[:3] == [
        pytest.approx(span, abs=12) for span in ((0, 90), (100, 210), (220, 560))
    ]
    # The first two fill a second; the one between long pauses stays alone.
    found = spans(segments(features, shortest=1.2))
    assert found[0] == pytest.approx((0, 210), abs=12)
    assert found[1] == pytest.approx((220, 560), abs=12)
    assert found[2] == pytest.approx((670, 770), abs=12)


@pytest.mark.parametrize("size", [50, 5000])
def test_speech_without_a_pause_is_cut_into_overlapping_windows(size: int) -> None:
    features = torch.cat([silence(1.0), speech(12.0), silence(1.0)])
    found = segments(features, size, window=5.0)
    ends = [end for _, end in spans(found)]
    assert [segment.overlap for segment in found] == [0, *[166] * (len(found) - 1)]
    assert [b for b, _ in spans(found)][1:] == [end - 166 for end in ends[:-1]]
    assert ends[-1] == pytest.approx(1320, abs=12)


def test_windows_end_at_short_gaps() -> None:
    features = torch.cat([speech(3.0), silence(0.25), speech(4.0), silence(0.25), speech(2.0)])
    found = segments(features, window=5.0)
    assert [segment.overlap for segment in found] == [0, 0, 0]
    assert [end for _, end in spans(found)][:2] == pytest.approx([312, 737], abs=12)


def test_short_audio_is_one_segment() -> None:
    features = torch.cat([silence(2.0), speech(1.0), silence(1.9)])
    (found,) = segments(features, 50)
    assert (len(found.features_TF), found.begin, found.overlap) == (490, 0, 0)
    assert segments(torch.full((300, 80), -15.94)) == []
    assert segments(torch.zeros(0, 80)) == []


def test_silence_and_clicks_give_no_segment() -> None:
    assert segments(torch.full((2000, 80), -15.94), 300) == []
    click = torch.cat([silence(1.0), speech(0.02, level=5.0), silence(1.0)])
    features = torch.cat([speech(3.0), *[click] * 5, speech(2.0)])
    assert len(segments(features)) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"window": 0.1}, "window is 0.1; it must be 0.5 to 3600 seconds"),
        ({"window": 2.0, "shortest": 3.0}, "shortest is 3; it must be 0 to 2 seconds"),
        ({"pause": 2.0}, "pause is 2; it must be 0.1 to 1 seconds"),
        ({"padding": -1.0}, "padding is -1"),
        ({"pause": None}, "pause is None; it must be 0.1 to 1 seconds"),
        ({"window": "3"}, "window is '3'; it must be"),
        ({"window": True}, "window is True; it must be"),
        ({"detector": "ears"}, "detector is 'ears'; it must be energy or silero"),
    ],
)
def test_wrong_settings_are_errors(config: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentConfig(**config)


def test_long_pauses_with_other_noise_give_no_segment() -> None:
    """Their noise is far above that of the other pauses, and far below the speech."""
    parts = [speech(2.0), silence(4.0, level=-12.0), speech(2.0), silence(5.0, level=-7.0)]
    found = segments(torch.cat([*parts, speech(2.0)]))
    assert [begin for begin, _ in spans(found)] == pytest.approx([0, 580, 1280], abs=12)
    assert [end for _, end in spans(found)] == pytest.approx([220, 820, 1500], abs=12)
