"""Raw ops compare every argument with what their kernels read and write, and refuse others.

Each op is called as in the tables of valid calls, with one tensor argument in turn of another
dtype, layout, size or device. On the device of the kernels, no such call may reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import has_native_kernel
from tests.loss import step_cases
from tests.ops.active_cases import active_calls, gradient_calls, layer_calls, packed_calls
from tests.ops.beam_cases import beam_frames_calls, greedy_frames_calls
from tests.ops.counted_cases import counted_calls
from tests.ops.native_batches import Call, batch_of
from tests.ops.native_cases import all_calls
from tests.ops.simple_cases import split_simple_calls
from tests.ops.test_opcheck import fused_calls, scale_calls

SHAPE = ("ragged", [7, 4, 5], [3, 3, 1], 6)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Dimensions that no other argument has, or of which others have more: with one less, the call is
# a smaller problem.
FREE = {
    ("band_gather", "lm", 1),
    ("band_gather_backward", "grad", 2),
    ("band_gather_backward", "grad_lm", 1),
    ("column_sums", "x", 0),
    ("column_sums", "partial", 0),
    ("duration_gradient", "grad", 0),
    ("joiner_rows", "lm", 1),
    ("joiner_rows", "hidden", 0),
    ("joiner_rows_backward", "grad_lm", 1),
    ("log_probs", "logits", 0),
    ("log_probs", "logits", 1),
    ("log_probs", "targets", 1),
    ("log_probs_backward", "logits", 1),
    ("log_probs_backward", "targets", 1),
    ("log_probs_backward", "grad_logits", 1),
    ("simple_log_probs", "targets", 1),
    ("simple_backward", "targets", 1),
}
# CUDA kernels have padding.
FREE_ON_CUDA = FREE | {
    ("active_gradients", "targets", 1),
    ("active_joiner_rows", "lm", 1),
    ("active_joiner_rows", "hidden", 0),
    ("active_joiner_rows", "hidden", 1),
    ("active_joiner_rows_backward", "hidden", 1),
    ("active_joiner_rows_backward", "grad_lm", 1),
    ("active_log_probs_backward", "targets", 1),
    ("active_log_probs_backward", "logits", 0),
    ("active_log_probs_backward", "sums", 0),
    ("counted_rows_sums", "out", 0),
    ("exp_rows", "x", 2),
    ("exp_rows", "x_exp", 1),
    ("exp_rows", "x_exp", 3),
    ("fused_log_probs", "lm", 1),
    ("fused_log_probs", "targets", 1),
    ("list_active_rows", "block_ends", 1),
    ("packed_log_probs", "lm", 1),
    ("packed_log_probs", "targets", 1),
    ("packed_log_probs", "hidden", 0),
    ("simple_backward", "product", 2),
    ("simple_backward", "lm_sum", 1),
    ("simple_weights", "product", 2),
    ("simple_weights", "weights", 3),
    ("pruned_step_forward", "targets", 1),
    ("pruned_step_rows_backward", "targets", 1),
}


def valid_calls(device: str) -> dict[str, list[Call]]:
    """The calls of each op with a kernel on the device, that have the fewest optional arguments
    and the most."""
    torch.manual_seed(0)
    batch, vocabulary = batch_of(*SHAPE[1:]), SHAPE[3]
    tables: list[Iterator[Call]] = [all_calls(SHAPE, torch.float32)]
    if device == "cpu":
        tables += [beam_frames_calls(SHAPE[1], 6), greedy_frames_calls(SHAPE[1], 6)]
    else:
        half = torch.bfloat16
        tables += [
            (call for call in beam_frames_calls(SHAPE[1], 6) if call.inputs[3] is None),
            greedy_frames_calls(SHAPE[1], 6),
            split_simple_calls(batch, vocabulary, torch.float32),
            active_calls(batch, vocabulary, half, 16),
            gradient_calls(batch, vocabulary, half, 16, torch.float32),
            layer_calls(torch.float32, half),
            packed_calls(batch, vocabulary, half, 16),
            fused_calls(),
            counted_calls(),
            scale_calls(),
        ]
    calls: dict[str, list[Call]] = {}
    for call in (call for table in tables for call in table):
        if has_native_kernel(call.op, device):
            calls.setdefault(call.op, []).append(call)

    def tensors(call: Call) -> int:
        return sum(isinstance(x, Tensor) for x in (*call.inputs, *call.outputs))

    def elements(call: Call) -> int:
        return sum(x.numel() for x in (*call.inputs, *call.outputs) if isinstance(x, Tensor))

    ends = {}
    for op, all_of_op in calls.items():
        whole = sorted(all_of_op, key=elements)[len(all_of_op) // 2 :]
        ends[op] = [min(whole, key=tensors), max(whole, key=tensors)]
    return ends


def calls_or_skip(device: str) -> dict[str, list[Call]]:
    calls = valid_calls(device)
    if not calls:
        pytest.skip(f"no compiled kernels for {device}")
    return calls


def moved(x: object, device: str) -> object:
    if isinstance(x, list):
        return [moved(item, device) for item in x]
    return x.to(device) if isinstance(x, Tensor) else x


def narrowed(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def spread(x: Tensor) -> Tensor:
    """The same shape with gaps between all elements."""
    return torch.stack([x, x], -1)[..., 0]


def other_dtypes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    wrong = torch.float32 if x.dtype == torch.float64 else torch.float64
    for dtype in (wrong, torch.int16, torch.complex64):
        yield f"{dtype}", x.to(dtype)
    yield "another integer", x.to(torch.int32 if x.dtype == torch.int64 else torch.int64)


def changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What must be refused in place of a tensor of a valid call, with a name."""
    yield from other_dtypes(x)
    for dim, size in enumerate(x.shape):
        if size > 0:
            yield f"narrow {dim}", narrowed(x, dim)
    if x.numel() > 1:
        yield "spread", spread(x)
        yield "expanded", x.flatten()[0].expand(x.shape)
    yield "one more dimension", x.unsqueeze(0).expand(2, *x.shape)
    if not x.is_cpu:
        yield "on the CPU", x.cpu()


