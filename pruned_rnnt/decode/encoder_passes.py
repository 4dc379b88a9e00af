"""How the encoder computes in inference: kernels, compiled before the first batch, and graphs."""

from __future__ import annotations

import logging

import torch

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import compute_dtype
from pruned_rnnt.model.encoder import WHOLE, Encoder
from pruned_rnnt.model.inference_graphs import InferenceGraphs
from pruned_rnnt.model.kernels.available import kernel_report, set_mode, use_kernels
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.switched_kernels import GRAPHS, why_switched

logger = logging.getLogger(__name__)

# Feature frames of passes that show which kernels are needed: those over rows of attention have
# block sizes for each power of two. The second one is for a first start.
_USUAL_FRAMES, _LONG_FRAMES = 1600, 3200


def choose_passes(config: DecodeConfig, model: SpeechModel) -> None:
    """Apply the settings of the encoder's passes to this process and a model on its device."""
    device = next(model.parameters()).device
    choose_kernels(config.fused_kernels, device)
    choose_graphs(config.cuda_graphs, model)
    compile_kernels(model.encoder, compute_dtype(config.precision, device))


def choose_graphs(mode: str, model: SpeechModel) -> None:
    """Apply `decode.cuda_graphs` to a model."""
    fits = next(model.parameters()).is_cuda and model.encoder.can_be_captured
    wanted = mode == "auto" and fits and not why_switched(GRAPHS, "cuda")
    model.inference_graphs = InferenceGraphs() if wanted else None


def choose_kernels(mode: str, device: torch.device) -> None:
    """Apply `decode.fused_kernels` to this process; on a GPU, log whether fused kernels run.

    Raises:
        ValueError: the mode is not one of that setting.
    """
    set_mode(mode)
    if device.type == "cuda":
        logger.info(kernel_report(device))


@torch.inference_mode()
def compile_kernels(encoder: Encoder, dtype: torch.dtype) -> None:
    """Compile or load the fused kernels of an encoder together, and log how long it took.

    Args:
        dtype: of matrix products.
    """
    parameter = next(encoder.parameters())
    if not (parameter.is_cuda and use_kernels(parameter)):
        return
    from pruned_rnnt.model.kernels.variants import compiled_together, counts

    device, was_training = parameter.device, encoder.training
    encoder.eval()
    with (
        compiled_together(device),
        torch.autocast("cuda", dtype, enabled=dtype != torch.float32),
    ):
        for frames in (_USUAL_FRAMES, _LONG_FRAMES):
            features_NTF = torch.zeros((2, frames, encoder.config.num_mel_bins), device=device)
            encoder(features_NTF, torch.full((2,), frames))
            if not counts.compiled:
                break
    encoder.train(was_training)


def set_chunks(model: SpeechModel, config: DecodeConfig) -> None:
    """Set chunk and left context of a causal encoder to decode.chunk and decode.left, if given.

    Raises:
        ValueError: the encoder is not causal, or does not support these sizes.
    """
    if not (config.chunk or config.left):
        return
    model.encoder.check_causal()
    trained_chunk, trained_left = model.encoder.config.stream_sizes
    chunk = config.chunk or trained_chunk
    # Rounded up to whole chunks.
    left = config.left or -(-trained_left // chunk) * chunk
    try:
        model.encoder.set_chunks(chunk, 0 if chunk == WHOLE else left)
    except ValueError as error:
        raise ValueError(f"decode.chunk and decode.left: {error}") from error
