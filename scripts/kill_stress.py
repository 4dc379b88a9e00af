"""Kill a short CPU training many times and compare its results with an uninterrupted run.

    python scripts/kill_stress.py [--kills 20] [--seed 0] [--workers 1]

Every second kill happens while a checkpoint is written. Exit code 0: the same losses and
parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "train")]


def main() -> int:
    from kill_loop import results, train_through_deaths
    from run_files import checkpoint_of
    from tiny_corpus import make_corpus, tiny_experiment

    from pruned_rnnt.train.tasks.speech_task import speech_trainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="data workers of the training")
    options = parser.parse_args()
    steps = 4 * options.kills
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = make_corpus(folder / "corpus")
        settings = [
            f"train.steps={steps}",
            "train.save_every=1",
            "train.validate_every=10",
            "data.augmentation.spec_augment.enabled=true",
            f"data.num_workers={options.workers}",
        ]
        straight = tiny_experiment(corpus, folder / "straight", *settings)
        speech_trainer(straight).run()
        killed = tiny_experiment(corpus, folder / "killed", *settings)
        deaths = train_through_deaths(killed, options.kills, options.seed)
        same = results(killed) == results(straight) and checkpoint_of(
            killed.folder, steps
        ) == checkpoint_of(straight.folder, steps)
    print(
        f"{len(deaths.steps)} kills after the checkpoints of steps {deaths.steps}, "
        f"{deaths.in_writes} of them during a write; {steps} steps in all: "
        f"{'the same losses and parameters, bit for bit' if same else 'DIFFERENT'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
