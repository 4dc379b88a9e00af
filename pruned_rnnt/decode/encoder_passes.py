"""How the encoder computes in inference: its kernels and CUDA graphs."""

from __future__ import annotations

import logging

import torch

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.model.inference_graphs import InferenceGraphs
from pruned_rnnt.model.kernels.available import kernel_report, set_mode
from pruned_rnnt.model.speech_model import SpeechModel

logger = logging.getLogger(__name__)


def choose_passes(config: DecodeConfig, model: SpeechModel) -> None:
    """Apply the settings of the encoder's passes to this process and a model on its device."""
    choose_kernels(config.fused_kernels, next(model.parameters()).device)
    choose_graphs(config.cuda_graphs, model)


def choose_graphs(mode: str, model: SpeechModel) -> None:
    """Apply `decode.cuda_graphs` to a model."""
    on_gpu = next(model.parameters()).is_cuda
    model.inference_graphs = InferenceGraphs() if mode == "auto" and on_gpu else None


def choose_kernels(mode: str, device: torch.device) -> None:
    """Apply `decode.fused_kernels` to this process; on a GPU, log whether fused kernels run.

    Raises:
        ValueError: the mode is not one of that setting.
    """
    set_mode(mode)
    if device.type == "cuda":
        logger.info(kernel_report(device))
