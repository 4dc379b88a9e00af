"""Models of speech and their losses: the base class with an encoder and a CTC head, the model of
these two, and the transducer, which also has a predictor and a joiner.

Axes: N batch, M utterances of all views, T frames (T' after subsampling), F mel bins, U symbols,
E encoder width, P predictor width, V vocabulary.

With CR-CTC (arXiv 2410.05101) the encoder gets every utterance in two views, which differ in their
SpecAugment masks: M = 2 N, first all first views, then all second ones. Every loss is the mean of
both views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.checks import check_fastemit
from pruned_rnnt.loss.ctc import ctc_consistency_loss, ctc_loss
from pruned_rnnt.loss.fused import rnnt_loss_fused, rnnt_loss_tdt_fused
from pruned_rnnt.loss.joiner import Joiner, durations_of_call, output_parameters
from pruned_rnnt.loss.logit_losses import rnnt_loss, rnnt_loss_tdt
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import Bounds, Occupancy, TdtOccupancy
from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.inference_graphs import InferenceGraphs
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import (
    AnyPredictorConfig,
    LstmPredictor,
    LstmPredictorConfig,
    Predictor,
    PredictorConfig,
    StatelessPredictor,
)

BLANK = 0
_REFERENCE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ModelLosses:
    """Losses of a batch, and the occupancy and band for pictures.

    objective: (), the sum of total over utterances, differentiable.
    total: (N,), without gradient.
    parts: (N,) each, unscaled and without gradient: `simple` and `pruned`, or `full`; `ctc` with a
        CTC head; and `consistency` of two views.
    encoded: (N, T', E) output of the encoder for the first view, differentiable.
    frame_lengths: (N,) encoder frames.
    occupancy, bounds: those of the simple loss, of all views; None with other losses.
    measures: (N,) each, other quantities for the log, without gradient.
    """

    objective: Tensor
    total: Tensor
    parts: Mapping[str, Tensor]
    encoded: Tensor
    frame_lengths: Tensor
    occupancy: Occupancy | TdtOccupancy | None
    bounds: Bounds | None
    measures: Mapping[str, Tensor] = field(default_factory=dict)


class _EncodedBatch(NamedTuple):
    """Encoder output (M, T', E), targets (M, U) and int32 lengths (M,) of all views."""

    encoded: Tensor
    logit_lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


class _TransducerPart(NamedTuple):
    """The transducer's losses of all views: `objective` is a sum, others as in `ModelLosses`."""

    objective: Tensor
    total: Tensor
    parts: Mapping[str, Tensor]
    occupancy: Occupancy | TdtOccupancy | None
    bounds: Bounds | None


class SpeechModel(nn.Module):
    """Computes losses from features and targets.

    Attributes:
        ctc_head: from the encoder's output to CTC logits; None without a CTC loss.
        batch_seconds: seconds of audio in a training step, over all processes; the encoder's
            schedules count steps of ten minutes.
        steps_before: such steps before the first one, for a model that is trained already.
        encoder_graphs: if set, runs the encoder in training.
        inference_graphs: if set, runs the encoder in evaluation mode without gradients.
    """

    ctc_head: nn.Linear | None

    def __init__(self, config: ModelConfig, vocab_size: int, loss: LossConfig) -> None:
        super().__init__()
        self.config = config
        self.loss_config = loss
        self.vocab_size = vocab_size
        self.batch_seconds = _REFERENCE_SECONDS
        self.steps_before = 0.0
        self.encoder_graphs: EncoderGraphs | None = None
        self.inference_graphs: InferenceGraphs | None = None
        self.encoder = build_encoder(config.encoder)
        self.ctc_dropout = nn.Dropout(loss.ctc_dropout)

    def _new_ctc_head(self) -> nn.Linear:
        return nn.Linear(self.encoder.output_dim, self.vocab_size)

    def set_step(self, step: float) -> None:
        """Set the step of the encoder's schedules to that after `step` optimiser steps."""
        steps = step * self.batch_seconds / _REFERENCE_SECONDS
        self.encoder.set_step(self.steps_before + steps, self.steps_before + step)

    def encode(self, features_NTF: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(N, T, F) and (N,) -> encoder output (N, T', E) and its lengths.

        Raises:
            ValueError: a length on the CPU exceeds T.
        """
        frames = features_NTF.size(1)
        if feature_lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            longest = max(feature_lengths.tolist(), default=0)
            if longest > frames:
                raise ValueError(
                    f"feature_lengths has {longest}, but features has {frames} frames: give the "
                    "frames of each utterance without padding"
                )
        graphs = self.inference_graphs
        if graphs is not None and not (self.training or torch.is_grad_enabled()):
            return graphs(self.encoder, features_NTF, feature_lengths)
        encoded: tuple[Tensor, Tensor] = self.encoder(features_NTF, feature_lengths)
        return encoded

    def forward(
        self,
        features_NTF: Tensor,
        feature_lengths: Tensor,
        targets_NU: Tensor,
        target_lengths: Tensor,
        step: int,
        second_view_NTF: Tensor | None = None,
    ) -> ModelLosses:
        """Losses of a batch.

        Args:
            features_NTF: (N, T, F) float32.
            feature_lengths, target_lengths: (N,) integer, preferably on the CPU.
            targets_NU: (N, U) int32 symbols.
            step: number of optimiser steps so far, for the warm-up of the loss scales and the
                schedules of the encoder.
            second_view_NTF: other features of the same utterances and lengths, for CR-CTC.
        """
        views = 1 if second_view_NTF is None else 2
        if second_view_NTF is not None:
            features_NTF = torch.cat((features_NTF, second_view_NTF))
            feature_lengths, target_lengths = feature_lengths.repeat(2), target_lengths.repeat(2)
            targets_NU = targets_NU.repeat(2, 1)
        if self.training:
            self.set_step(step)
        if self.encoder_graphs is not None and self.training and torch.is_grad_enabled():
            encoded_MTE, frame_lengths = self.encoder_graphs(features_NTF, feature_lengths)
        else:
            encoded_MTE, frame_lengths = self.encode(features_NTF, feature_lengths)
        batch = _EncodedBatch(encoded_MTE, frame_lengths.int(), targets_NU, target_lengths.int())
        transducer = self._transducer_part(batch, step)
        objectives: list[Tensor] = []
        totals: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        occupancy, bounds = None, None
        if transducer is not None:
            objective = transducer.objective
            objectives.append(objective if views == 1 else objective / views)
            totals.append(_mean_of_views(transducer.total, views))
            parts = {n: _mean_of_views(part, views) for n, part in transducer.parts.items()}
            occupancy, bounds = transducer.occupancy, transducer.bounds
        for name, (loss_N, scale) in self._ctc_parts(batch, views).items():
            objectives.append(scale * loss_N.sum())
            parts[name] = loss_N.detach()
            totals.append(scale * parts[name])
        return ModelLosses(
            objective=sum(objectives[1:], objectives[0]),
            total=sum(totals[1:], totals[0]),
            parts=parts,
            encoded=encoded_MTE[: len(encoded_MTE) // views],
            frame_lengths=frame_lengths[: len(frame_lengths) // views],
            occupancy=occupancy,
            bounds=bounds,
        )

    def _transducer_part(self, batch: _EncodedBatch, step: int) -> _TransducerPart | None:
        """The transducer's losses; None for a model without a joiner."""
        raise NotImplementedError

    def _ctc_parts(self, batch: _EncodedBatch, views: int) -> dict[str, tuple[Tensor, float]]:
        """Losses (N,) of the CTC head and their factors, by name; empty without a head."""
        if self.ctc_head is None:
            return {}
        config = self.loss_config
        logits_MTV = self.ctc_head(self.ctc_dropout(batch.encoded))
        ctc_M = ctc_loss(
            logits_MTV,
            batch.targets,
            batch.logit_lengths,
            batch.target_lengths,
            blank=BLANK,
            reduction="none",
        )
        scale = 1.0 if config.kind == "ctc" else config.ctc_scale
        found = {"ctc": (_mean_of_views(ctc_M, views), scale)}
        if views == 2:
            first_NTV, second_NTV = logits_MTV.chunk(2)
            consistency_N = ctc_consistency_loss(
                first_NTV,
                second_NTV,
                batch.logit_lengths[: len(first_NTV)],
                reduction="none",
            )
            found["consistency"] = (consistency_N, config.cr_ctc_scale)
        return found


def _mean_of_views(values_M: Tensor, views: int) -> Tensor:
    """(views * N,) -> (N,)"""
    return values_M if views == 1 else values_M.view(views, -1).mean(0)


class CtcModel(SpeechModel):
    """Encoder and CTC head: loss.kind=ctc. model.predictor and the joiner's settings are unused."""

    def __init__(self, config: ModelConfig, vocab_size: int, loss: LossConfig) -> None:
        super().__init__(config, vocab_size, loss)
        self.ctc_head = self._new_ctc_head()

    def _transducer_part(self, batch: _EncodedBatch, step: int) -> None:
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
                # Models trained with negative values load; `_transducer_part` refuses to train.
                fastemit_lambda=max(loss.fastemit_lambda, 0.0),
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

    def _transducer_part(self, batch: _EncodedBatch, step: int) -> _TransducerPart:
        check_fastemit(self.loss_config.fastemit_lambda)
        predicted_MUP = self.predictor.forward_targets(batch.targets)
        lengths = batch.logit_lengths, batch.target_lengths
        if self.pruned_loss is not None:
            losses = self.pruned_loss(batch.encoded, predicted_MUP, batch.targets, *lengths, step)
            of_each = losses.utterances
            return _TransducerPart(
                losses.loss,
                of_each.total,
                {"simple": of_each.simple, "pruned": of_each.pruned},
                losses.occupancy,
                losses.bounds,
            )
        full_M = self._full_loss(batch, predicted_MUP)
        total_M = full_M.detach()
        return _TransducerPart(full_M.sum(), total_M, {"full": total_M}, None, None)

    def _full_loss(self, batch: _EncodedBatch, predicted_MUP: Tensor) -> Tensor:
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
