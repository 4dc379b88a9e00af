"""Tiny models of the transformers library, with random parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pruned_rnnt.model.transformers_model import TransformersConfig

_SAME = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_WAVEFORM: dict[str, Any] = {
    **_SAME,
    "intermediate_size": 24,
    "conv_dim": (8,) * 7,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.2,
}
_WHISPER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 20,
    "max_source_positions": 100,
    "vocab_size": 20,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
}
# Name -> model type and settings. `group` models are as wav2vec2-base, `layer` as wav2vec2-large.
LAYER_NORM = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2-group": ("wav2vec2", _WAVEFORM),
    "wav2vec2-layer": ("wav2vec2", {**_WAVEFORM, **LAYER_NORM}),
    "hubert-group": ("hubert", _WAVEFORM),
    "wavlm-layer": ("wavlm", {**_WAVEFORM, **LAYER_NORM}),
    "whisper": ("whisper", _WHISPER),
}


def library_settings(name: str, **changes: Any) -> Any:
    import transformers

    kind, settings = MODELS[name]
    return transformers.AutoConfig.for_model(kind, **{**settings, **changes})


def tiny_pretrained(name: str, **changes: Any) -> TransformersConfig:
    """Settings of an encoder of width 12 with random parameters."""
    text = library_settings(name).to_json_string(use_diff=True)
    values: dict[str, Any] = {"settings": text, "normalise": name != "whisper", "dim": 12}
    return TransformersConfig(**{**values, **changes})


def saved_model(name: str, folder: Path, **changes: Any) -> Any:
    """Write a tiny model with its preprocessor's settings, as published ones are; returns it."""
    import torch
    import transformers

    torch.manual_seed(1)
    settings = library_settings(name, **changes)
    model = transformers.AutoModel.from_config(settings).eval()
    model.save_pretrained(folder)
    if settings.model_type == "whisper":
        transformers.WhisperFeatureExtractor(settings.num_mel_bins).save_pretrained(folder)
    else:
        transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return model
