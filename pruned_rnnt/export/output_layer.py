"""The layer after the encoder of an exported model."""

from __future__ import annotations

from torch import nn

from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.model.transducer_model import TransducerModel


def output_layer(model: SpeechModel) -> nn.Module:
    """The joiner's projection of a transducer; the log-probabilities of a CTC head without one."""
    if isinstance(model, TransducerModel):
        return model.joiner.encoder_proj
    assert model.ctc_head is not None
    return nn.Sequential(model.ctc_head, nn.LogSoftmax(dim=-1))
