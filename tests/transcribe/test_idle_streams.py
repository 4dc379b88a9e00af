"""Streams of digital silence: the encoder rests, and no result changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.transcribe.idle_streams import IdleStreams
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.stream import FinalText
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer
from tests.transcribe.random_model import sound

ENCODERS = [tiny_conformer(causal=True), tiny_zipformer(causal=True)]
SILENT_SECONDS = 12


def decoded(encoder: EncoderConfig, decode: DecodeConfig) -> list[list[FinalText]]:
    """Of a stream that is muted for a while, and of one that starts in this time."""
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    recogniser = Recogniser(tiny_model(encoder, len(tokenizer)), tokenizer, decode=decode)
    muted, other = recogniser.stream(), recogniser.stream()
    silence_S = np.zeros(16000, dtype=np.float32)
    pieces = [sound(1.5), *[silence_S] * SILENT_SECONDS, sound(1.3)]
    for number, piece_S in enumerate(pieces):
        muted.accept_waveform(piece_S)
        if number > SILENT_SECONDS // 2:
            other.accept_waveform(sound(1.0 + 0.1 * number))
        while recogniser.step([muted, other]):
            pass
    for stream in (muted, other):
        stream.finish()
    while recogniser.step([muted, other]):
        pass
    return [stream.take_finals() for stream in (muted, other)]


@pytest.mark.slow
@pytest.mark.parametrize("decode", [DecodeConfig(), DecodeConfig(method="modified_beam")])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_encoder_rests_in_digital_silence(
    encoder: EncoderConfig, decode: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 0
    encode = StreamDecoder.encode

    def counted(self: StreamDecoder, features_NTF: torch.Tensor, *rest: Any) -> Any:
        nonlocal chunks
        chunks += len(features_NTF)
        return encode(self, features_NTF, *rest)

    monkeypatch.setattr(StreamDecoder, "encode", counted)
    rested, chunks_rested = decoded(encoder, decode), chunks
    chunks = 0
    monkeypatch.setattr(IdleStreams, "_notice", lambda *_: None)
    assert decoded(encoder, decode) == rested
    assert chunks_rested < 0.8 * chunks
    assert all(any(final.text for final in finals) for finals in rested)


@pytest.mark.slow
def test_state_after_silence_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(ENCODERS[1], 8)
    recogniser = Recogniser(
        model, train_tokenizer(["one"], TokenizerConfig(kind="char")), decode=DecodeConfig()
    )

    def state() -> tuple[torch.Tensor, ...]:
        stream = recogniser.stream()
        for piece_S in (sound(1.5), *[np.zeros(16000, dtype=np.float32)] * SILENT_SECONDS):
            stream.accept_waveform(piece_S)
            while recogniser.step([stream]):
                pass
        (group,) = recogniser._stream_groups.values()
        read = group._slots.read(torch.tensor([stream.slot.number]))
        stream.close()
        return read

    rested = state()
    monkeypatch.setattr(IdleStreams, "_notice", lambda *_: None)
    for one, other in zip(rested, state(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_streams_whose_rounding_differs_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of a real encoder's state change with the streams encoded beside it."""
    chunks = 0
    encode = StreamDecoder.encode
    generator = torch.Generator().manual_seed(0)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        return x * (1 + 2e-7 * (torch.rand(x.shape, generator=generator) - 0.5))

    def counted(self: StreamDecoder, features_NTF: torch.Tensor, *rest: Any) -> Any:
        nonlocal chunks
        chunks += len(features_NTF)
        encoded_NCE, state = encode(self, features_NTF, *rest)
        return encoded_NCE, tuple(rounded(x) for x in state)

    monkeypatch.setattr(StreamDecoder, "encode", counted)
    tokenizer = train_tokenizer(["one"], TokenizerConfig(kind="char"))
    recogniser = Recogniser(tiny_model(ENCODERS[1], 8), tokenizer, decode=DecodeConfig())
    streams = [recogniser.stream() for _ in range(3)]
    counts = []
    for second in range(3 * SILENT_SECONDS):
        for number, stream in enumerate(streams):
            is_muted = second > number
            stream.accept_waveform(np.zeros(16000, np.float32) if is_muted else sound(1.0))
        while recogniser.step(streams):
            pass
        counts.append(chunks)
    assert counts[-1] == counts[2 * SILENT_SECONDS]
