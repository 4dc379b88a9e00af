"""CTC searches and alignments against all paths of small lattices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import build_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.search import ctc_alignment as ctc_alignment_module
from pruned_rnnt.decode.search.ctc_alignment import ctc_alignment
from pruned_rnnt.decode.search.ctc_search import CtcGreedySearch, CtcPrefixBeamSearch
from pruned_rnnt.decode.search.states import Rows
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import CtcModel, ctc_log_probs
from tests.decode.ctc_paths import BLANK, all_sequences, best_path, collapsed, scored_paths
from tests.decode.search_model import encoded
from tests.tiny_models import randomise, tiny_conformer, tiny_model

VOCAB = 4
LENGTHS = [5, 3, 1, 0, 4]
UNKNOWN = 2


def ctc_model(vocab_size: int = VOCAB, seed: int = 2) -> CtcModel:
    torch.manual_seed(seed)
    config = ModelConfig(encoder=tiny_conformer(dim=8))
    model = CtcModel(config, vocab_size, LossConfig(kind="ctc")).eval()
    assert model.ctc_head is not None
    randomise(model.ctc_head, 0.5)
    return model


def log_probs(model: CtcModel, frames: Tensor) -> Tensor:
    with torch.no_grad():
        return ctc_log_probs(model, frames).double()


@pytest.mark.parametrize("silent", [[], [UNKNOWN]])
def test_prefix_beam_that_holds_all_sequences_is_exact(silent: list[int]) -> None:
    model = ctc_model()
    frames, lengths = encoded(LENGTHS)
    search = CtcPrefixBeamSearch(model, beam_size=300, num_best=300, silent_symbols=silent)
    found = search(frames, lengths)
    probs = log_probs(model, frames)
    probs[:, :, silent] = -torch.inf
    for n, length in enumerate(LENGTHS):
        expected = all_sequences(probs[n, :length])
        assert len(expected) <= 300
        results = {hypothesis.symbols: hypothesis for hypothesis in found[n]}
        assert len(results) == len(found[n])
        assert results.keys() == expected.keys()
        for symbols, hypothesis in results.items():
            assert hypothesis.score == pytest.approx(expected[symbols], abs=1e-4)
        scores = [hypothesis.score for hypothesis in found[n]]
        assert scores == sorted(scores, reverse=True)
        best = found[n][0]
        times, _ = best_path(probs[n, :length], best.symbols)
        assert best.frames == times
        symbol_scores = [float(probs[n, t, s]) for t, s in zip(times, best.symbols, strict=True)]
        assert best.symbol_scores == pytest.approx(symbol_scores, abs=1e-5)


def test_repeated_symbols_need_a_blank_between_them() -> None:
    """In a certain lattice, a a and a - a are different sequences."""
    model = ctc_model(3)
    path = [1, 1, BLANK, 1, 2, 2]
    assert model.ctc_head is not None
    with torch.no_grad():
        model.ctc_head.weight.zero_()
        model.ctc_head.bias.zero_()
        model.ctc_head.weight[:, :3] = 30 * torch.eye(3)
    frames = torch.zeros(1, 6, 8)
    frames[0, range(6), path] = 1.0
    for search in (
        CtcPrefixBeamSearch(model, beam_size=3),
        lambda *batch: [[best] for best in CtcGreedySearch(model)(*batch)],
    ):
        ((best,),) = search(frames, torch.tensor([6]))
        assert best.symbols == (1, 1, 2)
        assert best.frames == (0, 3, 4)
        assert best.score == pytest.approx(0, abs=1e-4)


def test_small_beams_find_distinct_sequences_of_at_most_their_probability() -> None:
    model = ctc_model(6, seed=4)
    frames, lengths = encoded([5, 5, 4], seed=3)
    probs = log_probs(model, frames)
    for beam_size in (1, 2, 5):
        found = CtcPrefixBeamSearch(model, beam_size=beam_size, num_best=beam_size)(frames, lengths)
        for n, several in enumerate(found):
            exact = all_sequences(probs[n, : int(lengths[n])])
            assert len({hypothesis.symbols for hypothesis in several}) == len(several)
            for hypothesis in several:
                assert hypothesis.score <= exact[hypothesis.symbols] + 1e-4


def test_results_do_not_depend_on_the_batch() -> None:
    model = ctc_model(6)
    frames, lengths = encoded([7, 4, 6])
    frames[1, 4:] = torch.nan
    search = CtcPrefixBeamSearch(model, beam_size=4, num_best=3)
    greedy = CtcGreedySearch(model)
    together, best = search(frames, lengths), greedy(frames, lengths)
    for n, length in enumerate(lengths.tolist()):
        alone = frames[n : n + 1, :length], lengths[n : n + 1]
        for one, other in zip(search(*alone)[0], together[n], strict=True):
            assert (one.symbols, one.frames) == (other.symbols, other.frames)
            assert one.score == pytest.approx(other.score, abs=1e-5)
        assert greedy(*alone)[0].symbols == best[n].symbols


@pytest.mark.parametrize("silent", [[], [UNKNOWN]])
def test_greedy_is_the_best_path(silent: list[int]) -> None:
    model = ctc_model()
    frames, lengths = encoded(LENGTHS, seed=6)
    probs = log_probs(model, frames)
    for n, hypothesis in enumerate(CtcGreedySearch(model, silent_symbols=silent)(frames, lengths)):
        best, score = max(scored_paths(probs[n, : LENGTHS[n]]), key=lambda scored: scored[1])
        emitted = tuple(BLANK if symbol in silent else symbol for symbol in best)
        assert hypothesis.symbols == collapsed(emitted)
        assert hypothesis.score == pytest.approx(score, abs=1e-5)
        assert [emitted[t] for t in hypothesis.frames] == list(hypothesis.symbols)


def test_greedy_search_of_streams_joins_runs_over_chunks() -> None:
    model = ctc_model(seed=5)
    frames, lengths = encoded([9, 9], seed=8)
    search = CtcGreedySearch(model)
    whole = search.frames(frames, lengths, search.start(2, frames.device))
    state, pieces = search.start(2, frames.device), []
    for begin in range(0, 9, 2):
        part = frames[:, begin : begin + 2]
        found = search.frames(part, torch.full((2,), part.size(1)), state)
        state = found.state
        pieces.append(found.symbols_NTM)
    assert torch.equal(torch.cat(pieces, dim=1), whole.symbols_NTM)


class SequenceScorer:
    """Scores by the whole sequence, so that the search must keep one state for each hypothesis.

    A symbol v after sequence hash h adds sin(h + v); the end adds cos(h).
    """

    def start(self, rows: int, device: torch.device) -> Rows:
        return (torch.zeros(rows, dtype=torch.float64, device=device),)

    def scores(self, state: Rows) -> Tensor:
        return torch.sin(state[0][:, None] + torch.arange(VOCAB)).float()

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        return (state[0] * 1.7 + symbols_R,)

    def final(self, state: Rows) -> Tensor:
        return torch.cos(state[0]).float()

    def of(self, symbols: tuple[int, ...]) -> float:
        state, total = self.start(1, torch.device("cpu")), 0.0
        for symbol in symbols:
            total += float(self.scores(state)[0, symbol])
            state = self.advance(state, torch.tensor([symbol]), torch.tensor([True]))
        return total + float(self.final(state))


def test_fusion_adds_the_scores_of_whole_sequences() -> None:
    model = ctc_model()
    frames, lengths = encoded(LENGTHS)
    scorer = SequenceScorer()
    search = CtcPrefixBeamSearch(model, beam_size=300, num_best=300, scorers=[scorer])
    probs = log_probs(model, frames)
    for n, several in enumerate(search(frames, lengths)):
        exact = all_sequences(probs[n, : LENGTHS[n]])
        assert {hypothesis.symbols for hypothesis in several} == exact.keys()
        for hypothesis in several:
            expected = exact[hypothesis.symbols] + scorer.of(hypothesis.symbols)
            assert hypothesis.score == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_alignment_is_the_best_of_all_paths(
    as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_gpu:
        monkeypatch.setattr(ctc_alignment_module, "_forward_on_cpu", ctc_alignment_module._forward)
    else:
        monkeypatch.setattr(ctc_alignment_module, "_GATHERED", 2)
    generator = torch.Generator().manual_seed(7)
    probs = torch.randn(6, 5, VOCAB, generator=generator, dtype=torch.float64).log_softmax(2)
    targets = torch.tensor([[1, 1, 2], [3, 0, 0], [2, 2, 0], [1, 2, 3], [0, 0, 0], [1, 1, 0]])
    lengths, counts = torch.tensor([5, 4, 3, 2, 4, 2]), torch.tensor([3, 1, 2, 3, 0, 2])
    found = ctc_alignment(probs, lengths, targets, counts)
    for n in range(6):
        symbols = tuple(targets[n, : counts[n]].tolist())
        frames, needed = int(lengths[n]), int(counts[n]) + (symbols[:2] in ((1, 1), (2, 2)))
        if needed > frames:
            assert found.score_N[n] == -torch.inf
            continue
        times, score = best_path(probs[n, :frames], symbols)
        assert found.score_N[n].item() == pytest.approx(score, abs=1e-9)
        assert tuple(found.frames_NU[n, : counts[n]].tolist()) == times
        expected = [probs[n, t, s].item() for t, s in zip(times, symbols, strict=True)]
        assert found.log_probs_NU[n, : counts[n]].tolist() == pytest.approx(expected)
    assert [n for n in range(6) if found.score_N[n] == -torch.inf] == [3, 5]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("frames", "symbols"), [(1, 1), (5, 3), (40, 17), (376, 40), (1500, 150), (33, 31)]
)
def test_alignment_on_a_gpu_equals_that_of_the_cpu(frames: int, symbols: int) -> None:
    generator = torch.Generator().manual_seed(7)
    probs = torch.randn(9, frames, 30, generator=generator).log_softmax(2)
    targets = torch.randint(1, 4, (9, symbols), generator=generator)  # many repetitions
    lengths = torch.randint(0, frames + 1, (9,), generator=generator)
    counts = torch.randint(0, symbols + 1, (9,), generator=generator)
    lengths[0], counts[0] = frames, min(symbols, (frames + 1) // 2)
    expected = ctc_alignment(probs, lengths, targets, counts)
    inputs = [each.cuda() for each in (probs, lengths, targets, counts)]
    for mode in available.MODES:
        available.set_mode(mode)
        try:
            found = ctc_alignment(*inputs)
        finally:
            available.set_mode("auto")
        assert torch.equal(found.score_N.cpu(), expected.score_N)
        for n in range(9):
            if expected.score_N[n] > -torch.inf:
                own = slice(0, int(counts[n]))
                assert torch.equal(found.frames_NU[n, own].cpu(), expected.frames_NU[n, own])
                assert torch.equal(found.log_probs_NU[n, own].cpu(), expected.log_probs_NU[n, own])


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (ctc_model(), {"method": "modified_beam"}, "method=modified_beam needs a transducer"),
        (tiny_model(ctc_scale=0.0), {"method": "ctc_greedy"}, "needs a CTC head"),
        (tiny_model(ctc_scale=0.0), {"method": "ctc_prefix_beam"}, "needs a CTC head"),
    ],
)  # fmt: skip
def test_searches_that_do_not_fit_the_model(
    model: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_search(model, DecodeConfig(**settings))


def test_greedy_of_a_ctc_model_is_ctc_greedy() -> None:
    model = ctc_model()
    batch = encoded(LENGTHS)
    plain = build_search(model, DecodeConfig())(*batch)
    assert plain == build_search(model, DecodeConfig(method="ctc_greedy"))(*batch)
    beam = build_search(model, DecodeConfig(method="ctc_prefix_beam", num_best=2))(*batch)
    assert [len(several) for several in beam] == [2, 2, 2, 1, 2]


def test_settings_that_do_not_fit_the_method() -> None:
    with pytest.raises(ValueError, match="a CTC head has no internal language model"):
        DecodeConfig(method="ctc_prefix_beam", fusion=FusionConfig(ilm_scale=0.1))
    with pytest.raises(ValueError, match="modified_beam or ctc_prefix_beam"):
        DecodeConfig(method="ctc_greedy", num_best=2)


def test_times_need_no_copy_of_the_log_probs_for_each_hypothesis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sizes = ctc_model(), []
    align = ctc_alignment_module.ctc_alignment

    def recorded(log_probs_NTV: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(log_probs_NTV.shape)
        return align(log_probs_NTV, *arguments, **options)

    monkeypatch.setattr(ctc_alignment_module, "ctc_alignment", recorded)
    found = CtcPrefixBeamSearch(model, beam_size=4, num_best=4)(*encoded(LENGTHS))
    assert [len(own) for own in found] == [4, 4, 4, 1, 4]
    assert sizes == [(len(LENGTHS), max(LENGTHS), VOCAB)] * 4
