"""Fast beam search: calls in the order that k2 documents, and with k2 itself if installed.

The fake k2 keeps one hypothesis per utterance, so the result must be that of greedy search.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.search.fast_beam import FastBeamConfig, FastBeamSearch
from pruned_rnnt.decode.search.greedy import greedy_search
from tests.decode.search_model import UNKNOWN, VOCAB, encoded, make_model


class _Streams:
    """k2.RnntDecodingStreams with a beam of one."""

    def __init__(self, streams: list[Any], config: SimpleNamespace) -> None:
        self.config = config
        self.paths: list[list[tuple[int, float]]] = [[] for _ in streams]
        self.ended = False

    def get_contexts(self) -> tuple[SimpleNamespace, Tensor]:
        history = self.config.decoder_history_len
        symbols = [[label for label, _ in path if label] for path in self.paths]
        contexts = [([0] * history + emitted)[-history:] for emitted in symbols]
        row_ids = torch.arange(len(self.paths), dtype=torch.int32)
        shape = SimpleNamespace(row_ids=lambda axis: row_ids if axis == 1 else None)
        return shape, torch.tensor(contexts, dtype=torch.int32)

    def advance(self, log_probs: Tensor) -> None:
        assert not self.ended
        assert log_probs.shape == (len(self.paths), self.config.vocab_size)
        for path, row in zip(self.paths, log_probs, strict=True):
            path.append((int(row.argmax()), float(row.max())))

    def terminate_and_flush_to_streams(self) -> None:
        self.ended = True

    def format_output(self, lengths: list[int]) -> list[list[tuple[int, float]]]:
        assert self.ended
        return [
            [*path[:length], (-1, 0.0)] for path, length in zip(self.paths, lengths, strict=True)
        ]


def _shortest_path(paths: list[list[tuple[int, float]]], use_double_scores: bool) -> Any:
    sizes = [len(path) for path in paths]
    scores = [torch.tensor([score for _, score in path]) for path in paths]
    return SimpleNamespace(
        arcs=SimpleNamespace(shape=lambda: SimpleNamespace(remove_axis=lambda axis: sizes)),
        labels=torch.tensor([label for path in paths for label, _ in path]),
        scores=torch.cat(scores),
        get_tot_scores=lambda use_double_scores, log_semiring: torch.stack(
            [s.sum() for s in scores]
        ),
    )


def _ragged(sizes: list[int], values: Tensor) -> Any:
    return SimpleNamespace(tolist=lambda: [part.tolist() for part in values.split(sizes)])


@pytest.fixture
def fake_k2(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        trivial_graph=lambda most, device: ("graph", most),
        RnntDecodingStream=lambda graph: graph,
        RnntDecodingConfig=lambda **settings: SimpleNamespace(**settings),
        RnntDecodingStreams=_Streams,
        shortest_path=_shortest_path,
        RaggedTensor=_ragged,
    )
    monkeypatch.setitem(sys.modules, "k2", module)


@pytest.mark.usefixtures("fake_k2")
@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("hat", [False, True])
def test_one_hypothesis_equals_greedy_search(context_size: int, hat: bool) -> None:
    model = make_model(context_size, hat)
    frames, lengths = encoded([12, 1, 7])
    greedy = greedy_search(model, frames, lengths)
    found = FastBeamSearch(model, FastBeamConfig())(frames, lengths)
    for one, (other,) in zip(greedy, found, strict=True):
        assert (one.symbols, one.frames) == (other.symbols, other.frames)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.symbol_scores == pytest.approx(other.symbol_scores, abs=1e-4)


@pytest.mark.usefixtures("fake_k2")
def test_silent_symbols_are_never_emitted() -> None:
    model = make_model()
    with torch.no_grad():
        model.joiner.output_linear.bias[UNKNOWN] += 20.0
    ((found,),) = FastBeamSearch(model, FastBeamConfig(), [UNKNOWN])(*encoded([8]))
    assert UNKNOWN not in found.symbols


def test_missing_k2_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "k2", None)
    with pytest.raises(ValueError, match=r"needs k2.*modified_beam"):
        FastBeamSearch(make_model(), FastBeamConfig())


@pytest.mark.skipif(importlib.util.find_spec("k2") is None, reason="needs k2")
def test_k2_finds_no_worse_paths_than_greedy_search() -> None:
    model = make_model()
    frames, lengths = encoded([12, 1, 7])
    greedy = greedy_search(model, frames, lengths)
    config = FastBeamConfig(max_contexts=VOCAB**2, max_states=4 * VOCAB**2)
    for one, (other,) in zip(greedy, FastBeamSearch(model, config)(frames, lengths), strict=True):
        assert other.score >= one.score - 1e-3
        assert len(other.frames) == len(other.symbols)
