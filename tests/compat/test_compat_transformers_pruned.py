"""transformers_loss.use(model, pruned=...): the pruned loss in transformers' own models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pruned_rnnt import Joiner, PrunedTransducerLoss
from pruned_rnnt.compat import transformers_loss
from pruned_rnnt.compat.pruned_joint import PrunedOptions
from tests.bfloat16_lstm import needs_bfloat16_lstm
from tests.compat.transformers_models import BLANK, LABELS, WIDTH, batch, tiny_parakeet

transformers = pytest.importorskip("transformers", exc_type=ImportError)
try:
    from transformers import ParakeetForRNNT, ParakeetForTDT, ParakeetRNNTConfig, ParakeetTDTConfig
except ImportError:
    pytest.skip("needs a transformers that has ParakeetForRNNT", allow_module_level=True)

DURATIONS = (0, 1, 2, 3, 4)
LENGTHS, FRAMES = torch.tensor([3, 1]), torch.tensor([10, 8])


def model_of(durations: bool) -> Any:
    rnnt, tdt = (ParakeetForRNNT, ParakeetRNNTConfig), (ParakeetForTDT, ParakeetTDTConfig)
    # The same passes in comparisons.
    rates = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "dropout_positions")
    return tiny_parakeet(*(tdt if durations else rnnt), **dict.fromkeys(rates, 0.0)).train()


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
    loss.load_state_dict(dict(model.joint.pruned_loss.named_parameters()), strict=False)
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

        inputs = [x.detach().requires_grad_() for x in (output.logits.am, output.logits.lm)]
        plain = plain_loss(model, warm_up_steps=4, **own, **options)
        expected = plain(*inputs, LABELS, FRAMES, LENGTHS, step=step).loss.sum()
        expected.backward()
        torch.testing.assert_close(output.loss, expected, rtol=1e-11, atol=0)
        layer = plain.joiner.output_linear
        head = [layer.weight.grad, layer.bias.grad]
        if durations:
            layer = plain.joiner.duration_linear
            of_durations = layer.weight.grad, layer.bias.grad
            head = [torch.cat(pair) for pair in zip(head, of_durations, strict=True)]
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


@pytest.mark.parametrize("durations", [False, True], ids=["rnnt", "tdt"])
def test_a_band_as_wide_as_the_text_gives_the_exact_loss(durations: bool) -> None:
    model = model_of(durations).double()
    given = batch(model, torch.float64)
    keep_statistics(model)
    transformers_loss.use(model, fused=True)
    exact = gradients_of(model, given)
    # The pruned loss alone.
    pruned = PrunedOptions(s_range=4, simple_scale=0.0, warm_up_steps=0)
    transformers_loss.use(model, pruned=pruned)
    found = gradients_of(model, given)
    for name, expected in exact.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-11)
    narrow = PrunedOptions(s_range=2, simple_scale=0.0, warm_up_steps=0)
    transformers_loss.use(model, pruned=narrow)
    assert gradients_of(model, given)["loss"] > exact["loss"]


def keep_statistics(model: Any) -> None:
    """Of batch norms, which would change between two passes."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.momentum = 0.0


