"""transformers_loss.use(model, pruned=...): the pruned loss in transformers' own models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt import Joiner, PrunedTransducerLoss
from pruned_rnnt.compat import transformers_loss
from pruned_rnnt.compat.transformers_loss import PrunedOptions

transformers = pytest.importorskip("transformers", exc_type=ImportError)
try:
    from transformers import ParakeetForRNNT, ParakeetForTDT, ParakeetRNNTConfig, ParakeetTDTConfig
except ImportError:
    pytest.skip("needs a transformers that has ParakeetForRNNT", allow_module_level=True)

BLANK, PADDING, WIDTH = 8, 2, 12
DURATIONS = (0, 1, 2, 3, 4)
LENGTHS, FRAMES = torch.tensor([3, 1]), torch.tensor([10, 8])
LABELS = torch.tensor([[1, 3, 4], [5, BLANK, BLANK]])


def model_of(durations: bool) -> Any:
    torch.manual_seed(0)
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
        # The same passes in comparisons.
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
        **dict.fromkeys(("layerdrop", "dropout_positions"), 0.0),
    }
    options = {
        "vocab_size": BLANK + 1,
        "blank_token_id": BLANK,
        "pad_token_id": PADDING,
        "decoder_hidden_size": WIDTH,
        "num_decoder_layers": 1,
        "encoder_config": encoder,
    }
    if durations:
        return ParakeetForTDT(ParakeetTDTConfig(durations=list(DURATIONS), **options)).train()
    return ParakeetForRNNT(ParakeetRNNTConfig(**options)).train()


def batch(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 60:] = 0
    features = torch.randn(2, 80, 16, generator=torch.Generator().manual_seed(1))
    # RNN-T and TDT models count labels by different ids of padding.
    is_tdt = isinstance(model, ParakeetForTDT)
    return {
        "input_features": features.to(dtype),
        "attention_mask": mask,
        "labels": LABELS.where(LABELS != BLANK, PADDING if is_tdt else BLANK),
        "decoder_input_ids": torch.cat([torch.full((2, 1), BLANK), LABELS], 1),
    }


def plain_loss(model: Any, **options: Any) -> PrunedTransducerLoss:
    """A PrunedTransducerLoss with the parameters of the model's joint and of its simple loss."""
    head, vocab = model.joint.head, model.config.vocab_size
    joiner = Joiner(WIDTH, WIDTH, WIDTH, vocab, "relu", duration_count=head.out_features - vocab)
    if head.out_features > vocab:
        options["durations"] = DURATIONS
    loss = PrunedTransducerLoss(
        joiner, WIDTH, WIDTH, vocab, blank=BLANK, reduction="none", **options
    ).double()
    for layer in (joiner.encoder_proj, joiner.decoder_proj):
        torch.nn.init.eye_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    with torch.no_grad():
        for name in ("weight", "bias"):
            parameter = getattr(head, name)
            getattr(joiner.output_linear, name).copy_(parameter[:vocab])
            if joiner.duration_linear is not None:
                getattr(joiner.duration_linear, name).copy_(parameter[vocab:])
    loss.load_state_dict(
        {name: x for name, x in model.joint.pruned_loss.state_dict().items() if "extra" not in name},
        strict=False,
    )
    return loss


@pytest.mark.parametrize("durations", [False, True], ids=["rnnt", "tdt"])
def test_losses_and_gradients_are_those_of_the_module(durations: bool) -> None:
    model = model_of(durations).double()
    given = batch(model, torch.float64)
    own = {"s_range": 3, "lm_only_scale": 0.1, "am_only_scale": 0.2, "simple_scale": 0.3}
    options: dict[str, Any] = {"fastemit_lambda": 0.1, "delay_penalty": 0.05}
    if durations:
        options["sigma"] = 0.05
    pruned = PrunedOptions(warm_up_steps=4, **own)  # type: ignore[arg-type]
    transformers_loss.use(model, pruned=pruned, reduction="sum", **options)
    for step in (0, 1, 7):
        model.joint.pruned_loss.calls = step
        model.zero_grad()
        output = model(**given)
        output.loss.backward()

        inputs = [
            x.detach().requires_grad_() for x in (output.logits.am, output.logits.lm)
        ]
        plain = plain_loss(model, warm_up_steps=4, **own, **options)
        expected = plain(*inputs, LABELS, FRAMES, LENGTHS, step=step).loss.sum()
        expected.backward()
        torch.testing.assert_close(output.loss, expected, rtol=1e-11, atol=0)
        layer = plain.joiner.output_linear
        head = [layer.weight.grad, layer.bias.grad]
        if durations:
            layer = plain.joiner.duration_linear
            head = [torch.cat(x) for x in zip(head, (layer.weight.grad, layer.bias.grad))]
        found = {name: x.grad for name, x in model.named_parameters()}
        of_simple = {f"joint.pruned_loss.{n}": x.grad for n, x in plain.named_parameters()}
        wanted = {"joint.head.weight": head[0], "joint.head.bias": head[1]} | {
            name: x for name, x in of_simple.items() if name in found
        }
        assert len(wanted) == (10 if durations else 6)
        for name, gradient in wanted.items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            found["encoder_projector.bias"], inputs[0].grad.sum((0, 1)), rtol=1e-9, atol=1e-12
        )
