"""Streams of digital silence, whose encoder need not run: nothing would change.

The output of an encoder depends on its state and its input. After enough digital silence, such as a
muted microphone, a chunk of it leaves the state as it was, so that each further chunk of it has the
same output, too. Equal are numbers that differ by rounding in float32, which depends on the streams
that are encoded together. The search goes on: its scores change with every frame.

Axes: N streams, T feature frames of a chunk, F mel bins, C encoder frames of a chunk, E encoder
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.states import Rows, take_rows
from pruned_rnnt.decode.search.streaming import StreamDecoder

# Differences by rounding, relative to the largest number of a stream's tensor. In float32, those of
# a Zipformer stay below 4 units for ever.
_ROUNDING = 16 * torch.finfo(torch.float32).eps


class _Settled(NamedTuple):
    """output_CE: of a chunk of silence. advance: what it adds to each tensor of integers."""

    output_CE: Tensor
    advance: tuple[Tensor, ...]


class IdleStreams:
    """Encodes chunks of streams, but of each that has settled in silence only the first ones."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self._decoder = decoder
        self._settled: dict[int, _Settled] = {}

    def forget(self, slot: int) -> None:
        """Another stream has this slot now, or the stream has sound again."""
        self._settled.pop(slot, None)

    def encode(
        self,
        features_NTF: Tensor,
        state: Rows,
        lengths: Tensor | None,
        *,
        slots: Sequence[int],
        is_silent: Sequence[bool],
    ) -> tuple[Tensor, Rows]:
        """As `StreamDecoder.encode`; is_silent: streams with a whole chunk of digital silence."""
        for slot, silent in zip(slots, is_silent, strict=True):
            if not silent:
                self.forget(slot)
        idle = [n for n, slot in enumerate(slots) if slot in self._settled]
        if not idle:
            encoded_NCE, after = self._decoder.encode(features_NTF, state, lengths)
            self._notice(slots, is_silent, encoded_NCE, state, after)
            return encoded_NCE, after
        settled = [self._settled[slots[n]] for n in idle]
        idle_N = torch.tensor(idle, device=features_NTF.device)
        after = take_rows(state, idle_N)
        advances = zip(*(each.advance for each in settled), strict=True)
        after = tuple(
            x if x.is_floating_point() else x + torch.stack(next(advances)) for x in after
        )
        encoded_NCE = torch.stack([each.output_CE for each in settled])
        busy = [n for n, slot in enumerate(slots) if slot not in self._settled]
        if not busy:
            return encoded_NCE, after
        busy_N = torch.tensor(busy, device=features_NTF.device)
        before = take_rows(state, busy_N)
        own_lengths = None if lengths is None else lengths[busy]
        own_NCE, own_after = self._decoder.encode(features_NTF[busy_N], before, own_lengths)
        own_slots, own_silent = [slots[n] for n in busy], [is_silent[n] for n in busy]
        self._notice(own_slots, own_silent, own_NCE, before, own_after)
        places_N = torch.cat((idle_N, busy_N)).argsort()
        joined = tuple(
            torch.cat((one, other.to(one.dtype)))[places_N]
            for one, other in zip((encoded_NCE, *after), (own_NCE, *own_after), strict=True)
        )
        return joined[0], joined[1:]

    def _notice(
        self,
        slots: Sequence[int],
        is_silent: Sequence[bool],
        encoded_NCE: Tensor,
        before: Rows,
        after: Rows,
    ) -> None:
        """Keep the outputs of streams that silence has left as they were."""
        silent = [n for n, each in enumerate(is_silent) if each]
        if not silent:
            return
        silent_N = torch.tensor(silent, device=encoded_NCE.device)
        pairs = list(zip(take_rows(before, silent_N), take_rows(after, silent_N), strict=True))
        is_same_N = torch.ones(len(silent), dtype=torch.bool, device=encoded_NCE.device)
        for old, new in pairs:
            if old.is_floating_point():
                is_same_N &= _is_same(old, new.to(old.dtype))
        for place in is_same_N.nonzero()[:, 0].tolist():
            advance = tuple(
                new[place] - old[place] for old, new in pairs if not old.is_floating_point()
            )
            self._settled[slots[silent[place]]] = _Settled(
                encoded_NCE[silent[place]].clone(), advance
            )


def _is_same(old: Tensor, new: Tensor) -> Tensor:
    """(N,) whether all numbers of a stream are equal; in half precision to the last bit."""
    if old.dtype != torch.float32 or not old.numel():
        return (old == new).flatten(1).all(dim=1)
    largest_N = old.abs().flatten(1).amax(dim=1).clamp(min=1.0)
    return (old - new).abs().flatten(1).amax(dim=1) <= _ROUNDING * largest_N
