"""A short name for the values of a model's parameters."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_DIGITS = 16


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits, equal for equal names, shapes and values on any device.

    Only parameters count: buffers such as counters of training do not change what a model outputs.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_DIGITS]
