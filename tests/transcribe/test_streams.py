"""Streams that are decoded together: each has the result that it has alone."""

from __future__ import annotations

import gc
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pruned_rnnt import load
from pruned_rnnt.data.audio.features import FeatureKind
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.build_search import build_stream_search
from pruned_rnnt.decode.calibration import Calibration, ConfidenceMap, SymbolTimes
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.endpoints import EndpointConfig
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.stream import FinalText, Stream
from pruned_rnnt.transcribe.stream_group import _StateSlots, step
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer
from tests.transcribe.random_model import save_random_model, sound

ENCODERS = [
    tiny_conformer(causal=True),
    tiny_zipformer(causal=True),
    tiny_fastconformer(causal=True, feature_norm="fixed"),
]
BEAM = DecodeConfig(method="modified_beam")
MODELS: list[tuple[dict[str, Any], DecodeConfig]] = [
    ({}, DecodeConfig()),
    ({}, BEAM),
    ({"durations": (0, 1, 2, 4)}, DecodeConfig()),
    ({"durations": (0, 1, 2, 4)}, BEAM),
    ({"ctc_scale": 0.2}, DecodeConfig(method="ctc_greedy")),
]
NEVER = EndpointConfig(pause=0, silence=0, longest=0)
OFTEN = EndpointConfig(pause=0.16, silence=0.3, longest=0.7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))


def recogniser_of(
    tokenizer: Tokenizer,
    encoder: EncoderConfig = ENCODERS[0],
    decode: DecodeConfig | None = None,
    device: str = "cpu",
    **loss: Any,
) -> Recogniser:
    # With these seeds, all models emit symbols that change.
    seed = 13 if encoder.kind == "fastconformer" else 0
    model = tiny_model(encoder, len(tokenizer), seed=seed, **loss).to(device)
    return Recogniser(model, tokenizer, decode=decode)


def finished(streams: list[Stream]) -> list[list[FinalText]]:
    """End the streams and decode what is left; their final texts."""
    for stream in streams:
        stream.finish()
    while step(streams):
        pass
    assert all(stream.is_done for stream in streams)
    return [stream.take_finals() for stream in streams]


def voice(number: int) -> np.ndarray:
    """Sound that differs from stream to stream, with pauses."""
    samples = np.roll(sound(1.3 + 0.37 * number), 1000 * number)
    samples[8000:14000] *= 0.01
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("loss", "decode"), MODELS)
def test_stream_in_a_batch_equals_the_stream_alone(
    tokenizer: Tokenizer, encoder: EncoderConfig, loss: dict[str, Any], decode: DecodeConfig
) -> None:
    recogniser = recogniser_of(tokenizer, encoder, decode, **loss)
    alone = []
    for number in range(4):
        stream = recogniser.stream(endpoints=OFTEN)
        stream.accept_waveform(voice(number))
        alone += finished([stream])
    rng = np.random.default_rng(0)
    waiting = {number: voice(number) for number in range(4)}
    streams: dict[int, Stream] = {}
    while waiting:
        # Streams join one by one, get pieces of any size, and end at different times.
        if len(streams) < 4 and rng.random() < 0.3:
            streams[len(streams)] = recogniser.stream(endpoints=OFTEN)
        for number in list(streams):
            if number in waiting:
                size = int(rng.integers(1, 9000))
                streams[number].accept_waveform(waiting[number][:size])
                waiting[number] = waiting[number][size:]
                if not len(waiting[number]):
                    del waiting[number]
                    streams[number].finish()
        recogniser.step(streams.values())
    together = finished(list(streams.values()))
    for one, other in zip(together, alone, strict=True):
        assert [(final.text, final.reason) for final in one] == [
            (final.text, final.reason) for final in other
        ]
        assert [word[:3] for final in one for word in final.words] == [
            word[:3] for final in other for word in final.words
        ]
    assert len({final.text for finals in alone for final in finals}) > 5
    assert len({final.reason for finals in alone for final in finals}) > 1


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("loss", "decode"), MODELS)
def test_text_equals_that_of_the_whole_audio(
    tokenizer: Tokenizer, encoder: EncoderConfig, loss: dict[str, Any], decode: DecodeConfig
) -> None:
    recogniser = recogniser_of(tokenizer, encoder, decode, **loss)
    samples = voice(1)
    stream = recogniser.stream(endpoints=NEVER)
    for begin in range(0, len(samples), 1001):
        stream.accept_waveform(samples[begin : begin + 1001])
        recogniser.step([stream])
    ((final,),) = finished([stream])
    search = build_stream_search(recogniser.model, decode, tokenizer)
    decoder = StreamDecoder(recogniser.model, search, *encoder.stream_sizes)
    features = FeatureKind.of_encoder(encoder).of_recording(samples)
    (found,) = decoder.recognise(features[None], torch.tensor([len(features)]))
    assert len(found.symbols) > 5
    assert final.text == tokenizer.decode(found.symbols)
    assert (final.reason, final.start) == ("end", 0.0)
    assert final.end == pytest.approx(len(samples) / 16000, abs=0.15)


