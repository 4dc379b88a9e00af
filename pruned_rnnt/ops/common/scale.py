"""The chain rule for stored gradients: each is multiplied by the factor of its utterance."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pruned_rnnt.ops.common.library import define


def _scale(sources: Sequence[Tensor] | None, factors: Tensor, results: Sequence[Tensor]) -> None:
    for source, result in zip(results if sources is None else sources, results, strict=True):
        wide = factors.view(-1, *[1] * (source.dim() - 1)) if factors.dim() else factors
        result.copy_(source * wide)


# sources of any shapes and floating dtypes, contiguous; factors acc, () or (N) for sources (N,...)
# -> results, like the sources: source times factors, each rounded once. If sources is None, results
# are multiplied in place.
scale = define("scale(Tensor[]? sources, Tensor factors, Tensor(a!)[] results) -> ()", _scale)
