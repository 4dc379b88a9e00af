"""Encoder output for searches: precision, fused kernels, which are compiled before the first batch,
and CUDA graphs.

Axes: N batch, T feature frames or encoder frames, F features, E encoder width.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.decode.decode_config import DecodeConfig, Precision
from pruned_rnnt.model.encoder import WHOLE, Encoder
from pruned_rnnt.model.inference_graphs import InferenceGraphs
from pruned_rnnt.model.kernels.available import kernel_report, set_mode, use_kernels
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.switched_kernels import GRAPHS, why_switched

logger = logging.getLogger(__name__)

# Feature frames of passes that show which kernels are needed: those over rows of attention have
# block sizes for each power of two. The second one is for a first start.
_USUAL_FRAMES, _LONG_FRAMES = 1600, 3200


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype that a precision names; `auto`: bfloat16 on GPUs that have it, else float32."""
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    return torch.bfloat16 if _has_bfloat16(device) else torch.float32


@cache
def _has_bfloat16(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


@torch.inference_mode()
def encode_padded(
    model: SpeechModel, features_NTF: Tensor, lengths: Tensor, precision: Precision = "float32"
) -> tuple[Tensor, Tensor]:
    """Encoder output (N, T, E) float32 and its lengths (N,).

    Args:
        model: in evaluation mode.
        features_NTF: float32, on any device.
        lengths: (N,) integer feature frames, preferably on the CPU.
        precision: dtype of matrix products and convolutions; see `compute_dtype`.
    """
    parameter = next(model.parameters())
    device = parameter.device
    dtype = compute_dtype(precision, device)
    # Fused kernels and CUDA graphs need the model's device to be the current one.
    with (
        torch.cuda.device_of(parameter),
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    ):
        encoded_NTE, frames = model.encode(features_NTF.to(device), lengths)
    return encoded_NTE.float(), frames


def encode_batch(
    model: SpeechModel, batch: Batch, precision: Precision = "float32"
) -> tuple[Tensor, Tensor]:
    """`encode_padded` for the features of a batch."""
    batch = batch.to(next(model.parameters()).device)
    return encode_padded(model, batch.features_NTF, batch.feature_lengths_N, precision)


def choose_passes(config: DecodeConfig, model: SpeechModel) -> None:
    """Apply the settings of the encoder's passes to this process and a model on its device."""
    parameter = next(model.parameters())
    with torch.cuda.device_of(parameter):
        choose_kernels(config.fused_kernels, parameter.device)
        choose_graphs(config.cuda_graphs, model)
        _compile_kernels(model.encoder, compute_dtype(config.precision, parameter.device))


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
def _compile_kernels(encoder: Encoder, dtype: torch.dtype) -> None:
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
