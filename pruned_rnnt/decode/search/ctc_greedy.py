"""Greedy search of CTC: the best symbol of each frame, without repetitions and blanks.

Axes: N batch, T encoder frames, E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.search.greedy_frames import GreedyFrames, SearchByFrames
from pruned_rnnt.decode.search.rows import Rows
from pruned_rnnt.decode.search.search_arguments import check_ctc_head, silent_mask
from pruned_rnnt.model.speech_model import BLANK, SpeechModel, ctc_log_probs


class CtcGreedySearch(SearchByFrames):
    """The most probable path; a run of frames with one symbol emits it in its first frame.

    Args:
        model: in evaluation mode, with a CTC head.
        silent_symbols: ids that are treated as blank when they are the most probable (such as
            `<unk>`).

    Raises:
        ValueError: the model has no CTC head.
    """

    def __init__(self, model: SpeechModel, *, silent_symbols: Sequence[int] = ()) -> None:
        check_ctc_head(model)
        self.model = model
        self._silent_V = silent_mask(model.vocab_size, silent_symbols)

    def start(self, streams: int, device: torch.device) -> Rows:
        """The state before the first frame: the symbol of the frame before, here blank."""
        return (torch.full((streams,), BLANK, device=device),)

    @torch.inference_mode()
    def frames(self, encoded_NTE: Tensor, lengths_N: Tensor, state: Rows) -> GreedyFrames:
        """Decode the next frames of streams; arguments as for `GreedySearch.frames`."""
        log_probs_NTV = ctc_log_probs(self.model, encoded_NTE)
        if self._silent_V.device != encoded_NTE.device:
            self._silent_V = self._silent_V.to(encoded_NTE.device)
        best_NT, symbol_NT = log_probs_NTV.max(dim=2)
        alive_NT = torch.arange(symbol_NT.size(1), device=symbol_NT.device) < lengths_N[:, None]
        symbol_NT = symbol_NT.masked_fill(self._silent_V[symbol_NT] | ~alive_NT, BLANK)
        before_NT = torch.cat((state[0][:, None], symbol_NT), dim=1)
        emits_NT = (symbol_NT != BLANK) & (symbol_NT != before_NT[:, :-1])
        return GreedyFrames(
            torch.where(emits_NT, symbol_NT, -1)[:, :, None],
            (best_NT * alive_NT)[:, :, None],
            (before_NT[:, -1],),
        )
