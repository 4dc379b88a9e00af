"""The transducer model: encoder, predictor, joiner and losses.

Axes: M utterances of all views, T encoder frames, U symbols, E encoder width, P predictor width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pruned_rnnt.loss.fused import rnnt_loss_fused, rnnt_loss_tdt_fused
from pruned_rnnt.loss.joiner import Joiner, durations_of_call, output_parameters
from pruned_rnnt.loss.logit_losses import rnnt_loss, rnnt_loss_tdt
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.model.lstm_predictor import LstmPredictor, LstmPredictorConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import (
    AnyPredictorConfig,
    Predictor,
    PredictorConfig,
    StatelessPredictor,
)
from pruned_rnnt.model.speech_model import BLANK, EncodedBatch, SpeechModel, TransducerPart


class TransducerModel(SpeechModel):
    """Encoder, predictor and joiner; decoding uses `encode`, `predictor` and `joiner`.

    Modules are created in the same order for every loss, so that a seed gives the same encoder,
    predictor and joiner.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, loss: LossConfig | None = None):
        loss = loss or LossConfig()
        super().__init__(config, vocab_size, loss)
        encoder_dim, predictor_dim = self.encoder.output_dim, config.predictor.dim
        self.predictor = _build_predictor(config.predictor, vocab_size)
        self.joiner = Joiner(
            encoder_dim,
            predictor_dim,
            config.joiner_dim,
            vocab_size,
            config.joiner_activation,
            initial_scale=config.joiner_initial_scale,
            duration_count=len(loss.durations),
        )
        self.ctc_head = self._new_ctc_head() if loss.has_ctc_head else None
        self.pruned_loss = (
            PrunedTransducerLoss(
                self.joiner,
                encoder_dim,
                predictor_dim,
                vocab_size,
                blank=BLANK,
                s_range=loss.s_range,
                rnnt_type=loss.rnnt_type,
                lm_only_scale=loss.lm_only_scale,
                am_only_scale=loss.am_only_scale,
                delay_penalty=loss.delay_penalty,
                fastemit_lambda=loss.fastemit_lambda,
                simple_scale=loss.simple_scale,
                pruned_scale_start=loss.pruned_scale_start,
                warm_up_steps=loss.warm_up_steps,
                hat=loss.hat,
                exact_bounds=loss.exact_bounds,
                durations=loss.durations or None,
                sigma=loss.sigma,
                omega=loss.omega,
                # One sum: on CUDA its gradients are computed in forward.
                reduction="sum",
            )
            if loss.kind == "pruned"
            else None
        )

    def _transducer_part(self, batch: EncodedBatch, step: int) -> TransducerPart:
        predicted_MUP = self.predictor.forward_targets(batch.targets)
        lengths = batch.logit_lengths, batch.target_lengths
        if self.pruned_loss is not None:
            losses = self.pruned_loss(batch.encoded, predicted_MUP, batch.targets, *lengths, step)
            of_each = losses.utterances
            return TransducerPart(
                losses.loss,
                of_each.total,
                {"simple": of_each.simple, "pruned": of_each.pruned},
                losses.occupancy,
                losses.bounds,
            )
        full_M = self._full_loss(batch, predicted_MUP)
        total_M = full_M.detach()
        return TransducerPart(full_M.sum(), total_M, {"full": total_M}, None, None)

    def _full_loss(self, batch: EncodedBatch, predicted_MUP: Tensor) -> Tensor:
        config, joiner = self.loss_config, self.joiner
        am = joiner.encoder_proj(batch.encoded)
        lm = joiner.decoder_proj(predicted_MUP)
        texts = (batch.targets, batch.logit_lengths, batch.target_lengths)
        options: dict[str, Any] = {
            "blank": BLANK,
            "delay_penalty": config.delay_penalty,
            "fastemit_lambda": config.fastemit_lambda,
            "reduction": "none",
        }
        if config.durations:
            options |= {
                "durations": config.durations,
                "sigma": config.sigma,
                "omega": config.omega if self.training else 0.0,
            }
        else:
            options |= {"rnnt_type": config.rnnt_type, "hat": config.hat}
        output = output_parameters(joiner)
        if isinstance(output, str):
            # Only a call runs what was changed, and stores its logits (M, T, U+1, V).
            nodes = am[:, :, None], lm[:, None]
            if config.durations:
                return rnnt_loss_tdt(*durations_of_call(joiner, *nodes), *texts, **options)
            return rnnt_loss(joiner(*nodes), *texts, **options)
        options["activation"] = joiner.activation
        lattice: Any = (batch.targets, None, batch.logit_lengths, batch.target_lengths)
        if output.duration_weight is not None:
            inputs: tuple[Any, ...] = (am, lm, *output)
            return rnnt_loss_tdt_fused(*inputs, *lattice, **options)
        return rnnt_loss_fused(am, lm, *output[:2], *lattice, **options)


def _build_predictor(config: AnyPredictorConfig, vocab_size: int) -> Predictor:
    if isinstance(config, LstmPredictorConfig):
        return LstmPredictor(config, vocab_size, BLANK)
    assert isinstance(config, PredictorConfig)
    return StatelessPredictor(config, vocab_size, BLANK)
