"""Random ragged batches: the same results padded, packed and one utterance at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds, Occupancy
from tests.loss.loss_cases import (
    DEVICES,
    RNNT_TYPES,
    Batch,
    has_path,
    make_batch,
    not_reading,
    pack,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@st.composite
def batches(draw) -> tuple[Batch, str]:
    rnnt_type = draw(st.sampled_from(RNNT_TYPES))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.integers(0, 12)).filter(
                lambda p: has_path(p[0], p[1], rnnt_type)
            ),
            min_size=1,
            max_size=5,
        )
    )
    vocabulary = draw(st.integers(2, 20))
    blank = draw(st.integers(0, vocabulary - 1))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    frames_N, symbols_N = [t for t, _ in pairs], [u for _, u in pairs]
    batch = make_batch(frames_N, symbols_N, vocabulary, blank)
    # Padding beyond the longest utterance.
    more = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    padded = torch.nn.functional.pad(batch.targets, (0, more[1]))
    batch = batch._replace(
        frames=batch.frames + more[0], symbols=batch.symbols + more[1], targets=padded
    )
    return batch, rnnt_type


def with_gradient(loss_N: Tensor, *inputs: Tensor) -> list[Tensor]:
    upstream = torch.linspace(0.5, -1.5, loss_N.shape[0]).to(loss_N)
    return [loss_N, *torch.autograd.grad(loss_N, inputs, upstream)]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(batches())
def test_full_loss(device, case) -> None:
    batch, rnnt_type = case
    batch = batch._replace(targets=batch.targets.to(device))
    shape = (batch.size, batch.frames, batch.symbols + 1, batch.vocabulary)
    logits = torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()
    lengths = batch.lengths("cpu")
    options = {"rnnt_type": rnnt_type, "blank": batch.blank, "reduction": "none"}
    padded = with_gradient(
        pruned_rnnt.rnnt_loss(logits, batch.targets, *lengths, **options), logits
    )
    packed = with_gradient(
        pruned_rnnt.rnnt_loss(pack(logits, batch), batch.targets, *lengths, **options), logits
    )
    alone = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        one = logits[n : n + 1, :frames, : symbols + 1]
        y = batch.targets[n : n + 1, :symbols]
        alone.append(pruned_rnnt.rnnt_loss(one, y, **options))
    for other in (packed, with_gradient(torch.cat(alone), logits)):
        for a, b in zip(padded, other, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(2, 6), st.booleans(), st.sampled_from([1, 700, 1 << 20]))
def test_simple_bounds_pruned_and_fused(device, case, s_range, exact, workspace) -> None:
    """The whole chain, for the batch and for each utterance by itself."""
    from pruned_rnnt.ops.joiner import fused_joiner

    batch, rnnt_type = case
    batch = batch._replace(targets=batch.targets.to(device))
    if rnnt_type == "regular":
        s_range = max(
            s_range,
            *(-(-u // t) + 1 for t, u in zip(batch.frames_N, batch.symbols_N, strict=True)),
        )
    am = torch.randn(batch.size, batch.frames, batch.vocabulary, dtype=torch.float64)
    lm = torch.randn(batch.size, batch.symbols + 1, batch.vocabulary, dtype=torch.float64)
    weight = torch.randn(batch.vocabulary, batch.vocabulary, dtype=torch.float64)
    inputs = am, lm, weight = [x.to(device).requires_grad_() for x in (am, lm, weight)]
    options = {"rnnt_type": rnnt_type, "blank": batch.blank, "reduction": "none"}

    def chain(am: Tensor, lm: Tensor, y: Tensor, lengths: tuple) -> tuple[Tensor, Bounds]:
        simple, occupancy = pruned_rnnt.rnnt_loss_simple(
            am, lm, y, *lengths, lm_only_scale=0.25, **options
        )
        # Without windows of equal scores, between which rounding would decide.
        settled = Occupancy(*(x.mul(1e6).round() for x in occupancy))
        bounds = pruned_rnnt.prune_bounds(
            settled, *lengths, s_range, rnnt_type=rnnt_type, exact=exact
        )
        am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
        logits = torch.tanh(am_p + lm_p) @ weight.T
        pruned = pruned_rnnt.rnnt_loss_pruned(logits, y, bounds, *lengths, **options)
        fused = pruned_rnnt.rnnt_loss_fused(am, lm, weight, None, y, bounds, *lengths, **options)
        torch.testing.assert_close(fused, pruned, **EXACT)
        return simple + fused, bounds

    before = fused_joiner.WORKSPACE_BYTES
    fused_joiner.WORKSPACE_BYTES = workspace
    try:
        together, bounds = chain(am, lm, batch.targets, batch.lengths("cpu"))
        alone = []
        for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
            loss, own = chain(
                am[n : n + 1, :frames],
                lm[n : n + 1, : symbols + 1],
                batch.targets[n : n + 1, :symbols],
                (None, None),
            )
            alone.append(loss)
            assert torch.equal(own.start[0], bounds.start[n, :frames])
        for a, b in zip(
            with_gradient(together, *inputs),
            with_gradient(torch.cat(alone), *inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    finally:
        fused_joiner.WORKSPACE_BYTES = before


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([0.0, 0.3]))
def test_simple_loss_with_am_smoothing_ignores_padding(device, case, am_scale) -> None:
    """am smoothing couples the utterances of a batch, but not with padding."""
    batch, rnnt_type = case
    batch = batch._replace(targets=batch.targets.to(device))
    am = torch.randn(batch.size, batch.frames, batch.vocabulary, dtype=torch.float64)
    lm = torch.randn(batch.size, batch.symbols + 1, batch.vocabulary, dtype=torch.float64)
    inputs = am, lm = [x.to(device).requires_grad_() for x in (am, lm)]
    lengths = batch.lengths("cpu")
    options = {
        "rnnt_type": rnnt_type,
        "blank": batch.blank,
        "am_only_scale": am_scale,
        "reduction": "none",
    }
    loss, _ = pruned_rnnt.rnnt_loss_simple(am, lm, batch.targets, *lengths, **options)
    frames, symbols = max(batch.frames_N), max(batch.symbols_N)
    cut = pruned_rnnt.rnnt_loss_simple(
        am[:, :frames], lm[:, : symbols + 1], batch.targets[:, :symbols], *lengths, **options
    ).loss
    for a, b in zip(with_gradient(loss, *inputs), with_gradient(cut, *inputs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_only_empty_references(device) -> None:
    """Every loss is the sum of the blanks."""
    kind = {"dtype": torch.float64, "device": device}
    am = torch.randn(3, 5, 4, **kind).requires_grad_()
    lm = torch.randn(3, 1, 4, **kind).requires_grad_()
    targets = torch.empty(3, 0, dtype=torch.int32, device=device)
    frames = torch.tensor([5, 1, 3], device=device)
    symbols = torch.zeros(3, dtype=torch.int64, device=device)
    inside = (torch.arange(5, device=device) < frames[:, None]).double()
    expected = -((am + lm).log_softmax(-1)[:, :, 0] * inside).sum(1)
    logits = (am + lm)[:, :, None]
    lengths = (frames, symbols)
    bounds = pruned_rnnt.prune_bounds(
        pruned_rnnt.rnnt_loss_simple(am, lm, targets, *lengths).occupancy, *lengths, 2
    )
    assert not bounds.start.any()
    pruned_logits = sum(pruned_rnnt.prune(am, lm, bounds))
    eye = torch.eye(4, **kind)
    kept = {"reduction": "none"}
    losses = {
        "full": pruned_rnnt.rnnt_loss(logits, targets, *lengths, **kept),
        "simple": pruned_rnnt.rnnt_loss_simple(am, lm, targets, *lengths, **kept).loss,
        "pruned": pruned_rnnt.rnnt_loss_pruned(pruned_logits, targets, bounds, *lengths, **kept),
        "fused": pruned_rnnt.rnnt_loss_fused(
            am, lm, eye, None, targets, bounds, *lengths, activation="none", **kept
        ),
    }
    wanted = torch.autograd.grad(expected.sum(), (am, lm))
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected, msg=name)
        for a, b in zip(torch.autograd.grad(loss.sum(), (am, lm)), wanted, strict=True):
            torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_lattices_without_frames_are_refused_without_reading(device) -> None:
    targets = torch.ones(2, 1, dtype=torch.int32, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    am, lm, weight = (torch.zeros(x, device=device) for x in ((2, 0, 4), (2, 2, 4), (5, 4)))
    joiner = pruned_rnnt.Joiner(4, 4, 4, 5)
    module = pruned_rnnt.PrunedTransducerLoss(joiner, 4, 4, 5).to(device)
    calls = [
        lambda: pruned_rnnt.rnnt_loss(am.new_zeros(2, 0, 2, 5), targets, lengths, lengths),
        lambda: pruned_rnnt.rnnt_loss_simple(am, lm, targets, lengths, lengths),
        lambda: pruned_rnnt.rnnt_loss_fused(am, lm, weight, None, targets, None, lengths, lengths),
        lambda: pruned_rnnt.ctc_loss(am, targets, lengths, lengths),
        lambda: module(am, lm, targets, lengths, lengths, 0),
    ]
    for call in calls:
        with not_reading(), pytest.raises(ValueError, match="has no frames; there must be"):
            call()
    occupancy = pruned_rnnt.Occupancy(am.new_zeros(2, 3, 0), am.new_zeros(2, 3, 0))
    with not_reading(), pytest.raises(ValueError, match="occupancy has no columns"):
        pruned_rnnt.prune_bounds(occupancy, lengths, lengths)
