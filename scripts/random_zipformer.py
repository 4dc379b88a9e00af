"""Zipformer transducers with random parameters, for measurements of speed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pruned_rnnt.decode.search.states import start_predictor
from pruned_rnnt.model.model_config import ModelConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer.config import SIZES as PAPER_SIZES
from pruned_rnnt.model.zipformer.config import zipformer_config

# The paper's, and one of 290 million parameters.
SIZES = {
    **PAPER_SIZES,
    "xlarge": zipformer_config(
        "large",
        dims=(256, 384, 704, 1088, 704, 384),
        feedforward_dims=(768, 1152, 2176, 2880, 2176, 1152),
    ),
}
_EMITTING_FRAMES = 0.2


@torch.no_grad()
def random_model(
    size: str,
    vocab_size: int,
    features_NTF: Tensor | None = None,
    emitting_frames: float = _EMITTING_FRAMES,
    *,
    causal: bool = False,
) -> TransducerModel:
    """A Zipformer transducer with random parameters that emits a symbol now and then.

    Args:
        size: one of `SIZES`.
        features_NTF: one utterance, in which the fraction `emitting_frames` of frames emits a
            symbol; default: noise.
    """
    torch.manual_seed(0)
    encoder = replace(SIZES[size], causal=causal)
    config = ModelConfig(encoder=encoder, predictor=PredictorConfig(dim=512), joiner_dim=512)
    model = TransducerModel(config, vocab_size).eval()
    # Clear decisions, as trained models make.
    model.joiner.encoder_proj.weight *= 10
    model.joiner.output_linear.weight *= 10
    if features_NTF is None:
        features_NTF = torch.randn(1, 1000, 80)
    encoded_NTE, _ = model.encode(features_NTF, torch.tensor([features_NTF.size(1)]))
    lm_ND, *_ = start_predictor(model, 1, encoded_NTE.device)
    logits_TV = model.joiner(model.joiner.encoder_proj(encoded_NTE[0]), lm_ND)
    lead_T = logits_TV[:, 1:].amax(dim=1) - logits_TV[:, 0]
    model.joiner.output_linear.bias[0] += lead_T.quantile(1 - emitting_frames)
    return model