@pytest.mark.parametrize(("loss", "decode"), MODELS)
def test_stable_text_is_the_beginning_of_the_final_text(
    tokenizer: Tokenizer, loss: dict[str, Any], decode: DecodeConfig
) -> None:
    recogniser = recogniser_of(tokenizer, decode=decode, **loss)
    stream = recogniser.stream(endpoints=EndpointConfig(pause=0.2, longest=0))
    stable, tentative, finals = "", 0, list[FinalText]()
    samples = np.concatenate([voice(number) for number in range(3)])
    for begin in range(0, len(samples), 1600):
        stream.accept_waveform(samples[begin : begin + 1600])
        while recogniser.step([stream]):
            now = stream.take_finals()
            for final in now:
                assert final.text.startswith(stable)
                stable = ""
            finals += now
            assert stream.partial.stable.startswith(stable)
            stable, tentative = stream.partial.stable, tentative + len(stream.partial.tentative)
    ((last,),) = finished([stream])
    assert last.text.startswith(stable)
    assert (tentative > 0) == (decode.method == "modified_beam")


def test_stable_text_leaves_out_a_character_that_may_become_another(tokenizer: Tokenizer) -> None:
    """Marks may be symbols of their own, and the normal form joins them with the letter before."""
    marks = train_tokenizer(["xyz x\u0301y\u0308z"], TokenizerConfig(kind="char"))
    assert marks.lasting("xy") == "x"
    assert marks.lasting("xz\u0301\u0308") == "x"
    assert (marks.lasting(""), marks.lasting("\u0301")) == ("", "")
    assert tokenizer.lasting("xy\ufffd") == "xy"
    letters = train_tokenizer(["eae a\u0304e"], TokenizerConfig(kind="char"))
    assert letters.lasting("ea") == "ea"  # one character in normal form
    recogniser = recogniser_of(marks)
    for number in range(4):
        stream = recogniser.stream(endpoints=NEVER)
        shown, samples = "", np.concatenate((voice(number), voice(number + 4)))
        for begin in range(0, len(samples), 1600):
            stream.accept_waveform(samples[begin : begin + 1600])
            while recogniser.step([stream]):
                assert stream.partial.stable.startswith(shown)
                shown = stream.partial.stable
        ((final,),) = finished([stream])
        assert final.text.startswith(shown)
        assert set(final.text) & set("\u00fd\u00ff\u017a")  # a letter and a mark


def test_final_texts_have_the_language(tokenizer: Tokenizer) -> None:
    tagged = train_tokenizer(["one two"], TokenizerConfig(kind="char", languages=("en", "de")))
    recogniser = recogniser_of(tagged)
    stream = recogniser.stream(endpoints=EndpointConfig(pause=0, silence=0, longest=0.5))
    stream.accept_waveform(voice(3))
    (finals,) = finished([stream])
    assert {final.language for final in finals} & {"en", "de"}
    assert not any("<|" in final.text for final in finals)
    plain = recogniser_of(tokenizer).stream()
    assert [final.language for final in finished([plain])[0]] == [""]


def test_words_have_times_of_the_stream(tokenizer: Tokenizer) -> None:
    recogniser = recogniser_of(tokenizer)
    plain, later = recogniser.stream(endpoints=OFTEN), recogniser.stream(endpoints=OFTEN)
    later.gap(10.0)
    for stream in (plain, later):
        stream.accept_waveform(np.concatenate((np.zeros(3200), voice(2))))
    one, other = finished([plain, later])
    assert sum(len(final.words) for final in one) > 1
    for final, shifted in zip(one, other, strict=True):
        assert final.text == shifted.text
        assert shifted.end == pytest.approx(final.end + 10)
        for word, shifted_word in zip(final.words, shifted.words, strict=True):
            assert shifted_word.start == pytest.approx(word.start + 10)
            assert final.start <= word.start <= word.end <= final.end
    starts = [word.start for final in one for word in final.words]
    assert starts == sorted(starts)


