"""Programs that need a fresh interpreter, in forks of a process that has already imported torch.

A process that imports torch by itself takes seconds; a fork takes milliseconds.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Reads requests, one JSON object a line, and writes the exit code of each. The package is not
# imported before the fork, so that each program imports it with the environment of its own.
SERVER = """
import json, os, sys, traceback
import torch

def run(request):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    code = 0
    try:
        exec(request["code"], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends when this process does, which closes its input."""
    root = Path(__file__).parents[1]
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("PRUNED_RNNT_")}
    path = os.pathsep.join([str(root), cleared.pop("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**cleared, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_with_torch(
    code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program for which torch is already imported.

    Variables PRUNED_RNNT_... are only those of `environment`. An exception gives exit code 1.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
        request = {"code": code, "arguments": arguments, "environment": environment, **outputs}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        exit_code = int(server.stdout.readline())
        stdout, stderr = (Path(path).read_text() for path in outputs.values())
    return subprocess.CompletedProcess(["-c", *arguments], exit_code, stdout, stderr)
