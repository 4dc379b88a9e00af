"""The models that the compiled searches take, on CPUs and GPUs, and beams that a compiled op
searches: all frames at once, or with scorers of symbols until they are needed again.

Axes: N batch, T encoder frames, D joiner width, B beam, V vocabulary; R = N * B rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pruned_rnnt.loss.joiner import changed_part
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.common.library import new_outputs
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.search.search_frames import (
    MOST_GPU_BEAM,
    BeamState,
    BeamSteps,
    SearchModel,
    beam_frames,
    gpu_shared_bytes,
)


def compiled_model(
    model: TransducerModel, silent_V: Tensor, am_NTD: Tensor, beam: int = 0
) -> SearchModel | None:
    """What the ops need of a model; None if they cannot search these frames.

    The model must be in float32, with a stateless predictor whose layers are plain, and plain
    linear layers in the joiner. On a GPU, the op must be compiled, and a block's shared memory must
    hold the rows of an utterance.

    Args:
        beam: rows of a beam search; 0 for greedy search.
    """
    joiner, predictor = model.joiner, model.predictor
    device = am_NTD.device
    op = "beam_frames" if beam else "greedy_frames"
    if am_NTD.dtype != torch.float32:
        return None
    if device.type != "cpu" and not has_native_kernel(op, device.type):
        return None
    layers = (("decoder_proj", joiner.decoder_proj), ("output_linear", joiner.output_linear))
    parameters = plain_parameters(layers, device)
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
    found = SearchModel(
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
    return found if device.type == "cpu" or _fits_gpu(found, beam, device) else None


def _fits_gpu(model: SearchModel, beam: int, device: torch.device) -> bool:
    return beam <= MOST_GPU_BEAM and gpu_shared_bytes(model, beam) <= _shared_bytes(device)


@cache
def _shared_bytes(device: torch.device) -> int:
    """The most shared memory of a block."""
    properties = torch.cuda.get_device_properties(device)
    usual = properties.shared_memory_per_block
    return int(getattr(properties, "shared_memory_per_block_optin", usual))


class CompiledBeam:
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
        self.frame = 0
        batch, frames, _ = am_NTD.shape
        shape = (batch, frames, start.score.size(1))
        # The op changes the state in place, and needs contiguous tensors.
        self.state = BeamState(*(x.clone(memory_format=torch.contiguous_format) for x in start))
        parent_NTB, symbol_NTB = new_outputs(2, am_NTD, shape, torch.int64)
        self.steps = BeamSteps(parent_NTB, symbol_NTB, start.score.new_empty(shape))

    @property
    def has_frames_left(self) -> bool:
        return self.frame < self._am_NTD.size(1)

    def search(self, fusion_NBV: Tensor | None) -> None:
        """Search the next frames: all that are left, or with scores of other models, which the op
        takes on CPUs alone, until a sequence or the order of the rows changes."""
        fusion_NBV = None if fusion_NBV is None else fusion_NBV.contiguous()
        end = self._lengths_N.new_zeros(1)
        beam_frames(
            self._am_NTD,
            self._lengths_N,
            self.frame,
            fusion_NBV,
            self._model,
            self.state,
            self.steps,
            end,
        )
        # Reading the end would wait for a GPU.
        self.frame = self._am_NTD.size(1) if fusion_NBV is None else int(end)

    def last_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row, (R,): the row that it comes from, the symbol or blank, and whether it is a
        symbol."""
        parent_NB, symbol_NB = (x[:, self.frame - 1] for x in self.steps[:2])
        first_N1 = torch.arange(len(parent_NB))[:, None] * parent_NB.size(1)
        emits_NB = symbol_NB >= 0
        symbol_NB = symbol_NB.masked_fill(~emits_NB, self._model.blank)
        return (first_N1 + parent_NB).flatten(), symbol_NB.flatten(), emits_NB.flatten()
