"""The body of a recipe's transducer loss, with k2's calls unchanged."""

import torch
from torch import Tensor, nn

from pruned_rnnt.compat import k2


class Joiner(nn.Module):
    def __init__(self, encoder_dim: int, decoder_dim: int, joiner_dim: int, size: int) -> None:
        super().__init__()
        self.encoder_proj = nn.Linear(encoder_dim, joiner_dim)
        self.decoder_proj = nn.Linear(decoder_dim, joiner_dim)
        self.output_linear = nn.Linear(joiner_dim, size)

    def forward(self, am: Tensor, lm: Tensor, project_input: bool = True) -> Tensor:
        if project_input:
            am, lm = self.encoder_proj(am), self.decoder_proj(lm)
        return self.output_linear((am + lm).tanh())


class Recipe(nn.Module):
    """The layers between encoder and predictor, and the two losses."""

    def __init__(self, size: int = 30) -> None:
        super().__init__()
        self.blank_id = 0
        self.embedding = nn.Embedding(size, 12)
        self.simple_am_proj = nn.Linear(16, size)
        self.simple_lm_proj = nn.Linear(12, size)
        self.joiner = Joiner(16, 12, 20, size)

    def forward_transducer(
        self,
        encoder_out: Tensor,
        encoder_out_lens: Tensor,
        y_padded: Tensor,
        y_lens: Tensor,
        prune_range: int,
        lm_scale: float,
        am_scale: float,
    ) -> tuple[Tensor, Tensor]:
        sos_y = nn.functional.pad(y_padded, (1, 0), value=self.blank_id)
        decoder_out = self.embedding(sos_y)
        boundary = torch.zeros((encoder_out.size(0), 4), dtype=torch.int64)
        boundary[:, 2] = y_lens
        boundary[:, 3] = encoder_out_lens
        lm = self.simple_lm_proj(decoder_out)
        am = self.simple_am_proj(encoder_out)
        with torch.amp.autocast("cpu", enabled=False):
            simple_loss, (px_grad, py_grad) = k2.rnnt_loss_smoothed(
                lm=lm.float(),
                am=am.float(),
                symbols=y_padded,
                termination_symbol=self.blank_id,
                lm_only_scale=lm_scale,
                am_only_scale=am_scale,
                boundary=boundary,
                reduction="sum",
                return_grad=True,
            )
        ranges = k2.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=boundary, s_range=prune_range
        )
        am_pruned, lm_pruned = k2.do_rnnt_pruning(
            am=self.joiner.encoder_proj(encoder_out),
            lm=self.joiner.decoder_proj(decoder_out),
            ranges=ranges,
        )
        logits = self.joiner(am_pruned, lm_pruned, project_input=False)
        with torch.amp.autocast("cpu", enabled=False):
            pruned_loss = k2.rnnt_loss_pruned(
                logits=logits.float(),
                symbols=y_padded,
                ranges=ranges,
                termination_symbol=self.blank_id,
                boundary=boundary,
                reduction="sum",
            )
        return simple_loss, pruned_loss


def example() -> tuple[Recipe, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    frames, symbols = torch.tensor([20, 15, 18]), torch.tensor([7, 9, 0])
    y_padded = torch.randint(1, 30, (3, 9))
    y_padded[torch.arange(9) >= symbols[:, None]] = 0
    return Recipe(), torch.randn(3, 20, 16), frames, y_padded, symbols


def test_both_losses_train_every_parameter() -> None:
    model, *inputs = example()
    for am_scale in (0.0, 0.1):
        model.zero_grad()
        simple, pruned = model.forward_transducer(*inputs, 4, 0.25, am_scale)
        assert simple.isfinite()
        assert pruned.isfinite()
        (0.5 * simple + pruned).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name


def test_the_pruned_loss_is_above_the_full_loss_and_reaches_it() -> None:
    model, *inputs = example()
    encoder_out, frames, y_padded, symbols = inputs
    boundary = torch.stack((torch.zeros(3), torch.zeros(3), symbols, frames), dim=1).long()
    decoder_out = model.embedding(nn.functional.pad(y_padded, (1, 0)))
    logits = model.joiner(encoder_out[:, :, None], decoder_out[:, None])
    full = k2.rnnt_loss(logits, y_padded, 0, boundary, reduction="sum")
    losses = [
        model.forward_transducer(*inputs, s_range, 0.0, 0.0)[1].item() for s_range in (2, 4, 6, 10)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > full.item() + 1e-3
    assert abs(losses[-1] - full.item()) < 1e-3


def test_a_few_steps_reduce_both_losses() -> None:
    model, *inputs = example()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    history = []
    for _ in range(15):
        simple, pruned = model.forward_transducer(*inputs, 4, 0.25, 0.0)
        history.append((simple.item(), pruned.item()))
        optimiser.zero_grad()
        (0.5 * simple + pruned).backward()
        optimiser.step()
    assert history[-1][0] < 0.8 * history[0][0]
    assert history[-1][1] < 0.8 * history[0][1]
