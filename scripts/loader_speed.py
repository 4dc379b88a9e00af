"""Speed of one worker that makes batches: utterances per second, and times real time.

    OMP_NUM_THREADS=1 taskset -c 1 python -m scripts.loader_speed --data data/fsdd

Makes the batches of `--data` in this process, as a worker does, after a warm-up. Sampling is timed
separately, since it runs in the training process. With `--workers` the whole loader is timed, too,
for a training step that does nothing; only its wall-clock time is meaningful. On a busy machine,
CPU time is the fairer measure, unless the loader waits for a disk.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pruned_rnnt.data.input.augmentation import AugmentationConfig, SpecAugmentConfig
from pruned_rnnt.data.input.datamodule import DataConfig, DataModule
from pruned_rnnt.data.input.loader import BatchLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="prepared folder")
    parser.add_argument("--split", default="train")
    parser.add_argument("--max-duration", type=float, default=60.0, help="seconds in a batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    parser.add_argument("--workers", type=int, default=0, help="also time the whole loader")
    parser.add_argument("--profile", action="store_true", help="print a profile")
    options = parser.parse_args()
    print(f"{'':25} {'by the clock':>25} {'by CPU time of this process':>28}")
    columns = f"{'utterances/s':>14} {'real time':>10}"
    print(f"{'features':10} {'augmentation':14} {columns}    {columns}")
    plain = AugmentationConfig(spec_augment=SpecAugmentConfig(enabled=False))
    for features in ("stored", "waveform"):
        for name, augmentation in (("none", plain), ("SpecAugment", AugmentationConfig())):
            config = DataConfig(
                path=str(options.data),
                train=options.split,
                features=features,  # type: ignore[arg-type]
                max_duration=options.max_duration,
                num_workers=0,
                augmentation=augmentation,
            )
            try:
                loader = DataModule(config).train_loader()
            except ValueError as error:
                print(f"{features:10} {error}")
                break
            show = _profiled if options.profile else _measured
            show(f"{features:10} {name:14}", _made_in_this_process(loader), options.seconds)
            if options.workers > 0:
                several = replace(config, num_workers=options.workers)
                whole = DataModule(several).train_loader()
                label = f"  {options.workers} workers, whole loader"
                _measured(label, _endless(whole), options.seconds)
    sampled = ((len(cuts), sum(cut.duration for cut in cuts)) for cuts in _sampled(loader))
    _measured("sampling alone (main process)", sampled, options.seconds)


def _sampled(loader: BatchLoader) -> Iterator[Any]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader.sampler
        epoch += 1


def _made_in_this_process(loader: BatchLoader) -> Iterator[tuple[int, float]]:
    """Batches of cuts drawn in advance, so that sampling is not in the time."""
    drawn = list(islice(_sampled(loader), 200))
    epoch = 0
    while True:
        for cuts in drawn:
            batch = loader.dataset[(epoch, cuts)]
            yield len(batch), sum(batch.durations)
        epoch += 1


def _endless(loader: BatchLoader) -> Iterator[tuple[int, float]]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        for batch in loader:
            yield len(batch), sum(batch.durations)
        epoch += 1


def _measured(label: str, made: Iterator[tuple[int, float]], seconds: float) -> None:
    for _ in islice(made, 5):
        pass
    utterances, speech = 0, 0.0
    started, cpu_started = time.perf_counter(), time.process_time()
    while (taken := time.perf_counter() - started) < seconds:
        count, duration = next(made)
        utterances, speech = utterances + count, speech + duration
    rates = [
        f"{utterances / t:14,.0f} {speech / t:9,.0f}x"
        for t in (taken, time.process_time() - cpu_started)
    ]
    print(f"{label:25} {'    '.join(rates)}")


def _profiled(label: str, made: Iterator[tuple[int, float]], seconds: float) -> None:
    import cProfile
    import pstats

    with cProfile.Profile() as profile:
        _measured(label, made, seconds)
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
