"""Freed memory stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Page faults of computing with blocks of 64 MiB, which are freed each time.
_PROGRAM = """
import resource, sys, torch
from pruned_rnnt.system.allocator import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
x = torch.zeros(2**24)
(x + 1), (x + 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    x + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_freed_blocks_are_used_again() -> None:
    # By default each of forty blocks has 16,384 new pages (fewer where the system uses large ones).
    # With memory kept, the first few have: the heap may still grow.
    assert page_faults("keep") < page_faults("default") / 4


def test_a_process_ends_without_a_last_collection() -> None:
    program = """
import atexit, gc, sys
from pruned_rnnt.system.allocator import end_without_collection

class Noisy:
    def __init__(self, name): self.name = name
    def __del__(self): print(self.name)

end_without_collection()
atexit.register(print, "atexit")
gc.disable()
def main():
    kept, cycle = Noisy("kept"), Noisy("cycle")
    cycle.itself = cycle

main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["kept", "atexit"], done.stderr


@pytest.mark.parametrize("profiler", ["", "libinjection.so"])
def test_a_process_ends_without_taking_its_modules_apart(profiler: str) -> None:
    program = """
import os
from pruned_rnnt.system.allocator import end_process

class Noisy:
    def __del__(self, write=os.write): write(1, b"taken apart")

kept = Noisy()
end_process(3)
"""
    environment = {**os.environ} | ({"CUDA_INJECTION64_PATH": profiler} if profiler else {})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("taken apart" if profiler else "")


def test_a_process_ends_after_its_threads_and_functions() -> None:
    program = """
import atexit, threading, time
from pruned_rnnt.system.allocator import end_process

atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["main", "thread", "atexit"]
