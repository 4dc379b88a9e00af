"""Sizes to which shapes are padded, so that few of them occur."""

from __future__ import annotations


def round_up(count: int, smallest: int, *, steps: int) -> int:
    """`count` or slightly more, so that only `steps` results lie between powers of two.

    Args:
        smallest: results are multiples of it, as long as that is more than a step.
        steps: a power of two; at most 1 / steps of a result is padding where steps are larger than
            `smallest`.
    """
    step = max(1 << max(count.bit_length() - steps.bit_length(), 0), smallest)
    return -(-count // step) * step
