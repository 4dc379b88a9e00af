"""What every loss says about arguments that do not fit, row by row."""

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds, Occupancy

N, T, U, V, D, S = 3, 6, 3, 7, 4, 3


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "targets": torch.tensor([[1, 2, 3], [4, 5, 6], [1, 1, 1]]),
        "logit_lengths": torch.tensor([6, 5, 4]),
        "target_lengths": torch.tensor([3, 2, 0]),
        "start": torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6], dtype=torch.int32),
        "logits": torch.randn(N, T, U + 1, V, generator=generator),
        "band": torch.randn(N, T, S, V, generator=generator),
        "am": torch.randn(N, T, V, generator=generator),
        "lm": torch.randn(N, U + 1, V, generator=generator),
        "weight": torch.randn(V, V, generator=generator),
        "bias": torch.randn(V, generator=generator),
        "px": torch.randn(N, U, T + 1, generator=generator),
        "py": torch.randn(N, U + 1, T, generator=generator),
    }


def full(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.rnnt_loss(a["logits"], a["targets"], *lengths, **options)


def packed(logits: Tensor) -> Tensor:
    """The rows of T_n = 6, 5, 4 and U_n = 3, 2, 0."""
    sizes = ((6, 3), (5, 2), (4, 0))
    return torch.cat([logits[n, :t, : u + 1].flatten(0, 1) for n, (t, u) in enumerate(sizes)])


def full_packed(a: dict, **options):
    return full({**a, "logits": packed(a["logits"])}, **options)


def simple(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.rnnt_loss_simple(a["am"], a["lm"], a["targets"], *lengths, **options).loss


def pruned(a: dict, *, s_range: int = S, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    bounds = Bounds(a["start"], s_range)
    return pruned_rnnt.rnnt_loss_pruned(a["band"], a["targets"], bounds, *lengths, **options)


def fused(a: dict, *, s_range: int = S, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    bounds = Bounds(a["start"], s_range)
    layer = (a["am"], a["lm"], a["weight"], a["bias"])
    return pruned_rnnt.rnnt_loss_fused(*layer, a["targets"], bounds, *lengths, **options)


def bounds(a: dict, *, s_range: int = S, **options):
    occupancy = Occupancy(a["py"].mT.contiguous(), a["py"].mT.contiguous())
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.prune_bounds(occupancy, *lengths, s_range, **options).start


def prune(a: dict):
    return pruned_rnnt.prune(a["am"], a["lm"], Bounds(a["start"], S)).lm


def information(a: dict, **options):
    return pruned_rnnt.mutual_information(a["px"], a["py"], a.get("boundary"), **options).total


def ctc(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.ctc_loss(a["am"], a["targets"], *lengths, **options)


LOSSES = [full, simple, pruned, fused, ctc]
CALLS = [*LOSSES, full_packed, bounds, prune, information]


@pytest.mark.parametrize("call", CALLS)
def test_the_arguments_are_good_before_they_are_spoilt(call) -> None:
    assert call(arguments()).float().isfinite().all()


def changed(name: str, value) -> dict[str, Tensor]:
    given = arguments()
    given[name] = value(given[name]) if callable(value) else value
    return given


def refused(call, given: dict, words: str, **options) -> None:
    with pytest.raises(ValueError, match=words):
        call(given, **options)


# --- shapes and dtypes: (call, argument, how it is spoilt, what the message says) ---------------
SHAPES_AND_DTYPES = [
    (full, "logits", lambda x: x[0], r"logits has shape \(6, 4, 7\); it must be \(N, T, U\+1, V\)"),
    (full, "logits", lambda x: x.long(), "logits is torch.int64; it must be float64, float32"),
    (full, "logits", lambda x: x[:0], "logits has shape .*at least one utterance"),
    (
        full,
        "logits",
        lambda x: x[:, :, 1:],
        r"targets has shape \(3, 3\).*shape of logits.*\(3, 2\)",
    ),
    (full, "targets", lambda x: x.float(), "targets is torch.float32; it must be int32 or int64"),
    (full, "targets", lambda x: x[0], r"targets has shape \(3,\); it must be \(N, U\)"),
    (full, "targets", lambda x: x[:2], r"targets has shape \(2, 3\)"),
    (full, "logit_lengths", lambda x: x.float(), "logit_lengths is torch.float32"),
    (full, "logit_lengths", lambda x: x[:2], r"logit_lengths has shape \(2,\); .*\(N,\) = \(3,\)"),
    (full, "target_lengths", lambda x: x[:, None], r"target_lengths has shape \(3, 1\)"),
    (full_packed, "logit_lengths", None, "logit_lengths is missing; packed rows need it"),
    (
        full_packed,
        "target_lengths",
        torch.tensor([3, 3, 0]),
        "logits has 43 packed rows, but .* 48",
    ),
    (simple, "am", lambda x: x[0], r"am has shape \(6, 7\); it must be \(N, T, V\)"),
    (simple, "lm", lambda x: x[:, :, 1:], r"lm has shape \(3, 4, 6\); .*by the shape of am"),
    (simple, "lm", lambda x: x.int(), "lm is torch.int32"),
    (simple, "lm", lambda x: x[:, :0], r"lm has shape \(3, 0, 7\)"),
    (pruned, "band", lambda x: x[:, :, 1:], r"logits has shape \(3, 6, 2, 7\); .*bounds.s_range"),
    (pruned, "start", lambda x: x.float(), "bounds.start is torch.float32; it must be int32"),
    (pruned, "start", lambda x: x[0], r"bounds.start has shape \(6,\); it must be \(N, T\)"),
    (pruned, "start", lambda x: x[:, 1:], r"bounds.start has shape \(3, 5\)"),
    (fused, "weight", lambda x: x[:, 1:], r"weight has shape \(7, 6\); it must be \(V, D\)"),
    (fused, "bias", lambda x: x[1:], r"bias has shape \(6,\); it must be \(V,\) = \(7,\)"),
    (fused, "lm", lambda x: x[:, :, 1:], r"lm has shape \(3, 4, 6\)"),
    (bounds, "py", lambda x: x.long(), "occupancy.emit is torch.int64"),
    (prune, "lm", lambda x: x[:2], "lm has 2 utterances but am 3"),
    (prune, "start", lambda x: x[:, 1:], r"bounds.start has shape \(3, 5\)"),
    (
        information,
        "px",
        lambda x: x[:, :, 1:],
        r"px has shape \(3, 3, 6\); it must be \(N, U, T\+1\)",
    ),
    (information, "py", lambda x: x[0], r"py has shape \(4, 6\)"),
    (ctc, "am", lambda x: x[0], r"logits has shape \(6, 7\)"),
    (ctc, "targets", lambda x: x.float(), "targets is torch.float32"),
]


@pytest.mark.parametrize(("call", "name", "value", "words"), SHAPES_AND_DTYPES)
def test_shapes_and_dtypes(call, name, value, words) -> None:
    refused(call, changed(name, value), words)


def test_packed_band_must_add_up() -> None:
    given = changed("band", lambda x: x.flatten(0, 2)[:40])
    refused(
        pruned, given, r"logits has 40 packed rows, but the sum of logit_lengths \* s_range is 45"
    )


def test_devices_must_agree() -> None:
    """Seen without touching data: here the other device has none."""
    for call, name in ((simple, "lm"), (full, "targets"), (fused, "weight"), (prune, "start")):
        refused(call, changed(name, lambda x: x.to("meta")), f"{name} is on meta")


# --- scalars -------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [full, simple, pruned, fused, ctc])
@pytest.mark.parametrize("blank", [V, -V - 1])
def test_blank(call, blank) -> None:
    refused(call, arguments(), rf"blank is {blank}; it must be in 0\.\.6", blank=blank)


@pytest.mark.parametrize("call", [full, simple, pruned, fused, ctc])
def test_reduction(call) -> None:
    refused(call, arguments(), "reduction is 'avg'; it must be one of", reduction="avg")


@pytest.mark.parametrize("call", [full, simple, pruned, fused, bounds, information])
def test_rnnt_type(call) -> None:
    refused(call, arguments(), "rnnt_type is 'simple'; it must be one of", rnnt_type="simple")


@pytest.mark.parametrize("call", [pruned, fused, bounds])
@pytest.mark.parametrize(("rnnt_type", "least"), [("regular", 2), ("modified", 1), ("rna", 1)])
def test_s_range(call, rnnt_type, least) -> None:
    given = changed("band", lambda x: x[:, :, : least - 1])
    words = f"s_range is {least - 1}; it must be at least {least}"
    refused(call, given, words, s_range=least - 1, rnnt_type=rnnt_type)


OPTIONS = [
    (full, {"clamp": 0.0}, "clamp is 0.0; it must be above 0, or None"),
    (full, {"clamp": -1.0}, "clamp is -1.0"),
    (full, {"delay_penalty": float("nan")}, "delay_penalty is nan; it must be finite"),
    (full, {"fastemit_lambda": float("inf")}, "fastemit_lambda is inf; it must be finite"),
    (full, {"hat": True, "from_log_probs": True}, "hat=True needs logits"),
    (fused, {"activation": "gelu"}, "activation is 'gelu'; it must be one of"),
    (simple, {"lm_only_scale": -0.1}, "lm_only_scale is -0.1"),
    (simple, {"lm_only_scale": 0.6, "am_only_scale": 0.5}, "together at most 1"),
]


@pytest.mark.parametrize(("call", "options", "words"), OPTIONS)
def test_options(call, options, words) -> None:
    refused(call, arguments(), words, **options)


@pytest.mark.parametrize("call", [full, pruned])
def test_in_place_needs_contiguous_logits(call) -> None:
    name = "logits" if call is full else "band"
    given = changed(name, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    refused(call, given, "in_place=True needs contiguous logits", in_place=True)


# --- values, which on the CPU name the utterance -------------------------------------------------
LENGTHS = [
    ("logit_lengths", [6, 7, 4], r"logit_lengths\[1\] is 7; .* at most 6, the frames of"),
    ("logit_lengths", [6, 0, 4], r"logit_lengths\[1\] is 0; it must be at least 1"),
    ("target_lengths", [3, 2, 4], r"target_lengths\[2\] is 4; it must be in 0\.\.3"),
    ("target_lengths", [-1, 2, 0], r"target_lengths\[0\] is -1; it must be in 0\.\.3"),
]


@pytest.mark.parametrize("call", [*LOSSES, bounds])
@pytest.mark.parametrize(("name", "value", "words"), LENGTHS)
def test_lengths(call, name, value, words) -> None:
    refused(call, changed(name, torch.tensor(value)), words)


@pytest.mark.parametrize("call", [*LOSSES, full_packed])
@pytest.mark.parametrize("symbol", [-1, V, 0])
def test_targets(call, symbol) -> None:
    targets = arguments()["targets"]
    targets[1, 1] = symbol
    words = rf"targets\[1, 1\] of utterance 1 is {symbol}; .* 0\.\.6 and not the blank 0"
    refused(call, changed("targets", targets), words)


@pytest.mark.parametrize("call", LOSSES)
def test_targets_beyond_the_length_may_be_anything(call) -> None:
    targets = arguments()["targets"]
    targets[1, 2] = targets[2, 0] = 10**6
    assert torch.equal(call(changed("targets", targets)), call(arguments()))


@pytest.mark.parametrize("call", [full, simple, pruned, fused, bounds])
@pytest.mark.parametrize(
    ("rnnt_type", "frames", "symbols", "needed"),
    [("modified", 2, 3, 3), ("constrained", 1, 2, 2), ("rna", 3, 3, 4)],
)
def test_more_symbols_than_frames(call, rnnt_type, frames, symbols, needed) -> None:
    given = changed("logit_lengths", torch.tensor([6, 5, frames]))
    given["target_lengths"] = torch.tensor([3, 2, symbols])
    words = (
        f"utterance 2 has no path: {symbols} symbols need at least {needed} frames with rnnt_type "
        f"'{rnnt_type}'"
    )
    refused(call, given, words, rnnt_type=rnnt_type)


def test_band_too_narrow_for_the_symbols() -> None:
    given = changed("logit_lengths", torch.tensor([1, 5, 4]))
    words = r"utterance 0 has no path: with 3 symbols in 1 frames s_range must be at least 4"
    refused(bounds, given, words)
    module = pruned_rnnt.PrunedTransducerLoss(lambda a, b: a + b, V, V, V, s_range=3)
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


@pytest.mark.parametrize("call", [pruned, fused])
@pytest.mark.parametrize(
    ("start", "s_range", "rnnt_type"), [band[1:] for band in BANDS], ids=[band[0] for band in BANDS]
)
def test_band_without_a_path(call, start, s_range, rnnt_type) -> None:
    """The band of utterance 0, which has U_n = 3."""
    given = changed("start", lambda x: torch.cat([torch.tensor([start]).int(), x[1:]]))
    given["band"] = given["band"][:, :, :s_range]
    refused(
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
    given = arguments()
    given["boundary"] = torch.tensor([[0, 0, 3, 6], [0, 0, 2, 5], boundary])
    refused(information, given, r"boundary\[2\] is .*0 <= u_begin <= u_end <= 3")


# --- where values are not looked at: +inf and zero gradient, without a wait ---------------------
SPOILT = [
    ("logit_lengths", torch.tensor([6, 7, 4])),
    ("logit_lengths", torch.tensor([6, 0, 4])),
    ("logit_lengths", torch.tensor([6, -3, 4])),
    ("logit_lengths", torch.tensor([6, 2**31 - 1, 4])),
    ("target_lengths", torch.tensor([3, 4, 0])),
    ("target_lengths", torch.tensor([3, -1, 0])),
    ("target_lengths", torch.tensor([3, 2**31 - 1, 0])),
    ("targets", torch.tensor([[1, 2, 3], [4, 0, 6], [1, 1, 1]])),
    ("targets", torch.tensor([[1, 2, 3], [4, V, 6], [1, 1, 1]])),
    ("targets", torch.tensor([[1, 2, 3], [4, -(2**31), 6], [1, 1, 1]])),
]


@pytest.fixture
def blind(request, monkeypatch):
    """A device whose values are not looked at: CUDA, or the CPU as inside torch.compile. Any wait
    for CUDA is an error."""
    if request.param == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield "cpu"
        return
    torch.cuda.set_sync_debug_mode("error")
    yield "cuda"
    torch.cuda.set_sync_debug_mode("default")


BLIND = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("blind", BLIND, indirect=True)
@pytest.mark.parametrize("call", [full, simple, pruned, fused])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_infinity_and_no_gradient(call, name, value, blind) -> None:
    inputs = {"full": ["logits"], "pruned": ["band"]}.get(call.__name__, ["am", "lm"])
    losses, grads = [], []
    for spoilt in (arguments(), changed(name, value)):
        given = {key: x.to(blind) for key, x in spoilt.items()}
        leaves = [given[key].requires_grad_() for key in inputs]
        loss = call(given, reduction="none")
        grads.append(torch.autograd.grad(loss, leaves, torch.ones_like(loss)))
        losses.append(loss)
    if blind == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert losses[1][1] == torch.inf
    for n in (0, 2):
        torch.testing.assert_close(losses[1][n], losses[0][n], rtol=1e-6, atol=0)
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left[[0, 2]], right[[0, 2]], rtol=1e-5, atol=1e-7)
        assert not right[1].any()


@pytest.mark.parametrize("blind", BLIND, indirect=True)
def test_packed_rows_that_do_not_cover_an_utterance(blind) -> None:
    given = changed("target_lengths", torch.tensor([3, 2, 3]))
    given["logits"] = packed(given["logits"])
    loss = full({key: x.to(blind) for key, x in given.items()}, reduction="none")
    if blind == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isinf().tolist() == [False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("call", [full, simple, pruned, fused, ctc])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_validate_waits_and_raises(call, name, value) -> None:
    given = {key: x.cuda() for key, x in changed(name, value).items()}
    with pytest.raises(ValueError, match="1"):
        call(given, validate=True)
