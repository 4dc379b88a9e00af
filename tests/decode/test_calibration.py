"""Calibrations are found from observations, and word confidences are measured."""

from __future__ import annotations

import math
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pruned_rnnt.decode.calibration import (
    Calibration,
    ConfidenceMap,
    Distance,
    SymbolTimes,
    fit_confidence,
    fit_times,
    logit,
    read_calibration,
    save_calibration,
)
from pruned_rnnt.decode.head_paths import head_paths, launch_ranked_head_paths
from pruned_rnnt.decode.scoring.error_statistics import normalised_cross_entropy, right_words
from tests.tiny_models import tiny_conformer, tiny_model

BEFORE, AFTER = [0.1, 0.3, 0.05, 0.2], [0.2, 0.05, 0.15, 0.1]


def observed(text: list[int], pause: float = 0.0) -> list[Distance]:
    """The distances of one utterance of which only the borders are known."""
    between = [
        Distance(one, other, AFTER[one] + BEFORE[other] + (pause if index == 1 else 0.0))
        for index, (one, other) in enumerate(pairwise(text))
    ]
    return [
        Distance(None, text[0], BEFORE[text[0]]),
        *between,
        Distance(text[-1], None, AFTER[text[-1]]),
    ]


def test_times_follow_from_the_borders_of_utterances() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, size=5).tolist() for _ in range(400)]
    # In a tenth of the utterances, the speaker pauses for a second.
    distances = [d for n, text in enumerate(texts) for d in observed(text, float(n % 10 == 0))]
    found = fit_times(distances, [1, 4, 1, 2])
    assert found is not None
    assert found.before == pytest.approx(BEFORE, abs=0.02)
    assert found.after == pytest.approx(AFTER, abs=0.02)


def test_symbols_never_seen_have_times_by_their_letters() -> None:
    known = [Distance(None, n, 0.1 * n) for n in (1, 2, 3) for _ in range(30)]
    known += [Distance(n, None, 0.3) for n in (1, 2, 3) for _ in range(30)]
    found = fit_times(known, [0, 1, 2, 3, 5])
    assert found is not None
    assert found.before[4] == pytest.approx(0.5, abs=0.02)
    assert found.after[4] == pytest.approx(0.3, abs=0.02)
    assert fit_times([], [1, 2]) is None


def random_distances(count: int, symbols: int) -> tuple[list[Distance], list[int]]:
    """Boundaries of words with one symbol each, sums of neighbours, and some outliers."""
    draw = random.Random(0)
    letters = [draw.randint(0, 5) for _ in range(symbols)]
    distances = []
    for _ in range(count):
        after, before = draw.randrange(symbols), draw.randrange(symbols)
        seconds = draw.gauss(0.3, 0.1) + (draw.random() < 0.05)
        distances.append(
            draw.choice(
                [
                    Distance(after, None, seconds / 2),
                    Distance(None, before, seconds / 2),
                    Distance(after, before, seconds),
                ]
            )
        )
    return distances, letters


def test_times_are_those_of_a_dense_solution() -> None:
    distances, letters = random_distances(400, 7)
    count = len(letters)
    matrix = np.zeros((len(distances), 4 + 2 * count))
    for row, distance in zip(matrix, distances, strict=True):
        for symbol, base, own in ((distance.before, 0, 4), (distance.after, 2, 4 + count)):
            if symbol is not None:
                row[base : base + 2] = 1.0, letters[symbol]
                row[own + symbol] = 1.0
    seconds = np.array([distance.seconds for distance in distances])
    prior, weights = np.diag([1e-3] * 4 + [0.5] * (2 * count)), np.ones(len(distances))
    for _ in range(5):
        weighted = matrix * weights[:, None]
        x = np.linalg.solve(weighted.T @ matrix + prior, weighted.T @ seconds)
        weights = 1 / np.maximum(1.0, np.abs(seconds - matrix @ x) / 0.08)
    found = fit_times(distances, letters)
    assert found is not None
    of_length = np.array(letters)
    np.testing.assert_allclose(found.before, x[0] + x[1] * of_length + x[4 : 4 + count], atol=6e-5)
    np.testing.assert_allclose(found.after, x[2] + x[3] * of_length + x[4 + count :], atol=6e-5)


def test_many_symbols_need_little_memory() -> None:
    distances, letters = random_distances(4000, 3000)  # 190 MB as a dense matrix
    tracemalloc.start()
    fit_times(distances, letters)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_confidences_become_probabilities() -> None:
    """The probability of a right word is known: half of what the path says, more with the head."""
    rng = np.random.default_rng(0)
    path, head = rng.normal(2, 2, 4000), rng.normal(1, 2, 4000)
    chance = 1 / (1 + np.exp(-(0.3 + 0.5 * path + 0.8 * head)))
    right = (rng.random(4000) < chance).tolist()
    scores = [
        (-math.log1p(math.exp(-p)), -math.log1p(math.exp(-h)))
        for p, h in zip(path, head, strict=True)
    ]
    found = fit_confidence(scores, right)
    assert found is not None
    assert (found.bias, found.path, found.head) == pytest.approx((0.3, 0.5, 0.8), abs=0.12)
    calibrated = normalised_cross_entropy([found(*score) for score in scores], right)
    raw = normalised_cross_entropy([math.exp(p) for p, _ in scores], right)
    assert calibrated > raw + 0.1
    assert calibrated > 0.3


