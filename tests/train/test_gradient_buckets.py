"""Copying gradients into the vectors that are sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pruned_rnnt.train.engine import gradients


def test_gradients_are_copied_at_once_for_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [nn.Parameter(torch.zeros(4, 1, 3)), nn.Parameter(torch.zeros(5))]
    unused = nn.Parameter(torch.zeros(2))
    flat = torch.full((19,), 7.0)
    first, second, third = flat.split([12, 5, 2])
    views = [first.view(4, 1, 3), second, third]
    bucket = gradients._Bucket(flat, [*weights, unused], views)
    # The strides of the gradient of a depthwise convolution: the middle one differs.
    weights[0].grad = torch.arange(12.0).as_strided((4, 1, 3), (3, 1, 1))
    weights[1].grad = torch.arange(5.0)
    copies = []
    original = torch._foreach_copy_

    def watched(to: list[torch.Tensor], by: list[torch.Tensor]) -> None:
        copies.append([(a.stride(), b.stride()) for a, b in zip(to, by, strict=True)])
        original(to, by)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    bucket.fill()
    assert flat.tolist() == [*range(12), *range(5), 0, 0]
    for parameter, view in zip([*weights, unused], views, strict=True):
        assert parameter.grad is view
    (strides,) = copies
    assert all(to == by for to, by in strides)  # otherwise a GPU copies them one by one
