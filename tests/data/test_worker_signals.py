"""Workers outlive signals to the whole job, and end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Nothing here waits for a time: each line waits for what the next one needs.
PROGRAM = """
import multiprocessing, pathlib, signal, subprocess, sys, time
import torch
from pruned_rnnt.data.input.worker_signals import ignore_job_signals, sigterm_blocked

WORKERS = 2
NAMES = ("TERM", "INT", "HUP", "USR1")

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        return i

def has_pending_signals(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd", "ShdPnd"))]
    return any(masks)

def main(end, method):
    multiprocessing.set_start_method(method)
    loader = torch.utils.data.DataLoader(
        Numbers(), num_workers=WORKERS, batch_size=None,
        worker_init_fn=ignore_job_signals,
    )
    with sigterm_blocked():
        batches = iter(loader)
    for _ in range(WORKERS):  # one of each worker: all are beyond their set-up
        next(batches)
    workers = multiprocessing.active_children()
    for name in NAMES:
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    # A signal that is pending would swallow the same one of another sender.
    while any(has_pending_signals(worker.pid) for worker in workers):
        time.sleep(0.01)
    print([next(batches) for _ in range(50)][-1], [worker.is_alive() for worker in workers])
    if end == "terminate":
        workers[0].terminate()
        workers[0].join()
        print(workers[0].exitcode, flush=True)
    # The end of a program whose iterator is still open: multiprocessing terminates the workers and
    # waits for them.
    sys.modules["keeper"] = (batches, loader)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="Linux tells who sent a signal")
@pytest.mark.parametrize(
    ("end", "method"), [("leave", "fork"), ("terminate", "fork"), ("terminate", "forkserver")]
)
def test_workers_ignore_job_signals_and_end_with_their_parent(
    end: str, method: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"  # a fork server reads it again
    program.write_text(PROGRAM)
    # The time is for a defect to end the test: workers that do not end are waited for.
    done = subprocess.run(
        [sys.executable, program, end, method], capture_output=True, text=True, timeout=600
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["51 [True, True]"], done.stderr
    if end == "leave":
        assert done.returncode == 0, done.stderr
    else:
        assert lines[1:] == ["0"], done.stderr
