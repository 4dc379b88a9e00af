"""The part of the page about outlier channels, which decide what quantisation costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pruned_rnnt.model.quantisation import LayerRange

SHOWN_LAYERS = 8
# With a larger ratio, a channel of median size has less than 16 of the 256 levels of an int8 input,
# no more than weights of four bits have.
MOST_RATIO = 16.0


class RangeSection(NamedTuple):
    """The ranges as the template shows them.

    rows: of the layers with the largest ratios, the largest first.
    utterances: number of those that the encoder ran on.
    layers: number of all layers that int8 files quantise.
    beyond: how many of them have a ratio above MOST_RATIO.
    advice: what to do about these; empty if there is none.
    """

    rows: Sequence[LayerRange]
    utterances: int
    layers: int
    beyond: int
    advice: str


def range_section(
    ranges: Sequence[LayerRange], utterances: int, encoder_kind: str
) -> RangeSection | None:
    """The section of ranges in the order of `activation_ranges`; None if there are none."""
    if not ranges:
        return None
    beyond = sum(each.ratio > MOST_RATIO for each in ranges)
    return RangeSection(
        ranges[:SHOWN_LAYERS], utterances, len(ranges), beyond, _advice(encoder_kind, beyond)
    )


def _advice(encoder_kind: str, beyond: int) -> str:
    if not beyond:
        return ""
    advice = (
        "Measure what it costs: pruned-rnnt export RUN --precision int8 --calibrate DATA/SPLIT, "
        "which leaves layers in float32 if the error rate rises. In int4 files, inputs are "
        "float32, so that outlier channels do no harm."
    )
    if encoder_kind == "zipformer":
        advice += " In training, the balancers of a Zipformer limit its channels already."
    return advice
