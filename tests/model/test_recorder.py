"""The host's numbers in a captured pass: each read where it is written, all aligned alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pruned_rnnt.model.zipformer.schedule import Recorder


def test_numbers_are_read_where_they_are_written() -> None:
    recorder = Recorder(torch.device("cpu"))
    step = 0.0

    def numbers(first: float, count: int) -> Callable[[], Sequence[float]]:
        return lambda: [step + first + index for index in range(count)]

    counts = (1, 5, 4, 2, 1)
    recorder.start()
    places = [recorder.add(numbers(10.0 * index, n), n) for index, n in enumerate(counts)]
    assert [len(place) for place in places] == list(counts)
    assert all(place.data_ptr() % 16 == places[0].data_ptr() % 16 for place in places)
    for step in (100.0, 200.0):  # read by `numbers`
        recorder.refresh(recorder.program)
        for index, place in enumerate(places):
            assert place.tolist() == [step + 10 * index + k for k in range(len(place))]
