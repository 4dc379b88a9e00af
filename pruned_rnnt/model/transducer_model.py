"""The transducer model: encoder, predictor, joiner and losses.

Axes: N batch, T frames (T' after subsampling), F mel bins, U symbols, E encoder width,
P predictor width, D joiner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from pruned_rnnt.loss.ctc import ctc_loss
from pruned_rnnt.loss.fused import rnnt_loss_fused
from pruned_rnnt.loss.joiner import Joiner
from pruned_rnnt.loss.pruned_transducer import PrunedTransducerLoss
from pruned_rnnt.loss.results import Bounds, Occupancy
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_graphs import EncoderGraphs
from pruned_rnnt.model.encoder_kinds import ENCODER_CONFIGS, build_encoder
from pruned_rnnt.model.lstm_predictor import LstmPredictor, LstmPredictorConfig
from pruned_rnnt.model.predictor import (
    AnyPredictorConfig,
    Predictor,
    PredictorConfig,
    StatelessPredictor,
)
from pruned_rnnt.setting_checks import check_at_least, check_fractions

BLANK = 0
PREDICTOR_CONFIGS: dict[str, type[AnyPredictorConfig]] = {
    "stateless": PredictorConfig,
    "lstm": LstmPredictorConfig,
}
_REFERENCE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of encoder, predictor and joiner.

    The `kind` of encoder and predictor chooses one of the classes in `kinds`.

    joiner_dim: width of the joiner, to which encoder and predictor output are projected.
    joiner_initial_scale: initial weights of the joiner's two projections as a fraction of torch's
        default, with biases within a tenth of it; null keeps torch's default for both. icefall's
        recipes have 0.25.
    """

    encoder: EncoderConfig = field(
        default_factory=ConformerConfig, metadata={"kinds": ENCODER_CONFIGS}
    )
    predictor: AnyPredictorConfig = field(
        default_factory=PredictorConfig, metadata={"kinds": PREDICTOR_CONFIGS}
    )
    joiner_dim: int = 128
    joiner_initial_scale: float | None = None

    def __post_init__(self) -> None:
        check_at_least("model", self, joiner_dim=1, joiner_initial_scale=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The training loss.

    All fields except kind and those of the CTC loss are options of
    `pruned_rnnt.PrunedTransducerLoss`; with kind `full`, only rnnt_type, delay_penalty,
    fastemit_lambda and hat are used.

    kind: `pruned` is the simple loss plus the pruned loss; `full` is the transducer loss over the
        whole lattice, for comparisons.
    rnnt_type: topology of the lattice: `regular` allows any number of symbols per frame, the others
        at most one, see `pruned_rnnt.rnnt_loss`.
    s_range: width of the band that pruning keeps at each frame, in symbols.
    lm_only_scale, am_only_scale: weights in the simple loss of the distribution of the predictor
        alone, and of the encoder alone.
    simple_scale: factor of the simple loss after the warm-up; it starts at 1.
    pruned_scale_start: factor of the pruned loss at the start of the warm-up; it ends at 1.
    warm_up_steps: steps over which the two factors change.
    delay_penalty: log-probability that a symbol gains for each frame (40 ms) that it is emitted
        earlier; values above 0 favour early symbols.
    fastemit_lambda: scales the gradient of symbols by 1 + fastemit_lambda (FastEmit, arXiv
        2010.11148), which also favours early symbols.
    hat: factorise blank and symbols (HAT, arXiv 2003.07705): blank is a Bernoulli variable, and a
        softmax over the symbols has the remaining probability. decode.fusion.ilm_scale needs it.
    exact_bounds: choose the band with the most probability by dynamic programming, instead of
        adjusting the best window of each frame.
    ctc_scale: factor of an auxiliary CTC loss; with 0, the model has no CTC head.
    ctc_dropout: probability of dropping an input value of the CTC head in training.
    """

    kind: Literal["pruned", "full"] = "pruned"
    rnnt_type: Literal["regular", "modified", "constrained", "rna"] = "regular"
    s_range: int = 5
    lm_only_scale: float = 0.25
    am_only_scale: float = 0.0
    simple_scale: float = 0.5
    pruned_scale_start: float = 0.1
    warm_up_steps: int = 2000
    delay_penalty: float = 0.0
    fastemit_lambda: float = 0.0
    hat: bool = False
    exact_bounds: bool = False
    ctc_scale: float = 0.2
    ctc_dropout: float = 0.0

    def __post_init__(self) -> None:
        # In the other topologies a symbol needs two columns of one frame.
        columns = 1 if self.rnnt_type in ("modified", "rna") else 2
        check_at_least("loss", self, s_range=columns, warm_up_steps=0)
        check_at_least("loss", self, simple_scale=0, pruned_scale_start=0, ctc_scale=0)
        check_fractions("loss", self, "ctc_dropout", below_one=True)


@dataclass(frozen=True, kw_only=True)
class ModelLosses:
    """Losses of a batch, and the occupancy and band for pictures.

    objective: (), the sum of total over utterances, differentiable.
    total: (N,), without gradient.
    parts: (N,) each, unscaled and without gradient: `simple` and `pruned`, or `full`; and `ctc`
        with a CTC head.
    encoded: (N, T', E) output of the encoder, differentiable, for further losses.
    frame_lengths: (N,) encoder frames.
    occupancy, bounds: those of the simple loss; None with the full loss.
    measures: (N,) each, other quantities for the log, without gradient.
    """

    objective: Tensor
    total: Tensor
    parts: Mapping[str, Tensor]
    encoded: Tensor
    frame_lengths: Tensor
    occupancy: Occupancy | None
    bounds: Bounds | None
    measures: Mapping[str, Tensor] = field(default_factory=dict)


class TransducerModel(nn.Module):
    """Computes losses from features and targets; decoding uses `encode`, `predictor` and `joiner`.

    Modules are created in the same order for every loss, so that a seed gives the same encoder,
    predictor and joiner.

    Attributes:
        batch_seconds: seconds of audio in a training step, over all processes; the encoder's
            schedules count steps of ten minutes.
        steps_before: such steps before the first one, for a model that is trained already.
        encoder_graphs: if set, runs the encoder in training.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, loss: LossConfig | None = None):
        super().__init__()
        loss = loss or LossConfig()
        self.config = config
        self.loss_config = loss
        self.vocab_size = vocab_size
        self.batch_seconds = _REFERENCE_SECONDS
        self.steps_before = 0.0
        self.encoder_graphs: EncoderGraphs | None = None
        self.encoder = build_encoder(config.encoder)
        encoder_dim, predictor_dim = self.encoder.output_dim, config.predictor.dim
        self.predictor = _build_predictor(config.predictor, vocab_size)
        self.joiner = Joiner(
            encoder_dim,
            predictor_dim,
            config.joiner_dim,
            vocab_size,
            initial_scale=config.joiner_initial_scale,
        )
        self.ctc_dropout = nn.Dropout(loss.ctc_dropout)
        self.ctc_head = nn.Linear(encoder_dim, vocab_size) if loss.ctc_scale > 0 else None
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
                # One sum: on CUDA its gradients are computed in forward.
                reduction="sum",
            )
            if loss.kind == "pruned"
            else None
        )

    def encode(self, features_NTF: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(N, T, F) and (N,) -> encoder output (N, T', E) and its lengths."""
        encoded: tuple[Tensor, Tensor] = self.encoder(features_NTF, feature_lengths)
        return encoded

    def forward(
        self,
        features_NTF: Tensor,
        feature_lengths: Tensor,
        targets_NU: Tensor,
        target_lengths: Tensor,
        step: int,
    ) -> ModelLosses:
        """Losses of a batch.

        Args:
            features_NTF: (N, T, F) float32.
            feature_lengths, target_lengths: (N,) integer, preferably on the CPU.
            targets_NU: (N, U) int32 symbols.
            step: number of optimiser steps so far, for the warm-up of the loss scales and the
                schedules of the encoder.
        """
        if self.training:
            steps = step * self.batch_seconds / _REFERENCE_SECONDS
            self.encoder.set_step(self.steps_before + steps)
        if self.encoder_graphs is not None and self.training and torch.is_grad_enabled():
            encoded_NTE, frame_lengths = self.encoder_graphs(features_NTF, feature_lengths)
        else:
            encoded_NTE, frame_lengths = self.encode(features_NTF, feature_lengths)
        predicted_NUP = self.predictor.forward_targets(targets_NU)
        logit_lengths = frame_lengths.int()
        target_lengths = target_lengths.int()
        parts: dict[str, Tensor] = {}
        occupancy, bounds = None, None
        if self.pruned_loss is not None:
            losses = self.pruned_loss(
                encoded_NTE, predicted_NUP, targets_NU, logit_lengths, target_lengths, step
            )
            objective: Tensor = losses.loss
            total = losses.utterances.total
            parts.update(simple=losses.utterances.simple, pruned=losses.utterances.pruned)
            occupancy, bounds = losses.occupancy, losses.bounds
        else:
            full_N = self._full_loss(
                encoded_NTE, predicted_NUP, targets_NU, logit_lengths, target_lengths
            )
            objective, total = full_N.sum(), full_N.detach()
            parts["full"] = total
        if self.ctc_head is not None:
            ctc_N = ctc_loss(
                self.ctc_head(self.ctc_dropout(encoded_NTE)),
                targets_NU,
                logit_lengths,
                target_lengths,
                blank=BLANK,
                reduction="none",
            )
            objective = objective + self.loss_config.ctc_scale * ctc_N.sum()
            parts["ctc"] = ctc_N.detach()
            total = total + self.loss_config.ctc_scale * parts["ctc"]
        return ModelLosses(
            objective=objective,
            total=total,
            parts=parts,
            encoded=encoded_NTE,
            frame_lengths=frame_lengths,
            occupancy=occupancy,
            bounds=bounds,
        )

    def _full_loss(
        self,
        encoded_NTE: Tensor,
        predicted_NUP: Tensor,
        targets_NU: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
    ) -> Tensor:
        config = self.loss_config
        return rnnt_loss_fused(
            self.joiner.encoder_proj(encoded_NTE),
            self.joiner.decoder_proj(predicted_NUP),
            self.joiner.output_linear.weight,
            self.joiner.output_linear.bias,
            targets_NU,
            None,
            logit_lengths,
            target_lengths,
            activation=self.joiner.activation,
            blank=BLANK,
            rnnt_type=config.rnnt_type,
            delay_penalty=config.delay_penalty,
            fastemit_lambda=config.fastemit_lambda,
            hat=config.hat,
            reduction="none",
        )


def _build_predictor(config: AnyPredictorConfig, vocab_size: int) -> Predictor:
    if isinstance(config, LstmPredictorConfig):
        return LstmPredictor(config, vocab_size, BLANK)
    assert isinstance(config, PredictorConfig)
    return StatelessPredictor(config, vocab_size, BLANK)
