"""compat.transformers_loss: values, reductions, and how it replaces ParakeetForRNNT's loss."""

import sys
import types
from typing import Any

import pytest
import torch

from pruned_rnnt.compat import transformers_loss
from tests.compat.batches import BLANK, FRAMES, SYMBOLS, assert_same_gradients, batch, oracle_losses

LOSS_MODULE = "transformers.loss.loss_utils"


@pytest.fixture
def loss_utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new, importable replacement for transformers' table of loss functions."""
    module: Any = types.ModuleType(LOSS_MODULE)
    module.LOSS_MAPPING = {"ParakeetForRNNT": None, "ParakeetForTDT": "its own"}
    monkeypatch.setitem(sys.modules, LOSS_MODULE, module)
    return module


def call_arguments() -> dict[str, Any]:
    """The arguments that ParakeetForRNNT and the Trainer pass to the loss function."""
    example = batch()
    return {
        "logits": example.logits,
        "labels": example.targets,
        "logit_lengths": FRAMES,
        "label_lengths": SYMBOLS,
        "blank_token_id": BLANK,
        "num_items_in_batch": 7,
    }


class Model:
    """As transformers' models: loss_function is looked up when it is called, and can be set."""

    def __init__(self, loss_utils: Any = None, config: Any = None) -> None:
        self.config = config or types.SimpleNamespace()
        self.loss_utils = loss_utils
        self.own: Any = None

    @property
    def loss_function(self) -> Any:
        return self.own or self.loss_utils.LOSS_MAPPING["ParakeetForRNNT"]

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self.own = value


def test_values_and_gradients_against_all_paths() -> None:
    example = batch()
    got = transformers_loss.rnnt_loss(
        example.logits, example.targets, FRAMES, SYMBOLS, BLANK, reduction="none"
    )
    assert_same_gradients(got, oracle_losses(example.logits, example.targets), [example.logits])


def test_reductions() -> None:
    example = batch()
    each = oracle_losses(example.logits, example.targets)
    full = SYMBOLS > 0
    for reduction, rows, expected in (
        ("mean_volume", slice(None), each.sum() / SYMBOLS.sum()),
        ("mean_batch", slice(None), each.mean()),
        ("mean", full, (each[full] / SYMBOLS[full]).mean()),
        # transformers divides by the 0 symbols of the third utterance.
        ("mean", slice(None), (each / SYMBOLS.clamp_min(1)).mean()),
        ("mean_volume", ~full, each[~full].sum()),
        ("sum", slice(None), each.sum()),
    ):
        got = transformers_loss.rnnt_loss(
            example.logits[rows],
            example.targets[rows],
            FRAMES[rows],
            SYMBOLS[rows],
            BLANK,
            reduction,
        )
        torch.testing.assert_close(got, expected)


def test_register_changes_existing_models(loss_utils: Any) -> None:
    model = Model(loss_utils)
    transformers_loss.register(sigma=0.1)
    expected = oracle_losses(batch().logits, batch().targets)
    value = model.loss_function(**call_arguments())
    torch.testing.assert_close(value, expected.sum() / SYMBOLS.sum())
    tdt = loss_utils.LOSS_MAPPING["ParakeetForTDT"]
    assert (tdt.func, tdt.keywords) == (transformers_loss.parakeet_tdt_loss, {"sigma": 0.1})


def test_options_reach_the_loss(loss_utils: Any) -> None:
    transformers_loss.register(reduction="sum", clamp=0.05)
    arguments = call_arguments()
    value = Model(loss_utils).loss_function(**arguments)
    torch.testing.assert_close(value, oracle_losses(arguments["logits"], arguments["labels"]).sum())
    (gradient,) = torch.autograd.grad(value, arguments["logits"])
    assert gradient.abs().max() == 0.05
    with pytest.raises(ValueError, match="'clip' is not an option of the TDT loss"):
        transformers_loss.register(clip=1)


def test_use_changes_one_model(loss_utils: Any) -> None:
    one, other = Model(loss_utils), Model(loss_utils)
    transformers_loss.use(one, reduction="mean_batch")
    arguments = call_arguments()
    expected = oracle_losses(arguments["logits"], arguments["labels"]).mean()
    torch.testing.assert_close(one.loss_function(**arguments), expected)
    assert other.loss_function is None


