"""The models that the compiled searches on the CPU take, and beams that a compiled op searches: all
frames at once, or with scorers of symbols until they are needed again.

Axes: N batch, T encoder frames, D joiner width, B beam, V vocabulary; R = N * B rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.joiner import changed_part
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.common.library import new_outputs
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.search.search_frames import BeamState, BeamSteps, SearchModel, beam_frames


def host_model(model: TransducerModel, silent_V: Tensor) -> SearchModel | None:
    """What the ops need of a model; None if they cannot search it: the model must be on the CPU in
    float32, with a stateless predictor whose layers are plain, and plain linear layers in the
    joiner."""
    joiner, predictor = model.joiner, model.predictor
    layers = (("decoder_proj", joiner.decoder_proj), ("output_linear", joiner.output_linear))
    parameters = plain_parameters(layers, torch.device("cpu"))
    if isinstance(parameters, str) or changed_part(joiner) is not None:
        return None
    if not isinstance(predictor, StatelessPredictor):
        return None
    tables = predictor.context_tables()
    if tables is None or any(x.dtype != torch.float32 for x in (tables, *parameters)):
        return None
    decoder_weight, decoder_bias, output_weight, output_bias = (
        x.detach().contiguous() for x in parameters
    )
    return SearchModel(
        tables,
        decoder_weight,
        decoder_bias,
        output_weight,
        output_bias,
        silent_V,
        predictor.blank,
        ACTIVATIONS[joiner.activation],
        model.loss_config.hat,
    )


class HostBeam:
    """The beams of a batch, and the frames that they were searched in.

    Args:
        start: of the rows before the first frame.

    Attributes:
        state: of the rows after `frame` frames.
        steps: of these frames.
    """

    def __init__(
        self,
        model: SearchModel,
        am_NTD: Tensor,
        lengths_N: Tensor,
        start: BeamState,
    ) -> None:
        self._model = model
        self._am_NTD = am_NTD.contiguous()
        self._lengths_N = lengths_N.long().contiguous()
        self._end = torch.zeros(1, dtype=torch.int64)
        batch, frames, _ = am_NTD.shape
        shape = (batch, frames, start.score.size(1))
        # The op changes the state in place, and needs contiguous tensors.
        self.state = BeamState(*(x.clone(memory_format=torch.contiguous_format) for x in start))
        parent_NTB, symbol_NTB = new_outputs(2, am_NTD, shape, torch.int64)
        self.steps = BeamSteps(parent_NTB, symbol_NTB, start.score.new_empty(shape))

    @property
    def frame(self) -> int:
        return int(self._end)

    @property
    def has_frames_left(self) -> bool:
        return self.frame < self._am_NTD.size(1)

    def search(self, fusion_NBV: Tensor | None) -> None:
        """Search the next frames: all that are left, or with scores of other models until a
        sequence or the order of the rows changes."""
        fusion_NBV = None if fusion_NBV is None else fusion_NBV.contiguous()
        beam_frames(
            self._am_NTD,
            self._lengths_N,
            self.frame,
            fusion_NBV,
            self._model,
            self.state,
            self.steps,
            self._end,
        )

    def last_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row, (R,): the row that it comes from, the symbol or blank, and whether it is a
        symbol."""
        parent_NB, symbol_NB = (x[:, self.frame - 1] for x in self.steps[:2])
        first_N1 = torch.arange(len(parent_NB))[:, None] * parent_NB.size(1)
        emits_NB = symbol_NB >= 0
        symbol_NB = symbol_NB.masked_fill(~emits_NB, self._model.blank)
        return (first_N1 + parent_NB).flatten(), symbol_NB.flatten(), emits_NB.flatten()
