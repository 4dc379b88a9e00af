"""OpenMP's threads in a process of ours, set before torch loads the library.

torch's operations on the CPU end at barriers, where GNU's library lets threads spin for
milliseconds before they sleep. On an idle machine the next operation ends the wait. Beside other
processes, a thread that spins keeps its processor from the thread that it waits for, and a
training with half of the machine becomes twenty times slower.
"""

from __future__ import annotations

import os

# Rounds of the loop, some ten microseconds together: longer than torch takes between two
# operations, and shorter than the turn of another process.
_SPINS = "1000"


def limit_spinning() -> None:
    """Let waiting threads sleep soon, unless the user has chosen how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
