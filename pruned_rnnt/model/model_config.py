"""Configuration of a model of speech and of its training loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pruned_rnnt.config.checks import Removed, check_at_least, check_fractions
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_kinds import ENCODER_CONFIGS
from pruned_rnnt.model.predictor import AnyPredictorConfig, LstmPredictorConfig, PredictorConfig
from pruned_rnnt.ops.lattice.tdt_lattice import MOST_DURATIONS

PREDICTOR_CONFIGS: dict[str, type[AnyPredictorConfig]] = {
    "stateless": PredictorConfig,
    "lstm": LstmPredictorConfig,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of encoder, predictor and joiner; with loss.kind=ctc, only the encoder is used.

    The `kind` of encoder and predictor chooses one of the classes in `kinds`.

    joiner_dim: width of the joiner, to which encoder and predictor output are projected.
    joiner_activation: `tanh`, or `relu` as in NeMo's models.
    joiner_initial_scale: initial weights of the joiner's two projections as a fraction of torch's
        default, with biases within a tenth of it; null keeps torch's default for both. icefall's
        recipes have 0.25.
    """

    encoder: EncoderConfig = field(
        default_factory=ConformerConfig,
        metadata={"kinds": ENCODER_CONFIGS, "register": "register_encoder"},
    )
    predictor: AnyPredictorConfig = field(
        default_factory=PredictorConfig, metadata={"kinds": PREDICTOR_CONFIGS}
    )
    joiner_dim: int = 128
    joiner_activation: Literal["tanh", "relu"] = "tanh"
    joiner_initial_scale: float | None = None

    def __post_init__(self) -> None:
        check_at_least("model", self, joiner_dim=1, joiner_initial_scale=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The training loss.

    The fields from rnnt_type to exact_bounds are options of `pruned_rnnt.PrunedTransducerLoss`;
    with kind `full`, only rnnt_type, delay_penalty, fastemit_lambda, hat, durations, sigma and
    omega are used, with kind `ctc` none of them.

    kind: `pruned` is the simple loss plus the pruned loss; `full` is the transducer loss over the
        whole lattice, for comparisons; `ctc` is the CTC loss alone, of a model without predictor
        and joiner.
    rnnt_type: topology of the lattice: `regular` allows any number of symbols per frame, the others
        at most one; see `pruned_rnnt.rnnt_loss`.
    s_range: width of the band that pruning keeps at each frame, in symbols.
    lm_only_scale, am_only_scale: weights in the simple loss of the distribution of the predictor
        alone, and of the encoder alone.
    simple_scale: factor of the simple loss after the warm-up; it starts at 1.
    pruned_scale_start: factor of the pruned loss at the start of the warm-up; it ends at 1.
    warm_up_steps: steps over which the two factors change.
    delay_penalty: log-probability that a symbol gains for each frame (40 ms) that it is emitted
        earlier; values above 0 favour early symbols.
    target_delay_ms: training moves delay_penalty so that greedy search emits 95 of 100 words of the
        validation set at most so many milliseconds after their ends; null keeps delay_penalty as it
        is. It begins once half of the words are right and their delay has settled. It needs kind
        `pruned`, data with word times, and several validations in the training.
    fastemit_lambda: scales the gradient of symbols by 1 + fastemit_lambda (FastEmit, arXiv
        2010.11148), which also favours early symbols.
    hat: factorise blank and symbols (HAT, arXiv 2003.07705): blank is a Bernoulli variable, and a
        softmax over the symbols has the remaining probability. decode.fusion.ilm_scale needs it.
    durations: of a token-and-duration transducer (TDT, arXiv 2304.06795): the joiner also predicts
        by how many frames a symbol or blank advances, one of these numbers, so that decoding skips
        frames; the paper has [0, 1, 2, 3, 4]. Empty: each blank advances by one frame, and symbols
        do not. Needs rnnt_type `regular`.
    sigma: with durations, subtracted from the log-probability of each symbol and blank (0.02 to
        0.05 in public configurations), so that paths with fewer of them, which skip more, gain.
    omega: with durations, probability that a training step uses the loss without durations (0.1 in
        public configurations), so that symbols are also learned where decoding seldom stops.
    exact_bounds: choose the band with the most probability by dynamic programming, instead of
        adjusting the best window of each frame.
    ctc_scale: factor of the auxiliary CTC loss of a transducer; with 0, it has no CTC head. Kind
        `ctc` does not use it.
    ctc_dropout: probability of dropping an input value of the CTC head in training.
    cr_ctc_scale: factor of the consistency loss of CR-CTC (arXiv 2410.05101), which trains on two
        views of each utterance with different SpecAugment masks and makes their CTC outputs
        similar. The paper has 0.02 with a transducer and 0.2 with kind `ctc`; 0 trains on one
        view. data.max_duration, max_cuts and max_lattice count both views: a batch has half as many
        utterances.
    cr_ctc_mask_factor: with two views, factor of SpecAugment's frame_masks and max_masked_fraction.
    """

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        "predictor_mask_probability": Removed(
            "masking the predictor made error rates worse; for a model without a predictor, use "
            "loss.kind=ctc",
            unused=0.0,
        )
    }

    kind: Literal["pruned", "full", "ctc"] = "pruned"
    rnnt_type: Literal["regular", "modified", "constrained", "rna"] = "regular"
    s_range: int = 5
    lm_only_scale: float = 0.25
    am_only_scale: float = 0.0
    simple_scale: float = 0.5
    pruned_scale_start: float = 0.1
    warm_up_steps: int = 2000
    delay_penalty: float = 0.0
    target_delay_ms: float | None = None
    fastemit_lambda: float = 0.0
    hat: bool = False
    durations: tuple[int, ...] = ()
    sigma: float = 0.0
    omega: float = 0.0
    exact_bounds: bool = False
    ctc_scale: float = 0.2
    ctc_dropout: float = 0.0
    cr_ctc_scale: float = 0.0
    cr_ctc_mask_factor: float = 2.5

    def __post_init__(self) -> None:
        # In the other topologies a symbol needs two columns of one frame.
        columns = 1 if self.rnnt_type in ("modified", "rna") else 2
        check_at_least("loss", self, s_range=columns, warm_up_steps=0)
        check_at_least("loss", self, simple_scale=0, pruned_scale_start=0, ctc_scale=0)
        check_at_least("loss", self, cr_ctc_scale=0, cr_ctc_mask_factor=0)
        check_fractions("loss", self, "ctc_dropout", below_one=True)
        if self.cr_ctc_scale > 0 and not self.has_ctc_head:
            raise ValueError(
                f"loss.cr_ctc_scale is {self.cr_ctc_scale}, which needs a CTC head: set "
                "loss.ctc_scale above 0 (0.1 in the paper of CR-CTC), or loss.kind=ctc"
            )

        if self.target_delay_ms is not None:
            if not math.isfinite(self.target_delay_ms):
                raise ValueError(
                    f"loss.target_delay_ms is {self.target_delay_ms}, needs a finite number or null"
                )
            if self.kind != "pruned":
                raise ValueError(
                    f"loss.target_delay_ms is {self.target_delay_ms}, which needs "
                    f"loss.kind=pruned, got {self.kind}: set it to null, which turns it off"
                )
        self._check_durations()

    def _check_durations(self) -> None:
        found = list(self.durations)
        if not found:
            for name in ("sigma", "omega"):
                if getattr(self, name) != 0:
                    raise ValueError(
                        f"loss.{name} is {getattr(self, name)}, which needs loss.durations, for "
                        "example [0, 1, 2, 3, 4]"
                    )
            return
        if min(found) < 0 or len(set(found)) < len(found) or len(found) > MOST_DURATIONS:
            raise ValueError(
                f"loss.durations is {found}, needs different numbers from 0 on, at most "
                f"{MOST_DURATIONS} of them, for example [0, 1, 2, 3, 4]"
            )
        if 1 not in found:
            raise ValueError(
                f"loss.durations is {found}, needs a 1 among them: without it, some numbers of "
                "frames have no path"
            )
        check_fractions("loss", self, "omega")
        for name, wanted in (("rnnt_type", "regular"), ("hat", False)):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"loss.durations is {found} and loss.{name} is {getattr(self, name)}: a model "
                    f"with durations needs loss.{name}={str(wanted).lower()}"
                )
        if self.kind == "ctc":
            raise ValueError(
                f"loss.durations is {found}, but a model of loss.kind=ctc has no joiner that could "
                "predict them: set loss.kind to pruned or full"
            )

    @property
    def has_ctc_head(self) -> bool:
        return self.kind == "ctc" or self.ctc_scale > 0

    @property
    def views(self) -> int:
        """Number of views of an utterance in a training batch."""
        return 2 if self.cr_ctc_scale > 0 else 1
