"""align_symbols against all paths of small lattices of a model's joiner."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.align import best_path
from pruned_rnnt.align.best_path import TargetBatch, align_symbols, lattice_rows, too_long
from pruned_rnnt.model.predictor import LstmPredictorConfig, PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from tests.lattice_paths import joiner_log_probs, paths, weight
from tests.tdt_paths import tdt_paths, tdt_scores
from tests.tiny_models import randomise, tiny_conformer, tiny_model

LENGTHS = [(5, 3), (4, 0), (3, 1), (2, 4), (0, 1)]
VOCAB = 7


def make_model(rnnt_type: str, hat: bool = False, predictor: str = "stateless") -> TransducerModel:
    kind = {"stateless": PredictorConfig, "lstm": LstmPredictorConfig}[predictor]
    loss = {"rnnt_type": rnnt_type, "hat": hat, "kind": "full", "ctc_scale": 0.0}
    encoder = tiny_conformer(dim=8)
    model = tiny_model(encoder, VOCAB, predictor=kind(dim=8), joiner_dim=8, **loss)
    randomise(model.predictor)
    return model.double()


def make_batch() -> TargetBatch:
    generator = torch.Generator().manual_seed(4)
    encoded = torch.randn(len(LENGTHS), 5, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, VOCAB, (len(LENGTHS), 4), generator=generator, dtype=torch.int32)
    frames, symbols = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    return TargetBatch(encoded, frames, targets, symbols.int())


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
@pytest.mark.parametrize(
    ("limits", "predictor"),
    [((2**25, 2**23), "stateless"), ((1, 1), "stateless"), ((300, 60), "lstm")],
)
def test_best_of_all_paths_for_any_chunk_size(
    rnnt_type: str,
    hat: bool,
    limits: tuple[int, int],
    predictor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_path, "_MAX_LOGITS", limits[0])
    monkeypatch.setattr(best_path, "_MAX_NODES", limits[1])
    model = make_model(rnnt_type, hat, predictor)
    batch = make_batch()
    found = align_symbols(model, batch)
    am = model.joiner.encoder_proj(batch.encoded_NTE)
    lm = model.joiner.decoder_proj(model.predictor.forward_targets(batch.targets_NU))
    logits = model.joiner(am[:, :, None], lm[:, None]).detach()
    for n, (t_n, u_n) in enumerate(LENGTHS):
        emit, blank = joiner_log_probs(logits[n], batch.targets_NU[n, :u_n].tolist(), 0, hat=hat)
        scored = [
            (weight(p, emit, blank, rnnt_type), p) for p in paths(t_n, u_n, rnnt_type) if t_n > 0
        ]
        if not scored:
            assert found[n] is None
            continue
        best, path = max(scored, key=lambda pair: pair[0])
        result = found[n]
        assert result is not None
        arcs = [arc for arc in path if arc.is_symbol]
        assert result.score == pytest.approx(best, abs=1e-9)
        assert result.frames == tuple(arc.frame for arc in arcs)
        expected = [float(emit[arc.frame, arc.column]) for arc in arcs]
        assert result.log_probs == pytest.approx(expected, abs=1e-9)


def test_which_utterances_have_no_path() -> None:
    batch = make_batch()
    regular = align_symbols(make_model("regular"), batch)
    assert [a is None for a in regular] == [False, False, False, False, True]
    modified = align_symbols(make_model("modified"), batch)
    assert [a is None for a in modified] == [False, False, False, True, True]


def test_logits_are_computed_a_few_frames_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_path, "_MAX_LOGITS", 3 * 5 * 5 * VOCAB)  # of which D = 8 > V
    model = make_model("modified")
    batch = make_batch()
    sizes = []
    model.joiner.register_forward_hook(lambda *call: sizes.append(call[2].shape))
    rows = lattice_rows(model, batch)
    assert rows.emit.shape == (5, 5, 5)
    assert [size[1] for size in sizes] == [2, 2, 1]
    monkeypatch.setattr(best_path, "_MAX_LOGITS", 2**25)
    whole = lattice_rows(model, batch)
    torch.testing.assert_close(rows, whole)
    assert (rows.blank[1, 4:] == -torch.inf).all()


def test_a_search_that_takes_too_much_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model("regular"), make_batch()
    monkeypatch.setattr(best_path, "_MAX_NODES", 1)
    monkeypatch.setattr(best_path, "_MOST_BYTES", 40 * 4 * 4)
    found = align_symbols(model, batch)
    assert [path is None for path in found] == [True, False, False, False, True]
    assert too_long(model, 5, 3).startswith("5 frames and 3 symbols are too many for one search")
    assert too_long(model, 4, 3) == ""
    durations = tiny_model(tiny_conformer(dim=8), VOCAB, joiner_dim=8, durations=(0, 1, 2))
    assert too_long(durations, 4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
def test_gpu_finds_the_same_path(rnnt_type: str) -> None:
    model = make_model(rnnt_type)
    batch = make_batch()
    expected = align_symbols(model, batch)
    on_gpu = batch._replace(
        encoded_NTE=batch.encoded_NTE.cuda(), targets_NU=batch.targets_NU.cuda()
    )
    found = align_symbols(model.cuda(), on_gpu)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.frames == other.frames
            assert one.score == pytest.approx(other.score, abs=1e-9)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)


@pytest.mark.parametrize("limits", [(2**25, 2**23), (300, 60)])
@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (1, 2)])
def test_best_of_all_paths_with_durations(
    durations: tuple[int, ...], limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_path, "_MAX_LOGITS", limits[0])
    monkeypatch.setattr(best_path, "_MAX_NODES", limits[1])
    model = tiny_model(tiny_conformer(dim=8), VOCAB, joiner_dim=8, durations=durations).double()
    batch = make_batch()
    found = align_symbols(model, batch)
    am = model.joiner.encoder_proj(batch.encoded_NTE)
    lm = model.joiner.decoder_proj(model.predictor.forward_targets(batch.targets_NU))
    logits = [x.detach() for x in model.joiner.with_durations(am[:, :, None], lm[:, None])]
    for n, (t_n, u_n) in enumerate(LENGTHS):
        nodes = [x[n, :t_n, : u_n + 1] for x in logits]
        emit, blank, ld = tdt_scores(*nodes, batch.targets_NU[n, :u_n].tolist(), 0)
        scored = []
        for path in tdt_paths(t_n, u_n, durations) if t_n else ():
            arcs = [(emit if a.is_symbol else blank)[a.frame, a.column] for a in path]
            gains = [ld[a.frame, a.column, a.duration] for a in path]
            scored.append((float(sum(arcs) + sum(gains)), path, arcs, gains))
        if not scored:
            assert found[n] is None
            continue
        score, path, arcs, gains = max(scored, key=lambda each: each[0])
        emitted = [i for i, arc in enumerate(path) if arc.is_symbol]
        assert found[n].score == pytest.approx(score)
        assert found[n].frames == tuple(path[i].frame for i in emitted)
        assert found[n].durations == tuple(durations[path[i].duration] for i in emitted)
        assert found[n].log_probs == pytest.approx([float(arcs[i]) for i in emitted])
