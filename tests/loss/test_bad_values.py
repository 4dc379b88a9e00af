"""Impossible lengths, targets and bands: an error that names the utterance, or infinity."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import pruned_rnnt
from pruned_rnnt.ops.common.native import has_native_kernel
from tests.loss import bad_input_calls as calls
from tests.loss.bad_input_calls import SPOILT
from tests.loss.loss_cases import DEVICES

# --- values: on the CPU the error names the utterance --------------------------------------------
LENGTHS = [
    ("logit_lengths", [6, 7, 4], r"logit_lengths\[1\] is 7; .* at most 6, the frames of"),
    ("logit_lengths", [6, 0, 4], r"logit_lengths\[1\] is 0; it must be at least 1"),
    ("target_lengths", [3, 2, 4], r"target_lengths\[2\] is 4; it must be in 0\.\.3"),
    ("target_lengths", [-1, 2, 0], r"target_lengths\[0\] is -1; it must be in 0\.\.3"),
]


@pytest.mark.parametrize("call", [*calls.LOSSES, calls.bounds])
@pytest.mark.parametrize(("name", "value", "words"), LENGTHS)
def test_lengths(call, name, value, words) -> None:
    calls.refused(call, calls.changed(name, torch.tensor(value)), words)


@pytest.mark.parametrize("call", [*calls.LOSSES, calls.full_packed])
@pytest.mark.parametrize("symbol", [-1, calls.V, 0])
def test_targets(call, symbol) -> None:
    targets = calls.arguments()["targets"]
    targets[1, 1] = symbol
    words = rf"targets\[1, 1\] of utterance 1 is {symbol}; .* 0\.\.6 and not the blank 0"
    calls.refused(call, calls.changed("targets", targets), words)


@pytest.mark.parametrize("call", calls.LOSSES)
def test_targets_beyond_the_length_have_no_effect(call) -> None:
    targets = calls.arguments()["targets"]
    targets[1, 2] = targets[2, 0] = 10**6
    assert torch.equal(call(calls.changed("targets", targets)), call(calls.arguments()))


@pytest.mark.parametrize(
    "call", [calls.full, calls.simple, calls.pruned, calls.fused, calls.bounds]
)
@pytest.mark.parametrize(
    ("rnnt_type", "frames", "symbols", "needed"),
    [("modified", 2, 3, 3), ("constrained", 1, 2, 2), ("rna", 3, 3, 4)],
)
def test_more_symbols_than_frames(call, rnnt_type, frames, symbols, needed) -> None:
    given = calls.changed("logit_lengths", torch.tensor([6, 5, frames]))
    given["target_lengths"] = torch.tensor([3, 2, symbols])
    words = (
        f"utterance 2 has no path: {symbols} symbols need at least {needed} frames with rnnt_type "
        f"'{rnnt_type}'"
    )
    calls.refused(call, given, words, rnnt_type=rnnt_type)


def test_band_too_narrow_for_the_symbols() -> None:
    given = calls.changed("logit_lengths", torch.tensor([1, 5, 4]))
    words = r"utterance 0 has no path: with 3 symbols in 1 frames s_range must be at least 4"
    calls.refused(calls.bounds, given, words)
    module = pruned_rnnt.PrunedTransducerLoss(
        lambda a, b: a + b, calls.V, calls.V, calls.V, s_range=3
    )
    lengths = (given["logit_lengths"], given["target_lengths"])
    with pytest.raises(ValueError, match=words):
        module(given["am"], given["lm"], given["targets"], *lengths, 0)


BANDS = [
    ("does not start at 0", [1, 1, 1, 1, 1, 1], 3, "regular"),
    ("has a gap", [0, 0, 3, 3, 3, 3], 3, "regular"),
    ("goes up and back", [0, 1, 1, 1, 2, 0], 2, "modified"),
    ("ends too early", [0, 0, 0, 0, 0, 0], 3, "regular"),
    ("jumps", [0, 0, 0, 0, 0, 3], 2, "modified"),
]


@pytest.mark.parametrize("call", [calls.pruned, calls.fused])
@pytest.mark.parametrize(
    ("start", "s_range", "rnnt_type"), [band[1:] for band in BANDS], ids=[band[0] for band in BANDS]
)
def test_band_without_a_path(call, start, s_range, rnnt_type) -> None:
    """The band of utterance 0, which has U_n = 3."""
    given = calls.changed("start", lambda x: torch.cat([torch.tensor([start]).int(), x[1:]]))
    given["band"] = given["band"][:, :, :s_range]
    calls.refused(
        call, given, "utterance 0 has no path inside bounds", s_range=s_range, rnnt_type=rnnt_type
    )


BOUNDARIES = [
    [0, 0, 4, 6],
    [0, 0, 3, 7],
    [-1, 0, 3, 6],
    [2, 0, 1, 6],
    [0, 3, 3, 3],
]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_boundary(boundary) -> None:
    given = calls.arguments()
    given["boundary"] = torch.tensor([[0, 0, 3, 6], [0, 0, 2, 5], boundary])
    calls.refused(calls.information, given, r"boundary\[2\] is .*0 <= u_begin <= u_end <= 3")


# --- values that are not read: +inf and zero gradient, without synchronization -------------------
@contextmanager
def unseen_values(device: str) -> Iterator[None]:
    """Values are not read: on CUDA, where any synchronization is an error; on the CPU as inside
    torch.compile."""
    if device == "cpu":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            yield
        return
    # The fallback synchronizes; the compiled kernels must not.
    mode = "error" if has_native_kernel("band_lattice", "cuda") else "default"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [calls.full, calls.simple, calls.pruned, calls.fused])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_infinity_and_no_gradient(call, name, value, device) -> None:
    inputs = {"full": ["logits"], "pruned": ["band"]}.get(call.__name__, ["am", "lm"])
    losses, grads = [], []
    for spoilt in (calls.arguments(), calls.changed(name, value)):
        given = {key: x.to(device) for key, x in spoilt.items()}
        leaves = [given[key].requires_grad_() for key in inputs]
        with unseen_values(device):
            loss = call(given, reduction="none")
            grads.append(torch.autograd.grad(loss, leaves, torch.ones_like(loss)))
        losses.append(loss)
    assert losses[1][1] == torch.inf
    for n in (0, 2):
        torch.testing.assert_close(losses[1][n], losses[0][n], rtol=1e-6, atol=0)
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left[[0, 2]], right[[0, 2]], rtol=1e-5, atol=1e-7)
        assert not right[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [calls.pruned, calls.fused])
def test_a_band_beyond_32_bits_has_no_path(call, device) -> None:
    start = calls.arguments()["start"].long()
    start[1] += 2**32
    given = {key: x.to(device) for key, x in calls.changed("start", start).items()}
    with unseen_values(device):
        loss = call(given, reduction="none")
    assert loss.isinf().tolist() == [False, True, False]
    if device == "cpu":
        calls.refused(call, given, "utterance 1 has no path inside bounds")


@pytest.mark.parametrize("s_range", [1, 0])
def test_constrained_symbols_need_two_columns(s_range) -> None:
    words = f"s_range is {s_range}; it must be at least 2"
    calls.refused(calls.bounds, calls.arguments(), words, s_range=s_range, rnnt_type="constrained")


@pytest.mark.parametrize("device", DEVICES)
def test_too_few_packed_rows_for_an_utterance(device) -> None:
    given = calls.changed("target_lengths", torch.tensor([3, 2, 3]))
    given["logits"] = calls.packed(given["logits"])
    given = {key: x.to(device) for key, x in given.items()}
    with unseen_values(device):
        loss = calls.full(given, reduction="none")
    assert loss.isinf().tolist() == [False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_packed_rows_after_an_utterance_of_negative_length(device) -> None:
    given = calls.arguments()
    frames, symbols = given["logit_lengths"], given["target_lengths"]
    others = [n for n in range(len(frames)) if n != 1]
    packed = [given["logits"][n, : frames[n], : symbols[n] + 1].flatten(0, 1) for n in others]
    expected = calls.full(calls.arguments(), reduction="none")
    given |= {
        "logits": torch.cat(packed),
        "logit_lengths": frames.index_fill(0, torch.tensor(1), -4),
    }
    given = {key: x.to(device) for key, x in given.items()}
    with unseen_values(device):
        loss = calls.full(given, reduction="none")
    loss = loss.cpu()
    torch.testing.assert_close(loss[others], expected[others])
    assert loss[1] == torch.inf


@pytest.mark.gpu
@pytest.mark.parametrize("call", [calls.full, calls.simple, calls.pruned, calls.fused, calls.ctc])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_validate_synchronizes_and_raises(call, name, value) -> None:
    given = {key: x.cuda() for key, x in calls.changed(name, value).items()}
    with pytest.raises(ValueError, match="1"):
        call(given, validate=True)
