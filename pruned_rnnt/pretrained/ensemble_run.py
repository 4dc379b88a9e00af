"""The run of an ensemble: one model of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.data.input.training_durations import read_p99_duration, save_p99_duration
from pruned_rnnt.licences.chain import Origin, add_origins, merged
from pruned_rnnt.model.ensemble import ensemble
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.pretrained.found_model import NoModelError, find_model
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import CardConfig, ExperimentConfig, FinetuneConfig
from pruned_rnnt.train.run import LoadedModel, load_model, run_config
from pruned_rnnt.train.run_chain import chain_of_run, with_itself
from pruned_rnnt.train.tasks.split_errors import SplitErrors, first_split, measure_errors
from pruned_rnnt.train.untrained_run import check_is_new, save_run

# Utterances in which each model is measured.
_MEASURED = 300


class _Member(NamedTuple):
    config: ExperimentConfig
    loaded: LoadedModel
    origins: tuple[Origin, ...]
    p99_duration: float | None


def write_ensemble(
    paths: Sequence[Path], output: Path, settings: Sequence[str] = ()
) -> SpeechModel:
    """Write the run of the ensemble of other runs into the new folder `output`.

    Its data, features and other settings are those of the first run.

    Args:
        paths: folders of runs, or checkpoints in them; a run may be named several times.
        settings: `decode.key=value`, which choose the checkpoint of each folder.

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
    save_run(model, first.loaded.tokenizer, config, output)
    add_origins(output, merged(*(member.origins for member in members)))
    durations = [member.p99_duration for member in members if member.p99_duration is not None]
    if durations:
        save_p99_duration(output, min(durations))
    return model


def validation_split(run: Path) -> str:
    """The split on which a run is validated; empty if its data are not there."""
    data = run_config(run).data
    return first_split(data.path, data.valid)


def measure_ensemble(
    paths: Sequence[Path], output: Path, settings: Sequence[str] = ()
) -> list[SplitErrors]:
    """Errors of each run, and last of their ensemble, on a sample of its validation set.

    Models whose symbols come at different times make far more errors together than apart.

    Args:
        paths, output, settings: as for `write_ensemble`, which has written the run `output`; its
            `validation_split` is there.
    """
    data, split = run_config(output).data, validation_split(output)
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
        raise NoModelError(f"{path} is no run: `pruned-rnnt import` makes one of it")
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
