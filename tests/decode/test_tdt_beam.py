"""Beam search of models with durations against all paths, greedy search and the loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.states import Rows
from pruned_rnnt.decode.search.streaming import StreamPath
from pruned_rnnt.decode.search.tdt_beam import TdtBeamSearch
from pruned_rnnt.model.speech_model import TransducerModel
from tests.decode.search_model import UNKNOWN, VOCAB, encoded, make_model


@torch.no_grad()
def scores_of(model: TransducerModel, frame: Tensor, symbols: tuple[int, ...]) -> list[Tensor]:
    """Log-probabilities of symbols (V) and of durations (K) at a frame after symbols."""
    output, state = model.predictor.start(1, frame.device)
    for symbol in symbols:
        output, state = model.predictor.step(torch.tensor([symbol]), state)
    joiner = model.joiner
    logits = joiner.with_durations(joiner.encoder_proj(frame), joiner.decoder_proj(output[0]))
    return [x.log_softmax(-1) for x in logits]


def all_sequences(
    model: TransducerModel, frames: Tensor, most: int, allowed: tuple[int, ...]
) -> dict[tuple[int, ...], float]:
    """Log-probability of each sequence over its paths with at most `most` symbols in a frame."""
    totals: dict[tuple[int, ...], list[float]] = {}

    def extend(t: int, here: int, symbols: tuple[int, ...], score: float) -> None:
        log_probs, log_durations = scores_of(model, frames[t], symbols)
        for n, duration in enumerate(model.loss_config.durations):
            target, gain = t + duration, score + float(log_durations[n])
            by_blank = gain + float(log_probs[0])
            if duration > 0 and target == len(frames):
                totals.setdefault(symbols, []).append(by_blank)
            if target >= len(frames) or (duration == 0 and here + 1 == most):
                continue
            if duration > 0:
                extend(target, 0, symbols, by_blank)
            for symbol in allowed:
                there = 0 if duration > 0 else here + 1
                extend(target, there, (*symbols, symbol), gain + float(log_probs[symbol]))

    extend(0, 0, (), 0.0)
    return {
        symbols: float(torch.tensor(scores, dtype=torch.float64).logsumexp(0))
        for symbols, scores in totals.items()
    }


@pytest.mark.parametrize("durations", [(0, 1, 2), (1, 2), (2, 0, 1)])
@pytest.mark.parametrize("lstm", [False, True])
def test_wide_beam_finds_every_sequence_with_its_probability(
    durations: tuple[int, ...], lstm: bool
) -> None:
    model = make_model(durations=durations, lstm=lstm)
    frames, lengths = encoded([3, 1, 2])
    silent, allowed = (2, 4), (1, 3)
    search = TdtBeamSearch(
        model,
        beam_size=150,
        num_best=150,
        length_norm=False,
        max_symbols_per_frame=2,
        silent_symbols=silent,
    )
    for n, hypotheses in enumerate(search(frames, lengths)):
        wanted = all_sequences(model, frames[n, : lengths[n]], 2, allowed)
        assert len(hypotheses) == len(wanted)
        for found in hypotheses:
            assert found.score == pytest.approx(wanted[found.symbols], abs=1e-4)
            check_path(found, int(lengths[n]), durations)
        scores = [found.score for found in hypotheses]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("chunks", [(2, 2, 0), (3, 0), (3, 1)])
def test_a_stream_ends_with_the_scores_of_the_whole_utterance(chunks: tuple[int, ...]) -> None:
    length, size = sum(chunks), max(chunks)
    for seed in range(3):
        model = make_model(seed=seed, durations=(0, 1, 2))
        options = {"max_symbols_per_frame": 1, "silent_symbols": (2, 4), "length_norm": False}
        search = TdtBeamSearch(model, beam_size=150, **options)
        frames, lengths = encoded([length])
        ((whole, *_),) = search(frames, lengths)
        path, state, begin = StreamPath(), search.start_streams(1, frames.device), 0
        for count in chunks:
            chunk = torch.zeros(1, size, frames.size(2))
            chunk[:, :count] = frames[:, begin : begin + count]
            searched = search.search_chunk(chunk, torch.tensor([count]), state)
            state = searched.state
            path.extend(searched.found.result()[0], count)
            begin += count
        found = path.hypothesis()
        assert (found.symbols, found.frames) == (whole.symbols, whole.frames)
        assert found.score == pytest.approx(whole.score, abs=1e-4)


def check_path(found: Hypothesis, length: int, durations: tuple[int, ...]) -> None:
    assert len(found.symbols) == len(found.frames) == len(found.durations)
    assert len(found.symbol_scores) == len(found.symbols)
    assert set(found.durations) <= set(durations)
    ends = [t + d for t, d in zip(found.frames, found.durations, strict=True)]
    assert all(end <= t for end, t in zip(ends, found.frames[1:], strict=False))
    assert all(end < length for end in ends)


@pytest.mark.slow
def test_scores_of_sequences_are_those_of_the_loss() -> None:
    model = make_model(durations=(0, 1, 2, 3))
    frames, lengths = encoded([3])
    options = {"beam_size": 700, "num_best": 700, "max_symbols_per_frame": 3}
    search = TdtBeamSearch(model, silent_symbols=(2, 4), **options)
    ((*found,),) = search(frames, lengths)
    short = [each for each in found if len(each.symbols) == 2]
    assert len(short) == 4
    for each in short:
        targets = torch.tensor([each.symbols], dtype=torch.int32)
        with torch.no_grad():
            am = model.joiner.encoder_proj(frames)[:, :, None]
            lm = model.joiner.decoder_proj(model.predictor.forward_targets(targets))[:, None]
            logits, durations = model.joiner.with_durations(am, lm)
        options = {"durations": model.loss_config.durations}
        loss = pruned_rnnt.rnnt_loss_tdt(logits, durations, targets, **options)
        assert each.score == pytest.approx(-float(loss), abs=1e-3)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("lstm", [False, True])
def test_beam_search_in_a_batch_equals_one_at_a_time(beam_size: int, lstm: bool) -> None:
    model = make_model(lstm=lstm, durations=(0, 1, 2, 3, 4))
    frames, lengths = encoded([15, 3, 0, 9, 1])
    search = TdtBeamSearch(model, beam_size=beam_size, num_best=beam_size, silent_symbols=[UNKNOWN])
    together = search(frames, lengths)
    assert sum(len(found[0].symbols) for found in together) > 1
    for n, hypotheses in enumerate(together):
        (alone,) = search(frames[n : n + 1, : lengths[n]], lengths[n : n + 1])
        assert [one.symbols for one in alone] == [other.symbols for other in hypotheses]
        for one, other in zip(alone, hypotheses, strict=True):
            assert (one.frames, one.durations) == (other.frames, other.durations)
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert UNKNOWN not in one.symbols
            check_path(one, int(lengths[n]), model.loss_config.durations)


@pytest.mark.parametrize("favours", [False, True])
def test_scores_of_symbols_are_those_at_their_frames(favours: bool) -> None:
    model = make_model(durations=(0, 1, 2))
    frames, lengths = encoded([12])
    scorers = [_Favour()] if favours else []
    search = TdtBeamSearch(model, num_best=4, silent_symbols=[UNKNOWN], scorers=scorers)
    ((*found,),) = search(frames, lengths)
    assert max(len(each.symbols) for each in found) > 2
    for each in found:
        for n, (symbol, t) in enumerate(zip(each.symbols, each.frames, strict=True)):
            log_probs, _ = scores_of(model, frames[0, t], each.symbols[:n])
            assert each.symbol_scores[n] == pytest.approx(float(log_probs[symbol]), abs=1e-4)


def test_wider_beams_find_better_sequences() -> None:
    model = make_model(durations=(0, 1, 2, 3, 4))
    frames, lengths = encoded([25, 30, 18])
    best = [
        [found[0].score for found in TdtBeamSearch(model, beam_size=b, length_norm=False)(*batch)]
        for b in (1, 2, 8)
        for batch in [(frames, lengths)]
    ]
    assert sum(best[0]) < sum(best[1]) + 1e-4 < sum(best[2]) + 2e-4


class _Favour:
    """Adds 2 to symbol 3, counts symbols, and adds their number at the end."""

    def start(self, rows: int, device: torch.device) -> Rows:
        return (torch.zeros(rows, device=device),)

    def scores(self, state: Rows) -> Tensor:
        return (torch.arange(VOCAB) == 3).float().expand(len(state[0]), -1) * 2

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        return (state[0] + 1,)

    def final(self, state: Rows) -> Tensor:
        return state[0]


def test_scorers_add_to_the_scores_of_symbols_and_of_the_end() -> None:
    model = make_model(durations=(0, 1, 2))
    frames, lengths = encoded([2])
    options = {"beam_size": 80, "num_best": 80, "max_symbols_per_frame": 2}
    silent = {"silent_symbols": (2, 4)}
    ((*plain,),) = TdtBeamSearch(model, **options, **silent)(frames, lengths)
    ((*fused,),) = TdtBeamSearch(model, **options, **silent, scorers=[_Favour()])(frames, lengths)
    wanted = {each.symbols: each.score for each in plain}
    assert {each.symbols for each in fused} == set(wanted)
    for each in fused:
        extra = 2 * each.symbols.count(3) + len(each.symbols)
        assert each.score == pytest.approx(wanted[each.symbols] + extra, abs=1e-4)


def test_settings_that_do_not_fit_are_refused() -> None:
    model = make_model(durations=(0, 1))
    with pytest.raises(ValueError, match="use TdtBeamSearch"):
        ModifiedBeamSearch(model)
    fusion = FusionConfig(ilm_scale=0.2)
    with pytest.raises(ValueError, match=r"decode\.fusion\.ilm_scale is 0\.2"):
        build_search(model, DecodeConfig(method="modified_beam", fusion=fusion))
    for options in ({"beam_size": 0}, {"num_best": 5}, {"max_symbols_per_frame": 0}):
        with pytest.raises(ValueError, match=r"is 0|is 5"):
            TdtBeamSearch(model, **options)


def test_empty_batch_of_frames_gives_empty_hypotheses() -> None:
    model = make_model(durations=(0, 1))
    ((found, *_),) = TdtBeamSearch(model)(torch.zeros(1, 0, 8), torch.tensor([0]))
    assert (found.symbols, found.frames, found.score) == ((), (), 0.0)
    assert math.isfinite(found.score)


@pytest.mark.gpu
@torch.inference_mode()
def test_beam_search_matches_the_cpu_and_does_not_synchronise() -> None:
    frames, lengths = encoded([40, 1, 23, 0])
    options = {"beam_size": 4, "num_best": 4, "silent_symbols": [UNKNOWN]}
    wanted = TdtBeamSearch(make_model(durations=(0, 1, 2, 4)), **options)(frames, lengths)
    model = make_model(durations=(0, 1, 2, 4)).cuda()
    search = TdtBeamSearch(model, **options)
    for ours, theirs in zip(search(frames.cuda(), lengths), wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.symbols, one.frames) == (other.symbols, other.frames)
            assert one.score == pytest.approx(other.score, rel=1e-3, abs=1e-2)
    encoded_NTE, lengths_N = frames.cuda(), lengths.cuda()
    start = search._start(len(encoded_NTE), encoded_NTE.device, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        search._frames(encoded_NTE, lengths_N, start)
    finally:
        torch.cuda.set_sync_debug_mode("default")
