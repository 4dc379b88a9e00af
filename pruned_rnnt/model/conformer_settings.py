"""Settings that Conformer encoders have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pruned_rnnt.config.checks import check_at_least, check_fractions
from pruned_rnnt.model.encoder import WHOLE, EncoderConfig
from pruned_rnnt.model.feature_norm import FeatureNorm, check_feature_norm

# Left context of a stream, in chunks, for models trained with unlimited left context.
_LEFT_CHUNKS = 4
# Of a stream, in frames, for models trained with whole utterances alone.
_CHUNK = 16


@dataclass(frozen=True, kw_only=True)
class ConformerSettings(EncoderConfig):
    """Sizes and behaviour of an encoder of Conformer layers.

    Its frames are 40 ms in a conformer, and 80 ms in a fastconformer.

    layers: number of Conformer layers.
    dim: width of every layer, a multiple of twice the heads.
    heads: attention heads of every layer.
    feedforward_dim: inner width of the feed-forward modules.
    kernel_size: kernel size of the convolution modules, in frames of 40 ms (fastconformer: 80 ms);
        an odd number.
    subsampling_channels: channels of the convolutions that subsample.
    dropout: probability of dropping a value in training.
    feature_norm: what is done to the features first. `none`: nothing; `fixed`: a constant is
        subtracted; `utterance`: the mean of the utterance; `speech`: a mean in which loud frames
        count most, so that silence around the speech changes nothing; `bins`: each mel bin gets the
        mean 0 and the standard deviation 1 within the utterance.
    chunk_size: for a causal encoder: frames of 40 ms (fastconformer: 80 ms) in a chunk, which
        attend to each other; -1: those of the whole utterance.
    left_chunks: for a causal encoder: earlier chunks that a chunk attends to; null for all.
    chunk_sizes: for a causal encoder: training samples the chunk size of each utterance from these;
        if empty, it is always chunk_size. With -1 among them, one model decodes whole utterances
        (decode.chunk=-1), too.
    random_first_chunk: for a causal encoder: training shortens the first chunk of each utterance by
        a random number of frames, so that chunks end in all places of words. Without it, a model
        learns to guess the first word from a part of it, and makes several times as many errors in
        streams of short chunks.
    smallest_chunk_steps: for a causal encoder with chunk_sizes: so many first steps of training use
        the smallest of the sizes alone. The alignment forms in them: with longer chunks the model
        learns to emit words before their end, which short chunks cannot know. 1500 are a good
        value.
    """

    least_mel_bins: ClassVar[int] = 1

    layers: int = 4
    dim: int = 128
    heads: int = 4
    feedforward_dim: int = 384
    kernel_size: int = 15
    subsampling_channels: int = 16
    dropout: float = 0.1
    feature_norm: FeatureNorm = "fixed"
    chunk_size: int = 16
    left_chunks: int | None = None
    chunk_sizes: tuple[int, ...] = ()
    random_first_chunk: bool = False
    smallest_chunk_steps: int = 0

    def __post_init__(self) -> None:
        sizes = ("layers", "dim", "heads", "feedforward_dim", "kernel_size", "subsampling_channels")
        least = dict.fromkeys(sizes, 1)
        check_at_least("model.encoder", self, num_mel_bins=self.least_mel_bins, **least)
        check_at_least("model.encoder", self, chunk_size=WHOLE, chunk_sizes=WHOLE, left_chunks=0)
        check_at_least("model.encoder", self, smallest_chunk_steps=0)
        if 0 in (self.chunk_size, *self.chunk_sizes):
            raise ValueError(
                "model.encoder has a chunk of 0 frames, chunk_size and chunk_sizes need at least "
                f"1, or {WHOLE} for whole utterances"
            )
        check_fractions("model.encoder", self, "dropout", below_one=True)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"model.encoder.dim is {self.dim}, needs a multiple of 2 * heads = {2 * self.heads}"
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"model.encoder.kernel_size is {self.kernel_size}, needs an odd number"
            )
        check_feature_norm(self.feature_norm, self.causal)

    @property
    def stream_sizes(self) -> tuple[int, int]:
        bounded = [size for size in (self.chunk_size, *self.chunk_sizes) if size != WHOLE]
        chunk = bounded[0] if bounded else _CHUNK
        chunks = _LEFT_CHUNKS if self.left_chunks is None else self.left_chunks
        return chunk, chunks * chunk
