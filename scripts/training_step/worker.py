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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.training_step.batches import load_batches


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever prints to stdout must not mix with the answers.
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    use_checkout(setup["paths"])
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


def use_checkout(paths: Sequence[str]) -> None:
    """Import pruned_rnnt from the first of `paths`, and further modules from all of them.

    Raises:
        SystemExit: the first path has no such package.
    """
    checkout = Path(paths[0]).resolve()
    if not (checkout / "pruned_rnnt" / "__init__.py").is_file():
        raise SystemExit(f"{checkout} has no package pruned_rnnt")
    # Before this version's own folder, from which this module was imported.
    sys.path[:0] = paths
    # An editable installation adds a finder that takes precedence over sys.path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _leaves(finder, checkout)]


def _leaves(finder: Any, checkout: Path) -> bool:
    """True if a finder finds pruned_rnnt outside the checkout."""
    spec = finder.find_spec("pruned_rnnt", None)
    return spec is not None and checkout not in Path(str(spec.origin)).resolve().parents


if __name__ == "__main__":
    main()