def test_endpoint_rules() -> None:
    rules = EndpointConfig(pause=1.0, silence=2.0, longest=10.0)
    assert rules.reason(seconds=5.0, pause=0.9, has_text=True) is None
    assert rules.reason(seconds=5.0, pause=1.0, has_text=True) == "pause"
    assert rules.reason(seconds=1.9, pause=1.9, has_text=False) is None
    assert rules.reason(seconds=2.0, pause=2.0, has_text=False) == "pause"
    assert rules.reason(seconds=10.0, pause=0.0, has_text=True) == "length"
    assert NEVER.reason(seconds=1e6, pause=1e6, has_text=True) is None
    for wrong in (-1, None, "1", True, math.nan):
        with pytest.raises(
            ValueError, match=rf"endpoints\.pause is {wrong!r}; it must be at least"
        ):
            EndpointConfig(pause=wrong)  # type: ignore[arg-type]


def test_length_does_not_change_the_text() -> None:
    """A text that is final for its length ends with a complete word, and the search goes on."""
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="word"))
    recogniser = recogniser_of(tokenizer)
    texts, finals = [], []
    for longest in (0.0, 0.7):
        stream = recogniser.stream(endpoints=EndpointConfig(pause=0, silence=0, longest=longest))
        stream.accept_waveform(np.concatenate([voice(n) for n in range(4)]))
        (finals,) = finished([stream])
        texts.append(" ".join(final.text for final in finals if final.text))
    assert texts[0] == texts[1]
    assert sum(final.reason == "length" for final in finals) >= 3
    words = [word for final in finals for word in final.words]
    assert all(one.end <= other.start for one, other in itertools.pairwise(words))
    assert str(stream.partial) == ""


def test_a_text_without_spaces_is_final_for_its_length() -> None:
    """It ends after a symbol that stays, and the search goes on."""
    tokenizer = train_tokenizer(["きょうはよい", "てんきです"], TokenizerConfig(kind="char"))
    stream = recogniser_of(tokenizer).stream(
        endpoints=EndpointConfig(pause=0, silence=0, longest=1.0)
    )
    stream.accept_waveform(np.concatenate([voice(n) for n in range(4)]))
    (finals,) = finished([stream])
    lengths = [final.end - final.start for final in finals if final.reason == "length"]
    assert len(lengths) >= 3
    assert max(lengths) < 1.8


@pytest.mark.slow
def test_streams_in_threads_have_the_texts_that_they_have_alone(tokenizer: Tokenizer) -> None:
    def text(recogniser: Recogniser, number: int) -> str:
        stream = recogniser.stream()
        stream.accept_waveform(voice(number))
        return "".join(final.text for final in finished([stream])[0])

    shared = recogniser_of(tokenizer)
    numbers = [n % 6 for n in range(36)]
    alone = [text(recogniser_of(tokenizer), n) for n in range(6)]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda n: text(shared, n), numbers))
    assert found == [alone[n] for n in numbers]


def test_a_step_that_fails_decodes_no_chunk_twice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recogniser = recogniser_of(tokenizer, decode=BEAM)
    plain, failing = recogniser.stream(), recogniser.stream()
    for stream in (plain, failing):
        stream.accept_waveform(voice(2))
    (group,) = recogniser._stream_groups.values()
    search = group._model.decoder.search_chunk

    def no_memory(*arguments: Any) -> Any:
        def fails(_: object) -> Any:
            raise MemoryError

        found = search(*arguments)
        return found._replace(found=found.found.map(fails))

    while failing.is_ready:
        with monkeypatch.context() as patch:
            patch.setattr(group._model.decoder, "search_chunk", no_memory)
            with pytest.raises(MemoryError):
                step([failing])
        step([failing])
    one, other = finished([plain, failing])
    assert one == other


