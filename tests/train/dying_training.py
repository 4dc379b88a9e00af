"""`train` with a second process that kills itself once; arguments: MARKER STEP ARGUMENTS...

Started by torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pruned_rnnt.cli import main
from pruned_rnnt.train.engine.trainer import Trainer


def die_once(marker: Path, step: int) -> None:
    record = Trainer._record

    def record_or_die(self: Trainer) -> None:
        record(self)
        if self.ranks.rank == 1 and self.state.counters.step == step and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._record = record_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    die_once(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(["train", *sys.argv[3:]]))