def test_confidence_grows_with_the_scores() -> None:
    """A score that misleads gets no weight; sets without errors have no extreme map."""
    scores = [(-0.01 * n, -3.0 + 0.01 * n) for n in range(1, 200)]
    right = [n < 100 for n in range(1, 200)]
    found = fit_confidence(scores, right)
    assert found is not None
    assert found.path > 0
    assert found.head == 0
    perfect = fit_confidence([(-0.1, None), (-0.2, None)], [True, True])
    assert perfect is not None
    assert 0.5 < perfect(-0.1, None) < 0.95
    assert fit_confidence([], []) is None


def test_cross_entropy_of_confidences() -> None:
    right = [True, True, True, False]
    assert normalised_cross_entropy([0.75] * 4, right) == pytest.approx(0.0)
    assert normalised_cross_entropy([1.0, 1.0, 1.0, 0.0], right) == pytest.approx(1.0, abs=1e-3)
    assert normalised_cross_entropy([0.1, 0.1, 0.1, 0.9], right) < -1
    assert math.isnan(normalised_cross_entropy([0.9], [True]))
    assert right_words(["a", "b", "c", "d"], ["a", "x", "c", "*", "d"]) == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert right_words([], ["a"]) == [False]
    assert right_words(["a"], []) == []


def test_logits_are_bounded() -> None:
    assert logit(math.log(0.5)) == pytest.approx(0.0)
    assert logit(0.0) == -logit(-50.0) == pytest.approx(9.21)


def test_calibrations_are_stored(tmp_path: Path) -> None:
    assert read_calibration(tmp_path, 2) is None
    calibration = Calibration(
        times=SymbolTimes(before=(0.1, 0.2), after=(0.0, -0.1)),
        confidence=ConfidenceMap(bias=0.5, path=1.0, head=0.0),
        source="dev, step-00000001",
    )
    save_calibration(tmp_path, calibration)
    assert read_calibration(tmp_path, 2) == calibration
    with pytest.raises(ValueError, match="has times of 2 symbols, the model has 3"):
        read_calibration(tmp_path, 3)
    save_calibration(tmp_path, Calibration(times=None, confidence=None, source="dev"))
    assert read_calibration(tmp_path, 3) == Calibration(times=None, confidence=None, source="dev")
    (tmp_path / "calibration.json").write_text('{"times": 3}')
    with pytest.raises(ValueError, match=r"calibration\.json is damaged .* --calibrate"):
        read_calibration(tmp_path, 2)


def test_head_paths_are_those_of_the_ctc_head() -> None:
    model = tiny_model(tiny_conformer(), 5, ctc_scale=0.2)
    encoded, lengths = model.encode(torch.randn(2, 60, 80), torch.tensor([60, 40]))
    short, none, impossible = head_paths(
        model, encoded[[0, 1, 1]], lengths[[0, 1, 1]], [[1, 2], [], [3] * 40]
    )
    assert none is not None
    assert none.frames == ()
    assert impossible is None
    assert short is not None
    assert 0 <= short.frames[0] < short.frames[1] < int(lengths[0])
    assert model.ctc_head is not None
    with torch.inference_mode():
        log_probs = model.ctc_head(encoded[0]).log_softmax(dim=-1)
    expected = [float(log_probs[frame, s]) for frame, s in zip(short.frames, (1, 2), strict=True)]
    assert short.log_probs == pytest.approx(expected, abs=1e-5)
    assert head_paths(
        tiny_model(tiny_conformer(), 5, ctc_scale=0.0), encoded, lengths, [[1], [2]]
    ) == [
        None,
        None,
    ]


def test_head_paths_of_several_texts_take_one_pass_of_the_head() -> None:
    model = tiny_model(tiny_conformer(), 5, ctc_scale=0.2)
    encoded, lengths = model.encode(torch.randn(2, 60, 80), torch.tensor([60, 40]))
    ranks = [[[1, 2], []], [[3] * 40, [4]], [[], []]]
    expected = [head_paths(model, encoded, lengths, texts) for texts in ranks]
    assert expected[1][0] is None
    assert model.ctc_head is not None
    calls: list[object] = []
    model.ctc_head.register_forward_hook(lambda *call: calls.append(call))
    assert launch_ranked_head_paths(model, encoded, lengths, ranks).result() == expected
    assert len(calls) == 1
