"""The errors of every loss for shapes, dtypes, devices and scalars that do not fit."""

import pytest
import torch

import pruned_rnnt
from tests.loss.bad_input_calls import (
    CALLS,
    S,
    V,
    arguments,
    bounds,
    changed,
    ctc,
    full,
    full_packed,
    fused,
    information,
    module,
    prune,
    pruned,
    refused,
    simple,
)

LENGTHS = ("logit_lengths", "target_lengths")


@pytest.mark.parametrize("call", CALLS)
def test_unchanged_arguments_are_accepted(call) -> None:
    assert call(arguments()).float().isfinite().all()


# --- shapes and dtypes: (call, argument, how it is changed, words of the message) ---------------
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
    (
        module,
        "am",
        lambda x: x[..., 1:],
        r"encoder_out has shape \(3, 6, 6\); it must be \(N, T, encoder_dim\) = \(3, 6, 7\)",
    ),
    (module, "lm", lambda x: x[..., 1:], r"predictor_out has shape .*= \(3, 4, 7\)"),
    (module, "lm", lambda x: x[:2], r"predictor_out has shape \(2, 4, 7\); .*= \(3, 4, 7\)"),
    (module, "lm", lambda x: x[:, :0], r"predictor_out has shape \(3, 0, 7\); .*U\+1"),
    (ctc, "am", lambda x: x[0], r"logits has shape \(6, 7\)"),
    (ctc, "targets", lambda x: x.float(), "targets is torch.float32"),
]


@pytest.mark.parametrize(("call", "name", "value", "words"), SHAPES_AND_DTYPES)
def test_shapes_and_dtypes(call, name, value, words) -> None:
    refused(call, changed(name, value), words)


# --- types: the same for lists, arrays and numbers -----------------------------------------------
TYPES = [
    *((call, name) for call in (full, simple, pruned, fused, ctc, module) for name in LENGTHS),
    *((call, "targets") for call in (full, full_packed, simple, pruned, fused, ctc, module)),
    *((bounds, name) for name in LENGTHS),
    (full, "logits"),
    (simple, "lm"),
    (fused, "am"),
    (fused, "bias"),
    (prune, "lm"),
    (information, "py"),
]


@pytest.mark.parametrize(("call", "name"), TYPES)
def test_lists_are_refused(call, name) -> None:
    words = f"{name} is a list; it must be a torch.Tensor"
    refused(call, changed(name, lambda x: x.tolist()), words, TypeError)


@pytest.mark.parametrize(
    ("call", "name", "argument"),
    [
        (pruned, "band", "logits"),
        (pruned, "start", "bounds.start"),
        (prune, "start", "bounds.start"),
        (ctc, "am", "logits"),
        (module, "am", "encoder_out"),
        (module, "lm", "predictor_out"),
    ],
)
def test_arrays_are_refused(call, name, argument) -> None:
    words = f"{argument} is a ndarray; it must be a torch.Tensor"
    refused(call, changed(name, lambda x: x.numpy()), words, TypeError)


def test_only_bounds_are_taken_for_a_band() -> None:
    a = arguments()
    ranges = pruned_rnnt.Bounds(a["start"], S).ranges
    words = "bounds is a Tensor; it must be the Bounds that prune_bounds returns"
    with pytest.raises(TypeError, match=words):
        pruned_rnnt.rnnt_loss_pruned(a["band"], a["targets"], ranges)
    with pytest.raises(TypeError, match=words):
        pruned_rnnt.rnnt_loss_fused(a["am"], a["lm"], a["weight"], None, a["targets"], ranges)
    with pytest.raises(TypeError, match=words):
        pruned_rnnt.prune(a["am"], a["lm"], ranges)
    with pytest.raises(TypeError, match="occupancy is a Tensor; it must be the occupancy"):
        pruned_rnnt.prune_bounds(a["am"])


def test_other_helpers_refuse_lists() -> None:
    with pytest.raises(TypeError, match="boundary is a list"):
        information({**arguments(), "boundary": [[0, 0, 3, 6]] * 3})


# --- a joiner that does not fit ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((V, V, 8, V + 1), "vocab_size is 7 but joiner.output_linear.out_features is 8"),
        ((V + 1, V, 8, V), "encoder_dim is 7 but joiner.encoder_proj.in_features is 8"),
        ((V, V + 1, 8, V), "predictor_dim is 7 but joiner.decoder_proj.in_features is 8"),
    ],
)
def test_a_joiner_of_other_sizes(sizes, words) -> None:
    with pytest.raises(ValueError, match=words):
        pruned_rnnt.PrunedTransducerLoss(pruned_rnnt.Joiner(*sizes), V, V, V)


def test_a_callable_joiner_of_another_vocabulary() -> None:
    words = r"what joiner returns has shape \(3, 6, 3, 8\); .* vocab_size\) = \(3, 6, 3, 7\)"
    pad = torch.nn.functional.pad
    refused(module, arguments(), words, joiner=lambda am, lm: pad(am + lm, (0, 1)))
    refused(
        module, arguments(), "what joiner returns is a list", TypeError, joiner=lambda am, lm: [am]
    )


def test_packed_band_must_add_up() -> None:
    given = changed("band", lambda x: x.flatten(0, 2)[:40])
    refused(
        pruned, given, r"logits has 40 packed rows, but the sum of logit_lengths \* s_range is 45"
    )


def test_devices_must_agree() -> None:
    """Checked without reading data: tensors on the meta device have none."""
    for call, name in ((simple, "lm"), (full, "targets"), (fused, "weight"), (prune, "start")):
        refused(call, changed(name, lambda x: x.to("meta")), f"{name} is on meta")
    refused(module, changed("lm", lambda x: x.to("meta")), "predictor_out is on meta")


# --- scalars -------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [full, simple, pruned, fused, ctc])
@pytest.mark.parametrize("blank", [V, -1])
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
    *(
        (call, {"fastemit_lambda": -1}, "fastemit_lambda is -1.0; it must be at least 0")
        for call in (full, simple, pruned, fused)
    ),
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


@pytest.mark.parametrize("name", ["packed_row_splits", "prune_bounds_tdt", "rnnt_loss_tdt_simple"])
def test_removed_names_say_what_replaces_them(name) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'; it was removed: use "):
        getattr(pruned_rnnt, name)
