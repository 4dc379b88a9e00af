"""Shapes to which a training pads its batches."""

from __future__ import annotations

import random

import pytest

from pruned_rnnt.model.training_shapes import MOST_SHAPES, START, TrainingShapes

Batch = tuple[int, int]


def batches_from_buckets(count: int) -> list[Batch]:
    draw = random.Random(0)
    return [(60000 // frames, frames) for frames in draw.choices(range(600, 1700, 40), k=count)]


def batches_of_all_sizes(count: int) -> list[Batch]:
    draw = random.Random(0)
    return [(draw.randint(20, 200), draw.randint(150, 2000)) for _ in range(count)]


def padded(shapes: TrainingShapes, batches: list[Batch], first_step: int = 0) -> list[Batch]:
    return [shapes.shape_of(*batch, step) for step, batch in enumerate(batches, first_step)]


def test_batches_from_buckets_get_fine_shapes_after_the_start() -> None:
    shapes = TrainingShapes(6)
    batches = batches_from_buckets(2 * START)
    found = padded(shapes, batches)
    for step, (batch, shape) in enumerate(zip(batches, found, strict=True)):
        most = 1 + 1 / (8 if step < START else 32)
        for size, padded_size, grid in zip(batch, shape, (1, 16), strict=True):
            assert size <= padded_size <= max(size * most, size + grid)
    assert len(set(found[START:])) == len(set(batches)) > len(set(found[:START]))


def test_batches_of_all_sizes_keep_the_shapes_of_the_start() -> None:
    shapes = TrainingShapes(6)
    batches = batches_of_all_sizes(2 * START)
    found = padded(shapes, batches)
    assert set(found[START:]) <= set(padded(TrainingShapes(6), batches[START:]))
    assert shapes.steps == 8


def test_shapes_become_coarser_when_more_occur_than_are_kept() -> None:
    shapes = TrainingShapes(6)
    padded(shapes, batches_from_buckets(START))
    steps = []
    for step, batch in enumerate(batches_of_all_sizes(5000), START):
        shapes.shape_of(*batch, step)
        if not steps or steps[-1] != shapes.steps:
            steps.append(shapes.steps)
    assert steps == [32, 16, 8]


def test_fine_shapes_stay_while_they_are_kept() -> None:
    shapes = TrainingShapes(6)
    kept = [(rows, 800) for rows in range(1, 32)] + [(rows, 400) for rows in range(1, 32)]
    assert len(kept) < MOST_SHAPES
    padded(shapes, 10 * kept, START)
    assert shapes.steps == 32


@pytest.mark.parametrize("stop", [10, START - 1, START, START + 90, START + 700])
def test_a_resumed_training_pads_as_one_that_was_not_interrupted(stop: int) -> None:
    batches = batches_from_buckets(START) + batches_of_all_sizes(1500)
    expected = padded(TrainingShapes(6), batches)
    stopped, resumed = TrainingShapes(6), TrainingShapes(6)
    found = padded(stopped, batches[:stop])
    resumed.load_state_dict(stopped.state_dict())
    assert found + padded(resumed, batches[stop:], stop) == expected
