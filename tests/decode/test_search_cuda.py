"""Searches on CUDA match those on the CPU and do not synchronise with the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pruned_rnnt.decode.fusion.build import NeuralScorer
from pruned_rnnt.decode.fusion.hotwords import Hotword, HotwordScorer
from pruned_rnnt.decode.fusion.word_ngram import WordNgram
from pruned_rnnt.decode.fusion.word_scorer import WordNgramScorer
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.greedy import GreedySearch, greedy_search
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.states import start_predictor
from pruned_rnnt.model.language_model import LanguageModel, LanguageModelConfig
from tests.decode.search_model import UNKNOWN, VOCAB, encoded, make_model

pytestmark = pytest.mark.gpu

LENGTHS = [100, 1, 64, 33, 0]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(one: Hypothesis, other: Hypothesis) -> None:
    assert (one.symbols, one.frames) == (other.symbols, other.frames)
    assert one.score == pytest.approx(other.score, rel=1e-3, abs=1e-2)
    assert one.symbol_scores == pytest.approx(other.symbol_scores, rel=1e-3, abs=1e-2)


def assert_all_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("max_symbols", [1, 3])
@pytest.mark.parametrize("frames", [20, 100])
def test_greedy_matches_the_cpu(lstm: bool, hat: bool, max_symbols: int, frames: int) -> None:
    model = make_model(hat=hat, lstm=lstm)
    lengths = [min(length, frames) for length in LENGTHS]
    batches = [encoded(lengths, seed) for seed in range(3)]
    batches.append((batches[0][0][:1], batches[0][1][:1]))
    expected = [
        greedy_search(
            model, frames, lengths, max_symbols_per_frame=max_symbols, silent_symbols=[UNKNOWN]
        )
        for frames, lengths in batches
    ]
    search = GreedySearch(model.cuda(), max_symbols_per_frame=max_symbols, silent_symbols=[UNKNOWN])
    for (encoded_NTE, lengths_N), wanted in zip(batches, expected, strict=True):
        assert_all_same(search(encoded_NTE.cuda(), lengths_N), wanted)


@torch.inference_mode()
def test_greedy_does_not_synchronise() -> None:
    model = make_model().cuda()
    search = GreedySearch(model, silent_symbols=[UNKNOWN])
    encoded_NTE, lengths_N = (x.cuda() for x in encoded(LENGTHS))
    start = start_predictor(model, len(LENGTHS), encoded_NTE.device)
    search.frames(encoded_NTE[:, :40], lengths_N, start)
    search.frames(encoded_NTE[:, :20], lengths_N, start)
    for num_frames in (100, 20):
        with no_synchronisation():
            search.frames(encoded_NTE[:, :num_frames], lengths_N, start)


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("frames", [20, 100])
def test_beam_search_matches_the_cpu(lstm: bool, frames: int) -> None:
    batches = [encoded([min(length, frames) for length in LENGTHS], seed) for seed in range(3)]
    batches.append((batches[0][0][:1], batches[0][1][:1]))
    options = {"beam_size": 4, "num_best": 4, "silent_symbols": [UNKNOWN]}
    on_cpu = ModifiedBeamSearch(make_model(lstm=lstm), **options)
    expected = [on_cpu(*batch) for batch in batches]
    search = ModifiedBeamSearch(make_model(lstm=lstm).cuda(), **options)
    for (encoded_NTE, lengths_N), wanted in zip(batches, expected, strict=True):
        found = search(encoded_NTE.cuda(), lengths_N)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_all_same(ours, theirs)


@torch.inference_mode()
def test_beam_search_does_not_synchronise() -> None:
    model = make_model().cuda()
    search = ModifiedBeamSearch(model, silent_symbols=[UNKNOWN])
    encoded_NTE, lengths_N = (x.cuda() for x in encoded(LENGTHS))
    search(encoded_NTE, lengths_N)
    start = search._start(len(encoded_NTE), encoded_NTE.device)
    with no_synchronisation():
        search._frames(encoded_NTE, lengths_N, start)


@torch.inference_mode()
def test_scorers_match_the_cpu_and_do_not_synchronise() -> None:
    torch.manual_seed(0)
    lm = LanguageModel(LanguageModelConfig(dim=8, layers=1), VOCAB).eval()
    encoded_NTE, lengths_N = encoded(LENGTHS)

    def search(device: str) -> ModifiedBeamSearch:
        hotword = Hotword(symbols=(4, 2), bonus=1.0)
        scorers = [NeuralScorer(lm.to(device), 0.5), HotwordScorer([hotword], VOCAB)]
        return ModifiedBeamSearch(make_model(hat=True).to(device), scorers=scorers, ilm_scale=0.2)

    expected = search("cpu")(encoded_NTE, lengths_N)
    on_device = search("cuda")
    frames_NTE, lengths_N = encoded_NTE.cuda(), lengths_N.cuda()
    for (one,), (other,) in zip(on_device(frames_NTE, lengths_N), expected, strict=True):
        assert_same(one, other)
    start = on_device._start(len(frames_NTE), frames_NTE.device)
    with no_synchronisation():
        on_device._frames(frames_NTE, lengths_N, start)


def test_word_ngram_matches_the_cpu_without_synchronisation() -> None:
    texts = ["ab abc b", "b ab", "abc abc"]
    symbols = ["<blk>", "<sos/eos>", "<unk>", "\u2581a", "b"][:VOCAB]
    batches = [encoded(LENGTHS, seed) for seed in range(2)]
    found = []
    for device in ("cpu", "cuda"):
        scorer = WordNgramScorer(WordNgram(texts=texts), symbols, scale=0.7, unknown=0.01)
        search = ModifiedBeamSearch(
            make_model().to(device), beam_size=4, silent_symbols=[UNKNOWN], scorers=[scorer]
        )
        found.append([search(x.to(device), lengths) for x, lengths in batches])
    for expected, results in zip(*found, strict=True):
        for one, other in zip(expected, results, strict=True):
            assert_same(one[0], other[0])
    state = scorer.start(8, torch.device("cuda"))
    symbols_R = torch.full((8,), 3, device="cuda")
    with no_synchronisation():
        scorer.scores(scorer.advance(state, symbols_R, symbols_R > 0))
