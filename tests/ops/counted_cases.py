"""Calls of the products whose number of rows is on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.native_batches import Call, poison


def counted_calls() -> Iterator[Call]:
    """Whole tiles and parts of them, with copies of four elements and of one."""
    for rows, depth, columns in ((150, 40, 136), (9, 5, 7)):
        a, bias, total = torch.randn(rows, depth), torch.randn(columns), torch.tensor(rows + 1)
        for b in (torch.randn(depth, columns), torch.randn(columns, depth).t()):
            out = poison(rows, columns, dtype=torch.float32)
            yield Call("counted_rows_product", (a, b, bias, total, 3), (out,))
        b, out = torch.randn(rows, columns), poison(2, depth, columns, dtype=torch.float32)
        yield Call("counted_rows_sums", (a, b, total, 3, False), (out,))