@pytest.mark.parametrize("decode", [DecodeConfig(), BEAM])
def test_nan_of_the_model_is_a_warning_of_the_stream(
    tokenizer: Tokenizer, decode: DecodeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    recogniser = recogniser_of(tokenizer, decode=decode)
    stream, other = recogniser.stream(), recogniser.stream()
    stream.accept_waveform(voice(0))
    while step([stream]):
        pass
    assert stream.warning == ""
    with torch.no_grad():
        recogniser.model.encoder.get_parameter(
            next(name for name, _ in recogniser.model.encoder.named_parameters())
        ).fill_(math.nan)
    seconds = stream.seconds
    stream.accept_waveform(voice(1))
    finished([stream])
    assert stream.warning.startswith(
        f"text is missing from {seconds:.2f} s of the stream on: the score of the best hypothesis "
        "is nan"
    )
    assert [record.getMessage() for record in caplog.records].count(stream.warning) == 1
    assert other.warning == ""


def test_streams_have_no_calibration_that_needs_the_ctc_head(tokenizer: Tokenizer) -> None:
    for scale, is_used in ((0.2, False), (0.0, True)):
        calibration = Calibration(
            times=SymbolTimes(before=(0.2,) * len(tokenizer), after=(0.0,) * len(tokenizer)),
            confidence=ConfidenceMap(bias=-9.0, path=0.1, head=0.0 if is_used else 2.0),
            source="dev",
        )
        model = tiny_model(ENCODERS[0], len(tokenizer), seed=0, ctc_scale=scale)
        finals = []
        for used in (None, calibration):
            stream = Recogniser(model, tokenizer, calibration=used).stream()
            stream.accept_waveform(voice(0))
            finals.append(finished([stream])[0])
        assert any(final.words for final in finals[0])
        assert (finals[0] != finals[1]) == is_used


def test_stream_that_leaves_gives_its_memory_to_the_next(tokenizer: Tokenizer) -> None:
    recogniser = recogniser_of(tokenizer)
    first = recogniser.stream()
    first.accept_waveform(voice(0))
    (expected,) = finished([first])
    (group,) = recogniser._stream_groups.values()
    gc.freeze()  # collections then look at newer objects alone
    streams = [recogniser.stream() for _ in range(3)]
    rows = len(group._slots._tensors[0])
    for turn in range(8):
        streams[turn % 3].accept_waveform(voice(turn % 4)[:20000])
        recogniser.step(streams)
        if turn % 2:
            streams[turn % 3].close()
        streams[turn % 3] = recogniser.stream()  # the other one is dropped without an end
        gc.collect()
    gc.unfreeze()
    assert len(group._slots._tensors[0]) == rows
    streams[0].accept_waveform(voice(0))
    assert finished(streams[:1]) == [expected]
    other = recogniser.stream(left=4)
    other.accept_waveform(voice(0))
    assert recogniser.step([streams[1], other]) == [other]


def test_a_slot_that_is_released_while_others_are_made_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = _StateSlots((torch.zeros(1, 2),), 0)
    taken = [slots.take(), slots.take()]

    def cat_and_release(tensors: Any) -> Any:
        slots.release(taken[0])
        return torch.concat(tensors)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", cat_and_release)
        taken.append(slots.take())
    # Of four rows, two are in use.
    assert taken == [0, 1, 2]
    assert sorted([slots.take(), slots.take()]) == [0, 3]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_closed_and_ended_streams(tokenizer: Tokenizer, encoder: EncoderConfig) -> None:
    recogniser = recogniser_of(tokenizer, encoder)
    closed, ended, empty = (recogniser.stream() for _ in range(3))
    for stream in (closed, ended):
        stream.accept_waveform(voice(0))
    closed.close()
    assert closed.is_done
    assert recogniser.step([closed]) == []
    assert recogniser.step([ended, ended]) == [ended]
    ended.finish()
    ended.finish()
    for stream in (closed, ended):
        with pytest.raises(ValueError, match="the stream has ended"):
            stream.accept_waveform(voice(0))
        with pytest.raises(ValueError, match="the stream has ended"):
            stream.gap(1.0)
    (final,) = finished([empty])[0]
    assert (final.text, final.words, final.reason) == ("", (), "end")


def test_bad_samples_do_not_spoil_the_rest_of_a_stream(tokenizer: Tokenizer) -> None:
    """With a limited past, the texts from some time after the bad samples on are the same."""
    recogniser = recogniser_of(tokenizer, tiny_conformer(causal=True))
    good, bad, other = (recogniser.stream(endpoints=NEVER) for _ in range(3))
    samples = np.concatenate([voice(n) for n in range(4)])
    spoiled = samples.copy()
    spoiled[8000:12000] = np.nan
    spoiled[12000:16000] *= 1e35
    for begin in range(0, len(samples), 1600):
        good.accept_waveform(samples[begin : begin + 1600])
        other.accept_waveform(samples[begin : begin + 1600])
        try:
            bad.accept_waveform(spoiled[begin : begin + 1600])
        except ValueError:
            bad.gap(0.1)
        recogniser.step([good, bad, other])
    (one,), (two,), (three,) = finished([good, bad, other])
    assert bad.audio.replaced == 4000
    assert one == three
    assert two.text != one.text
    assert two.text[-30:] == one.text[-30:]
    assert two.end == one.end


def test_errors_name_what_a_stream_needs(tokenizer: Tokenizer) -> None:
    with pytest.raises(ExportError, match="not causal"):
        recogniser_of(tokenizer, tiny_conformer()).stream()
    for sizes, name in (
        ({"chunk": 10**9}, "chunk"),
        ({"left": 1e9}, "left"),
        ({"chunk": 8.0}, "chunk"),
        ({"chunk": -1}, "chunk"),
        ({"chunk": True}, "chunk"),
        ({"left": -3}, "left"),
    ):
        with pytest.raises(ExportError, match=f"^{name} is .* needs a whole number of frames"):
            recogniser_of(tokenizer).stream(**sizes)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"^decode\.chunk is 9999999, needs"):
        recogniser_of(tokenizer, decode=DecodeConfig(chunk=9999999)).stream()
    with pytest.raises(ValueError, match=r"endpoints is \{'pause': 1\}, needs an EndpointConfig"):
        recogniser_of(tokenizer).stream(endpoints={"pause": 1})  # type: ignore[arg-type]
    search = recogniser_of(tokenizer, decode=DecodeConfig(method="ctc_prefix_beam"), ctc_scale=0.2)
    with pytest.raises(ValueError, match=r"decode\.method is ctc_prefix_beam, which needs whole"):
        search.stream()
    stream = recogniser_of(tokenizer).stream()
    for streams, message in (
        (stream, r"streams is <.*Stream .*>, needs a list of streams: step\(\[stream\]\)"),
        (None, "streams is None, needs a list of streams"),
        ([stream, None], "streams has None, needs streams"),
        ([[stream]], r"streams has \[<.*Stream .*\], needs streams"),
    ):
        with pytest.raises(ValueError, match=message):
            recogniser_of(tokenizer).step(streams)  # type: ignore[arg-type]
    for seconds in ("a", None):
        with pytest.raises(ValueError, match=f"gap is {seconds!r}, needs a number of seconds"):
            stream.gap(seconds)  # type: ignore[arg-type]


