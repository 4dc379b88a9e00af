"""Searches against each other and against an enumeration of all paths."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import build_search, score_problem
from pruned_rnnt.decode.decode_config import DecodeConfig, result_settings
from pruned_rnnt.decode.decode_config import label as result_label
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.fusion.hotwords import Hotword, HotwordScorer
from pruned_rnnt.decode.search import compiled_search
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.greedy import GreedySearch, greedy_search
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.predictor import LstmPredictor
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from tests.decode.search_model import (
    UNKNOWN,
    VOCAB,
    all_sequences,
    encoded,
    log_probs_after,
    make_model,
    modified_beam_search,
)


@torch.no_grad()
def greedy_by_hand(
    model: TransducerModel, frames: Tensor, max_symbols: int, silent: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...], float, tuple[float, ...]]:
    symbols: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    score = 0.0
    for t, frame in enumerate(frames):
        for _ in range(max_symbols):
            log_probs = log_probs_after(model, frame, symbols)
            best = int(log_probs.argmax())
            score += float(log_probs[best])
            if best in silent:
                break
            symbols, times = (*symbols, best), (*times, t)
            scores = (*scores, float(log_probs[best]))
    return symbols, times, score, scores


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("max_symbols", [1, 3])
@pytest.mark.parametrize("silent", [(), (UNKNOWN,)])
def test_greedy_in_a_batch_equals_greedy_by_hand(
    hat: bool, context_size: int, max_symbols: int, silent: tuple[int, ...]
) -> None:
    model = make_model(context_size, hat)
    frames, lengths = encoded([12, 1, 7, 0])
    found = greedy_search(
        model, frames, lengths, max_symbols_per_frame=max_symbols, silent_symbols=silent
    )
    assert sum(len(hypothesis.symbols) for hypothesis in found) > 2
    for n, hypothesis in enumerate(found):
        expected = greedy_by_hand(model, frames[n, : lengths[n]], max_symbols, {0, *silent})
        assert (hypothesis.symbols, hypothesis.frames) == expected[:2]
        assert hypothesis.score == pytest.approx(expected[2], abs=1e-4)
        assert hypothesis.symbol_scores == pytest.approx(expected[3], abs=1e-4)


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize(("context_size", "lstm"), [(1, False), (2, False), (1, True)])
def test_beam_of_one_is_greedy(hat: bool, context_size: int, lstm: bool) -> None:
    model = make_model(context_size, hat, lstm=lstm)
    frames, lengths = encoded([12, 1, 7])
    greedy = greedy_search(model, frames, lengths)
    beam = modified_beam_search(model, frames, lengths, beam_size=1)
    for one, (other,) in zip(greedy, beam, strict=True):
        assert (one.symbols, one.frames) == (other.symbols, other.frames)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.symbol_scores == pytest.approx(other.symbol_scores, abs=1e-4)


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("context_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wide_beam_finds_every_sequence_with_its_probability(hat: bool, context_size: int) -> None:
    model = make_model(context_size, hat)
    frames, lengths = encoded([4, 3])
    wide = 700
    found = modified_beam_search(
        model, frames, lengths, beam_size=wide, num_best=wide, length_norm=False
    )
    for n, hypotheses in enumerate(found):
        expected = all_sequences(model, frames[n, : lengths[n]])
        assert {hypothesis.symbols for hypothesis in hypotheses} == set(expected)
        assert len(hypotheses) == len(expected)
        for hypothesis in hypotheses:
            assert hypothesis.score == pytest.approx(expected[hypothesis.symbols], abs=1e-4)
            assert len(hypothesis.frames) == len(hypothesis.symbols)
            assert list(hypothesis.frames) == sorted(set(hypothesis.frames))
            assert len(hypothesis.symbol_scores) == len(hypothesis.symbols)
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert math.isclose(sum(math.exp(score) for score in scores), 1.0, abs_tol=1e-4)


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("beam_size", [2, 4])
def test_beam_search_in_a_batch_equals_one_at_a_time(beam_size: int, lstm: bool) -> None:
    model = make_model(lstm=lstm)
    frames, lengths = encoded([15, 3, 9, 1])
    together = modified_beam_search(model, frames, lengths, beam_size=beam_size, num_best=beam_size)
    for n, hypotheses in enumerate(together):
        length = int(lengths[n])
        (alone,) = modified_beam_search(
            model,
            frames[n : n + 1, :length],
            lengths[n : n + 1],
            beam_size=beam_size,
            num_best=beam_size,
        )
        assert [h.symbols for h in alone] == [h.symbols for h in hypotheses]
        assert [h.frames for h in alone] == [h.frames for h in hypotheses]
        for one, other in zip(alone, hypotheses, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)


def test_hypotheses_are_different_and_best_first() -> None:
    model = make_model(seed=3)
    frames, lengths = encoded([10])
    (hypotheses,) = modified_beam_search(model, frames, lengths, beam_size=6, num_best=6)
    assert len({hypothesis.symbols for hypothesis in hypotheses}) == len(hypotheses) > 2
    norms = [h.score / (len(h.symbols) + 2) for h in hypotheses]
    assert norms == sorted(norms, reverse=True)


def test_silent_symbols_are_never_emitted() -> None:
    model = make_model()
    with torch.no_grad():
        model.joiner.output_linear.bias[UNKNOWN] += 20.0
    frames, lengths = encoded([8, 5])
    silent = (UNKNOWN,)
    assert UNKNOWN in greedy_search(model, frames, lengths)[0].symbols
    assert greedy_search(model, frames, lengths, silent_symbols=silent)[0].symbols == ()
    (first, _) = modified_beam_search(model, frames, lengths, silent_symbols=silent)
    assert UNKNOWN not in first[0].symbols


@pytest.mark.parametrize("hat", [False, True])
def test_log_probs_sum_to_one(hat: bool) -> None:
    log_probs = joint_log_probs(torch.randn(3, VOCAB).half() * 5, 0, hat)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3))


def test_no_frames_give_no_symbols() -> None:
    frames, lengths = torch.zeros(2, 0, 8), torch.tensor([0, 0])
    for hypothesis in greedy_search(make_model(), frames, lengths):
        assert (hypothesis.symbols, hypothesis.score) == ((), 0.0)
    for (hypothesis,) in modified_beam_search(make_model(), frames, lengths):
        assert (hypothesis.symbols, hypothesis.score) == ((), 0.0)


@pytest.mark.parametrize("method", ["greedy", "modified_beam", "ctc_greedy", "ctc_prefix_beam"])
@pytest.mark.parametrize("model", [{}, {"lstm": True}, {"durations": (0, 1, 2)}])
def test_a_batch_of_no_utterances_has_no_hypotheses(method: str, model: dict[str, Any]) -> None:
    search = build_search(make_model(ctc_scale=0.2, **model), DecodeConfig(method=method))
    assert search(torch.zeros(0, 5, 8), torch.zeros(0, dtype=torch.int64)) == []


@pytest.mark.parametrize("method", ["greedy", "modified_beam", "ctc_greedy", "ctc_prefix_beam"])
@pytest.mark.parametrize("model", [{}, {"lstm": True}, {"durations": (0, 1, 2)}])
def test_values_and_lengths_beyond_the_frames_change_nothing(
    method: str, model: dict[str, Any]
) -> None:
    search = build_search(make_model(ctc_scale=0.2, **model), DecodeConfig(method=method))
    frames, lengths = encoded([9, 5])
    expected = search(frames, lengths)
    frames[1, 5:] = torch.nan
    assert search(frames, torch.tensor([14, 5])) == expected
    assert expected[0][0].symbols


def test_single_frames_of_greedy_search_ignore_padding() -> None:
    search = GreedySearch(make_model())
    frames, lengths = encoded([9, 5])
    frames[1, 5:] = torch.nan
    with torch.inference_mode():
        am_NTD = search.model.joiner.encoder_proj(frames)
        (_, scores_NTM), _ = search._loop(am_NTD, lengths, search.start(2, frames.device))
    assert bool(scores_NTM.isfinite().all())


@pytest.mark.parametrize("method", ["greedy", "modified_beam", "ctc_greedy", "ctc_prefix_beam"])
@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_nan_in_an_utterance_is_a_problem_of_its_score(
    method: str, durations: tuple[int, ...]
) -> None:
    model = make_model(ctc_scale=0.2, durations=durations)
    search = build_search(model, DecodeConfig(method=method))
    frames, lengths = encoded([9, 5])
    assert [score_problem(found[0]) for found in search(frames, lengths)] == ["", ""]
    frames[1, 2] = torch.nan
    first, second = (score_problem(found[0]) for found in search(frames, lengths))
    assert first == ""
    assert "is nan" in second
    assert "decode.precision=float16" in second


@pytest.mark.parametrize(("beam_size", "num_best"), [(0, 1), (4, 5), (4, 0)])
def test_wrong_sizes_are_errors(beam_size: int, num_best: int) -> None:
    frames, lengths = encoded([3])
    with pytest.raises(ValueError, match="num_best"):
        modified_beam_search(make_model(), frames, lengths, beam_size=beam_size, num_best=num_best)
    with pytest.raises(ValueError, match="at least 1"):
        greedy_search(make_model(), frames, lengths, max_symbols_per_frame=0)


@pytest.mark.parametrize("rnnt_type", ["modified", "constrained", "rna"])
def test_more_symbols_per_frame_than_the_topology_allows_is_an_error(rnnt_type: str) -> None:
    model = make_model()
    model.loss_config = LossConfig(rnnt_type=rnnt_type)
    with pytest.raises(ValueError, match=f"is 3, needs 1.*rnnt_type={rnnt_type}"):
        build_search(model, DecodeConfig(max_symbols_per_frame=3))
    build_search(model, DecodeConfig())


def test_more_than_one_hypothesis_needs_a_beam() -> None:
    with pytest.raises(ValueError, match=r"num_best is 4, which needs .*modified_beam"):
        DecodeConfig(num_best=4)


def test_results_of_other_settings_have_other_names() -> None:
    ngram, lm = FusionConfig(ngram="a.arpa", ngram_scale=0.45), FusionConfig(lm="exp/lm")
    for config, label in (
        (DecodeConfig(), "greedy"),
        (DecodeConfig(beam_size=8), "greedy"),
        (DecodeConfig(metric="cer"), "greedy-cer"),
        (DecodeConfig(max_symbols_per_frame=3, left=64), "greedy-symbols3-left64"),
        (DecodeConfig(method="modified_beam", beam_size=8), "modified_beam-beam8"),
        (DecodeConfig(method="modified_beam", fusion=ngram), "modified_beam-ngram0.45"),
        (DecodeConfig(method="modified_beam", chunk=8, fusion=lm), "modified_beam-lm0.3-chunk8"),
    ):
        assert result_label(result_settings(config)) == label


@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("scores", ["none", "internal", "all"])
def test_beams_on_the_host_find_what_beams_on_a_device_find(
    context_size: int, scores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(context_size, hat=scores != "none")
    frames, lengths = encoded([40, 3, 0, 17])
    hotwords = [Hotword(symbols=(3, 4), bonus=2.0), Hotword(symbols=(4, 4, 3), bonus=1.0)]
    options: dict[str, Any] = {"beam_size": 4, "num_best": 4, "silent_symbols": [UNKNOWN]}
    if scores != "none":
        options["ilm_scale"] = 0.2
    if scores == "all":
        options["scorers"] = [HotwordScorer(hotwords, VOCAB)]
    on_host = modified_beam_search(model, frames, lengths, **options)
    # No predictor is one of these, so the other loop runs.
    monkeypatch.setattr(compiled_search, "StatelessPredictor", LstmPredictor)
    on_device = modified_beam_search(model, frames, lengths, **options)
    assert [len(found) for found in on_host] == [len(found) for found in on_device]
    assert len(on_host[0]) >= 3
    _assert_same(on_host, on_device)
    for n, found in enumerate(on_host):
        for each in found:
            # Those of the model alone.
            expected = [
                float(log_probs_after(model, frames[n, t], each.symbols[:place])[symbol])
                for place, (symbol, t) in enumerate(zip(each.symbols, each.frames, strict=True))
            ]
            assert each.symbol_scores == pytest.approx(expected, abs=1e-4)


def _assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert (one.symbols, one.frames) == (other.symbols, other.frames)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.symbol_scores == pytest.approx(other.symbol_scores, abs=1e-4)


def test_joiners_and_dtypes_that_the_op_does_not_take_find_the_same() -> None:
    model = make_model()
    frames, lengths = encoded([20, 5])
    expected = modified_beam_search(model, frames, lengths, num_best=4)
    calls = []
    hook = model.joiner.output_linear.register_forward_hook(lambda *_: calls.append(1))
    _assert_same(modified_beam_search(model, frames, lengths, num_best=4), expected)
    hook.remove()
    assert len(calls) == 20
    doubled = modified_beam_search(model.double(), frames.double(), lengths, num_best=4)
    _assert_same(doubled, expected)


def test_one_search_follows_parameters_that_change() -> None:
    model, other = make_model(), make_model(seed=9)
    frames, lengths = encoded([20, 5])
    search = ModifiedBeamSearch(model)
    before = search(frames, lengths)
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    expected = ModifiedBeamSearch(other)(frames, lengths)
    _assert_same(search(frames, lengths), expected)
    assert before[0][0].symbols != expected[0][0].symbols


def test_searches_on_the_host_run_adapters_of_the_predictor() -> None:
    model, scaled = make_model(), make_model()
    frames, lengths = encoded([20, 5])
    plain = modified_beam_search(model, frames, lengths)
    model.predictor.embedding.register_forward_hook(lambda *call: 3 * call[2])
    with torch.no_grad():
        scaled.predictor.embedding.weight.mul_(3)
    expected = modified_beam_search(scaled, frames, lengths)
    assert expected[0][0].symbols != plain[0][0].symbols
    _assert_same(modified_beam_search(model, frames, lengths), expected)
    greedy = [[each] for each in greedy_search(model, frames, lengths)]
    _assert_same(greedy, [[each] for each in greedy_search(scaled, frames, lengths)])


@pytest.mark.parametrize(("context_size", "lstm"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("max_symbols", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
def test_greedy_on_the_host_finds_what_single_frames_find(
    context_size: int, lstm: bool, max_symbols: int, hooked: bool
) -> None:
    model = make_model(context_size, lstm=lstm, hat=max_symbols == 2)
    calls: list[int] = []
    if hooked:  # so that the compiled search does not take it
        model.joiner.output_linear.register_forward_hook(lambda *_: calls.append(1))
    # More than the utterances from which spans are shorter.
    frames, lengths = encoded([*range(0, 60, 3), 40, 41])
    search = GreedySearch(model, max_symbols_per_frame=max_symbols, silent_symbols=[UNKNOWN])
    together = search(frames, lengths)
    with torch.inference_mode():
        am_NTD = model.joiner.encoder_proj(frames)
        start = search.start(len(frames), frames.device)
        before = [x.clone() for x in start]
        assert bool(calls) == hooked
        (symbols_NTM, scores_NTM), state = search._loop(am_NTD, lengths, start)
        found = search.frames(frames, lengths, start)
    assert all(torch.equal(x, y) for x, y in zip(start, before, strict=True))
    assert torch.equal(found.symbols_NTM, symbols_NTM)
    torch.testing.assert_close(found.scores_NTM, scores_NTM, rtol=0, atol=1e-4)
    for one, other in zip(found.state, state, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for n, length in enumerate(lengths.tolist()):
        (alone,) = search(frames[n : n + 1, :length], lengths[n : n + 1])
        assert (alone.symbols, alone.frames) == (together[n].symbols, together[n].frames)


def test_greedy_in_parts_finds_what_it_finds_at_once() -> None:
    model = make_model()
    frames, lengths = encoded([40, 33, 0])
    search = GreedySearch(model)
    with torch.inference_mode():
        state = search.start(len(frames), frames.device)
        whole = search.frames(frames, lengths, state)
        parts = []
        for begin in range(0, 40, 7):
            part = frames[:, begin : begin + 7]
            found = search.frames(part, (lengths - begin).clamp(0, part.size(1)), state)
            state = found.state
            parts.append(found)
    symbols_NTM = torch.cat([part.symbols_NTM for part in parts], dim=1)
    assert torch.equal(symbols_NTM, whole.symbols_NTM)
    assert (symbols_NTM >= 0).any()
    for one, other in zip(state, whole.state, strict=True):
        torch.testing.assert_close(one, other)
