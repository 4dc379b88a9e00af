"""Calls of beam_frames and greedy_frames on random models.

Axes: N batch, T frames, B beam, M symbols of a frame, C context, P predictor width, D joiner width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.search.search_frames import BeamState, BeamSteps, SearchModel, predicted
from tests.ops.native_batches import NEG_INF, Call

# Where the compiled searches run.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True, kw_only=True)
class BeamCase:
    """lengths: frames of each utterance; begin: the first frame; fusion: with scores of another
    model; blank_logit: added to that of blank; spread: of logits and projections, whatever the
    widths; 0 for weights of 1."""

    lengths: list[int]
    vocabulary: int
    beam: int = 4
    context: int = 2
    predictor: int = 12
    joiner: int = 20
    blank: int = 0
    activation: str = "tanh"
    hat: bool = False
    fusion: bool = False
    begin: int = 0
    silent: tuple[int, ...] = ()
    blank_logit: float = 2.0
    spread: float = 0.0


def skip_without_kernel(op: str, device: str) -> None:
    if not has_native_kernel(op, device):
        pytest.skip(f"the {device} library is not built")


def moved(call: Call, device: str) -> Call:
    def on_device(x: object) -> object:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    inputs, outputs = (tuple(map(on_device, each)) for each in (call.inputs, call.outputs))
    return replace(call, inputs=inputs, outputs=outputs)  # type: ignore[arg-type]


def beam_model(case: BeamCase) -> SearchModel:
    V, P, D = case.vocabulary, case.predictor, case.joiner
    tables = torch.randn(case.context, V + 1, P)
    tables[:, -1] = 0
    output_bias = torch.randn(V)
    output_bias[case.blank] += case.blank_logit
    silent = torch.zeros(V, dtype=torch.bool)
    silent[list(case.silent)] = True
    return SearchModel(
        tables,
        torch.randn(D, P) * (case.spread / P**0.5 if case.spread else 1.0),
        torch.randn(D),
        torch.randn(V, D) * (case.spread / D**0.5 if case.spread else 1.0),
        output_bias,
        silent,
        case.blank,
        ACTIVATIONS[case.activation],
        case.hat,
    )


def start_state(case: BeamCase, model: SearchModel) -> BeamState:
    """One empty hypothesis for each utterance."""
    shape = (len(case.lengths), case.beam)
    score = torch.full(shape, NEG_INF)
    score[:, 0] = 0
    context = torch.full((*shape, case.context), -1)
    context[..., -1] = case.blank
    lm = predicted(context, model).clone()
    hashes, length = torch.zeros((2, *shape), dtype=torch.int64).unbind()
    return BeamState(score, hashes.clone(), length.clone(), lm, context)


def beam_call(case: BeamCase) -> Call:
    model = beam_model(case)
    frames, size = max(case.lengths, default=0), len(case.lengths)
    am = 2 * torch.randn(size, frames, case.joiner)
    fusion = torch.randn(size, case.beam, case.vocabulary) if case.fusion else None
    if fusion is not None:
        fusion[..., case.blank] = 0
    shape = (size, frames, case.beam)
    steps = BeamSteps(torch.full(shape, -7), torch.full(shape, -7), torch.full(shape, float("nan")))
    inputs = (am, torch.tensor(case.lengths, dtype=torch.int64), case.begin, fusion, *model)
    end = torch.full((1,), -7)
    return Call("beam_frames", inputs, (*start_state(case, model), *steps, end))


def beam_frames_calls(lengths: list[int], vocabulary: int) -> Iterator[Call]:
    """Beams that always have as many extensions as rows."""
    beam = min(4, vocabulary)
    common = {"lengths": lengths, "vocabulary": vocabulary, "beam": beam}
    yield beam_call(BeamCase(**common))
    yield beam_call(BeamCase(**common, context=1, activation="relu", predictor=5, joiner=7))
    yield beam_call(BeamCase(**common, hat=True, activation="none", blank=vocabulary - 1))
    yield beam_call(BeamCase(**common, fusion=True, begin=max(lengths) // 2, blank_logit=9.0))
    if vocabulary > beam:
        yield beam_call(BeamCase(**common, silent=(vocabulary - 1,)))


def usual_cases(utterances: int) -> Iterator[BeamCase]:
    """Models of usual sizes, the last of sizes that are no multiples of four."""
    for vocabulary, joiner, predictor in ((500, 512, 512), (5000, 640, 320), (33, 514, 130)):
        yield BeamCase(
            lengths=[90, 0, *torch.randint(1, 90, (utterances - 2,)).tolist()],
            vocabulary=vocabulary,
            joiner=joiner,
            predictor=predictor,
            spread=2.0,
            blank_logit=6.0,
        )


def greedy_call(case: BeamCase, most: int = 1) -> Call:
    """most: M."""
    model = beam_model(case)
    frames, size = max(case.lengths, default=0), len(case.lengths)
    am = 2 * torch.randn(size, frames, case.joiner)
    *_, lm, context = (x[:, 0].contiguous() for x in start_state(case, model))
    shape = (size, frames, most)
    steps = torch.full(shape, -7), torch.full(shape, float("nan"))
    inputs = (am, torch.tensor(case.lengths, dtype=torch.int64), *model)
    return Call("greedy_frames", inputs, (lm, context, *steps))


def greedy_frames_calls(lengths: list[int], vocabulary: int) -> Iterator[Call]:
    common = {"lengths": lengths, "vocabulary": vocabulary}
    yield greedy_call(BeamCase(**common))
    yield greedy_call(BeamCase(**common, context=1, activation="relu", predictor=5, joiner=7), 3)
    last = vocabulary - 1
    yield greedy_call(BeamCase(**common, hat=True, activation="none", blank=last), 2)
    yield greedy_call(BeamCase(**common, hat=True, blank=vocabulary // 2))
    yield greedy_call(BeamCase(**common, silent=(last,), blank_logit=0.0), 2)
