"""A process that keeps the trainer of one version of pruned_rnnt and runs it on request.

It reads a line of JSON with `paths`, `batches` and the other arguments of `Session`, then one line
for each request: `{"do": METHOD of Session, ...its arguments}`. It answers each line with a line.
Its own messages go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.training_step.batches import load_batches


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever prints to stdout must not mix with the answers.
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    # Before this version's own folder, from which this module was imported.
    sys.path[:0] = setup["paths"]
    import pruned_rnnt

    found = Path(pruned_rnnt.__file__).resolve().parents[1]
    if found != Path(setup["paths"][0]).resolve():
        raise SystemExit(f"{setup['paths'][0]} has no package pruned_rnnt; found that of {found}")
    from scripts.training_step.session import Session

    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            setup["overrides"],
            load_batches(Path(setup["batches"])),
            Path(folder),
            at_step=setup["at_step"],
        )
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            options: dict[str, Any] = json.loads(line)
            print(json.dumps(getattr(session, options.pop("do"))(**options)), file=answers)


if __name__ == "__main__":
    main()
