"""One process of the measurement: trains some steps, and prints when they were done.

Its argument is JSON: `paths` of the checkout (see `scripts.training_step.worker`), `model`,
`batches` (a file), `overrides` and `started` (of the process, in seconds of time.time).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.training_step.worker import use_checkout

# Steps whose times are printed, besides the last one.
_SHOWN = (1, 13, 50)
_BINS = 80


class Stepper:
    """A trainer's stepper that notes when steps were launched."""

    def __init__(self, stepper: Any, started: float) -> None:
        self._stepper = stepper
        self._started = started
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        step = self._stepper(*arguments, **options)
        self.seconds.append(time.time() - self._started)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)


class Captures:
    """How many CUDA graphs were captured, and how long making them of what was captured took."""

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def count(self, graph: Any) -> None:
        """Measure a class of graphs from now on."""
        capture_end = graph.capture_end

        def timed(*arguments: Any) -> None:
            started = time.perf_counter()
            capture_end(*arguments)
            self.number += 1
            self.seconds += time.perf_counter() - started

        graph.capture_end = timed


def main(arguments: Sequence[str]) -> None:
    setup = json.loads(arguments[0])
    use_checkout(setup["paths"])
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("pruned_rnnt").setLevel(logging.INFO)
    import torch

    from scripts.training_step.__main__ import parser, settings
    from scripts.training_step.batches import load_batches
    from scripts.training_step.session import RunOver, Session, random_batch, synchronise

    class Batches:
        """A loader: parts of one tensor, since the features of a run are made by its workers."""

        def __iter__(self) -> Iterator[Any]:
            most = max(batch.shape[0] * batch.shape[1] for batch in lengths)
            values = torch.randn(most * _BINS) * 3 - 7
            if torch.cuda.is_available():
                values = values.pin_memory()
            for seed, batch in enumerate(lengths):
                count, frames, _ = batch.shape
                features_NTF = values[: count * frames * _BINS].view(count, frames, _BINS)
                yield random_batch(batch, _BINS, seed, features_NTF)
            raise RunOver

        def set_epoch(self, epoch: int) -> None: ...

        def state_dict(self, consumed_batches: int) -> dict[str, Any]:
            return {}

    lengths = load_batches(Path(setup["batches"]))
    captures = Captures()
    captures.count(torch.cuda.CUDAGraph)
    options = parser().parse_args(["--shapes", "-", "--model", setup["model"]])
    every = [*settings(options), *setup["overrides"]]
    with tempfile.TemporaryDirectory() as folder:
        session = Session(every, lengths, Path(folder), at_step=0, loader=Batches())
        ready = time.time() - setup["started"]
        stepper = session.trainer.stepper = Stepper(session.trainer.stepper, setup["started"])
        with suppress(RunOver):
            session.trainer.run()
        synchronise()
        end = time.time() - setup["started"]
    seconds = stepper.seconds
    print(
        json.dumps(
            {
                "ready_s": round(ready, 2),
                **{f"step_{n}_s": round(seconds[n - 1], 2) for n in _SHOWN if n < len(seconds)},
                f"step_{len(seconds)}_s": round(end, 2),
                "graphs": captures.number,
                "capture_end_s": round(captures.seconds, 2),
                **session.about(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
