"""Numbers and tensors that are almost right: accepted with the right result, or named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.loss import bad_input_calls as calls
from tests.loss.bad_input_calls import N, T, U, V

NAN = float("nan")


def tdt(a: dict, **options):
    durations = torch.zeros(N, T, U + 1, len(options.get("durations", range(5))))
    lengths = (a["logit_lengths"], a["target_lengths"])
    return pruned_rnnt.rnnt_loss_tdt(a["logits"], durations, a["targets"], *lengths, **options)


def multi_blank(a: dict, **options):
    lengths = (a["logit_lengths"], a["target_lengths"])
    targets = a["targets"].clamp(max=4)
    return pruned_rnnt.rnnt_loss_multi_blank(a["logits"], targets, *lengths, **options)


def module(a: dict, *, step: object = 3, **options):
    joiner = pruned_rnnt.Joiner(V, V, V, V, duration_count=2 if "durations" in options else 0)
    losses = pruned_rnnt.PrunedTransducerLoss(joiner, V, V, V, **{"s_range": 3, **options})
    lengths = (a["logit_lengths"], a["target_lengths"])
    return losses(a["am"], a["lm"], a["targets"], *lengths, step).loss


LOSSES = [calls.full, calls.simple, calls.pruned, calls.fused]
INTEGERS = [
    *((call, "blank") for call in (*LOSSES, calls.ctc, tdt, module)),
    *((call, "s_range") for call in (calls.pruned, calls.fused, calls.bounds, module)),
    (module, "warm_up_steps"),
    (module, "step"),
]
SIZES = ("encoder_dim", "predictor_dim", "joiner_dim", "vocab_size")


@pytest.mark.parametrize(("call", "name"), INTEGERS)
@pytest.mark.parametrize("value", [3.0, True, "3", None, NAN])
def test_what_is_no_integer(call, name, value) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; it must be an integer"):
        call(calls.arguments(), **{name: value})


@pytest.mark.parametrize(("call", "name"), INTEGERS)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_integers_of_numpy(call, name, kind) -> None:
    number = 0 if name == "blank" else 3
    torch.manual_seed(0)
    found = call(calls.arguments(), **{name: kind(number)})
    torch.manual_seed(0)
    assert torch.equal(found, call(calls.arguments(), **{name: number}))


NUMBERS = [
    *((call, "delay_penalty") for call in (*LOSSES, tdt, module)),
    *((call, "fastemit_lambda") for call in (*LOSSES, tdt, module)),
    *((call, "clamp") for call in (calls.full, calls.pruned, calls.fused, tdt)),
    *(
        (call, name)
        for call in (calls.simple, module)
        for name in ("lm_only_scale", "am_only_scale")
    ),
    *((module, name) for name in ("simple_scale", "pruned_scale_start")),
    *((tdt, name) for name in ("sigma", "omega")),
]


@pytest.mark.parametrize(("call", "name"), NUMBERS)
@pytest.mark.parametrize("value", [True, "0.1", torch.tensor(0.1), 1j])
def test_what_is_no_number(call, name, value) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; it must be a number"):
        call(calls.arguments(), **{name: value})


@pytest.mark.parametrize(("call", "name"), NUMBERS)
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf"), np.float32("nan")])
def test_numbers_that_are_not_finite(call, name, value) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; it must be finite"):
        call(calls.arguments(), **{name: value})


@pytest.mark.parametrize("options", [{"sigma": NAN}, {"omega": 2.0}, {"omega": NAN}])
def test_numbers_of_a_module_with_durations(options) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} is"):
        module(calls.arguments(), durations=(0, 1), **options)


@pytest.mark.parametrize("name", [*SIZES, "duration_count"])
def test_sizes_of_a_joiner(name) -> None:
    sizes = {**dict.fromkeys(SIZES, 5), "duration_count": 0}
    least = sizes[name] and 1
    with pytest.raises(TypeError, match=f"^{name} is 5.0; it must be an integer"):
        pruned_rnnt.Joiner(**{**sizes, name: 5.0})
    with pytest.raises(ValueError, match=f"^{name} is {least - 1}; it must be at least {least}"):
        pruned_rnnt.Joiner(**{**sizes, name: least - 1})


@pytest.mark.parametrize("name", [name for name in SIZES if name != "joiner_dim"])
def test_sizes_of_a_module(name) -> None:
    sizes = {key: 5 for key in SIZES if key != "joiner_dim"}
    with pytest.raises(TypeError, match=f"^{name} is 5.0; it must be an integer"):
        pruned_rnnt.PrunedTransducerLoss(torch.add, **{**sizes, name: 5.0})
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1"):
        pruned_rnnt.PrunedTransducerLoss(torch.add, **{**sizes, name: 0})


def test_initial_scale_of_a_joiner() -> None:
    with pytest.raises(ValueError, match=r"^initial_scale is nan; it must be finite"):
        pruned_rnnt.Joiner(5, 5, 5, 5, initial_scale=NAN)


@pytest.mark.parametrize("joiner", [None, "j", torch.nn.Linear(V, V), lambda am: am])
def test_what_is_no_joiner(joiner) -> None:
    with pytest.raises(TypeError, match=r"joiner is a .*, needs a pruned_rnnt\.Joiner or a call"):
        pruned_rnnt.PrunedTransducerLoss(joiner, V, V, V)


def test_a_joiner_takes_projected_inputs() -> None:
    joiner = pruned_rnnt.Joiner(6, 5, 9, 11, duration_count=2)
    am, lm = torch.zeros(2, 6), torch.zeros(2, 5)
    for call in (joiner, joiner.with_durations):
        with pytest.raises(ValueError, match=r"am has 6 columns.* pass joiner.encoder_proj\(am\)"):
            call(am, lm)
        with pytest.raises(ValueError, match=r"lm has 5 columns.* pass joiner.decoder_proj\(lm\)"):
            call(joiner.encoder_proj(am), lm)
        call(joiner.encoder_proj(am), joiner.decoder_proj(lm))


def test_a_warm_up_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="warm_up_steps is -1; it must be at least 0"):
        module(calls.arguments(), warm_up_steps=-1)


def test_omega_is_drawn_on_the_cpu() -> None:
    given, durations = calls.arguments(), torch.zeros(N, T, U + 1, 5)
    with torch.device("meta"):
        loss = pruned_rnnt.rnnt_loss_tdt(given["logits"], durations, given["targets"], omega=0.5)
    assert loss.isfinite()


@pytest.mark.parametrize("durations", [np.arange(5), [np.int64(x) for x in range(5)], range(5)])
def test_durations_of_numpy(durations) -> None:
    found = tdt(calls.arguments(), durations=durations)
    assert torch.equal(found, tdt(calls.arguments(), durations=(0, 1, 2, 3, 4)))


@pytest.mark.parametrize("durations", [[0.0, 1.0], [False, True], ["0", "1"], torch.arange(2)])
def test_durations_that_are_no_integers(durations) -> None:
    with pytest.raises(ValueError, match=r"durations is .*; it must be different integers"):
        tdt(calls.arguments(), durations=durations)


def test_big_blanks() -> None:
    right = multi_blank(calls.arguments(), big_blanks={5: 2, 6: 4})
    numbers = {np.int64(5): np.int32(2), np.int64(6): np.int32(4)}
    assert torch.equal(multi_blank(calls.arguments(), big_blanks=numbers), right)
    for wrong, words in (
        ([2], "big_blanks is a list; it must be a mapping"),
        ({5.0: 2}, "a column of big_blanks is 5.0; it must be an integer"),
        ({5: 2.0}, r"big_blanks\[5\] is 2.0; it must be an integer"),
        ({5: True}, r"big_blanks\[5\] is True; it must be an integer"),
    ):
        with pytest.raises(TypeError, match=words):
            multi_blank(calls.arguments(), big_blanks=wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", [*LOSSES, calls.ctc, tdt, calls.information])
def test_layouts_without_strides(call) -> None:
    inputs = {"logits", "band", "am", "px"}
    name = next(name for name in inputs if _takes(call, name))
    for change in (torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor(list(x))):
        given = calls.arguments()
        given[name] = change(given[name])
        with pytest.raises(ValueError, match=r"is (of layout|nested).*must be a dense tensor"):
            call(given)


def _takes(call, name: str) -> bool:
    given = calls.arguments()
    given[name] = None
    try:
        call(given)
    except (TypeError, AttributeError):
        return True
    return False


@pytest.mark.parametrize("name", ["targets", "logit_lengths", "target_lengths"])
def test_sparse_integers(name) -> None:
    calls.refused(calls.full, calls.changed(name, calls.arguments()[name].to_sparse()), name)


@pytest.mark.parametrize("call", [*LOSSES, calls.ctc, calls.bounds, tdt])
@pytest.mark.parametrize("lengths", ["meta", "cpu"])
def test_meta_tensors_have_the_shapes_of_results(call, lengths) -> None:
    given = calls.arguments()
    expected = call(given)
    for name, x in given.items():
        if "length" not in name or lengths == "meta":
            given[name] = x.to("meta")
    if call is tdt:
        with torch.device("meta"):
            found = call(given)
    else:
        found = call(given)
    assert found.is_meta
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_a_module_on_meta() -> None:
    given = {name: x.to("meta") for name, x in calls.arguments().items()}
    with torch.device("meta"):
        loss = module(given)
    loss.backward()
    assert loss.is_meta
    assert loss.shape == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("call", [*LOSSES, calls.ctc, tdt])
def test_torch_jit_trace_is_refused(call) -> None:
    given = calls.arguments()

    def traced(logits, band, am):
        return call({**given, "logits": logits, "band": band, "am": am})

    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record .* torch\.compile"):
        torch.jit.trace(traced, (given["logits"], given["band"], given["am"]))


def test_starts_that_are_no_integers() -> None:
    given = calls.arguments()
    with pytest.raises(ValueError, match=r"bounds\.start is torch\.float32"):
        pruned_rnnt.prune(given["am"], given["lm"], Bounds(given["start"].float(), 3))
    with pytest.raises(TypeError, match=r"s_range is 3\.0; it must be an integer"):
        pruned_rnnt.prune(given["am"], given["lm"], Bounds(given["start"], 3.0))


@pytest.mark.parametrize("length", [T + 9, -3])
def test_lengths_of_two_views(length) -> None:
    x, lengths = torch.randn(N, T, U), torch.tensor([T, length, 1])
    with pytest.raises(ValueError, match=rf"logit_lengths\[1\] is {length}; it must be in 0\.\.6"):
        pruned_rnnt.ctc_consistency_loss(x, x + 1, lengths)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(pruned_rnnt.ctc_consistency_loss, backend="eager")
    loss = compiled(leaf, x.roll(1, 2), lengths, reduction="none")
    assert loss.isinf().tolist() == [False, True, False]
    loss.sum().backward()
    assert leaf.grad[0].any()
    assert not leaf.grad[1].any()


def consistency(a: dict, **options):
    views = (a["logits"][:, :, 0], a["logits"][:, :, 1])
    return pruned_rnnt.ctc_consistency_loss(*views, a["logit_lengths"], **options)


FLAGS = [
    *((call, "hat") for call in (calls.full, calls.pruned, calls.fused, module)),
    *((call, "from_log_probs") for call in (calls.full, calls.pruned)),
    *((call, "in_place") for call in (calls.full, calls.pruned, tdt, multi_blank)),
    *((call, "validate") for call in (*LOSSES, calls.ctc, calls.bounds, calls.information, tdt)),
    (consistency, "validate"),
    (calls.bounds, "exact"),
    (module, "exact_bounds"),
]


def with_flag(call, name: str, value: object):
    options = {"big_blanks": {5: 2}} if call is multi_blank else {}
    torch.manual_seed(0)
    return call(calls.arguments(), **options, **{name: value})


@pytest.mark.parametrize(("call", "name"), FLAGS)
@pytest.mark.parametrize("value", ["False", "no", 0, 2, None, torch.tensor(False)])
def test_what_is_neither_true_nor_false(call, name, value) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*, needs True or False"):
        with_flag(call, name, value)


@pytest.mark.parametrize(("call", "name"), FLAGS)
@pytest.mark.parametrize("value", [False, True])
def test_flags_of_numpy(call, name, value) -> None:
    assert torch.equal(with_flag(call, name, np.bool_(value)), with_flag(call, name, value))


@pytest.mark.parametrize(
    "call", [*LOSSES, calls.ctc, calls.bounds, calls.information, consistency, tdt]
)
def test_torch_compile_refuses_to_validate(call) -> None:
    given = calls.arguments()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="use validate=False there"):
        compiled(given, validate=True)
    assert torch.equal(compiled(given, validate=False), call(given))
