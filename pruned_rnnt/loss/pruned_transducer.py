"""Simple loss, band and pruned loss as one module, with the warm-up of their scales."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_batch
from pruned_rnnt.loss.bounds import check_band_width
from pruned_rnnt.loss.composed_losses import LossCall, composed_losses, streamed_of
from pruned_rnnt.loss.joiner import Joiner, changed_part, check_joiner, scale_initial
from pruned_rnnt.loss.results import (
    Bounds,
    Occupancy,
    TdtOccupancy,
    TransducerLosses,
    UtteranceLosses,
)
from pruned_rnnt.loss.simple import check_scales
from pruned_rnnt.loss.tdt_head import (
    TdtHead,
    check_no_durations,
    check_tdt_joiner,
)
from pruned_rnnt.ops.common.matrix_products import product_dtype
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.joiner.fused_joiner import row_chunks
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerPlan
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.lattice.recursion import Recursion
from pruned_rnnt.ops.pruning.prune_bounds import clipped_width, tdt_topology
from pruned_rnnt.ops.step.pruned_step import has_dtypes_of_step, pruned_step
from pruned_rnnt.ops.step.step_library import StepInputs, StepLosses, StepPlan, has_native_step

logger = logging.getLogger(__name__)

# Of the simple loss's projections, because their sum should begin near the uniform distribution.
_INITIAL_SCALE = 0.25


class PrunedTransducerLoss(nn.Module):
    """The training loss of a pruned transducer (arXiv 2206.13236) of encoder and predictor outputs.

    loss = simple_scale * simple loss + pruned_scale * pruned loss. During warm_up_steps the first
    scale goes from 1 to simple_scale and the second from pruned_scale_start to 1, linearly,
    because the band means little until the simple loss has learned something.

    On CUDA, with reduction `mean` or `sum`, gradients are computed during forward and backward only
    scales them; use torch.no_grad() for evaluation. Gradients of simple_loss or pruned_loss by
    itself are computed anew: set the scales here instead. Not in float16, whose gradients need the
    scale of the loss while they are computed: there the loss runs layer by layer.

    Args:
        joiner: a Joiner, whose logits are then never stored; or any callable from am
            (N, T, S, E) and lm (N, T, S, P), the encoder and predictor outputs inside the band, to
            logits (N, T, S, V). Layers may have hooks and adapters, or be replaced. The loss calls
            a Joiner whose forward or output layer was changed in such a way, stores its logits, and
            says so in the log once. The constructor refuses torch's wrappers of a Joiner, such as
            torch.compile(joiner); other wrappers, such as a lambda around it, fail in the first
            call. Both leave out the two projections.
        encoder_dim, predictor_dim, vocab_size: E, P and V.
        blank: column of the blank.
        s_range: columns of the band.
        exact_bounds: see prune_bounds.
        rnnt_type, delay_penalty, fastemit_lambda, hat, reduction: see rnnt_loss; hat concerns the
            pruned loss.
        lm_only_scale, am_only_scale: see rnnt_loss_simple.
        durations, sigma, omega: see rnnt_loss_tdt; with durations, 1 among them, both losses are
            TDT losses and joiner is a Joiner with a layer for them. omega applies in training,
            drawn once a step. sigma and omega must be 0 without durations.
        simple_scale, pruned_scale_start, warm_up_steps: see above.

    Raises:
        TypeError: an option of another type; a joiner that does not take am and lm, or is one of
            torch's wrappers of a Joiner.
        ValueError: options out of range; a Joiner of other widths or another vocabulary, or with
            durations that the loss does not have.
    """

    def __init__(
        self,
        joiner: Joiner | Callable[[Tensor, Tensor], Tensor],
        encoder_dim: int,
        predictor_dim: int,
        vocab_size: int,
        *,
        blank: int = 0,
        s_range: int = 5,
        rnnt_type: str = "regular",
        lm_only_scale: float = 0.25,
        am_only_scale: float = 0.0,
        delay_penalty: float = 0.0,
        fastemit_lambda: float = 0.0,
        simple_scale: float = 0.5,
        pruned_scale_start: float = 0.1,
        warm_up_steps: int = 2000,
        hat: bool = False,
        exact_bounds: bool = False,
        durations: Sequence[int] | None = None,
        sigma: float = 0.0,
        omega: float = 0.0,
        reduction: str = "mean",
    ):
        super().__init__()
        encoder_dim = checks.check_at_least("encoder_dim", encoder_dim, 1)
        predictor_dim = checks.check_at_least("predictor_dim", predictor_dim, 1)
        vocab_size = checks.check_at_least("vocab_size", vocab_size, 1)
        checks.check_reduction(reduction)
        self.options = checks.check_options(
            blank, vocab_size, rnnt_type, delay_penalty, fastemit_lambda, hat=hat
        )
        self.simple_options = check_scales(self.options, lm_only_scale, am_only_scale)
        self.s_range = checks.check_s_range(s_range, self.options.rnnt_type)
        check_joiner(joiner, encoder_dim, predictor_dim, vocab_size)
        self.joiner = joiner
        self.encoder_dim = encoder_dim
        self.predictor_dim = predictor_dim
        self.vocab_size = vocab_size
        self.simple_scale = checks.check_finite("simple_scale", simple_scale)
        self.pruned_scale_start = checks.check_finite("pruned_scale_start", pruned_scale_start)
        self.warm_up_steps = checks.check_at_least("warm_up_steps", warm_up_steps, 0)
        self.exact_bounds = checks.check_flag("exact_bounds", exact_bounds)
        self.reduction = reduction
        self._reported: set[str] = set()
        self.simple_am_proj = nn.Linear(encoder_dim, vocab_size)
        self.simple_lm_proj = nn.Linear(predictor_dim, vocab_size)
        for layer in (self.simple_am_proj, self.simple_lm_proj):
            scale_initial(layer, _INITIAL_SCALE)

        self.tdt: TdtHead | None = None
        if durations is None:
            check_no_durations(joiner, sigma, omega)
        else:
            check_tdt_joiner(joiner, durations, rnnt_type, hat)
            dims = (encoder_dim, predictor_dim)
            self.tdt = TdtHead(*dims, durations, sigma, omega, _INITIAL_SCALE)

    def set_delay_penalty(self, delay_penalty: float) -> None:
        """Use another delay penalty from the next call on.

        Raises:
            ValueError: it is not finite.
        """
        penalty = checks.check_finite("delay_penalty", delay_penalty)
        self.options = self.options._replace(delay_penalty=penalty)
        scales = self.simple_options.scales
        self.simple_options = check_scales(self.options, scales.lm_only_scale, scales.am_only_scale)

    def scales(self, step: int | None) -> tuple[float, float]:
        """Scales of the simple and of the pruned loss after that many optimiser steps; None: after
        the warm-up, in evaluation alone."""
        done = 1.0
        if step is not None:
            step = checks.check_at_least("step", step, 0)
            if self.warm_up_steps > 0:
                # A minimum of integers, because inductor (torch 2.11) truncates one of fractions.
                done = min(step, self.warm_up_steps) / self.warm_up_steps
        elif self.training and self.warm_up_steps > 0:
            raise TypeError(
                "step is None; it must be an integer in training, the number of optimiser steps "
                "done so far, by which the scales warm up"
            )
        simple = 1.0 + done * (self.simple_scale - 1.0)
        pruned = self.pruned_scale_start + done * (1.0 - self.pruned_scale_start)
        return simple, pruned

    def forward(
        self,
        encoder_out: Tensor,
        predictor_out: Tensor,
        targets: Tensor,
        logit_lengths: Tensor | None,
        target_lengths: Tensor | None,
        step: int | None = None,
    ) -> TransducerLosses:
        """Losses of a batch.

        Args:
            encoder_out: (N, T, E) and predictor_out: (N, U+1, P), floating. Padding must be
                finite: it does not change the loss, but the gradients of the layers' weights
                multiply it by 0, which is NaN for NaN and infinity.
            targets: (N, U) integers, not the blank.
            logit_lengths, target_lengths: (N,) integers, None for T and U. If they are on the CPU,
                the joiner leaves padding out; if they are on the inputs' device, the host does not
                wait for them.
            step: optimiser steps done so far, for the warm-up. In evaluation it can be left out:
                then the scales are those after the warm-up.

        Raises:
            TypeError, ValueError: see rnnt_loss and prune_bounds; widths that are not E and P.
        """
        checks.check_floating("encoder_out", encoder_out, "(N, T, E)", 3)
        checks.check_floating("predictor_out", predictor_out, "(N, U+1, P)", 3)
        batch, frames, rows = *encoder_out.shape[:2], max(predictor_out.shape[1], 1)
        wanted = (batch, frames, self.encoder_dim)
        checks.check_shape("encoder_out", encoder_out, wanted, "(N, T, encoder_dim)")
        wanted = (batch, rows, self.predictor_dim)
        checks.check_shape("predictor_out", predictor_out, wanted, "(N, U+1, predictor_dim)")
        checks.check_same("predictor_out", predictor_out, "encoder_out", encoder_out)
        owner = (encoder_out.device, "encoder_out and predictor_out")
        sizes = Sizes(batch, frames, rows - 1, self.vocab_size, *owner)
        recursion = Recursion(self.options)
        if self.tdt is not None:
            recursion = self.tdt.recursion(self.options, step, encoder_out.device)
        utterances = check_batch(targets, logit_lengths, target_lengths, sizes, recursion)
        if utterances.host_lengths is not None:
            check_band_width(utterances.host_lengths, self.s_range, self.options.rnnt_type)
        scales = self.scales(step)
        # Other columns would cost rows of the joiner.
        columns = clipped_width(self.s_range, rows)
        call = LossCall(encoder_out, predictor_out, utterances, scales, recursion, columns)
        losses = self._in_one_step(call)
        if losses is None:
            losses = composed_losses(self, call._replace(utterances=utterances.on_device()))
        total, simple, pruned, emit, blank, start_NT, each_3N, stay, durations = losses
        occupancy: Occupancy | TdtOccupancy = Occupancy(emit, blank)
        if stay is not None and durations is not None:
            occupancy = TdtOccupancy(emit, blank, stay, durations)
        each = (total, simple, pruned) if each_3N is None else each_3N.unbind()
        return TransducerLosses(
            loss=total,
            simple_loss=simple,
            pruned_loss=pruned,
            occupancy=occupancy,
            bounds=Bounds(start_NT, self.s_range),
            simple_scale=scales[0],
            pruned_scale=scales[1],
            utterances=UtteranceLosses(*(x.detach() for x in each)),
        )

    def report(self, message: str) -> None:
        """Log a message about how this module computes its losses; each message once."""
        if not torch.compiler.is_compiling() and message not in self._reported:
            self._reported.add(message)
            logger.warning("%s", message)

    def _in_one_step(self, call: LossCall) -> StepLosses | None:
        """The losses by the compiled step; None where that does not apply. torch.compile must see
        each layer, and the step has no prior of the predictor (am_only_scale), does not mix TDT
        with RNN-T (omega), and stores am and lm."""
        encoder_out, predictor_out, utterances, scales, recursion, columns = call
        joiner = self.joiner
        if not (isinstance(joiner, Joiner) and encoder_out.is_cuda and has_native_step()):
            return None
        has_prior = self.simple_options.scales.am_only_scale != 0
        if torch.compiler.is_compiling() or has_prior or recursion.ignores_durations:
            return None
        if not (checks.has_values(encoder_out) and checks.has_values(predictor_out)):
            return None
        is_empty = min(encoder_out.numel(), predictor_out.numel()) == 0
        if is_empty or streamed_of(self, encoder_out, predictor_out) is not None:
            return None
        if changed_part(joiner) is not None:
            return None  # composed_losses reports it
        layers = [
            ("simple_am_proj", self.simple_am_proj),
            ("simple_lm_proj", self.simple_lm_proj),
            ("joiner.encoder_proj", joiner.encoder_proj),
            ("joiner.decoder_proj", joiner.decoder_proj),
            ("joiner.output_linear", joiner.output_linear),
        ]
        if self.tdt is not None and joiner.duration_linear is not None:
            layers += [
                ("tdt.simple_am_proj", self.tdt.simple_am_proj),
                ("tdt.simple_lm_proj", self.tdt.simple_lm_proj),
                ("joiner.duration_linear", joiner.duration_linear),
            ]
        parameters = plain_parameters(layers, encoder_out.device)
        if isinstance(parameters, str):
            self.report(f"{parameters}: the loss runs layer by layer, which takes more time")
            return None
        inputs = StepInputs(encoder_out, predictor_out, *parameters)
        dtype = product_dtype(*inputs.given)
        # The step rounds gradients of the simple loss before the scale of the loss reaches them.
        loses_gradients = dtype == torch.float16 and torch.is_grad_enabled()
        if loses_gradients or not has_dtypes_of_step(inputs, dtype):
            return None
        options = self.options
        if self.tdt is not None:
            options = options._replace(rnnt_type=tdt_topology(self.tdt.durations))
        frames = encoder_out.shape[1]
        chunks = row_chunks(
            utterances.band_rows(frames, columns),
            columns,
            logit_bytes=self.vocab_size * dtype.itemsize,
            hidden_bytes=inputs.output_weight.shape[1] * dtype.itemsize,
        )
        counts_rows = False
        sizes = (frames, columns, *chunks, counts_rows, self.vocab_size)
        plan = StepPlan(
            dtype=dtype,
            differentiable=torch.is_grad_enabled(),
            simple=self.simple_options._replace(recursion=recursion),
            joiner=JoinerPlan(*sizes, ACTIVATIONS[joiner.activation], options),
            exact_bounds=self.exact_bounds,
            simple_scale=scales[0],
            pruned_scale=scales[1],
            reduction=self.reduction,
        )
        return pruned_step(inputs, utterances, plan)
