"""Modes of torch in which a function is called: values without gradients, autocast, transforms."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tests.cells.axes_gradients import finished, has_gradients
from tests.cells.cell import Cell, plain
from tests.cells.judge import Comparison, Upstream, compute, names_of, weighted
from tests.cells.subject import Arguments, Results, Subject, leaves_of, results_of


def without_gradients(subject: Subject, given: Arguments, results: Results) -> Comparison:
    """Results that must not require gradients."""
    losses = [name for name, x in results.items() if x.requires_grad and not x._is_view()]
    assert not losses, f"{losses} require gradients"
    return Comparison(given, {k: x.clone() for k, x in results.items()}, [], {})


def within(mode: Callable[[], Any], with_gradients: bool = True) -> Callable[..., Comparison]:
    """The forward pass runs in a mode."""

    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        with mode():
            results = results_of(subject.call(**given))
        if with_gradients:
            return compute(subject, given, results, upstream)
        return without_gradients(subject, given, results)

    return run


def throughout(mode: Callable[[], Any]) -> Callable[..., Comparison]:
    """Both passes run in a mode."""

    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        with mode():
            return plain(subject, given, upstream)

    return run


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Uninitialized memory is filled with NaN as well."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def accumulated_once(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """By backward()."""
    results, leaves = results_of(subject.call(**given)), leaves_of(given)
    names = names_of(subject, results, upstream)
    if names:
        weighted(results, names, upstream).backward()
    return finished(subject, given, results, {name: x.grad for name, x in leaves.items()})


def counted(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    with FlopCounterMode(display=False):
        # Of modules, it supports backward() alone.
        return accumulated_once(subject, given, upstream)


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


def inference_inputs(given: Arguments) -> Arguments:
    """Floating arguments are inference tensors, which autograd cannot save."""
    with torch.inference_mode():
        return {
            k: x.detach().clone() if isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in given.items()
        }


def in_threads(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Several calls at once; all must agree."""
    found: list[Any] = [None] * 4

    def work(n: int) -> None:
        try:
            found[n] = plain(subject, given, upstream)
        except Exception as error:
            found[n] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, Exception):
            raise one
        for name, x in one.results.items():
            other = found[0].results[name]
            assert torch.equal(x.nan_to_num(0.5), other.nan_to_num(0.5)), "threads disagree"
    return found[-1]


def _moved(given: Arguments, move: Callable[[Tensor], Tensor]) -> Arguments:
    moved = {}
    for name, x in given.items():
        if isinstance(x, Tensor):
            moved[name] = move(x.detach()).requires_grad_(x.requires_grad)
        else:
            moved[name] = x.to("meta") if isinstance(x, nn.Module) else x
    return moved


class ShapesDiffer(AssertionError):
    pass


def _same_shapes(subject: Subject, given: Arguments, found: Results) -> Comparison:
    """The shapes of a call without data; the values come from a call with them."""
    results = results_of(subject.call(**given))
    for name, x in results.items():
        if found[name].shape != x.shape or found[name].dtype != x.dtype:
            raise ShapesDiffer(f"{name} is {found[name].dtype} {tuple(found[name].shape)}")
    return Comparison(given, {k: x.detach() for k, x in results.items()}, [], {})


def on_meta(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    moved = _moved(given, lambda x: x.to("meta"))
    found = results_of(subject.call(**moved))
    if "module" in given:
        device = given["encoder_out"].device
        given["module"] = subject.make()["module"].to(device, torch.float32)
    return _same_shapes(subject, given, found)


def fake(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """With gradients, as a planner of memory would trace a training step."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        moved = {k: mode.from_tensor(x) if isinstance(x, Tensor) else x for k, x in given.items()}
        results = results_of(subject.call(**moved))
        found = compute(subject, moved, results, upstream)
    for name, x in found.grads.items():
        leaf = leaves_of(given)[name]
        if x is not None and (x.shape != leaf.shape or x.dtype != leaf.dtype):
            raise ShapesDiffer(f"the gradient of {name} is {x.dtype} {tuple(x.shape)}")
    return _same_shapes(subject, given, found.results)


MODES: dict[str, Callable[..., Comparison]] = {
    "no_grad": within(torch.no_grad, with_gradients=False),
    "inference_mode": within(torch.inference_mode, with_gradients=False),
    "default dtype float64": throughout(lambda: default_dtype(torch.float64)),
    "default dtype bfloat16": throughout(lambda: default_dtype(torch.bfloat16)),
    "deterministic": throughout(deterministic),
    "anomaly mode": throughout(torch.autograd.detect_anomaly),
    "profiler": throughout(profiler),
    "FLOP counter": counted,
    "threads": in_threads,
    "meta": on_meta,
    "FakeTensor": fake,
}
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def cells(subjects: list[Subject]) -> Iterator[Cell]:
    for subject in subjects:
        words = (*subject.floats, *subject.integers)
        if not subject.floats:
            continue
        for column, run in MODES.items():
            if subject.overwrites and column == "threads":
                continue
            named = (*words, "deterministic") if column == "deterministic" else words
            yield Cell(subject, "modes", subject.name, column, run=run, words=named)
        for column, dtype in AUTOCAST.items():
            mode = _autocast(dtype)
            precision = dtype if subject.has_products else None
            yield Cell(
                subject,
                "modes",
                subject.name,
                f"autocast {column}",
                run=within(mode),
                precision=precision,
            )
        if has_gradients(subject) and not subject.is_module:
            yield Cell(
                subject,
                "modes",
                subject.name,
                "inference tensors",
                inference_inputs,
                run=lambda s, given, _: without_gradients(s, given, results_of(s.call(**given))),
                words=("inference", *words),
            )


def _autocast(dtype: torch.dtype) -> Callable[[], Any]:
    @contextlib.contextmanager
    def mode() -> Iterator[None]:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.autocast(kind, dtype):
            yield

    return mode
