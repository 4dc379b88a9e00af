"""Sizes and behaviour of a Zipformer, and the three sizes of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pruned_rnnt.config.checks import check_at_least, check_fractions
from pruned_rnnt.model.encoder import WHOLE, EncoderConfig
from pruned_rnnt.model.feature_norm import FeatureNorm, check_feature_norm

# Frames of the embedding (20 ms) become encoder frames (40 ms) at the end.
OUTPUT_RATE = 2
# Warm-up steps of the paper's recipe; all schedules are written for them.
REFERENCE_WARM_UP = 4000


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes of the layers of one stack; see `ZipformerConfig`."""

    dim: int
    feedforward_dim: int
    heads: int
    kernel_size: int
    query_head_dim: int
    value_head_dim: int
    position_head_dim: int
    position_dim: int


@dataclass(frozen=True, kw_only=True)
class ZipformerConfig(EncoderConfig):
    """Settings of a Zipformer. Lists have one entry per stack; `size` fills in empty ones.

    size: small, medium and large are those of the paper (23, 65, 148 million parameters).
    downsampling: factor of each stack, relative to the 20 ms frames of the embedding.
    layers: number of layers of each stack.
    dims: width of each stack; multiples of 4.
    feedforward_dims: inner width of the feed-forward modules of each stack.
    heads: attention heads of each stack.
    kernel_sizes: kernel size of the convolution modules of each stack, in frames of the stack; odd.
    query_head_dim, value_head_dim, position_head_dim: widths of each attention head for queries and
        keys, for values, and for positions.
    position_dim: width of the encodings of relative positions; an even number.
    unmasked_dims: channels of each stack that training never masks.
    warm_up_steps: number of steps (of ten minutes of audio each) over which the layers are phased
        in, stack by stack. All other schedules (dropout, skips, balancers, bypasses) scale with
        it; they take up to five times as long, a few of them longer.
    dropout_scale: 0 to 1, a factor on all dropout rates: of channels, positions, branches and
        layers. Use less than 1 for a small model with little data.
    feature_norm: value that is subtracted from the features first: nothing (`none`, as icefall's
        models expect), a constant (`fixed`), the utterance's mean (`utterance`), or a mean in which
        loud frames count most, so that silence around the speech changes nothing (`speech`). With
        `none`, the layers must learn to remove the mean of all frames, which takes longer with less
        data.

    chunk_sizes, left_contexts: of a causal encoder, in frames of 20 ms: training samples the chunk
        size and the left context from these lists for each batch (-1: the whole utterance, all of
        the past). If a list is empty, training has chunk_size, or left_context.
    chunk_size, left_context: of a causal encoder, in frames of 20 ms: the values for validation,
        and for decoding if decode.chunk and decode.left are 0. Left contexts are rounded down to
        whole chunks, and are one chunk at least.
    """

    kind: Literal["zipformer"] = "zipformer"
    size: Literal["small", "medium", "large"] = "medium"
    downsampling: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    unmasked_dims: tuple[int, ...] = ()
    feedforward_dims: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    kernel_sizes: tuple[int, ...] = ()
    query_head_dim: int = 32
    value_head_dim: int = 12
    position_head_dim: int = 4
    position_dim: int = 48
    warm_up_steps: int = REFERENCE_WARM_UP
    dropout_scale: float = 1.0
    feature_norm: FeatureNorm = "none"
    chunk_sizes: tuple[int, ...] = (16, 32, 64, WHOLE)
    left_contexts: tuple[int, ...] = (64, 128, 256, WHOLE)
    chunk_size: int = 32
    left_context: int = 128

    def __post_init__(self) -> None:
        if self.size not in _BY_SIZE:
            raise ValueError(
                f"model.encoder.size is {self.size!r}, needs one of {', '.join(_BY_SIZE)}"
            )
        for name, values in (_COMMON | _BY_SIZE[self.size]).items():
            if not getattr(self, name):
                object.__setattr__(self, name, values)
        stacks = len(self.downsampling)
        for name in (*_COMMON, *_BY_SIZE[self.size]):
            if len(getattr(self, name)) != stacks:
                raise ValueError(
                    f"model.encoder.{name} has {len(getattr(self, name))} entries, needs one for "
                    f"each of the {stacks} stacks of model.encoder.downsampling"
                )
        if self.num_mel_bins < 11:
            raise ValueError(
                f"model.encoder.num_mel_bins is {self.num_mel_bins}, needs at least 11"
            )
        sizes = (*_COMMON, *_BY_SIZE[self.size], "query_head_dim", "value_head_dim")
        check_at_least("model.encoder", self, **dict.fromkeys(sizes, 1))
        check_at_least("model.encoder", self, position_head_dim=1, position_dim=2)
        if any(size % 2 == 0 for size in self.kernel_sizes):
            raise ValueError(
                f"model.encoder.kernel_sizes is {self.kernel_sizes}, needs odd numbers"
            )
        if any(dim % 4 for dim in self.dims):
            raise ValueError(f"model.encoder.dims is {self.dims}, needs multiples of 4")
        if self.position_dim % 2:
            raise ValueError(
                f"model.encoder.position_dim is {self.position_dim}, needs an even number"
            )
        check_at_least(
            "model.encoder", self, warm_up_steps=1, left_contexts=WHOLE, left_context=WHOLE
        )
        check_fractions("model.encoder", self, "dropout_scale")
        check_feature_norm(self.feature_norm, self.causal)
        if self.causal:
            for size in (*self.chunk_sizes, self.chunk_size):
                self.check_chunk_size(size)

    def check_chunk_size(self, size: int) -> None:
        """Raises ValueError if a chunk is not a whole number of frames of every stack."""
        if size != WHOLE and (size < 1 or size % self.common_rate):
            raise ValueError(
                f"chunk size is {size}, needs a multiple of {self.common_rate} (every rate of "
                f"model.encoder.downsampling), or {WHOLE} for whole utterances: see "
                "model.encoder.chunk_sizes and chunk_size, or decode.chunk"
            )

    @property
    def common_rate(self) -> int:
        """The fewest frames of 20 ms that make whole frames of every stack and of the output."""
        return math.lcm(OUTPUT_RATE, *self.downsampling)

    @property
    def output_dim(self) -> int:
        return max(self.dims)

    @property
    def stream_sizes(self) -> tuple[int, int]:
        bounded = [size for size in (self.chunk_size, *self.chunk_sizes) if size != WHOLE]
        chunk = bounded[0] if bounded else 4 * self.common_rate
        left = 4 if self.left_context == WHOLE else self.left_chunks(chunk, self.left_context)
        return chunk // OUTPUT_RATE, left * chunk // OUTPUT_RATE

    @staticmethod
    def left_chunks(chunk_size: int, left_context: int) -> int:
        """Chunks of the past in attention, for a bounded left context."""
        return max(left_context // chunk_size, 1)

    def stack(self, index: int) -> StackConfig:
        return StackConfig(
            dim=self.dims[index],
            feedforward_dim=self.feedforward_dims[index],
            heads=self.heads[index],
            kernel_size=self.kernel_sizes[index],
            query_head_dim=self.query_head_dim,
            value_head_dim=self.value_head_dim,
            position_head_dim=self.position_head_dim,
            position_dim=self.position_dim,
        )


_COMMON: dict[str, tuple[int, ...]] = {
    "downsampling": (1, 2, 4, 8, 4, 2),
    "heads": (4, 4, 4, 8, 4, 4),
    "kernel_sizes": (31, 31, 15, 15, 15, 31),
}
_BY_SIZE: dict[str, dict[str, tuple[int, ...]]] = {
    "small": {
        "layers": (2, 2, 2, 2, 2, 2),
        "dims": (192, 256, 256, 256, 256, 256),
        "unmasked_dims": (192, 192, 192, 192, 192, 192),
        "feedforward_dims": (512, 768, 768, 768, 768, 768),
    },
    "medium": {
        "layers": (2, 2, 3, 4, 3, 2),
        "dims": (192, 256, 384, 512, 384, 256),
        "unmasked_dims": (192, 192, 256, 256, 256, 192),
        "feedforward_dims": (512, 768, 1024, 1536, 1024, 768),
    },
    "large": {
        "layers": (2, 2, 4, 5, 4, 2),
        "dims": (192, 256, 512, 768, 512, 256),
        "unmasked_dims": (192, 192, 256, 320, 256, 192),
        "feedforward_dims": (512, 768, 1536, 2048, 1536, 768),
    },
}
SMALL = ZipformerConfig(size="small")
MEDIUM = ZipformerConfig(size="medium")
LARGE = ZipformerConfig(size="large")
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}


def zipformer_config(size: str, **changes: Any) -> ZipformerConfig:
    """The configuration of a size of the paper (23, 65, 148 million parameters), with changes.

    Raises:
        ValueError: `size` is not `small`, `medium` or `large`.
    """
    return ZipformerConfig(size=size, **changes)  # type: ignore[arg-type]
