"""Shapes to which a training pads its batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pruned_rnnt.model.training_shapes import MOST_SHAPES, TrainingShapes

Batch = tuple[int, int]


def batches_from_buckets(count: int) -> list[Batch]:
    draw = random.Random(0)
    return [(60000 // frames, frames) for frames in draw.choices(range(600, 1700, 40), k=count)]


def batches_of_all_sizes(count: int) -> list[Batch]:
    draw = random.Random(0)
    return [(draw.randint(20, 200), draw.randint(150, 2000)) for _ in range(count)]


def padded(shapes: TrainingShapes, batches: list[Batch]) -> list[Batch]:
    return [shapes.shape_of(*batch) for batch in batches]


def size(shape: Batch) -> int:
    return shape[0] * shape[1]


@pytest.mark.parametrize("batches_of", [batches_from_buckets, batches_of_all_sizes])
def test_shapes_hold_their_batches(batches_of: Callable[[int], list[Batch]]) -> None:
    batches = batches_of(3000)
    for batch, shape in zip(batches, padded(TrainingShapes(6), batches), strict=True):
        assert batch[0] <= shape[0]
        assert batch[1] <= shape[1]
        # A coarse shape has up to 1/8 more of both, or 16 frames; one in use is up to 1.5 times it.
        assert size(shape) <= 1.5 * (batch[0] * 9 / 8 + 1) * (batch[1] * 9 / 8 + 22)


def test_a_batch_has_the_most_frames_where_no_shape_is_used() -> None:
    for utterances, frames in batches_of_all_sizes(200):
        assert TrainingShapes(6).shape_of(utterances, frames)[1] == TrainingShapes(6).most_frames(
            frames
        )


def test_batches_from_buckets_get_fine_shapes_in_the_end() -> None:
    batches = batches_from_buckets(20000)
    found = padded(TrainingShapes(6), batches)
    waste = [size(s) / size(b) - 1 for s, b in zip(found, batches, strict=True)]
    assert sum(waste[-1000:]) < 0.5 * sum(waste[:1000])
    assert len(set(found[:200])) < len(set(found)) <= 3 * len(set(batches))
    # Fewer captures and less padding together than with either grid alone, in steps.
    assert 8 * len(set(found)) + sum(waste) < 0.07 * len(batches)


def test_a_shape_comes_into_use_when_it_repays_its_capture() -> None:
    shapes = TrainingShapes(6)
    found = padded(shapes, [(33, 1637)] * 200)
    coarse, fine = found[0], found[-1]
    assert len(set(found)) == 2
    assert size(fine) < size(coarse)
    saved = size(coarse) / size(fine) - 1
    assert found.index(fine) == math.ceil(8 / saved)


def test_batches_of_all_sizes_do_not_capture_again_and_again() -> None:
    shapes = TrainingShapes(6)
    found = padded(shapes, batches_of_all_sizes(5000))
    # Those that the largest ones in use do not hold come in addition.
    assert len(set(found)) <= 1.1 * MOST_SHAPES


def test_a_small_batch_does_not_take_a_large_shape() -> None:
    shapes = TrainingShapes(6)
    large, small = padded(shapes, [(60, 1600), (10, 300)])
    assert size(small) < size(large) / 10


@pytest.mark.parametrize("stop", [10, 999, 2500])
def test_a_resumed_training_pads_as_one_that_was_not_interrupted(stop: int) -> None:
    batches = batches_from_buckets(1500) + batches_of_all_sizes(1500)
    expected = padded(TrainingShapes(6), batches)
    stopped, resumed = TrainingShapes(6), TrainingShapes(6)
    found = padded(stopped, batches[:stop])
    resumed.load_state_dict(stopped.state_dict())
    assert found + padded(resumed, batches[stop:]) == expected


def test_a_shape_that_ran_out_of_memory_holds_no_smaller_batch() -> None:
    shapes = TrainingShapes(6)
    failed = shapes.shape_of(64, 1600)
    shapes.drop_newest()
    assert shapes.shape_of(48, 1600) == TrainingShapes(6).shape_of(48, 1600) != failed
    assert shapes.shape_of(64, 1600) == failed


def test_a_shape_that_ran_out_of_memory_drops_those_that_hold_it() -> None:
    shapes = TrainingShapes(6)
    failed, larger = shapes.shape_of(33, 1640), shapes.shape_of(40, 2000)
    assert larger[0] > failed[0]
    assert larger[1] > failed[1]
    assert shapes.shape_of(33, 1640) == failed
    shapes.drop_newest()
    assert shapes.shape_of(33, 1640) == failed


def test_cleared_shapes_are_those_of_a_new_training() -> None:
    batches = batches_from_buckets(3000)
    shapes = TrainingShapes(6)
    padded(shapes, batches_of_all_sizes(500))
    shapes.clear()
    assert padded(shapes, batches) == padded(TrainingShapes(6), batches)


def test_checkpoints_of_earlier_versions_have_the_shapes_in_use() -> None:
    shapes = TrainingShapes(6)
    shapes.load_state_dict({"steps": 32, "is_start": False, "seen": [(34, 1638)]})
    assert shapes.shape_of(33, 1637) == (34, 1638)
