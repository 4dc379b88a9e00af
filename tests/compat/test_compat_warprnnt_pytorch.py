"""compat.warprnnt_pytorch: a published value, shapes of results, and ESPnet's calls of losses."""

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.compat import k2, warprnnt_pytorch
from pruned_rnnt.compat.warprnnt_pytorch import RNNTLoss
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, assert_same_gradients, batch, oracle_losses

# From the test of warp-transducer's torch binding.
ACTS = torch.tensor(
    [
        [
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
        ]
    ]
)
LABELS = torch.tensor([[1, 2]], dtype=torch.int32)
TWO = torch.tensor([2], dtype=torch.int32)


def test_published_value() -> None:
    loss = RNNTLoss()(ACTS, LABELS, TWO, TWO)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(4.495666, rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", None])
def test_shapes_and_values_of_the_reductions(reduction: str | None) -> None:
    data = batch()
    got = warprnnt_pytorch.rnnt_loss(data.logits, data.targets, FRAMES, SYMBOLS, BLANK, reduction)
    costs = oracle_losses(data.logits, data.targets)
    expected = {"mean": costs.mean()[None], "sum": costs.sum()[None]}.get(reduction, costs)
    assert got.shape == ((1,) if reduction in ("mean", "sum") else (4,))
    torch.testing.assert_close(got, expected)
    module = RNNTLoss(blank=BLANK, reduction=reduction)
    torch.testing.assert_close(module(data.logits, data.targets, FRAMES, SYMBOLS), got)
    got, expected = (torch.autograd.grad(x.sum(), data.logits)[0] for x in (got, expected))
    torch.testing.assert_close(got, expected.nan_to_num(0.0))


def test_gradients_of_logits() -> None:
    data = batch()
    got = RNNTLoss(BLANK, "none")(data.logits, data.targets, FRAMES, SYMBOLS)
    assert_same_gradients(got, oracle_losses(data.logits, data.targets), [data.logits])


def test_fastemit_goes_through_the_softmax_and_leaves_the_loss() -> None:
    """As log_softmax followed by the labels' gradient times 1 + lambda."""
    data = batch()
    arguments = (data.targets, FRAMES, SYMBOLS)
    plain = RNNTLoss(BLANK, "sum")(data.logits, *arguments)
    fast = RNNTLoss(BLANK, "sum", fastemit_lambda=0.5)(data.logits, *arguments)
    torch.testing.assert_close(fast, plain)
    log_probs = data.logits.log_softmax(-1)
    leaf = log_probs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_of_log_probs(leaf, *arguments), leaf)
    scale = torch.full((gradient.shape[-1],), 1.5, dtype=gradient.dtype)
    scale[BLANK] = 1.0
    (expected,) = torch.autograd.grad(log_probs, data.logits, gradient * scale)
    torch.testing.assert_close(torch.autograd.grad(fast.sum(), data.logits)[0], expected)


def _of_log_probs(leaf: Tensor, targets: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
    from pruned_rnnt import rnnt_loss

    return rnnt_loss(
        leaf, targets, frames, symbols, blank=BLANK, from_log_probs=True, reduction="sum"
    )


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match=r"reduction is 0\.01; it must be 'mean', 'sum' or 'none'"):
        RNNTLoss(0, 0.01)(ACTS, LABELS, TWO, TWO)


class Transducer(nn.Module):
    """Both calls of a loss in ESPnet's asr_transducer model."""

    def __init__(self, use_k2: bool, size: int = 15) -> None:
        super().__init__()
        self.use_k2 = use_k2
        self.embedding = nn.Embedding(size, 10, padding_idx=0)
        self.lin_enc, self.lin_dec = nn.Linear(12, 16), nn.Linear(10, 16)
        self.lin_out = nn.Linear(16, size)
        self.am_proj, self.lm_proj = nn.Linear(12, size), nn.Linear(10, size)
        self.criterion = RNNTLoss(reduction="mean", fastemit_lambda=0.1)

    def forward(self, encoder_out: Tensor, t_len: Tensor, labels: Tensor) -> Tensor:
        """labels (B, L), padded with -1."""
        u_len = (labels != -1).sum(1).int()
        target = labels.masked_fill(labels == -1, 0).int()
        decoder_out = self.embedding(nn.functional.pad(target, (1, 0)).long())
        if self.use_k2:
            return self.pruned(encoder_out, decoder_out, labels, t_len, u_len)
        joint = self.lin_enc(encoder_out)[:, :, None] + self.lin_dec(decoder_out)[:, None]
        with torch.amp.autocast("cpu", enabled=False):
            return self.criterion(self.lin_out(joint.tanh()).float(), target, t_len, u_len)

    def pruned(
        self, encoder_out: Tensor, decoder_out: Tensor, labels: Tensor, t_len: Tensor, u_len: Tensor
    ) -> Tensor:
        target = k2.RaggedTensor([row[row != -1].tolist() for row in labels]).to(t_len.device)
        padded = target.pad(mode="constant", padding_value=0).to(torch.int64)
        boundary = torch.zeros((labels.size(0), 4), dtype=torch.int64)
        boundary[:, 2], boundary[:, 3] = u_len, t_len
        simple, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
            self.lm_proj(decoder_out), self.am_proj(encoder_out), padded, 0,
            lm_only_scale=0.0, am_only_scale=0.0, boundary=boundary, rnnt_type="regular",
            reduction="mean", return_grad=True,
        )  # fmt: skip
        ranges = k2.get_rnnt_prune_ranges(px_grad, py_grad, boundary, 3)
        am, lm = k2.do_rnnt_pruning(self.lin_enc(encoder_out), self.lin_dec(decoder_out), ranges)
        pruned = k2.rnnt_loss_pruned(
            self.lin_out((am + lm).tanh()), padded, ranges, 0, boundary,
            rnnt_type="regular", reduction="mean",
        )  # fmt: skip
        return 0.5 * simple + pruned


@pytest.mark.usefixtures("no_k2")
@pytest.mark.parametrize("use_k2", [False, True])
def test_both_losses_of_espnet_train(use_k2: bool) -> None:
    torch.manual_seed(0)
    model = Transducer(use_k2)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    encoder_out, t_len = torch.randn(3, 12, 12), torch.tensor([12, 7, 10], dtype=torch.int32)
    labels = torch.tensor([[3, 5, 2, 9], [7, 1, -1, -1], [4, 4, 8, -1]])
    history = []
    for _ in range(20):
        loss = model(encoder_out, t_len, labels)
        history.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert history[-1] < 0.5 * history[0]
