"""A tiny Parakeet model of transformers, RNN-T or TDT, and a batch for it."""

from typing import Any

import torch
from torch import Tensor

BLANK, PADDING, WIDTH = 8, 2, 12
LABELS = torch.tensor([[1, 3, 4], [5, BLANK, BLANK]])  # padded with the blank


def tiny_parakeet(kind: Any, config: Any, **encoder: float) -> Any:
    """A model of the class `kind`.

    config: its class of configurations. encoder: further settings of the encoder.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
    }
    return kind(
        config(
            vocab_size=BLANK + 1,
            blank_token_id=BLANK,
            pad_token_id=PADDING,
            decoder_hidden_size=WIDTH,
            num_decoder_layers=1,
            encoder_config={**sizes, **encoder},
        )
    )


def batch(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 60:] = 0
    features = torch.randn(2, 80, 16, generator=torch.Generator().manual_seed(1))
    # RNN-T and TDT models count labels by different ids of padding.
    is_tdt = hasattr(model.config, "durations")
    return {
        "input_features": features.to(dtype),
        "attention_mask": mask,
        "labels": LABELS.where(LABELS != BLANK, PADDING if is_tdt else BLANK),
        "decoder_input_ids": torch.cat([torch.full((2, 1), BLANK), LABELS], 1),
    }
