"""Many recordings: decoded together, read ahead in threads, results in order."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt import load
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.data.audio.audio_file import without_decoder_messages
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.export.model_file import load_model
from pruned_rnnt.system.device import DeviceLock
from pruned_rnnt.transcribe import batches
from pruned_rnnt.transcribe.batch_input import BatchDecoder, BatchInput, BestPaths
from pruned_rnnt.transcribe.batches import SegmentBatches
from pruned_rnnt.transcribe.joined_path import JoinedPath
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.recordings import WholeRecording, read_ahead
from pruned_rnnt.transcribe.segments import SegmentConfig
from pruned_rnnt.transcribe.transcription import Transcription
from tests.ops.native_batches import torch_threads
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer
from tests.transcribe.random_model import save_random_model, sound


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short and long files at several rates, silence, and two that cannot be read."""
    folder = tmp_path_factory.mktemp("audio")
    for index, seconds in enumerate((1.0, 2.3, 0.4, 9.0, 1.7, 3.1)):
        rate = 16000 if index % 2 else 8000
        soundfile.write(folder / f"{index}.wav", sound(seconds)[:: 16000 // rate], rate)
    soundfile.write(folder / "silence.wav", np.zeros(16000), 16000)
    (folder / "2b.wav").write_text("no sound")
    # Unreadable from its third second on.
    whole = folder / "damaged.flac"
    soundfile.write(whole, np.random.default_rng(0).standard_normal(80000) * 0.1, 16000)
    data = bytearray(whole.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    whole.write_bytes(data)
    return folder


def test_files_decoded_together_have_the_output_of_each_alone(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["transcribe", str(model), str(folder), "--window", "4", "--times"]
    shown = []
    for seconds in (0, 6, 600):
        assert main([*command, f"decode.batch_seconds={seconds}"]) == EXIT_FAILED
        shown.append(capsys.readouterr())
    assert f"{folder}/2b.wav cannot be read as audio" in shown[0].err
    names = [line.partition("\t")[0] for line in shown[0].out.splitlines() if "\t" in line]
    assert f"{folder}/0.wav" in names
    for other in shown[1:]:
        assert other.out == shown[0].out
        # The device's line about kernels apart, errors come in the order of the files.
        assert other.err == shown[0].err


def test_features_of_whole_recordings_are_computed_in_batches(model: Path, folder: Path) -> None:
    paths = sorted(folder.iterdir())
    settings = SegmentConfig(window=4.0)

    def transcribe(batch_seconds: float) -> list[Transcription | Exception]:
        decode = DecodeConfig(batch_seconds=batch_seconds)
        recogniser = Recogniser(*load_model(model)[:4], segments=settings, decode=decode)
        return list(recogniser.transcribe_each(paths))

    for path, one, other in zip(paths, transcribe(0.0), transcribe(8.0), strict=True):
        if isinstance(one, Exception):
            assert str(other) == str(one)
            continue
        assert isinstance(other, Transcription)
        assert (other.text, other.seconds) == (one.text, one.seconds), path
        assert other.score == pytest.approx(one.score, rel=1e-3, abs=1e-2)


def test_a_recording_that_does_not_fit_in_memory_is_an_error_of_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recogniser = Recogniser(*load_model(model)[:4], decode=DecodeConfig(batch_seconds=60.0))
    best_paths = recogniser._best_paths

    def limited(batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        if batch.lengths_N.max() > 300:
            raise MemoryError
        return best_paths(batch, with_heads)

    monkeypatch.setattr(recogniser, "_best_paths", limited)
    found = list(recogniser.transcribe_each([sound(2.0), sound(4.0), sound(1.0)]))
    assert [type(each) for each in found] == [Transcription, MemoryError, Transcription]
    # The frames of the pass would keep its tensors.
    assert isinstance(found[1], MemoryError)
    assert found[1].__traceback__ is None


def test_words_are_made_only_if_asked_for(folder: Path) -> None:
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    model = tiny_model(tiny_conformer(causal=True), len(tokenizer), kind="full", ctc_scale=0.3)
    paths = sorted(folder.iterdir())
    for batch_seconds in (0.0, 6.0):
        recogniser = Recogniser(
            model,
            tokenizer,
            segments=SegmentConfig(window=2.0),
            decode=DecodeConfig(batch_seconds=batch_seconds),
        )
        with_words = list(recogniser.transcribe_each(paths))
        without = list(recogniser.transcribe_each(paths, words=False))
        for one, other in zip(with_words, without, strict=True):
            if isinstance(one, Transcription):
                assert isinstance(other, Transcription)
                assert (other.text, other.seconds, other.words) == (one.text, one.seconds, ())
                assert bool(one.words) == bool(one.text)


def test_a_batch_is_launched_before_the_results_of_the_one_before_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def best_paths(batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        name = str(len(batch.lengths_N))
        for step in ("launch", "align", "read"):
            # Graphs have tensors of their own, which threads would overwrite.
            assert lock._lock._is_owned()  # type: ignore[attr-defined]
            done.append(f"{step} {name}")
            if step != "read":
                yield
        found = Hypothesis(symbols=(3,), frames=(0,), score=-1.0, symbol_scores=(-1.0,))
        return [(found, None)] * len(batch.lengths_N)

    def fake_input(parts: list[WholeRecording], *_: object, **__: object) -> BatchInput:
        count = len(parts)
        return BatchInput(torch.zeros(count, 1, 80), torch.ones(count), torch.zeros(count).bool())

    monkeypatch.setattr(batches, "batch_input", fake_input)
    tokenizer = train_tokenizer(["one two"], TokenizerConfig(kind="word"))
    lock = DeviceLock()
    decoder = BatchDecoder(best_paths, torch.device("cuda"), 1, lock=lock)
    collected = SegmentBatches(decoder, most_frames=900, with_words=False)
    early = []
    for _ in range(20):  # 400 frames each, with padding 416
        recording = collected.start(JoinedPath(tokenizer, with_words=False))
        for found in collected.add(recording, WholeRecording(np.zeros(64000, np.float32))):
            assert all(each is not recording for each in found)
            early += found
        early += collected.done()
    assert done[:5] == ["launch 1", "launch 1", "align 1", "launch 2", "read 1"]
    assert len(early) >= 10
    late = [len(found) for found in collected.finish() if found]
    assert len(late) > 1  # by batch, not at the end
    assert len(early) + sum(late) == 20
    launches = [place for place, step in enumerate(done) if step.startswith("launch")]
    reads = [place for place, step in enumerate(done) if step.startswith("read")]
    sizes = [int(done[place].split()[1]) for place in launches]
    assert sizes == [1, 1, *[2] * 9]
    assert all(after < read for after, read in zip(launches[1:], reads, strict=False))


@pytest.mark.parametrize("frames", [9, 100, 1001, 2999])
def test_batches_have_aligned_encoder_frames(frames: int) -> None:
    """Of a Zipformer: (T - 7) // 2 for T feature frames, before its stacks downsample."""
    decoder = BatchDecoder(lambda *_: iter(()), torch.device("cuda"), 9)  # type: ignore[arg-type, return-value]
    padded = decoder.padded_frames(frames)
    assert padded >= frames
    assert (padded - 7) // 2 % 16 == 0
    on_a_cpu = decoder._replace(device=torch.device("cpu"))
    assert on_a_cpu.padded_frames(frames) == frames


@pytest.mark.gpu
def test_threads_on_a_gpu_have_the_texts_of_one(model: Path) -> None:
    recogniser = load(model, "cuda", settings=["decode.batch_seconds=20"])
    recordings = [[sound(1.0 + 0.3 * n + 0.1 * i) for i in range(8)] for n in range(6)]
    alone = [list(map(str, recogniser.transcribe_each(each))) for each in recordings]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            results = threads.map(recogniser.transcribe, recordings)
            assert [list(map(str, found)) for found in results] == alone


def test_segments_of_all_lengths_are_decoded_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(100, 400, 400)

    def best_paths(batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        yield
        found = Hypothesis(symbols=(3,), frames=(0,), score=-1.0, symbol_scores=(-1.0,))
        return [(found, None)] * len(batch.lengths_N)

    def fake_input(parts: list[WholeRecording], *_: object, **__: object) -> BatchInput:
        count = len(parts)
        longest = max(len(part.samples_S) for part in parts) / 160
        full.append(count * longest > 0.7 * 2000)
        assert count * longest <= 2000
        return BatchInput(torch.zeros(count, 1, 80), torch.ones(count), torch.zeros(count).bool())

    full: list[bool] = []
    monkeypatch.setattr(batches, "batch_input", fake_input)
    tokenizer = train_tokenizer(["one two"], TokenizerConfig(kind="word"))
    collected = SegmentBatches(
        BatchDecoder(best_paths, torch.device("cuda"), 1), most_frames=2000, with_words=False
    )
    done = 0
    for number, length in enumerate(lengths, start=1):
        recording = collected.start(JoinedPath(tokenizer, with_words=False))
        part = WholeRecording(np.zeros(160 * length, np.float32))
        done += sum(map(len, collected.add(recording, part)))
        done += len(collected.done())
        # Two times eight batches, and those that were launched last.
        assert number - done < 2.5 * 8 * 2000 / lengths.mean()
    assert all(full[1:])
    assert done + sum(map(len, collected.finish())) == len(lengths)


def test_memory_is_released_before_halves_of_a_batch_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []

    def best_paths(batch: BatchInput, with_heads: bool) -> Generator[None, None, BestPaths]:
        yield
        count = len(batch.lengths_N)
        events.append(count)
        if count > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [(Hypothesis(symbols=(), frames=(), score=0.0, symbol_scores=()), None)]

    def fake_input(parts: list[WholeRecording], *_: object, **__: object) -> BatchInput:
        count = len(parts)
        return BatchInput(torch.zeros(count, 1, 80), torch.ones(count), torch.zeros(count).bool())

    monkeypatch.setattr(batches, "batch_input", fake_input)
    tokenizer = train_tokenizer(["one two"], TokenizerConfig(kind="word"))
    decoder = BatchDecoder(
        best_paths, torch.device("cuda"), 1, release_memory=lambda: events.append("released")
    )
    collected = SegmentBatches(decoder, most_frames=2000, with_words=False)
    for _ in range(2):
        recording = collected.start(JoinedPath(tokenizer, with_words=False))
        list(collected.add(recording, WholeRecording(np.zeros(16000, np.float32))))
        collected.done()
    assert sum(map(len, collected.finish())) == 2
    assert events == [2, "released", 1, 1]


class Source:
    """Recordings of three parts each; remembers how many were taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.count):
            self.taken += 1
            yield [10 * number + part for part in range(3)]


def test_reading_ahead_is_bounded_and_in_order() -> None:
    source = Source(1000)
    found = []
    for _, parts in read_ahead(source, threads=3, recordings_ahead=5):
        found.append(list(parts))
        assert source.taken <= len(found) + 5
    assert found == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1000)]


def test_threads_end_with_the_reader() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    before = threading.active_count()
    recordings = read_ahead((endless() for _ in range(100)), threads=4, recordings_ahead=8)
    _, parts = next(recordings)
    assert next(iter(parts)) == 1
    recordings.close()
    limit = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_readers_alone_use_one_torch_thread() -> None:
    def own_threads() -> Iterator[int]:
        yield torch.get_num_threads()

    with torch_threads(3), ThreadPoolExecutor(1) as later:
        reading = read_ahead([own_threads() for _ in range(3)], threads=2, recordings_ahead=2)
        assert [list(parts) for _, parts in reading] == [[1]] * 3
        assert torch.get_num_threads() == 3
        assert later.submit(torch.get_num_threads).result() == 3


def test_an_error_is_raised_where_the_parts_are_used() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("damaged")

    recordings = [partial(list, [7])(), broken(), [8]]
    found: list[object] = []
    for _, parts in read_ahead(recordings, threads=2, recordings_ahead=2):
        try:
            found += list(parts)
        except ValueError as error:
            found.append(str(error))
    assert found == [7, "damaged", 8]


def test_an_error_of_the_source_comes_after_what_was_taken() -> None:
    def source() -> Iterator[list[int]]:
        yield from ([number] for number in range(6))
        raise OSError("the list is damaged")

    found: list[list[int]] = []
    with pytest.raises(OSError, match="the list is damaged"):
        found.extend(list(p) for _, p in read_ahead(source(), threads=2, recordings_ahead=4))
    assert found == [[number] for number in range(6)]


@pytest.mark.parametrize("ahead", [True, False])
def test_an_error_of_the_source_loses_no_results(model: Path, folder: Path, ahead: bool) -> None:
    recogniser = load(model, settings=["decode.batch_seconds=3000"])
    paths = sorted(folder.glob("[0-9].wav"))

    def source() -> Iterator[Path]:
        yield from paths
        raise OSError("the list is damaged")

    on_seconds = None if ahead else (lambda _: None)
    found = []
    with pytest.raises(OSError, match="the list is damaged"):
        found.extend(recogniser.transcribe_each(source(), on_seconds=on_seconds))
    expected = load(model).transcribe(paths)
    assert [each.text for each in found if isinstance(each, Transcription)] == [
        each.text for each in expected
    ]


def test_standard_error_survives_decoders_in_threads(capfd: pytest.CaptureFixture[str]) -> None:
    def decode() -> None:
        for _ in range(50):
            with without_decoder_messages():
                os.write(2, b"warning\n")
                time.sleep(0.0002)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"


@pytest.mark.gpu
def test_many_files_on_a_gpu_have_the_texts_of_the_cpu(model: Path, folder: Path) -> None:
    paths = sorted(folder.iterdir())
    segments = SegmentConfig(window=4.0)
    alone = load(model, "cpu", segments=segments)
    settings = ["decode.batch_seconds=12", "decode.precision=float32"]
    together = load(model, "cuda", segments=segments, settings=settings)
    for one, other in zip(
        alone.transcribe_each(paths * 5), together.transcribe_each(paths * 5), strict=True
    ):
        assert str(other) == str(one)
        if isinstance(one, Transcription):
            assert isinstance(other, Transcription)
            assert other.seconds == one.seconds


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["greedy", "modified_beam"])
@pytest.mark.parametrize("is_zipformer", [False, True])
def test_nothing_that_launches_a_batch_waits_for_the_gpu(method: str, is_zipformer: bool) -> None:
    tokenizer = train_tokenizer(["one two three"], TokenizerConfig(kind="char"))
    encoder = tiny_zipformer(causal=False) if is_zipformer else tiny_conformer()
    model = tiny_model(encoder, len(tokenizer), kind="full", ctc_scale=0.3).to("cuda")
    decode = DecodeConfig(method=method, batch_seconds=40.0)
    recogniser = Recogniser(model, tokenizer, decode=decode)
    recordings = [sound(4.0) for _ in range(40)]
    for words in (False, True):
        expected = list(recogniser.transcribe_each(recordings, words=words))  # captures graphs
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = list(recogniser.transcribe_each(recordings, words=words))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert list(map(str, found)) == list(map(str, expected))


def test_nan_is_an_error_of_its_recording_and_no_path_an_empty_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recogniser = load(str(model))
    assert isinstance(recogniser, Recogniser)
    monkeypatch.setattr(recogniser, "_search", lambda *_: [[]])
    (nothing,) = recogniser.transcribe_each([sound(1.0)])
    assert nothing.text == ""
    lost = Hypothesis(symbols=(3,), frames=(0,), score=math.nan, symbol_scores=(math.nan,))
    found = iter([[lost], []])
    monkeypatch.setattr(recogniser, "_search", lambda _, lengths: [next(found) for _ in lengths])
    error, other = recogniser.transcribe_each([sound(1.0), sound(1.0)])
    assert isinstance(error, ValueError)
    assert str(error).startswith("the score of the best hypothesis is nan")
    assert isinstance(other, Transcription)
