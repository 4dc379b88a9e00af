"""The compiled beam search against its fallback, and against itself in other batches."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS, NEG_INF
from pruned_rnnt.ops.search.search_frames import BeamState, BeamSteps, gpu_shared_bytes
from tests.ops.beam_cases import (
    DEVICES,
    BeamCase,
    beam_call,
    beam_frames_calls,
    beam_model,
    moved,
    skip_without_kernel,
    start_state,
    usual_cases,
)
from tests.ops.native_batches import SHAPES, Call, torch_threads

Found = tuple[BeamState, BeamSteps, int]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    skip_without_kernel("beam_frames", request.param)
    return str(request.param)


def run(call: Call, device: str = "cpu", function=None) -> Found:
    """The results on the CPU."""
    call = moved(call, device)
    outputs = call.fresh_outputs()
    (function or torch.ops.pruned_rnnt.beam_frames)(*call.inputs, *outputs)
    outputs = [x.cpu() for x in outputs]
    return BeamState(*outputs[:5]), BeamSteps(*outputs[5:8]), int(outputs[8])


def fallback(call: Call) -> Found:
    return run(call, function=FALLBACKS["beam_frames"])


def sequences(found: Found, n: int) -> dict[tuple[tuple[int, int], ...], float]:
    """The frames and symbols of the live rows of an utterance, with their scores."""
    state, steps, _ = found
    results = {}
    for row, score in enumerate(state.score[n].tolist()):
        if score == NEG_INF:
            continue
        path, place = [], row
        for t in reversed(range(steps.parent.size(1))):
            symbol = int(steps.symbol[n, t, place])
            if symbol >= 0:
                path.append((t, symbol))
            place = int(steps.parent[n, t, place])
        results[tuple(reversed(path))] = score
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_kernel_equals_fallback(device: str, shape: tuple[str, list[int], list[int], int]) -> None:
    torch.manual_seed(len(shape[0]))
    for call in beam_frames_calls(shape[1], shape[3]):
        if device == "cuda" and call.inputs[3] is not None:
            with pytest.raises(RuntimeError, match="`fusion` must be None"):
                run(call, device)
            continue
        state, steps, end = run(call, device)
        expected, expected_steps, expected_end = fallback(call)
        assert end == expected_end
        first = call.inputs[2]
        parts = (x[:, first:end] for x in steps), (x[:, first:end] for x in expected_steps)
        for got, want in zip((*state, *parts[0]), (*expected, *parts[1]), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("context", [1, 2])
def test_beams_wider_than_the_vocabulary_find_the_same(
    device: str, hat: bool, context: int
) -> None:
    torch.manual_seed(4)
    case = BeamCase(lengths=[9, 0, 1], vocabulary=3, beam=11, context=context, hat=hat)
    call = beam_call(case)
    found, expected = run(call, device), fallback(call)
    for n in range(3):
        got, want = sequences(found, n), sequences(expected, n)
        assert got == pytest.approx(want, abs=1e-4)
    assert len(sequences(found, 0)) > 4
    assert sequences(found, 1) == {(): 0.0}
    assert len(sequences(found, 2)) == 3


def test_wide_beams_of_several_tiles_find_the_same(device: str) -> None:
    torch.manual_seed(9)
    for beam, lengths in ((2, [7] * 300), (13, [20, 11, 3]), (32, [9])):
        call = beam_call(BeamCase(lengths=lengths, vocabulary=50, beam=beam, joiner=64))
        found, expected = run(call, device), fallback(call)
        for n in (0, len(lengths) - 1):
            got, want = sequences(found, n), sequences(expected, n)
            assert got == pytest.approx(want, abs=1e-3)


@pytest.mark.gpu
def test_models_of_usual_sizes_find_what_the_cpu_finds() -> None:
    for op in ("cuda", "cpu"):
        skip_without_kernel("beam_frames", op)
    torch.manual_seed(11)
    for case in usual_cases(72):
        call = beam_call(case)
        found, expected = run(call, "cuda"), run(call)
        # Rounding decides between paths of nearly equal probability.
        same = found[0].hash[:, 0] == expected[0].hash[:, 0]
        assert float(same.float().mean()) > 0.97
        torch.testing.assert_close(
            found[0].score[:, 0], expected[0].score[:, 0], rtol=1e-4, atol=1e-3
        )
        assert 0 < int(found[0].length[0, 0]) < 90


@pytest.mark.gpu
def test_models_that_a_gpu_does_not_hold_are_refused() -> None:
    skip_without_kernel("beam_frames", "cuda")
    beam = beam_call(BeamCase(lengths=[2], vocabulary=60_000, beam=2))
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        run(beam, "cuda")
    with pytest.raises(RuntimeError, match="at most 32 rows, got 33"):
        run(beam_call(BeamCase(lengths=[2], vocabulary=9, beam=33)), "cuda")
    # The largest vocabulary that the formula in Python allows.
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    below, above = 10_000, 60_000
    while above - below > 1:
        middle = (below + above) // 2
        case = BeamCase(lengths=[2], vocabulary=middle, beam=2)
        if gpu_shared_bytes(beam_model(case), 2) <= room:
            below = middle
        else:
            above = middle
    run(beam_call(BeamCase(lengths=[2], vocabulary=below, beam=2)), "cuda")
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        run(beam_call(BeamCase(lengths=[2], vocabulary=above, beam=2)), "cuda")


def test_only_silent_symbols_leave_the_blank(device: str) -> None:
    torch.manual_seed(4)
    found = run(beam_call(BeamCase(lengths=[5], vocabulary=3, silent=(1, 2))), device)
    assert list(sequences(found, 0)) == [()]


@pytest.mark.slow
def test_a_long_utterance_finds_the_same(device: str) -> None:
    torch.manual_seed(6)
    call = beam_call(BeamCase(lengths=[5000], vocabulary=400, blank_logit=4.0))
    (state, steps, end), (expected, expected_steps, _) = run(call, device), fallback(call)
    assert end == 5000
    # More contexts than are kept.
    assert int(state.length.max()) > 1000
    # Rounding decides between paths of equal probability, far behind the best one.
    assert torch.equal(state.length[:, 0], expected.length[:, 0])
    assert torch.equal(state.hash[:, 0], expected.hash[:, 0])
    torch.testing.assert_close(state.score[:, 0], expected.score[:, 0], rtol=1e-4, atol=0)
    agree = (steps.symbol == expected_steps.symbol).float().mean()
    assert agree > 0.99


def test_of_equal_scores_the_first_is_kept(device: str) -> None:
    case = BeamCase(lengths=[3], vocabulary=6, beam=3)
    call = beam_call(case)
    model = beam_model(case)
    flat = model._replace(
        output_weight=torch.zeros_like(model.output_weight),
        output_bias=torch.zeros_like(model.output_bias),
    )
    inputs = (*call.inputs[:4], *flat)
    _, steps, _ = run(Call(call.op, inputs, (*start_state(case, flat), *call.outputs[5:])), device)
    assert steps.symbol[0, 0].tolist() == [-1, 1, 2]
    assert steps.parent[0, 1].tolist() == [0, 0, 0]
    assert steps.symbol[0, 1].tolist() == [-1, 1, 2]


def test_nan_stays_visible(device: str) -> None:
    call = beam_call(BeamCase(lengths=[4], vocabulary=5))
    call.inputs[0][0, 2, 0] = torch.nan
    state, steps, _ = run(call, device)
    assert state.score.isnan().any()
    assert int(steps.parent.min()) >= 0
    assert int(steps.parent.max()) < 4


def test_an_utterance_does_not_depend_on_the_others_or_on_threads(device: str) -> None:
    torch.manual_seed(5)
    lengths = [40, 0, 7, 33, 40, 1, 21] * 30
    call = beam_call(BeamCase(lengths=lengths, vocabulary=37))
    together = run(call, device)
    with torch_threads(3):
        with_threads = run(call, device)
    for one, other in zip(together[:2], with_threads[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for n in range(7):
        am, length, *rest = call.inputs
        inputs = (am[n : n + 1], length[n : n + 1], *rest)
        outputs = tuple(x[n : n + 1] for x in call.outputs[:-1])
        alone = run(Call(call.op, inputs, (*outputs, call.outputs[-1])), device)
        for one, other in zip(together[:2], alone[:2], strict=True):
            assert all(torch.equal(a[n], b[0]) for a, b in zip(one, other, strict=True))


def test_it_stops_where_scores_of_other_models_change() -> None:
    skip_without_kernel("beam_frames", "cpu")
    torch.manual_seed(7)
    case = BeamCase(lengths=[30, 12], vocabulary=9, fusion=True, blank_logit=11.0)
    call = beam_call(case)
    outputs = call.fresh_outputs()
    am, length, _, *rest = call.inputs
    frame, stops = 0, []
    while frame < 30:
        torch.ops.pruned_rnnt.beam_frames(am, length, frame, *rest, *outputs)
        last, frame = frame, int(outputs[-1])
        assert last < frame <= 30
        stops.append(frame)
        symbol, parent = outputs[6][:, last:frame], outputs[5][:, last:frame]
        moved = (symbol >= 0) | (parent != torch.arange(4))
        assert not moved[:, :-1].any()
    assert 2 < len(stops) < 30