class Recorded(TorchDispatchMode):
    """The calls of the ops of the pruned step, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("pruned_rnnt::")
        if name.startswith("pruned_step_") and name != "pruned_step_layout":
            self.calls.setdefault(name, []).append(Call(name, args, ()))
        return func(*args, **(kwargs or {}))


def step_calls(device: str) -> dict[str, list[Call]]:
    """Of a step without durations and of one with them, with lengths on the device, of which all
    losses get a gradient."""
    recorded = Recorded()
    for options in ({"reduction": "none"}, {"durations": step_cases.DURATIONS}):
        module, _ = step_cases.modules(device, 16, torch.float32, **options)
        batch = [x.to(device) for x in step_cases.inputs(device, 16, torch.float32)]
        with recorded:
            losses = module(*batch, step=4)
            (losses.loss + losses.simple_loss - losses.pruned_loss).sum().backward()
    return recorded.calls


def refusals(call: Call, device: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(argument, change, call) for all tensor arguments, also those in lists."""
    op = getattr(torch.ops.pruned_rnnt, call.op)
    given = [*call.inputs, *call.outputs]
    # Those of a step are recorded on the device, but for one that ops read on the host.
    if not any(isinstance(x, Tensor) and x.device.type == device for x in given):
        given = [moved(x, device) for x in given]
    free = FREE if device == "cpu" else FREE_ON_CUDA
    names = [argument.name for argument in op.default._schema.arguments]
    for place, (name, x) in enumerate(zip(names, given, strict=True)):
        is_list = isinstance(x, list) and isinstance(next(iter(x), None), Tensor)
        if not (is_list or isinstance(x, Tensor)):
            continue
        for change, wrong in changes(x[-1] if is_list else x):
            if change.startswith("narrow") and (call.op, name, int(change[-1])) in free:
                continue
            arguments = [*given]
            arguments[place] = [*x[:-1], wrong] if is_list else wrong
            yield name, change, lambda arguments=arguments: op(*arguments)


