"""`train` with a second process that kills itself once; arguments: MARKER STEP ARGUMENTS...

Started by torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.step_recorder import StepRecorder
from pruned_rnnt.train.engine.step_report import StepReport


def die_once(marker: Path, step: int) -> None:
    record_step = StepRecorder._record

    def record_or_die(self: StepRecorder, report: StepReport, batches: list[Batch]) -> None:
        record_step(self, report, batches)
        if self.state.ranks.rank == 1 and self.state.counters.step == step and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    StepRecorder._record = record_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    die_once(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(["train", *sys.argv[3:]]))
