"""Errors of exported files, and runs of a graph that are kept for the comparison of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.scoring.error_rates import Transcript
from pruned_rnnt.quantise import measurements
from pruned_rnnt.quantise.measurements import (
    Utterance,
    _joined,
    _SpreadRuns,
    errors_of,
    file_errors,
    utterances,
)
from pruned_rnnt.transcribe.transcription import Transcription


def batch(features_NTF: torch.Tensor, lengths: list[int]) -> Batch:
    names = tuple("abc"[: len(lengths)])
    return Batch(
        features_NTF=features_NTF,
        feature_lengths_N=torch.tensor(lengths),
        targets_NU=torch.zeros(len(lengths), 1, dtype=torch.int64),
        target_lengths_N=torch.ones(len(lengths), dtype=torch.int64),
        texts=names,
        ids=names,
        durations=(1.0,) * len(lengths),
        words=((),) * len(lengths),
    )


@pytest.mark.parametrize("are_samples", [False, True])
def test_utterances_have_no_padding(are_samples: bool) -> None:
    features_NTF = torch.arange(24.0).view(2, 3, 4)
    first, second = utterances([batch(features_NTF, [3, 2])], are_samples=are_samples)
    assert (first.id, second.id, second.text) == ("a", "b", "b")
    if are_samples:
        assert isinstance(second.audio, np.ndarray)
        assert second.audio.tolist() == list(range(12, 20))
    else:
        assert torch.equal(torch.as_tensor(second.audio), features_NTF[1, :2])


def test_files_decode_an_utterance_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sherpa-onnx does; a second pass may insert words where a model emits early."""
    seen: dict[str, Any] = {}

    class Recogniser:
        def __init__(self, folder: Path, **options: Any) -> None:
            seen.update(options, folder=folder)

        def transcribe_each(self, audio: list[Any], *, words: bool) -> Any:
            return iter([Transcription(text="one four", words=(), score=0.0, seconds=1.0)])

    monkeypatch.setattr(measurements, "OnnxRecogniser", Recogniser)
    found = file_errors(Path("out"), "int4", [Utterance("a", torch.zeros(9, 80), "one two three")])
    assert seen["segments"].lost_speech == "ignore"
    assert seen["precision"] == "int4"
    assert (found.errors, found.words) == ((2,), (3,))
    assert found.counts.substitutions == found.counts.deletions == 1


@pytest.mark.parametrize("number", [1, 12, 23, 24, 100, 5000])
def test_kept_runs_are_evenly_spread(number: int) -> None:
    runs = _SpreadRuns(12)
    for place in range(number):
        runs.add({"x": np.array([place])})
    places = [int(feeds["x"][0]) for feeds in runs.kept]
    assert min(number, 12) <= len(places) < 24
    assert places[0] == 0
    assert len(set(np.diff(places))) <= 1
    assert places[-1] >= number - 1 - number // 12


def test_runs_of_a_graph_are_joined_along_the_batch() -> None:
    """The second axis of the states of models in NeMo's layout."""
    runs = [{"targets": np.full((1, 1), n), "states.1": np.full((2, 1, 3), n)} for n in range(4)]
    joined = _joined(runs)
    assert joined["targets"].shape == (4, 1)
    assert joined["states.1"].shape == (2, 4, 3)
    assert joined["states.1"][0, :, 0].tolist() == [0, 1, 2, 3]


def test_errors_of_texts_without_spaces_are_counted_in_characters() -> None:
    reference = "今日はとても良い天気なので散歩に行きました"
    transcripts = [
        Transcript(id=str(n), reference=(reference,), hypothesis=(reference.replace("良", "よ"),))
        for n in range(20)
    ]
    found = errors_of(iter(transcripts))
    assert (found.counts.errors, found.counts.reference_words) == (20, 20 * len(reference))
    assert (found.words[0], found.unit) == (len(reference), "characters")
    spaced = Transcript(id="a", reference=("one", "two"), hypothesis=("one",))
    found = errors_of([spaced])
    assert (found.words, found.unit) == ((2,), "words")