def error_of(run: Callable[[], object]) -> str:
    """The message of the error, or nothing."""
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_tensors_are_refused(device) -> None:
    calls = calls_or_skip(device)
    if device == "cuda":
        calls |= step_calls(device)
    errors = {
        (op, name, change): error_of(run)
        for op, ends in calls.items()
        for call in ends
        for name, change, run in refusals(call, device)
    }
    if device == "cuda":
        torch.cuda.synchronize()
    assert [key for key, error in errors.items() if not error] == []
    # Of a contract, not of the dispatcher; on CUDA also of a kernel's host function.
    source = "arguments.h" if device == "cpu" else "csrc"
    assert [key for key, error in errors.items() if source not in error] == []
    assert len(errors) > 1000


# Numbers that say nothing about memory.
FREE_NUMBERS = {
    ("active_gradients", "hidden_rows"),
    ("counted_rows_product", "begin"),
    ("counted_rows_sums", "begin"),
    ("fused_log_probs", "hidden_rows"),
    ("packed_log_probs", "hidden_rows"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_numbers_are_refused(device) -> None:
    accepted = []
    for op, ends in calls_or_skip(device).items():
        arguments = getattr(torch.ops.pruned_rnnt, op).default._schema.arguments
        given = [moved(x, device) for x in (*ends[-1].inputs, *ends[-1].outputs)]
        for place, argument in enumerate(arguments):
            if str(argument.type) != "int" or (op, argument.name) in FREE_NUMBERS:
                continue
            for number in (-2, 2**31, 2**62):
                changed = [*given[:place], number, *given[place + 1 :]]
                run = getattr(torch.ops.pruned_rnnt, op)
                if op not in error_of(lambda run=run, changed=changed: run(*changed)):
                    accepted.append((op, argument.name, number))
    assert accepted == []


@pytest.mark.skipif(not has_native_kernel("lattice", "cpu"), reason="the CPU library is not built")
@pytest.mark.parametrize("splits", [[0, 40, 60, 90], [-8, 28, 44, 54], [0, 28, 20, 54]])
def test_row_splits_on_the_cpu_have_the_rows_of_the_lengths(splits) -> None:
    batch = batch_of(*SHAPE[1:])
    lengths = (batch.logit_lengths, batch.target_lengths)
    px, py, gx, gy = torch.zeros(4, 54).unbind()
    work, total = torch.empty(10_000), torch.empty(3)
    rows = (None, torch.tensor(splits), batch.frames, batch.symbols + 1)
    with pytest.raises(RuntimeError, match="row_splits"):
        torch.ops.pruned_rnnt.band_lattice(px, py, *lengths, *rows, 0, 0.0, work, total, gx, gy)


@pytest.mark.parametrize("device", DEVICES)
def test_valid_calls_are_accepted(device) -> None:
    for call in (call for ends in calls_or_skip(device).values() for call in ends):
        given = [moved(x, device) for x in (*call.inputs, *call.outputs)]
        getattr(torch.ops.pruned_rnnt, call.op)(*given)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.skipif(not has_native_kernel("lattice", "cpu"), reason="the CPU library is not built")
def test_all_kernels_are_in_the_table() -> None:
    native = {op for op in FALLBACKS if has_native_kernel(op, "cpu")}
    assert valid_calls("cpu").keys() == native


@pytest.mark.gpu
def test_all_cuda_kernels_are_in_the_table() -> None:
    native = {op for op in FALLBACKS if has_native_kernel(op, "cuda")}
    assert valid_calls("cuda").keys() == native
