"""Speech far quieter than the rest of its segment is decoded as loud as the rest."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest
import torch

from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.decode.head_paths import HeadPath
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.transcribe.batch_input import BatchInput, BestPaths, amplified
from pruned_rnnt.transcribe.lost_speech import FoundPath, Stretch, stretches
from pruned_rnnt.transcribe.quiet_speech import compared, missing_gain
from pruned_rnnt.transcribe.speech_energy import far_quieter_speech
from tests.transcribe.test_lost_speech import StandIn, audio

QUIETER = 7.0  # 30 dB


def changing(*levels: float) -> torch.Tensor:
    """(T, F) features of 2 s of speech at each of these levels."""
    return torch.cat([audio(("speech", 2.0)) + level for level in levels])


def gain_of(features_TF: torch.Tensor) -> torch.Tensor:
    return missing_gain(features_TF[None], torch.tensor([len(features_TF)]))[0]


def test_gain_is_what_quiet_speech_lacks() -> None:
    gain_T = gain_of(changing(0.0, -QUIETER, 0.0))
    assert gain_T[210:390].mean() == pytest.approx(QUIETER, abs=0.7)
    assert gain_T[:190].max() == gain_T[410:].max() == 0


def test_pauses_and_even_speech_have_no_gain() -> None:
    for kind in ("noise", "zeros"):
        features = audio(
            ("speech", 2.0), (kind, 2.0), ("speech", 0.3), (kind, 0.3), ("speech", 2.0)
        )
        assert gain_of(features).max() == 0
    assert gain_of(audio(("noise", 3.0))).max() == 0
    # Less than a few words, or 17 dB.
    short = torch.cat([changing(0.0), audio(("speech", 0.2)) - QUIETER, changing(0.0)])
    assert gain_of(short).max() == 0
    assert gain_of(changing(0.0, -4.0)).max() == 0


def test_frames_beyond_the_end_change_nothing() -> None:
    features = changing(0.0, -QUIETER)
    padded_NTF = torch.zeros(1, 700, 80)
    padded_NTF[0, : len(features)] = features
    (gain_T,) = missing_gain(padded_NTF, torch.tensor([len(features)]))
    assert gain_T[len(features) :].max() == 0
    torch.testing.assert_close(gain_T[: len(features)], gain_of(features))
    assert gain_T.max() > 0


def test_streams_find_quiet_speech_beside_loud_speech() -> None:
    features = torch.cat([changing(0.0, -QUIETER), audio(("noise", 1.0)) - QUIETER, changing(0.0)])
    (is_quiet_T,) = far_quieter_speech(features[None], torch.tensor([len(features)]))
    found = stretches(is_quiet_T)
    assert found[0].begin == pytest.approx(200, abs=15)
    assert found[-1].end >= 395
    assert not is_quiet_T[:190].any()
    assert not is_quiet_T[505:].any()
    for others in (("noise", 2.0), ("zeros", 2.0)):
        even = audio(("speech", 2.0), others, ("speech", 2.0))
        assert not far_quieter_speech(even[None], torch.tensor([len(even)])).any()


def test_quiet_speech_at_the_end_does_not_depend_on_padding() -> None:
    features = changing(0.0, -QUIETER)
    lengths = torch.tensor([len(features)])
    alone = far_quieter_speech(features[None], lengths)
    assert alone[0, 300:395].any()
    padded = far_quieter_speech(torch.nn.functional.pad(features, (0, 0, 0, 200))[None], lengths)
    assert torch.equal(padded[:, : len(features)], alone)
    assert not padded[:, len(features) :].any()


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_samples_are_amplified_like_features(dtype: type) -> None:
    samples_S = (2000 * np.random.default_rng(0).standard_normal(16000)).astype(np.int16)
    floats_S = samples_S.astype(np.float32) * np.float32(2**-15)
    features_NTF = audio_features(floats_S)[None]
    gain_NT = torch.zeros(1, 100)
    gain_NT[0, 40:] = 2.0
    given = samples_S if dtype == np.int16 else floats_S
    batch = BatchInput(features_NTF, torch.tensor([100]), torch.tensor([False]), [given])
    found = amplified(batch, gain_NT)
    changed_TF = audio_features(np.asarray(found.samples[0], dtype=np.float32))
    for frames in (slice(0, 38), slice(42, 100)):
        torch.testing.assert_close(
            changed_TF[frames], found.features_NTF[0, frames], atol=1e-2, rtol=0
        )


def test_without_samples_nothing_waits_for_the_device() -> None:
    batch = BatchInput(
        torch.zeros(1, 9, 80, device="meta"), torch.tensor([9]), torch.tensor([False])
    )
    assert not amplified(batch, torch.zeros(1, 9, device="meta")).samples


def path(symbols: tuple[int, ...], frames: tuple[int, ...], *scores: float) -> FoundPath:
    """A path without a head, with a score of each symbol."""
    hypothesis = Hypothesis(symbols=symbols, frames=frames, score=sum(scores), symbol_scores=scores)
    return FoundPath(hypothesis, None)


def with_head(found: FoundPath) -> FoundPath:
    hypothesis = found.hypothesis
    return found._replace(head=HeadPath(hypothesis.frames, hypothesis.symbol_scores))


QUIET = [Stretch(80, 200)]


@pytest.mark.parametrize("change", [with_head, lambda found: found], ids=["head", "no head"])
def test_unsure_symbols_are_replaced_by_sure_ones(change: object) -> None:
    assert callable(change)
    own = change(path((3, 7, 6), (5, 30, 60), -0.1, -4.0, -0.1))
    louder = change(path((3, 4, 5, 6), (5, 28, 40, 61), -0.1, -0.2, -0.3, -0.1))
    found = compared(own, louder, QUIET)
    assert found.path.hypothesis.symbols == (3, 4, 5, 6)
    assert found.path.hypothesis.frames == (5, 28, 40, 60)
    assert found.path.hypothesis.score == pytest.approx(-4.2 + 4.0 - 0.5)
    assert (found.lost, found.doubtful) == ([], [])
    # Elsewhere, the first path stays.
    assert compared(own, louder, [Stretch(300, 400)]) == (own, [], [])


def test_what_is_left_is_marked() -> None:
    own = path((3, 7, 6), (5, 30, 60), -0.1, -4.0, -0.1)
    unsure = path((3, 4, 5, 6), (5, 28, 40, 61), -0.1, -2.0, -0.3, -0.1)
    assert compared(own, unsure, QUIET) == (own, [], [Stretch(112, 164)])
    # Of another order in time.
    early = path((3, 4, 5, 6), (5, 28, 65, 66), -0.1, -0.2, -0.3, -0.1)
    assert compared(own, early, QUIET) == (own, [], [Stretch(112, 264)])
    short = path((3, 6), (5, 60), -0.1, -0.1)
    assert compared(short, unsure, QUIET) == (short, [Stretch(112, 164)], [])
    # The model was sure, or only one symbol is different.
    sure = path((3, 7, 6), (5, 30, 60), -0.1, -1.0, -0.1)
    assert compared(sure, unsure, QUIET) == (sure, [], [])
    single = path((3, 4, 6), (5, 28, 61), -0.1, -2.0, -0.1)
    assert compared(own, single, QUIET) == (own, [], [])


def test_a_model_that_hears_only_loud_speech() -> None:
    features = changing(0.0, -QUIETER)
    whole = StandIn(lambda *_: False, "ignore").transcribe_features(changing(0.0, 0.0))
    ignored = StandIn(lambda *_: False, "ignore").transcribe_features(features)
    assert len(ignored.words) < 0.8 * len(whole.words)
    found = StandIn(lambda *_: False, "retry").transcribe_features(features)
    assert found.text == whole.text
    assert [word.start for word in found.words] == [word.start for word in whole.words]
    assert found.marks == ()


def test_the_padding_of_a_batch_is_not_decoded_again() -> None:
    """Louder, it may become words."""
    lengths: list[int] = []

    class Recorded(StandIn):
        batch_seconds = 100.0

        def _best_paths(
            self, batch: BatchInput, with_heads: bool
        ) -> Generator[None, None, BestPaths]:
            lengths.extend(batch.lengths_N.tolist())
            return super()._best_paths(batch, with_heads)

    quiet, longer = changing(0.0, -QUIETER), changing(0.0, 0.0, 0.0)
    alone, found = Recorded(lambda *_: False, "retry"), Recorded(lambda *_: False, "retry")
    (expected,) = alone.transcribe_each([quiet])
    expected_lengths = sorted([*lengths, len(longer)])
    lengths.clear()
    _, result = found.transcribe_each([longer, quiet])
    assert result == expected
    assert sorted(lengths) == expected_lengths
