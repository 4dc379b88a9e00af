"""Several models of the same symbols as one, whose logits are the mean of theirs; and its run.

The softmax of a mean of logits is the normalised geometric mean of the distributions (a product of
experts, Hinton 2002). A joiner is linear before and after its activation, so that the mean of K
joiners is one joiner of their total width:

    1/K sum_k (W_k act(A_k x_k + B_k y_k + c_k) + b_k) = W act(A x + B y + c) + b
    x, y, c    outputs of the encoders, those of the predictors, and biases, one after the other
    A, B       block-diagonal
    W, b       [W_1 ... W_K] / K, and the mean of b_k

Predictors are joined in the same way. So whatever takes a model takes an ensemble: the searches
with their kernels, and exports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.licences.chain import Origin, add_origins, merged
from pruned_rnnt.model.build_model import UninitialisedParameters, build_model
from pruned_rnnt.model.ensemble_encoder import EnsembleConfig, EnsembleEncoder
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import LstmPredictor, Predictor, StatelessPredictor
from pruned_rnnt.model.speech_model import SpeechModel, TransducerModel
from pruned_rnnt.pretrained.found_model import NoModelError, find_model
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.run_files import read_p99_duration, save_p99_duration
from pruned_rnnt.train.experiment import CardConfig, ExperimentConfig, FinetuneConfig
from pruned_rnnt.train.run import LoadedModel, check_is_new, load_model, run_config, save_run
from pruned_rnnt.train.run_chain import chain_of_run, with_itself
from pruned_rnnt.train.tasks.split_errors import SplitErrors, first_split, measure_errors

# Of an LSTM: the rows of its weights are input, forget and output gates and the new values.
_GATES = 4
# Utterances in which each model is measured.
_MEASURED = 300


@torch.no_grad()
def ensemble(models: Sequence[SpeechModel], names: Sequence[str]) -> SpeechModel:
    """The model whose logits are the mean of those of `models`, on the CPU in evaluation mode.

    It has a CTC head if all of them have one.

    Args:
        models: two or more, on the CPU, of one kind of loss, with the same symbols, features and
            frame rate, and predictors of one kind; the encoders may differ.
        names: of each, for the error message.

    Raises:
        ValueError: there are too few models, or they differ in what they must share.
    """
    if len(models) < 2:
        raise ValueError(f"an ensemble needs at least 2 models, got {len(models)}")
    shared = [_shared_settings(model) for model in models]
    for name, settings in zip(names[1:], shared[1:], strict=True):
        for key, value in settings.items():
            if value != shared[0].get(key):
                raise ValueError(
                    f"{name} has {key}={value}, and {names[0]} has {shared[0].get(key)}: models of "
                    "an ensemble need the same value"
                )
    with UninitialisedParameters():
        joined = build_model(*_configuration(models))
    assert isinstance(joined.encoder, EnsembleEncoder)
    for member, model in zip(joined.encoder.members, models, strict=True):
        member.load_state_dict(model.encoder.state_dict())
    if joined.ctc_head is not None:
        _join_outputs(joined.ctc_head, [model.ctc_head for model in models])
    if isinstance(joined, TransducerModel):
        _join_transducers(joined, [m for m in models if isinstance(m, TransducerModel)])
    return joined.eval()


def _shared_settings(model: SpeechModel) -> dict[str, Any]:
    """What the models of an ensemble must have in common."""
    config, loss, encoder = model.config, model.loss_config, model.encoder
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "model.encoder.features": config.encoder.features,
        "model.encoder.num_mel_bins": config.encoder.num_mel_bins,
        "subsampling_factor": encoder.subsampling_factor,
    }
    if not isinstance(model, TransducerModel):
        return {"loss.kind": "ctc", **settings}
    settings["loss.kind"] = "pruned or full"
    for key in ("rnnt_type", "hat", "durations"):
        settings[f"loss.{key}"] = getattr(loss, key)
    settings["model.joiner_activation"] = config.joiner_activation
    for key in ("kind", "context_size", "layers"):
        settings[f"model.predictor.{key}"] = getattr(config.predictor, key, None)
    return settings


def _configuration(models: Sequence[SpeechModel]) -> tuple[ModelConfig, int, LossConfig]:
    first = models[0]
    encoder = EnsembleConfig(
        num_mel_bins=first.config.encoder.num_mel_bins,
        features=first.config.encoder.features,
        # As they are read from a file, which has lists instead of tuples.
        members=tuple(json.loads(json.dumps(asdict(model.config.encoder))) for model in models),
    )
    predictor_dim = sum(model.config.predictor.dim for model in models)
    config = replace(
        first.config,
        encoder=encoder,
        predictor=replace(first.config.predictor, dim=predictor_dim),
        joiner_dim=sum(model.config.joiner_dim for model in models),
    )
    is_transducer = isinstance(first, TransducerModel)
    has_head = all(model.ctc_head is not None for model in models)
    loss = replace(
        first.loss_config,
        # The pruned loss has parameters of its own.
        kind="full" if is_transducer else "ctc",
        ctc_scale=first.loss_config.ctc_scale if has_head else 0.0,
        cr_ctc_scale=0.0,
        target_delay_ms=None,
    )
    return config, first.vocab_size, loss


def _join_transducers(joined: TransducerModel, models: Sequence[TransducerModel]) -> None:
    joiners = [model.joiner for model in models]
    for name in ("encoder_proj", "decoder_proj"):
        _join_inputs(getattr(joined.joiner, name), [getattr(joiner, name) for joiner in joiners])
    for name in ("output_linear", "duration_linear"):
        if getattr(joined.joiner, name) is not None:
            layers = [getattr(joiner, name) for joiner in joiners]
            _join_outputs(getattr(joined.joiner, name), layers)
    _join_predictors(joined.predictor, [model.predictor for model in models])


def _join_inputs(joined: nn.Linear, layers: Sequence[nn.Linear]) -> None:
    """Every layer takes its own part of the input to its own part of the output."""
    joined.weight.copy_(torch.block_diag(*(layer.weight for layer in layers)))
    joined.bias.copy_(torch.cat([layer.bias for layer in layers]))


def _join_outputs(joined: nn.Linear, layers: Sequence[Any]) -> None:
    """The mean of what the layers make of their own parts of the input."""
    joined.weight.copy_(torch.cat([layer.weight for layer in layers], dim=1) / len(layers))
    joined.bias.copy_(torch.stack([layer.bias for layer in layers]).mean(dim=0))


def _join_predictors(joined: Predictor, predictors: Sequence[Any]) -> None:
    assert isinstance(joined, StatelessPredictor | LstmPredictor)
    embeddings = [predictor.embedding.weight for predictor in predictors]
    joined.embedding.weight.copy_(torch.cat(embeddings, dim=1))
    if isinstance(joined, LstmPredictor):
        for name, parameter in joined.lstm.named_parameters():
            parts = [predictor.lstm.get_parameter(name) for predictor in predictors]
            parameter.copy_(_joined_gates(parts))
    elif joined.convolution is not None:
        # Its groups do not mix the parts.
        weights = [predictor.convolution.weight for predictor in predictors]
        joined.convolution.weight.copy_(torch.cat(weights))


def _joined_gates(parts: Sequence[Tensor]) -> Tensor:
    """Weights (4 P, P) or biases (4 P,) of LSTM layers, as those of one layer of their total
    width."""
    gates = zip(*(part.chunk(_GATES) for part in parts), strict=True)
    join = torch.block_diag if parts[0].dim() == 2 else lambda *biases: torch.cat(biases)
    return torch.cat([join(*gate) for gate in gates])


class _Member(NamedTuple):
    config: ExperimentConfig
    loaded: LoadedModel
    origins: tuple[Origin, ...]
    p99_duration: float | None


def write_ensemble(
    paths: Sequence[Path],
    output: Path,
    settings: Sequence[str] = (),
    *,
    unfinished: Path | None = None,
) -> SpeechModel:
    """Write the run of the ensemble of other runs into the new folder `output`.

    Its data, features and other settings are those of the first run.

    Args:
        paths: folders of runs, or checkpoints in them; a run may be named several times.
        settings: `decode.key=value`, which choose the checkpoint of each folder.
        unfinished: the folder to write instead, whose files the caller moves to `output`.

    Raises:
        ValueError: `output` holds a run; there are fewer than two paths; or the models differ in
            their symbols, features, frame rate, kind of loss or predictor.
        NoModelError, ConfigError, CheckpointError: a path is not a run, or has no such checkpoint.
    """
    check_is_new(output)
    members = [_read(path, settings) for path in paths]
    first, names = members[0], [str(path) for path in paths]
    for name, member in zip(names[1:], members[1:], strict=True):
        if member.loaded.tokenizer.symbols != first.loaded.tokenizer.symbols:
            raise ValueError(
                f"the symbols of {name} differ from those of {names[0]}: prepare the data of one "
                "with `pruned-rnnt prepare ... --tokenizer-from` the other run, and train it again"
            )
    model = ensemble([member.loaded.model for member in members], names)
    config = first.config
    same_card = all(member.config.card == config.card for member in members)
    config = replace(
        config,
        model=model.config,
        loss=model.loss_config,
        finetune=FinetuneConfig(),
        # With train.init, which tells that the symbols of the data may be others than the model's.
        train=replace(config.train, folder=str(output), compile_encoder=False),
        decode=replace(config.decode, checkpoint="last"),
        card=config.card if same_card else CardConfig(),
    )
    folder = unfinished or output
    save_run(model, first.loaded.tokenizer, config, folder)
    add_origins(folder, merged(*(member.origins for member in members)))
    durations = [member.p99_duration for member in members if member.p99_duration is not None]
    if durations:
        save_p99_duration(folder, min(durations))
    return model


def measured_data(runs: Sequence[Path], settings: Sequence[str] = ()) -> DataConfig | None:
    """The data of the first of these runs, or checkpoints, whose validation set is there."""
    for run in runs:
        data = run_config(find_model(run).path, settings).data
        if first_split(data.path, data.valid):
            return data
    return None


def measure_ensemble(
    paths: Sequence[Path], output: Path, data: DataConfig, settings: Sequence[str] = ()
) -> list[SplitErrors]:
    """Errors of each run, and last of their ensemble, on a sample of a validation set.

    Models whose symbols come at different times make far more errors together than apart.

    Args:
        paths, output, settings: as for `write_ensemble`, which has written the run `output`.
        data: whose validation set is there.
    """
    split = first_split(data.path, data.valid)
    errors = []
    for path, own in (*((path, settings) for path in paths), (output, ())):
        found = find_model(path)
        config = run_config(found.path, [*own, *found.settings])
        loaded = load_model(config)
        model, config = loaded.model, replace(config, data=data)
        errors.append(
            measure_errors(model, loaded.tokenizer, config, split, ranks=Ranks(), sample=_MEASURED)
        )
    return errors


def _read(path: Path, settings: Sequence[str]) -> _Member:
    found = find_model(path)
    if found.kind != "run":
        advice = (
            "name the run that it was exported from"
            if found.kind in ("file", "onnx")
            else "`pruned-rnnt import` makes one of it"
        )
        raise NoModelError(f"{path} is no run: {advice}")
    config = run_config(found.path, [*settings, *found.settings])
    # Only here: the new run has the device of its first member.
    loaded = load_model(replace(config, train=replace(config.train, device="cpu")))
    name = found.path.resolve().name
    return _Member(
        config,
        loaded,
        with_itself(chain_of_run(config), name, loaded.model),
        read_p99_duration(found.path),
    )
