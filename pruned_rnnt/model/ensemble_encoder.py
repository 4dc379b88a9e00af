"""The encoders of an ensemble: every one reads the same features, and their outputs follow each
other along the width.

Axes: N batch, T feature frames, T' encoder frames, F features, E width of all outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pruned_rnnt.model.encoder import Encoder, EncoderConfig


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(EncoderConfig):
    """The encoders of the runs that `pruned-rnnt ensemble` joined; they are not trained further.

    kind: ensemble
    members: the settings of each encoder, with its `kind`.
    """

    kind: str = "ensemble"
    members: tuple[Any, ...] = ()


class EnsembleEncoder(Encoder):
    """Encoders of one rate; `forward` as that of any encoder.

    The last frame is that of the encoder that needs the most features.

    An ensemble does not stream: a causal member has the chunks of its own configuration.
    """

    def __init__(self, config: EnsembleConfig, members: Sequence[Encoder]) -> None:
        super().__init__(config, chunking=(None, None))
        self.members = nn.ModuleList(members)
        self.subsampling_factor = members[0].subsampling_factor
        self.receptive_field = max(member.receptive_field for member in members)
        self._output_dim = sum(member.output_dim for member in members)
        self.can_be_captured = all(member.can_be_captured for member in members)

    @property
    def output_dim(self) -> int:
        return self._output_dim

    def output_lengths(self, feature_lengths: Tensor) -> Tensor:
        lengths = [member.output_lengths(feature_lengths) for member in self.members]  # type: ignore[operator]
        return torch.stack(lengths).amin(dim=0)

    def forward(self, features_NTF: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [member(features_NTF, feature_lengths)[0] for member in self.members]
        frames = min(output_NTE.size(1) for output_NTE in outputs)
        encoded_NTE = torch.cat([output_NTE[:, :frames] for output_NTE in outputs], dim=-1)
        return encoded_NTE, self.output_lengths(feature_lengths)

    def check_trainable(self) -> NoReturn:
        raise ValueError(
            "model.encoder.kind is ensemble, which is not trained: train its members, and join "
            "their runs again with `pruned-rnnt ensemble`"
        )

    def check_causal(self) -> NoReturn:
        raise ValueError(
            "the model is an ensemble, which cannot stream and has no chunks: use one of the runs "
            "that it was made of"
        )


def has_encoder(encoder: Encoder, *classes: type[Encoder]) -> bool:
    """Whether an encoder, or a member of an ensemble, is of one of these classes."""
    members = encoder.members if isinstance(encoder, EnsembleEncoder) else [encoder]
    return any(isinstance(member, classes) for member in members)
