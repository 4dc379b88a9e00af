"""Encoders of the transformers library on frames of samples: wav2vec 2.0, HuBERT, WavLM, Whisper.

    rows of 160 samples -> samples -> the library's module, 20 ms -> pairs of frames -> (40 ms)

The library's module gets an attention mask, and what it computes beyond the end of an utterance
changes nothing within: the output of an utterance is that of the module for the utterance alone.

Axes: N batch, T feature frames (10 ms), S samples, L frames of the module (20 ms), H its width,
F mel bins, B bins of the spectrum, E encoder width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.linear import Linear
from pruned_rnnt.model.transformers_model import (
    SAMPLES_PER_FRAME,
    SAMPLING_RATE,
    WHISPER,
    TransformersConfig,
    library_config,
    load_pretrained,
    random_network,
)

_VARIANCE_FLOOR = 1e-7  # of the library's Wav2Vec2FeatureExtractor
# Of Whisper's log-mel energies. Those further below the loudest one of the utterance than the
# range, in powers of 10, are raised to this.
_SPECTRUM, _LEAST_ENERGY, _RANGE = 400, 1e-10, 8.0


class MaskedGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` with one channel a group, whose means are over the valid frames.

    The first convolution of some wav2vec 2.0 models (`feat_extract_norm: group`) is normalised over
    the whole utterance. torch's norm counts padding, so that the output of an utterance depends on
    the batch that it is in. The parameters are those of the module that this one replaces.

    Attributes:
        lengths_N: valid frames of the next call; None if all are valid.
    """

    lengths_N: Tensor | None = None

    @classmethod
    def like(cls, norm: nn.GroupNorm) -> MaskedGroupNorm:
        made = cls(norm.num_groups, norm.num_channels, norm.eps, norm.affine)
        assert norm.num_groups == norm.num_channels
        made.load_state_dict(norm.state_dict())
        return made

    def forward(self, x_NCL: Tensor) -> Tensor:
        if self.lengths_N is None:
            return super().forward(x_NCL)
        lengths_N11 = self.lengths_N[:, None, None]
        valid_N1L = torch.arange(x_NCL.size(2), device=x_NCL.device) < lengths_N11
        counts_N11 = lengths_N11.clamp(min=1)
        wide_NCL = x_NCL.float()
        mean_NC1 = wide_NCL.masked_fill(~valid_N1L, 0).sum(2, keepdim=True) / counts_N11
        centred_NCL = (wide_NCL - mean_NC1).masked_fill(~valid_N1L, 0)
        variance_NC1 = centred_NCL.square().sum(2, keepdim=True) / counts_N11
        normed_NCL = centred_NCL * (variance_NC1 + self.eps).rsqrt()
        scaled_NCL = normed_NCL * self.weight[:, None] + self.bias[:, None]
        return scaled_NCL.to(x_NCL.dtype)


