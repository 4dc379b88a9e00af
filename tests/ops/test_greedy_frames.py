"""The compiled greedy search against its fallback, and in other batches and parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import FALLBACKS
from tests.ops.beam_cases import (
    DEVICES,
    BeamCase,
    beam_model,
    greedy_call,
    greedy_frames_calls,
    moved,
    skip_without_kernel,
    usual_cases,
)
from tests.ops.native_batches import SHAPES, Call, torch_threads


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    skip_without_kernel("greedy_frames", request.param)
    return str(request.param)


def run(call: Call, device: str = "cpu", function=None) -> list[Tensor]:
    """lm, context, symbols, scores; on the CPU"""
    call = moved(call, device)
    outputs = call.fresh_outputs()
    (function or torch.ops.pruned_rnnt.greedy_frames)(*call.inputs, *outputs)
    return [x.cpu() for x in outputs]


def fallback(call: Call) -> list[Tensor]:
    return run(call, function=FALLBACKS["greedy_frames"])


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_kernel_equals_fallback(device: str, shape: tuple[str, list[int], list[int], int]) -> None:
    torch.manual_seed(len(shape[0]))
    for call in greedy_frames_calls(shape[1], shape[3]):
        assert_same(run(call, device), fallback(call))


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("hat", [False, True])
def test_frames_have_up_to_the_maximum_of_symbols(device: str, hat: bool, most: int) -> None:
    torch.manual_seed(3)
    case = BeamCase(lengths=[60, 0, 1, 23], vocabulary=9, hat=hat, blank_logit=1.0)
    call = greedy_call(case, most)
    found = run(call, device)
    assert_same(found, fallback(call))
    counts = (found[2] >= 0).sum(dim=2)
    assert int(counts.max()) == most
    assert int(counts[0].min()) == 0
    assert found[2][1].eq(-1).all()
    assert found[3][1].eq(0).all()


def test_silent_symbols_end_a_frame_with_their_score(device: str) -> None:
    torch.manual_seed(4)
    call = greedy_call(BeamCase(lengths=[9], vocabulary=3, silent=(1, 2)), 2)
    found = run(call, device)
    assert_same(found, fallback(call))
    assert found[2].eq(-1).all()
    assert (found[3][..., 0] < 0).all()
    assert found[3][..., 1].eq(0).all()
    assert torch.equal(found[0], call.outputs[0])


@pytest.mark.parametrize("blank", [0, 4])
def test_of_equal_symbols_the_lowest_is_chosen(device: str, blank: int) -> None:
    case = BeamCase(lengths=[3], vocabulary=6, blank=blank)
    call = greedy_call(case, 2)
    model = beam_model(case)
    flat = model._replace(
        output_weight=torch.zeros_like(model.output_weight),
        output_bias=torch.zeros_like(model.output_bias),
    )
    call = Call(call.op, (*call.inputs[:2], *flat), call.outputs)
    found = run(call, device)
    assert_same(found, fallback(call))
    assert set(found[2].flatten().tolist()) == {-1 if blank == 0 else 0}


@pytest.mark.parametrize("hat", [False, True])
@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_visible(device: str, hat: bool, blank: int, value: float) -> None:
    torch.manual_seed(5)
    case = BeamCase(lengths=[6, 4], vocabulary=5, hat=hat, blank=blank)
    call = greedy_call(case, 2)
    bias = call.inputs[6]
    assert bias.shape == (5,)
    bias[4] = value
    assert_same(run(call, device), fallback(call))
    call.inputs[0][0, 2, 0] = torch.nan
    found = run(call, device)
    assert_same(found, fallback(call))
    assert found[3][0, 2].isnan().any()
    assert found[3][1].isnan().any() == (value != float("-inf"))


@pytest.mark.slow
def test_a_long_utterance_finds_the_same(device: str) -> None:
    torch.manual_seed(6)
    call = greedy_call(BeamCase(lengths=[5000], vocabulary=400, blank_logit=9.0))
    found, expected = run(call, device), fallback(call)
    # More contexts than are kept.
    assert int((found[2] >= 0).sum()) > 2100
    agree = (found[2] == expected[2]).float().mean()
    assert agree == 1
    torch.testing.assert_close(found[3], expected[3], rtol=1e-3, atol=1e-4)


def test_an_utterance_does_not_depend_on_the_others_or_on_threads(device: str) -> None:
    torch.manual_seed(5)
    lengths = [40, 0, 7, 33, 40, 1, 21] * 30
    call = greedy_call(BeamCase(lengths=lengths, vocabulary=37), 2)
    together = run(call, device)
    with torch_threads(3):
        with_threads = run(call, device)
    assert all(torch.equal(a, b) for a, b in zip(together, with_threads, strict=True))
    for n in range(7):
        am, length, *model = call.inputs
        inputs = (am[n : n + 1], length[n : n + 1], *model)
        alone = run(Call(call.op, inputs, tuple(x[n : n + 1] for x in call.outputs)), device)
        assert all(torch.equal(a[n], b[0]) for a, b in zip(together, alone, strict=True))


def test_frames_in_parts_are_those_of_the_whole(device: str) -> None:
    torch.manual_seed(8)
    call = moved(greedy_call(BeamCase(lengths=[31, 31], vocabulary=11), 2), device)
    am, _, *model = call.inputs
    whole = run(call, device)
    lm, context, *_ = call.fresh_outputs()
    parts = []
    for begin, end in ((0, 9), (9, 10), (10, 10), (10, 31)):
        shape = (2, end - begin, 2)
        steps = am.new_full(shape, -7, dtype=torch.int64), am.new_full(shape, float("nan"))
        lengths = torch.full((2,), end - begin, device=device)
        part = am[:, begin:end].contiguous()
        torch.ops.pruned_rnnt.greedy_frames(part, lengths, *model, lm, context, *steps)
        parts.append(steps)
    symbols, scores = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
    for got, want in zip((lm, context, symbols, scores), whole, strict=True):
        assert torch.equal(got.cpu(), want)


def test_many_utterances_share_a_block(device: str) -> None:
    torch.manual_seed(10)
    lengths = torch.randint(0, 30, (700,)).tolist()
    call = greedy_call(BeamCase(lengths=lengths, vocabulary=9, joiner=64, predictor=32), 2)
    assert_same(run(call, device), fallback(call))


@pytest.mark.gpu
def test_models_of_usual_sizes_find_what_the_cpu_finds() -> None:
    skip_without_kernel("greedy_frames", "cuda")
    skip_without_kernel("greedy_frames", "cpu")
    torch.manual_seed(11)
    for case in usual_cases(142):
        call = greedy_call(case, 2)
        found, expected = run(call, "cuda"), run(call)
        # Rounding decides between symbols of nearly equal probability.
        same = (found[2] == expected[2]).flatten(1).all(dim=1)
        assert float(same.float().mean()) > 0.97
        assert 0 < int((found[2][0] >= 0).sum()) < 90
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got[same], want[same], rtol=1e-4, atol=1e-4)
