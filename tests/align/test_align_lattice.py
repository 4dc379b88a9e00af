"""align_symbols against every path of small lattices of a model's joiner."""

from __future__ import annotations

import pytest
import torch
from lattice_paths import joiner_log_probs, paths, weight

from pruned_rnnt.align import best_path as lattice
from pruned_rnnt.align.best_path import align_symbols, lattice_rows
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.lstm_predictor import LstmPredictorConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer_model import LossConfig, ModelConfig, TransducerModel

LENGTHS = [(5, 3), (4, 0), (3, 1), (2, 4), (0, 1)]
VOCAB = 7


def make_model(rnnt_type: str, hat: bool = False, predictor: str = "stateless") -> TransducerModel:
    torch.manual_seed(0)
    encoder = ConformerConfig(
        layers=1, dim=8, heads=2, feedforward_dim=8, kernel_size=3, subsampling_channels=2
    )
    kind = {"stateless": PredictorConfig, "lstm": LstmPredictorConfig}[predictor]
    config = ModelConfig(encoder=encoder, predictor=kind(dim=8), joiner_dim=8)
    loss = LossConfig(rnnt_type=rnnt_type, hat=hat, kind="full", ctc_scale=0.0)  # type: ignore[arg-type]
    model = TransducerModel(config, VOCAB, loss)
    with torch.no_grad():
        for parameter in (*model.joiner.parameters(), *model.predictor.parameters()):
            parameter.copy_(torch.randn_like(parameter))
    return model.double().eval()


def batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    encoded = torch.randn(len(LENGTHS), 5, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, VOCAB, (len(LENGTHS), 4), generator=generator, dtype=torch.int32)
    frames, symbols = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    return encoded, frames, targets, symbols.int()


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
@pytest.mark.parametrize(
    ("limits", "predictor"),
    [((2**25, 2**23), "stateless"), ((1, 1), "stateless"), ((300, 60), "lstm")],
)
def test_best_of_all_paths_whatever_the_chunks(
    rnnt_type: str,
    hat: bool,
    limits: tuple[int, int],
    predictor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lattice, "_LOGITS", limits[0])
    monkeypatch.setattr(lattice, "_NODES", limits[1])
    model = make_model(rnnt_type, hat, predictor)
    encoded, frames, targets, symbols = batch()
    found = align_symbols(model, encoded, frames, targets, symbols)
    am = model.joiner.encoder_proj(encoded)
    lm = model.joiner.decoder_proj(model.predictor.forward_targets(targets))
    logits = model.joiner(am[:, :, None], lm[:, None]).detach()
    for n, (t_n, u_n) in enumerate(LENGTHS):
        emit, blank = joiner_log_probs(logits[n], targets[n, :u_n].tolist(), 0, hat=hat)
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
    encoded, frames, targets, symbols = batch()
    regular = align_symbols(make_model("regular"), encoded, frames, targets, symbols)
    assert [a is None for a in regular] == [False, False, False, False, True]
    modified = align_symbols(make_model("modified"), encoded, frames, targets, symbols)
    assert [a is None for a in modified] == [False, False, False, True, True]


def test_logits_are_made_a_few_frames_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lattice, "_LOGITS", 2 * 5 * 5 * VOCAB)
    model = make_model("modified")
    encoded, frames, targets, symbols = batch()
    sizes = []
    model.joiner.register_forward_hook(lambda *call: sizes.append(call[2].shape))
    rows = lattice_rows(model, encoded, frames, targets, symbols)
    assert rows.emit.shape == (5, 5, 5)
    assert [size[1] for size in sizes] == [2, 2, 1]
    monkeypatch.setattr(lattice, "_LOGITS", 2**25)
    whole = lattice_rows(model, encoded, frames, targets, symbols)
    torch.testing.assert_close(rows, whole)
    assert (rows.blank[1, 4:] == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
def test_the_gpu_finds_the_same_path(rnnt_type: str) -> None:
    model = make_model(rnnt_type)
    encoded, frames, targets, symbols = batch()
    expected = align_symbols(model, encoded, frames, targets, symbols)
    found = align_symbols(model.cuda(), encoded.cuda(), frames, targets.cuda(), symbols)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.frames == other.frames
            assert one.score == pytest.approx(other.score, abs=1e-9)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)