def test_models_with_durations_get_the_tdt_loss() -> None:
    model = Model(config=types.SimpleNamespace(durations=[0, 1, 2]))
    transformers_loss.use(model, sigma=0.05)
    assert model.loss_function.func is transformers_loss.parakeet_tdt_loss
    with pytest.raises(ValueError, match="'sigma' is not an option of the RNN-T loss"):
        transformers_loss.use(Model(), sigma=0.05)


def test_durations_are_never_scored_as_rnnt() -> None:
    with pytest.raises(ValueError, match="duration_logits is given, which an RNN-T loss would"):
        transformers_loss.parakeet_rnnt_loss(token_logits=1, duration_logits=2, labels=3)
    arguments = call_arguments()
    logits = arguments.pop("logits")
    with pytest.raises(ValueError, match="without duration_logits, durations"):
        transformers_loss.parakeet_tdt_loss(token_logits=logits, **arguments)


def test_another_calling_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="without logit_lengths, label_lengths, blank_token_id"):
        transformers_loss.parakeet_rnnt_loss(logits=1, labels=2, encoder_outputs=3)


def test_wrong_arguments_are_named() -> None:
    arguments = call_arguments()
    for name in ("labels", "logits"):
        with pytest.raises(TypeError, match=f"{name} is a list; it must be a torch.Tensor"):
            transformers_loss.parakeet_rnnt_loss(**arguments | {name: [1]})
    logits = arguments.pop("logits")
    arguments |= {"token_logits": logits, "duration_logits": logits, "durations": None}
    with pytest.raises(ValueError, match="durations is None; it must be different integers"):
        transformers_loss.parakeet_tdt_loss(**arguments)


def test_labels_of_minus_100_are_padding() -> None:
    """The models count them in label_lengths, which may be right, too."""
    arguments = call_arguments()
    expected = transformers_loss.parakeet_rnnt_loss(**arguments)
    labels = arguments["labels"].clone()
    is_padding = torch.arange(labels.shape[1]) >= SYMBOLS[:, None]
    arguments["labels"] = labels.masked_fill(is_padding, -100)
    for lengths in (torch.full_like(SYMBOLS, labels.shape[1]), SYMBOLS):
        found = transformers_loss.parakeet_rnnt_loss(**arguments | {"label_lengths": lengths})
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    logits = arguments.pop("logits")
    arguments |= {"token_logits": logits, "duration_logits": logits[..., :2], "durations": [0, 1]}
    expected = transformers_loss.parakeet_tdt_loss(**arguments | {"label_lengths": SYMBOLS})
    found = transformers_loss.parakeet_tdt_loss(**arguments | {"label_lengths": 0 * SYMBOLS + 3})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_errors_have_the_names_of_the_models() -> None:
    arguments = call_arguments()
    arguments["labels"][1, 0] = -5
    with pytest.raises(ValueError, match=r"^labels\[1, 0\] of utterance 1 is -5; labels must"):
        transformers_loss.parakeet_rnnt_loss(**arguments)
    with pytest.raises(ValueError, match=r"^label_lengths has shape \(3,\)"):
        transformers_loss.parakeet_rnnt_loss(**arguments | {"label_lengths": SYMBOLS[:3]})


def test_use_needs_the_model_itself() -> None:
    for model in (None, torch.nn.Linear(2, 2), torch.nn.DataParallel(torch.nn.Linear(2, 2))):
        with pytest.raises(TypeError, match=rf"model is a {type(model).__name__}; it must be the"):
            transformers_loss.use(model)


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="reduction is 'max'; it must be one of"):
        transformers_loss.parakeet_rnnt_loss(**call_arguments(), reduction="max")


def test_without_a_fitting_transformers(loss_utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del loss_utils.LOSS_MAPPING["ParakeetForRNNT"]
    with pytest.raises(ImportError, match="has no ParakeetForRNNT loss to replace"):
        transformers_loss.register()
    monkeypatch.setitem(sys.modules, LOSS_MODULE, None)
    with pytest.raises(ImportError, match=r"needs transformers, .*pip install transformers"):
        transformers_loss.register()
