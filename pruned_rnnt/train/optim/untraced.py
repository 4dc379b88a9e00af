"""Keep torch's optimisers from importing Dynamo, which takes as long as torch itself."""

from __future__ import annotations

import inspect
import sys

import torch


def leave_dynamo_unloaded() -> None:
    """Let the methods of `torch.optim.Optimizer` run as they are.

    torch wraps them for torch.compile, which must not trace them: the first call imports Dynamo
    (1.2 s of 2.3 s of processor time until a training starts) to get the function that is called
    instead, unless the method already names one. Does nothing where Dynamo is loaded.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dict__.setdefault("__dynamo_disable", plain)


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrapper of `step` that breaks Dynamo's graphs around the update."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
