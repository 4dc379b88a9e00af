"""Several training processes on this machine, each of which runs one function of a test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

# The server imports the modules once and forks the processes, which makes their start fast.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pruned_rnnt.train.engine.trainer",
        "pruned_rnnt.diagnostics",
        "omegaconf",
        "kaldialign",
        "matplotlib.backends.backend_agg",
        "torch._dynamo",  # optimisers import it
        "torch.utils.tensorboard",
    ]
)


def start(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a process that runs `function`; the caller joins or kills it."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(ranks, *arguments)` in each process of a group; returns the results by rank."""
    results = _CONTEXT.Queue()
    port = _free_port()
    processes = [
        start(_run_rank, rank, world_size, port, results, function, arguments)
        for rank in range(world_size)
    ]
    try:
        found = [results.get(timeout=120) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()
    errors = [result for _, result in found if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    return [pickle.loads(result) for _, result in sorted(found, key=lambda item: int(item[0]))]


def _run_rank(
    rank: int, world_size: int, port: int, results: Any, function: Any, arguments: Any
) -> None:
    from pruned_rnnt.train.engine.distributed import process_group

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # On a machine with fewer GPUs, which NCCL does not support, gradients go over gloo.
        PRUNED_RNNT_SHARE_GPUS="1",
    )
    try:
        with process_group() as ranks:
            # As bytes: torch would share tensors of a process that is about to end.
            results.put((rank, pickle.dumps(function(ranks, *arguments))))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
