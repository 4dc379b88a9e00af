"""A model that consists of an encoder and a CTC head."""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import EncodedBatch, SpeechModel


class CtcModel(SpeechModel):
    """Encoder and CTC head: loss.kind=ctc. model.predictor and the joiner's settings are unused."""

    def __init__(self, config: ModelConfig, vocab_size: int, loss: LossConfig) -> None:
        super().__init__(config, vocab_size, loss)
        self.ctc_head = self._new_ctc_head()

    def _transducer_part(self, batch: EncodedBatch, step: int) -> None:
        return None


def ctc_log_probs(model: SpeechModel, encoded_NTE: Tensor) -> Tensor:
    """Encoder output (N, T, E) -> float32 log-probabilities (N, T, V) of the CTC head.

    Raises:
        ValueError: the model has no CTC head.
    """
    if model.ctc_head is None:
        raise ValueError(
            "the model has no CTC head: it was trained with loss.ctc_scale=0; decode.method=greedy "
            "and the other transducer searches need none"
        )
    log_probs_NTV: Tensor = model.ctc_head(encoded_NTE).float().log_softmax(dim=-1)
    return log_probs_NTV
