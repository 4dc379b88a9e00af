"""compat.optimized_transducer: packed logits, both topologies, in-place gradients."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import optimized_transducer
from tests.compat.batches import BLANK, LENGTHS, batch, oracle_losses

# One symbol a frame and a last blank need more frames than symbols: without the last utterance.
RNA_LENGTHS = LENGTHS[:3]


def pack(logits: Tensor, lengths: list[tuple[int, int]]) -> Tensor:
    return torch.cat(
        [logits[n, :t, : u + 1].reshape(-1, logits.shape[-1]) for n, (t, u) in enumerate(lengths)]
    )


def arguments(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = batch()
    count = len(lengths)
    frames, symbols = torch.tensor(lengths, dtype=torch.int32).T.contiguous()
    return data.logits[:count], data.targets[:count].int(), frames, symbols


def total(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum()


@pytest.mark.parametrize("one_sym_per_frame", [False, True])
@pytest.mark.parametrize("from_log_softmax", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_all_paths(one_sym_per_frame: bool, from_log_softmax: bool, reduction: str) -> None:
    lengths = RNA_LENGTHS if one_sym_per_frame else LENGTHS
    logits, targets, frames, symbols = arguments(lengths)
    rnnt_type = "rna" if one_sym_per_frame else "regular"
    expected = total(oracle_losses(logits, targets, rnnt_type, lengths=lengths), reduction)
    leaf = batch().logits
    rows = pack(leaf[: len(lengths)], lengths)
    if from_log_softmax:
        rows = rows.log_softmax(-1)
    got = optimized_transducer.transducer_loss(
        rows, targets, frames, symbols, BLANK, from_log_softmax, one_sym_per_frame, reduction
    )
    assert got.shape == ()
    torch.testing.assert_close(got, expected)
    (gradient,) = torch.autograd.grad(got, leaf, torch.tensor(-1.5, dtype=torch.float64))
    source = batch().logits
    again = oracle_losses(source, targets, rnnt_type, lengths=lengths)
    (wanted,) = torch.autograd.grad(-1.5 * total(again, reduction), source)
    torch.testing.assert_close(gradient, wanted.nan_to_num(0.0))


def test_gradient_overwrites_logits() -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    rows = pack(logits.detach(), LENGTHS).requires_grad_()
    before = rows.detach().clone()
    hidden = rows * 1.0  # a joiner's output: not a leaf
    loss = optimized_transducer.transducer_loss(hidden, targets, frames, symbols, BLANK, False)
    loss.backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.detach(), before)
    torch.testing.assert_close(hidden.detach(), rows.grad)


def test_log_probs_and_inference_do_not_change_their_input() -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    rows = pack(logits.detach(), LENGTHS).log_softmax(-1)
    before = rows.clone()
    optimized_transducer.transducer_loss(rows, targets, frames, symbols, BLANK, False)
    torch.testing.assert_close(rows, before, rtol=0, atol=0)
    rows.requires_grad_()
    optimized_transducer.transducer_loss(rows, targets, frames, symbols, BLANK, True).backward()
    torch.testing.assert_close(rows.detach(), before, rtol=0, atol=0)


def test_module_has_the_functions_defaults() -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    rows = pack(logits.detach(), LENGTHS)
    module = optimized_transducer.TransducerLoss(blank=BLANK)
    expected = optimized_transducer.transducer_loss(rows, targets, frames, symbols, BLANK, False)
    torch.testing.assert_close(module(rows, targets, frames, symbols, False), expected)
    by_sum = optimized_transducer.TransducerLoss(BLANK, "sum")(
        rows, targets, frames, symbols, False
    )
    torch.testing.assert_close(by_sum, expected * len(LENGTHS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "reduction is 'none'; it must be 'mean' or 'sum'"),
        ({"logits": torch.zeros(4, 4, 4, 6)}, "logits has 4 dimensions; it must be packed"),
        ({"blank": 6}, "blank"),
        ({"logits": torch.zeros(7, 6)}, "logits"),
        (
            {"logits": torch.zeros(6, 7, requires_grad=True).mT},
            r"logits is not contiguous.*call logits.contiguous\(\)",
        ),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    good = {
        "logits": pack(logits.detach(), LENGTHS),
        "targets": targets,
        "logit_lengths": frames,
        "target_lengths": symbols,
        "blank": BLANK,
        "from_log_softmax": False,
    }
    with pytest.raises(ValueError, match=message):
        optimized_transducer.transducer_loss(**{**good, **change})


@pytest.mark.parametrize("flags", [("False",), (False, "no")])
def test_what_is_neither_true_nor_false(flags: tuple) -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    given = (pack(logits.detach(), LENGTHS), targets, frames, symbols, BLANK)
    name = ("from_log_softmax", "one_sym_per_frame")[len(flags) - 1]
    for with_gradient in (False, True):
        given[0].requires_grad_(with_gradient)
        with pytest.raises(TypeError, match=f"^{name} is '.*', needs True or False"):
            optimized_transducer.transducer_loss(*given, *flags)


def test_targets_may_be_wider_than_the_longest() -> None:
    logits, targets, frames, symbols = arguments(LENGTHS)
    rest = (frames, symbols, BLANK, False)
    rows, wide = pack(logits.detach(), LENGTHS), torch.nn.functional.pad(targets, (0, 2))
    expected = optimized_transducer.transducer_loss(rows, targets, *rest)
    assert torch.equal(optimized_transducer.transducer_loss(rows, wide, *rest), expected)


def test_against_the_original() -> None:
    peer = pytest.importorskip("optimized_transducer")
    generator = torch.Generator().manual_seed(3)
    lengths = [(12, 7), (9, 8), (10, 1)]
    frames, symbols = torch.tensor(lengths, dtype=torch.int32).T.contiguous()
    targets = torch.randint(1, 20, (3, 8), generator=generator, dtype=torch.int32)
    rows = torch.randn(sum(t * (u + 1) for t, u in lengths), 20, generator=generator)
    for one_sym_per_frame in (False, True):
        for from_log_softmax in (False, True):
            values, grads = [], []
            for module in (peer, optimized_transducer):
                leaf = rows.clone().requires_grad_()
                inputs = leaf.log_softmax(-1) if from_log_softmax else leaf * 1.0
                loss = module.transducer_loss(
                    inputs, targets, frames, symbols, 0, from_log_softmax, one_sym_per_frame
                )
                (2.5 * loss).backward()
                values.append(loss.detach().reshape(()))
                grads.append(leaf.grad)
            torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)