class TransformersEncoder(Encoder):
    """Base class: joins the frames of a module of the library, and projects them.

    Args:
        width: H.
        samples: of a frame of the module, from one to the next.
        first_samples: that its first frame needs.

    Attributes:
        network: the library's module.
    """

    config: TransformersConfig

    def __init__(
        self, config: TransformersConfig, width: int, samples: int, first_samples: int
    ) -> None:
        super().__init__(config, chunking=(None, None))
        frame = self.subsampling_factor * SAMPLES_PER_FRAME
        if frame % samples:
            raise ValueError(
                f"model.encoder.settings have a frame every {samples} samples, which does not "
                f"divide the {frame} samples of a frame of this package"
            )
        self.joined = frame // samples
        needed = first_samples + (self.joined - 1) * samples
        self.receptive_field = math.ceil(needed / SAMPLES_PER_FRAME)
        self.network = random_network(config)
        self.projection = Linear(self.joined * width, config.dim)

    def freeze(self) -> None:
        """Exclude the parameters that `frozen` names from training."""
        if self.config.frozen == "all":
            self.network.requires_grad_(False)
        elif self.config.frozen == "convolutions":
            for module in self.convolutions():
                module.requires_grad_(False)

    def convolutions(self) -> list[nn.Module]:
        """The modules below the transformer's layers."""
        raise NotImplementedError

    @property
    def output_dim(self) -> int:
        return self.config.dim

    def train(self, mode: bool = True) -> TransformersEncoder:
        super().train(mode)
        if self.config.frozen == "all":
            self.network.eval()
        return self

    def load_pretrained(self) -> None:
        """Load the parameters of `name_or_folder`; raises as the function `load_pretrained`."""
        load_pretrained(self.network, self.config)

    def forward(self, features_NTF: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """See `Encoder`; a feature frame is a row of 160 samples.

        Raises:
            ValueError: the features are not (N, T, 160), or the longest utterance is shorter than
                one encoder frame, or longer than Whisper's window.
        """
        self._check_features(features_NTF)
        frames = features_NTF.size(1)
        frames_N = feature_lengths.to(features_NTF.device)
        valid_NT1 = (torch.arange(frames, device=frames_N.device) < frames_N[:, None])[..., None]
        samples_NS = features_NTF.float().masked_fill(~valid_NT1, 0.0).flatten(1)
        without_gradient: AbstractContextManager[Any] = (
            torch.no_grad() if self.config.frozen == "all" else nullcontext()
        )
        with without_gradient:
            hidden_NLH = self._hidden(samples_NS, frames_N)
        count = (frames - self.receptive_field) // self.subsampling_factor + 1
        pairs_NTE = hidden_NLH[:, : count * self.joined].unflatten(1, (count, self.joined))
        encoded_NTE: Tensor = self.projection(pairs_NTE.flatten(2))
        return encoded_NTE, self.output_lengths(feature_lengths)

    def _hidden(self, samples_NS: Tensor, frames_N: Tensor) -> Tensor:
        """(N, L, H) of samples that are zeros beyond the (N,) feature frames."""
        raise NotImplementedError


class WaveformEncoder(TransformersEncoder):
    """wav2vec 2.0, HuBERT or WavLM.

    In training, the module masks spans of frames as its settings say (mask_time_prob,
    mask_feature_prob), in place of SpecAugment.
    """

    def __init__(self, config: TransformersConfig) -> None:
        settings = library_config(config)
        stride, field = 1, 1
        for kernel, step in zip(settings.conv_kernel, settings.conv_stride, strict=True):
            field += (kernel - 1) * stride
            stride *= step
        super().__init__(config, settings.hidden_size, stride, field)
        self._first_samples = field
        extractor: Any = self.network.feature_extractor
        # Otherwise the library asks for gradients of the samples.
        extractor._requires_grad = False
        if settings.feat_extract_norm == "group":
            first = extractor.conv_layers[0]
            first.layer_norm = MaskedGroupNorm.like(first.layer_norm)
        self.freeze()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # Earlier versions saved the group norm a second time under this name.
        for name in ("weight", "bias"):
            state_dict.pop(f"{prefix}_norm.{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def convolutions(self) -> list[nn.Module]:
        extractor: Any = self.network.feature_extractor
        return [extractor]

    def _hidden(self, samples_NS: Tensor, frames_N: Tensor) -> Tensor:
        # An utterance that is too short for a frame has no output; the mask must not be empty.
        lengths_N = (frames_N * SAMPLES_PER_FRAME).clamp(min=self._first_samples)
        places_S = torch.arange(samples_NS.size(1), device=samples_NS.device)
        valid_NS = places_S < lengths_N[:, None]
        if self.config.normalise:
            samples_NS = _normalised(samples_NS, valid_NS)
        network: Any = self.network
        settings = network.config
        norm = getattr(network.feature_extractor.conv_layers[0], "layer_norm", None)
        if isinstance(norm, MaskedGroupNorm):
            kernel, stride = settings.conv_kernel[0], settings.conv_stride[0]
            norm.lengths_N = (lengths_N - kernel) // stride + 1
        masked: Tensor | None = None
        if network.training:
            frames = int(network._get_feat_extract_output_lengths(samples_NS.size(1)))
            if frames <= settings.mask_time_length:
                # The library refuses to mask batches that are shorter than a mask.
                shape = (len(samples_NS), frames)
                masked = torch.zeros(shape, dtype=torch.bool, device=samples_NS.device)
        result = network(samples_NS, attention_mask=valid_NS.long(), mask_time_indices=masked)
        hidden_NLH: Tensor = result.last_hidden_state
        return hidden_NLH


class WhisperEncoder(TransformersEncoder):
    """Whisper's encoder, on the length of the batch instead of windows of 30 s.

    The module of the library computes windows of 30 s, most of which is silence for usual
    utterances. Here its layers compute the frames of the batch, with the first positions; frames
    beyond an utterance are zeros to the convolutions and no keys of attention. An utterance as long
    as the window gives what the library's module gives. A shorter one gives what that module gives
    with as many positions (`max_source_positions`); its layers do not see the silence which
    Whisper's own training had behind each utterance, so at least some layers should be trained.
    """

    def __init__(self, config: TransformersConfig) -> None:
        settings = library_config(config)
        super().__init__(config, settings.d_model, 2 * SAMPLES_PER_FRAME, SAMPLES_PER_FRAME)
        self.freeze()

    def convolutions(self) -> list[nn.Module]:
        network: Any = self.network
        return [network.conv1, network.conv2]

    def _hidden(self, samples_NS: Tensor, frames_N: Tensor) -> Tensor:
        network: Any = self.network
        settings = network.config
        frames = samples_NS.size(1) // SAMPLES_PER_FRAME
        most = 2 * settings.max_source_positions
        if frames > most:
            raise ValueError(
                f"an utterance of {frames / 100:.2f} s is longer than the {most / 100:.2f} s of "
                "the positions of this Whisper model: leave longer ones out with "
                f"data.filters.max_duration={most / 100:g}, or cut them"
            )
        with torch.autocast(samples_NS.device.type, enabled=False):
            features_NFT = whisper_features(samples_NS, frames_N, settings.num_mel_bins)
        gelu: Callable[[Tensor], Tensor] = nn.functional.gelu
        x_NHT = gelu(network.conv1(features_NFT))
        beyond_NT = torch.arange(frames, device=frames_N.device) >= frames_N[:, None]
        x_NHT = x_NHT.masked_fill(beyond_NT[:, None], 0.0)
        x_NLH = gelu(network.conv2(x_NHT)).transpose(1, 2)
        count = x_NLH.size(1)
        x_NLH = x_NLH + network.embed_positions.weight[:count]
        x_NLH = nn.functional.dropout(x_NLH, settings.dropout, network.training)
        lengths_N = ((frames_N + 1) // 2).clamp(min=1)
        valid_NL = torch.arange(count, device=frames_N.device) < lengths_N[:, None]
        # True where attention looks; the library passes it to scaled_dot_product_attention.
        mask_N1LL = valid_NL[:, None, None, :].expand(-1, 1, count, -1)
        for layer in network.layers:
            drops = network.training and settings.encoder_layerdrop > 0
            if drops and float(torch.rand([])) < settings.encoder_layerdrop:
                continue
            x_NLH = layer(x_NLH, mask_N1LL)
        normed_NLH: Tensor = network.layer_norm(x_NLH)
        return normed_NLH


def _normalised(samples_NS: Tensor, valid_NS: Tensor) -> Tensor:
    """Samples with mean 0 and variance 1 over the valid ones, zeros beyond them."""
    counts_N1 = valid_NS.sum(1, keepdim=True)
    mean_N1 = samples_NS.sum(1, keepdim=True) / counts_N1
    centred_NS = (samples_NS - mean_N1).masked_fill(~valid_NS, 0.0)
    variance_N1 = centred_NS.square().sum(1, keepdim=True) / counts_N1
    return centred_NS * (variance_N1 + _VARIANCE_FLOOR).rsqrt()


def build_transformers_encoder(config: TransformersConfig) -> TransformersEncoder:
    """The encoder of a model type, with random parameters; errors are those of `library_config`."""
    if library_config(config).model_type == WHISPER:
        return WhisperEncoder(config)
    return WaveformEncoder(config)


def whisper_features(samples_NS: Tensor, frames_N: Tensor, num_mel_bins: int) -> Tensor:
    """Whisper's log-mel energies of N utterances, computed on the device of the samples.

    They equal those of transformers' WhisperFeatureExtractor.

    The extractor gets each utterance padded with silence to its window of 30 s; these are the
    frames up to the end of the utterance.

    Args:
        samples_NS: float32, zeros beyond the utterances; S = 160 T >= 320.
        frames_N: frames of each utterance, on the same device.

    Returns:
        (N, F, T) float32, zeros beyond the lengths.
    """
    edge = _SPECTRUM // 2
    begin_NS = samples_NS[:, 1 : edge + 1].flip(1)
    padded_NS = torch.cat((begin_NS, nn.functional.pad(samples_NS, (0, edge))), dim=1)
    window_S, filters_FB = _constants(samples_NS.device, num_mel_bins)
    spectrum_NBT = torch.stft(
        padded_NS,
        _SPECTRUM,
        SAMPLES_PER_FRAME,
        window=window_S,
        center=False,
        return_complex=True,
    )[..., : samples_NS.size(1) // SAMPLES_PER_FRAME]
    energies_NFT = filters_FB @ torch.view_as_real(spectrum_NBT).square().sum(-1)
    logs_NFT = energies_NFT.clamp(min=_LEAST_ENERGY).log10()
    frames_T = torch.arange(logs_NFT.size(2), device=logs_NFT.device)
    beyond_N1T = (frames_T >= frames_N[:, None])[:, None]
    loudest_N11 = logs_NFT.masked_fill(beyond_N1T, -torch.inf).amax((1, 2), keepdim=True)
    logs_NFT = torch.maximum(logs_NFT, loudest_N11 - _RANGE)
    return ((logs_NFT + 4.0) / 4.0).masked_fill(beyond_N1T, 0.0)


@cache
def _constants(device: torch.device, num_mel_bins: int) -> tuple[Tensor, Tensor]:
    """The window and the mel filters (F, B)."""
    from transformers.audio_utils import mel_filter_bank

    filters_BF = mel_filter_bank(
        num_frequency_bins=_SPECTRUM // 2 + 1,
        num_mel_filters=num_mel_bins,
        min_frequency=0.0,
        max_frequency=SAMPLING_RATE / 2,
        sampling_rate=SAMPLING_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    filters_FB = torch.from_numpy(np.ascontiguousarray(filters_BF.T, dtype=np.float32))
    with torch.inference_mode(False):  # the tensors outlive the mode of their first user
        return torch.hann_window(_SPECTRUM, device=device), filters_FB.to(device)