def test_streams_have_the_chunks_of_the_decode_settings(tokenizer: Tokenizer) -> None:
    chosen = recogniser_of(tokenizer, decode=DecodeConfig(chunk=8, left=16))
    whole = recogniser_of(tokenizer, decode=DecodeConfig(chunk=-1))
    chosen.stream()
    chosen.stream(chunk=np.int64(4), left=8)  # type: ignore[arg-type]
    assert list(chosen._stream_groups) == [(8, 16), (4, 8)]
    with pytest.raises(ValueError, match=r"decode\.chunk is -1, for whole recordings"):
        whole.stream()
    whole.stream(chunk=8, left=16)
    assert list(whole._stream_groups) == [(8, 16)]


def test_loaded_model_streams(tmp_path: Any) -> None:
    recogniser = load(save_random_model(tmp_path))
    stream = recogniser.stream()
    stream.accept_waveform(np.stack([np.repeat(voice(0), 3)] * 2, axis=1), 48000)
    stream.finish()
    while recogniser.step([stream]):
        pass
    assert str(stream.take_finals()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("loss", "decode"), MODELS)
def test_gpu_matches_cpu(
    tokenizer: Tokenizer,
    encoder: EncoderConfig,
    loss: dict[str, Any],
    decode: DecodeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The symbols of a random model are nearly as likely as each other.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    texts = []
    for device in ("cpu", "cuda"):
        decode = replace(decode, precision="float32")
        recogniser = recogniser_of(tokenizer, encoder, decode, device, **loss)
        streams = [recogniser.stream(endpoints=OFTEN) for _ in range(5)]
        for number, stream in enumerate(streams):
            stream.accept_waveform(voice(number))
        texts.append([[final.text for final in finals] for finals in finished(streams)])
    assert texts[0] == texts[1]
