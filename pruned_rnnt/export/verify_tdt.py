"""Check the graphs of a TDT model, whose decoder has a state.

Axes: N = 1, T feature frames, F mel bins, T' encoder frames, J joiner width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.export.graph_pair import Pair
from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.tdt_graphs import LstmDecoderGraph, TdtDecoderGraph, TdtEncoderGraph


@torch.inference_mode()
def converted_features(encoder: Graph, feature_TF: Tensor) -> Tensor:
    """(T, F) features of sherpa-onnx after the conversion in the encoder's graph."""
    assert isinstance(encoder.module, TdtEncoderGraph)
    converted_NTF: Tensor = encoder.module.features(feature_TF.T[None])
    return converted_NTF[0]


def compare_tdt(pairs: Sequence[Pair], feature_TF: Tensor, symbols: Sequence[int]) -> None:
    """Run encoder, decoder and joiner on one utterance; the pairs record the differences.

    Args:
        feature_TF: as sherpa-onnx computes them.
        symbols: ids of the recognised symbols in our order.
    """
    encoder, decoder, joiner = pairs
    encoded_NJT = encoder.run(feature_TF.T[None], torch.tensor([len(feature_TF)]))[0]
    assert isinstance(decoder.graph.module, TdtDecoderGraph | LstmDecoderGraph)
    blank = decoder.graph.module.vocab_size - 1
    layers, size = decoder.graph.module.state_sizes
    states = [torch.zeros(layers, 1, size), torch.zeros(layers, 1, size)]
    for step, symbol in enumerate([blank, *(symbol - 1 for symbol in symbols)]):
        target = torch.tensor([[symbol]], dtype=torch.int32)
        output_NJ1, _, *states = decoder.run(target, torch.ones(1, dtype=torch.int32), *states)
        frame = min(step, encoded_NJT.size(2) - 1)
        joiner.run(encoded_NJT[:, :, frame : frame + 1].contiguous(), output_NJ1)
