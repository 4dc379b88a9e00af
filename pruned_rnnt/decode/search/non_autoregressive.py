"""Search without a predictor: all frames at once, for HAINAN models (arXiv 2410.02597).

Axes: N batch, T encoder frames, E encoder width, P predictor width, D joiner width.

A model trained with loss.predictor_mask_probability can also decode with zeros in place of the
predictor's output. A frame emits its most probable symbol, or nothing if that is blank: at most one
symbol per frame, also for models of loss.rnnt_type=regular.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, pending_hypotheses
from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.pending import DeviceSearch, Pending
from pruned_rnnt.decode.search.search_arguments import silent_mask
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs


class NonAutoregressiveSearch(DeviceSearch[list[Hypothesis]]):
    """Decides all frames in one pass, and again with the predictor's output for the symbols found.

    A refinement gives each frame the predictor's output after the symbols that the pass before
    found in earlier frames, and decides all frames again (semi-autoregressive decoding).

    Args:
        model: in evaluation mode, trained with loss.predictor_mask_probability above 0.
        refinements: number of further passes.
        silent_symbols: ids that are treated as blank when they are the most probable (such as
            `<unk>`).

    Raises:
        ValueError: the model was trained without loss.predictor_mask_probability.
    """

    def __init__(
        self, model: TransducerModel, *, refinements: int = 0, silent_symbols: Sequence[int] = ()
    ) -> None:
        if model.loss_config.predictor_mask_probability == 0:
            raise ValueError(
                "non-autoregressive search needs a model trained with "
                "loss.predictor_mask_probability above 0 (HAINAN, for example 0.5)"
            )
        self.model = model
        self.refinements = refinements
        silent = [model.predictor.blank, *silent_symbols]
        self._silent_V = silent_mask(model.vocab_size, silent)

    @torch.inference_mode()
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[Hypothesis]]:
        joiner, device = self.model.joiner, encoded_NTE.device
        self._silent_V = self._silent_V.to(device)
        am_NTD = joiner.encoder_proj(encoded_NTE)
        frames_T = torch.arange(am_NTD.size(1), device=device)
        alive_NT = frames_T < lengths.to(device)[:, None]
        zeros_NTP = encoded_NTE.new_zeros(1, 1, self.model.config.predictor.dim)
        symbols_NT, scores_NT = self._decide(am_NTD, joiner.decoder_proj(zeros_NTP), alive_NT)
        for _ in range(self.refinements):
            lm_NTD = self._predicted(symbols_NT)
            symbols_NT, scores_NT = self._decide(am_NTD, lm_NTD, alive_NT)
        return pending_hypotheses(GreedyFrames(symbols_NT[:, :, None], scores_NT[:, :, None]))

    def _decide(self, am_NTD: Tensor, lm_NTD: Tensor, alive_NT: Tensor) -> tuple[Tensor, Tensor]:
        """(N, T): the symbol that each frame emits, or -1; and its log-probability or blank's."""
        logits_NTV: Tensor = self.model.joiner(am_NTD, lm_NTD)
        blank, hat = self.model.predictor.blank, self.model.loss_config.hat
        best_NT, symbol_NT = joint_log_probs(logits_NTV, blank, hat).max(dim=2)
        emits_NT = alive_NT & ~self._silent_V[symbol_NT]
        return torch.where(emits_NT, symbol_NT, -1), best_NT * alive_NT

    def _predicted(self, symbols_NT: Tensor) -> Tensor:
        """(N, T, D): the projected predictor output after the symbols of the frames before each."""
        emits_NT = symbols_NT >= 0
        places_NT = emits_NT.cumsum(dim=1) - emits_NT.long()
        frames = symbols_NT.size(1)
        # Frames without a symbol write to a last column, which is cut off.
        targets_NU = symbols_NT.new_zeros(len(symbols_NT), frames + 1)
        targets_NU.scatter_(1, torch.where(emits_NT, places_NT, frames), symbols_NT.clamp(min=0))
        predicted_NUP = self.model.predictor.forward_targets(targets_NU[:, :frames])
        lm_NUD: Tensor = self.model.joiner.decoder_proj(predicted_NUP)
        return lm_NUD.gather(1, places_NT[:, :, None].expand(-1, -1, lm_NUD.size(2)))