def gradients_of(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("durations", [False, True], ids=["rnnt", "tdt"])
def test_a_model_learns_a_batch(durations: bool) -> None:
    model = model_of(durations)
    given = batch(model)
    pruned = PrunedOptions(s_range=3, warm_up_steps=10)
    transformers_loss.use(model, pruned=pruned, reduction="mean_batch")
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    simple = model.joint.pruned_loss.simple_am_proj.weight.detach().clone()
    before = exact_loss(model, given)
    for _ in range(160):
        optimiser.zero_grad()
        model(**given).loss.backward()
        optimiser.step()
    assert before > 5
    assert exact_loss(model, given) < 0.5
    assert not torch.equal(model.joint.pruned_loss.simple_am_proj.weight, simple)
    assert model.joint.pruned_loss.calls == 160


def exact_loss(model: Any, given: dict[str, Tensor]) -> float:
    """That of evaluation, whose logits are stored."""
    model.eval()
    with torch.no_grad():
        output = model(**given)
    assert isinstance(output.logits, Tensor)
    model.train()
    return float(output.loss)


def test_evaluation_has_the_exact_loss() -> None:
    model = model_of(durations=True)
    transformers_loss.use(model)
    expected = exact_loss(model, batch(model))
    transformers_loss.use(model, pruned=PrunedOptions())
    assert exact_loss(model, batch(model)) == expected
    assert model.joint.pruned_loss.calls == 0


def test_logits_are_still_to_be_had() -> None:
    model = model_of(durations=False)
    transformers_loss.use(model, pruned=PrunedOptions())
    given = batch(model)
    keep_statistics(model)
    logits = model(**given).logits
    with pytest.raises(TypeError, match=r"which pruned=\.\.\. does not store in training"):
        logits[0]
    transformers_loss.use(model)
    torch.testing.assert_close(logits.stored(), model(**given).logits)


def test_the_warm_up_counts_steps_of_several_calls() -> None:
    model = model_of(durations=False)
    pruned = PrunedOptions(warm_up_steps=2, calls_per_step=2, simple_scale=0.0)
    transformers_loss.use(model, pruned=pruned)
    used = []
    loss = model.joint.pruned_loss
    loss.register_forward_hook(lambda *args: used.append(args[-1].simple_scale))
    with torch.no_grad():
        model(**batch(model))
    for _ in range(5):
        model(**batch(model)).loss.backward()
    assert used == [1.0, 1.0, 1.0, 0.5, 0.5, 0.0]


def test_layers_are_of_the_models_dtype_and_go_with_a_copy() -> None:
    model = model_of(durations=True).to(torch.bfloat16)
    transformers_loss.use(model, pruned=PrunedOptions())
    new = {n: x for n, x in model.named_parameters() if n.startswith("joint.pruned_loss.")}
    assert len(new) == 8
    assert {x.dtype for x in new.values()} == {torch.bfloat16}
    copied = copy.deepcopy(model)
    loss = copied(**batch(model, torch.bfloat16)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert copied.joint.pruned_loss.simple_am_proj.weight.grad.abs().max() > 0
    assert all(x.grad is None for x in model.parameters())


class Wrapper(torch.nn.Module):
    """As PEFT wraps what modules_to_save names."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["_modules"]
        return own[name] if name in own else getattr(own["inner"], name)


def test_a_wrapper_of_the_layers_takes_part() -> None:
    model = model_of(durations=False)
    transformers_loss.use(model, pruned=PrunedOptions())
    keep_statistics(model)
    expected = model(**batch(model)).loss
    inner = model.joint.pruned_loss
    inner.calls = 0
    model.joint.pruned_loss = Wrapper(inner)
    assert torch.equal(model(**batch(model)).loss, expected)
    assert inner.calls == 1


@needs_bfloat16_lstm
def test_under_autocast() -> None:
    model = model_of(durations=True)
    transformers_loss.use(model, pruned=PrunedOptions())
    given = batch(model)
    keep_statistics(model)
    expected = model(**given).loss
    model.joint.pruned_loss.calls = 0
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**given).loss
    found.backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.slow
def test_torch_compile_compiles_for_the_first_steps_alone() -> None:
    model = model_of(durations=False)
    transformers_loss.use(model, pruned=PrunedOptions(warm_up_steps=8))
    given = batch(model)
    graphs: list[int] = []
    losses: list[float] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(losses))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(5):
        losses.append(float(compiled(**given).loss.detach()))
    torch.compiler.reset()
    assert 0 in graphs
    assert max(graphs) <= 1  # Once more for a number that changes.
    assert len(set(losses)) == 5
    assert model.joint.pruned_loss.calls == 5


def test_saved_models(tmp_path: Path) -> None:
    """A folder saved in training has the layers of the simple loss, which transformers leaves out
    with a warning; after use(model) it has the model's own."""
    model = model_of(durations=True)
    transformers_loss.use(model, pruned=PrunedOptions())
    given = batch(model)
    model(**given).loss.backward()
    model.save_pretrained(tmp_path / "training")
    again, report = ParakeetForTDT.from_pretrained(tmp_path / "training", output_loading_info=True)
    assert {name.split(".")[1] for name in report["unexpected_keys"]} == {"pruned_loss"}
    assert not report["missing_keys"]
    transformers_loss.use(again, pruned=PrunedOptions())
    assert exact_loss(again, given) == exact_loss(model, given)

    again.load_state_dict(load_file(tmp_path / "training" / "model.safetensors"))
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert again.joint.pruned_loss.calls == 1

    transformers_loss.use(model)
    model.save_pretrained(tmp_path / "plain")
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(saved) == set(model_of(durations=True).state_dict())
    assert type(model.joint).__module__.startswith("transformers.")


def test_what_the_pruned_loss_does_not_have_is_refused() -> None:
    model = model_of(durations=False)
    kind = type(model.joint)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pruned": True}, TypeError, r"pruned is True; it must be a PrunedOptions"),
        ({"pruned": PrunedOptions(s_range=0)}, ValueError, "s_range is 0"),
        ({"pruned": PrunedOptions(calls_per_step=0)}, ValueError, "calls_per_step is 0"),
        ({"pruned": PrunedOptions(), "clamp": 0.1}, ValueError, "clamp is 0.1, which the pruned"),
        ({"pruned": PrunedOptions(), "sigma": 0.1}, ValueError, "'sigma' is not an option"),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            transformers_loss.use(model, **options)
        assert type(model.joint) is kind
    joint, model.joint = model.joint, torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"pruned=\.\.\. needs model\.joint to be one of"):
        transformers_loss.use(model, pruned=PrunedOptions())
    model.joint = joint
    transformers_loss.use(model, pruned=PrunedOptions())
    model.joint.head.register_forward_hook(lambda module, inputs, output: 0 * output)
    with pytest.raises(ValueError, match=r"joint\.head has forward hooks, so that the pruned loss"):
        model(**batch(model))
