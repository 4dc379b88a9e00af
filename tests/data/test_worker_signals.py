"""Workers outlive signals to the whole job, and end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, multiprocessing, sys, time
import torch
from pruned_rnnt.data.worker_signals import leave_signals_to_the_parent

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        time.sleep(0.01)
        return i

loader = torch.utils.data.DataLoader(
    Numbers(), num_workers=2, batch_size=None, worker_init_fn=leave_signals_to_the_parent
)
batches = iter(loader)
next(batches)
workers = multiprocessing.active_children()
for name in ("-TERM", "-INT"):
    subprocess.run(["kill", name, *(str(worker.pid) for worker in workers)], check=True)
time.sleep(0.3)
print([next(batches) for _ in range(50)][-1], [worker.is_alive() for worker in workers])
if sys.argv[1] == "terminate":
    workers[0].terminate()
    workers[0].join(20)
    print(workers[0].exitcode)
# The end of a program whose iterator is still open: multiprocessing terminates the workers and
# waits for them.
keep = batches
sys.modules["keeper"] = (batches, loader)
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="Linux tells who sent a signal")
@pytest.mark.parametrize("how", ["leave", "terminate"])
def test_workers_outlive_the_signals_of_a_job_and_end_with_their_parent(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=90
    )
    if how == "leave":
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "50 [True, True]"
    assert how == "leave" or done.stdout.splitlines()[1] == "0"
