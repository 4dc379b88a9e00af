"""A run on disk: its configuration, checkpoints and model; runs that hold an untrained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.config.load import (
    ConfigError,
    differences,
    from_dict,
    load_config,
    to_dict,
    value_of,
)
from pruned_rnnt.config.written import as_override, to_yaml
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.encode import set_chunks
from pruned_rnnt.model.build_model import build_model, fitted_model
from pruned_rnnt.model.kernels import prebuilt
from pruned_rnnt.model.lora import add_adapters, merge_adapters
from pruned_rnnt.model.saved_file import NewerFileError, UnusableFileError
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.device import start_device
from pruned_rnnt.train.engine.average import SpanMean, mean_between, mean_of_states
from pruned_rnnt.train.engine.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from pruned_rnnt.train.engine.run_files import run_tokenizer
from pruned_rnnt.train.engine.train_config import AVERAGED_CHECKPOINTS, pick_device
from pruned_rnnt.train.experiment import ExperimentConfig

# What may change after training: sections, and single settings.
_SECTIONS_OF_USE, _KEYS_OF_USE = ("data.", "decode.", "card."), ("train.device", "train.folder")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with the parameters of a checkpoint, in evaluation mode, and its tokenizer.

    name: of the checkpoint, for file names; for an average, the newest one and their number.
    """

    model: SpeechModel
    tokenizer: Tokenizer
    step: int
    name: str


def run_config(folder: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The saved configuration of a run, changed by `section.key=value`.

    train.folder is the present folder, which may have been moved.

    Raises:
        ConfigError: the folder is no run of a recogniser, or an override is wrong or changes a
            setting of training, which has no effect on a trained model.
    """
    path = config_path(folder)
    if (task := value_of("task", path)) is not None:
        raise ConfigError(f"{folder} is a run of task {task!r}; this command is for recognisers")
    overrides = [as_override("train.folder", folder), *overrides]
    config = load_config(ExperimentConfig, path, overrides, is_run=True)
    check_overrides(folder, config, overrides)
    return config


def check_overrides(folder: Path, config: Any, overrides: Sequence[str]) -> None:
    """Raise ConfigError if overrides change settings of a run that have no effect after training.

    Args:
        config: of the run, with the overrides.
    """
    # Few overrides need the second reading, which every start of a command would wait for.
    if all(_is_of_use(item.partition("=")[0]) for item in overrides):
        return
    place = as_override("train.folder", folder)
    saved = load_config(type(config), config_path(folder), [place], is_run=True)
    changed = [
        line for line in differences(saved, config) if not _is_of_use(line.partition(":")[0])
    ]
    if changed:
        chunk = any(line.startswith("model.encoder.chunk_size:") for line in changed)
        advice = "; decode.chunk chooses the chunks of decoding" if chunk else ""
        raise ConfigError(
            f"{folder} was trained with other settings ({'; '.join(changed)}), which cannot be "
            f"changed after training: leave them out{advice}"
        )


def _is_of_use(key: str) -> bool:
    return key.startswith(_SECTIONS_OF_USE) or key in _KEYS_OF_USE


def config_path(folder: Path) -> Path:
    """The path of a run's configuration.

    Raises:
        ConfigError: the folder is no run.
    """
    path = RunFolder(folder).config
    if folder.is_file():
        raise ConfigError(
            f"{folder} is not a run: it is a file, and a run is the folder of a training, with its "
            f"{path.name}"
        )
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run: it has no {path.name}")
    return path


def find_checkpoint(folder: Path, which: str) -> Path:
    """The path of a run's `last` or `best` checkpoint, or of a file named directly.

    Raises:
        CheckpointError: there is none, or the file is a checkpoint of another run.
    """
    checkpoints = CheckpointFolder(RunFolder(folder).checkpoints)
    if which == "best":
        best = checkpoints.best()
        if best is None:
            raise CheckpointError(
                f"{checkpoints.folder} has no checkpoint with an error rate of a validation"
            )
        return best
    if which == "last":
        paths = checkpoints.paths()
        if not paths:
            raise CheckpointError(f"{checkpoints.folder} has no checkpoints")
        return paths[-1]
    if not Path(which).is_file():
        raise CheckpointError(
            f"checkpoint not found: {which}; decode.checkpoint (in a fine-tuning "
            "finetune.checkpoint) needs last, best, average or a file"
        )
    _refuse_of_another_run(folder, Path(which))
    return Path(which)


def _refuse_of_another_run(folder: Path, path: Path) -> None:
    """Raise CheckpointError for a checkpoint in the folder of another run.

    Its results, its licence and its data would be taken for those of the run at `folder`.
    """
    own = RunFolder(folder)
    if path.absolute().parent in (folder.absolute(), own.checkpoints.absolute()):
        return  # it may be a link
    place = path.resolve().parent  # averages are in the folder of the run itself
    other = place.parent if place == RunFolder(place.parent).checkpoints else place
    if other == folder.resolve() or not RunFolder(other).config.is_file():
        return
    raise CheckpointError(
        f"{path} is a checkpoint of the run {other}, and not of {folder}: give the command "
        f"{other} in place of {folder}"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The values of a checkpoint, as `load_checkpoint`, whose message then names an earlier one."""
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        earlier = [each for each in CheckpointFolder(path.parent).paths() if each.name < path.name]
        is_newer = isinstance(error.__cause__, NewerFileError)
        if is_newer or not earlier or not path.is_file():
            raise
        raise CheckpointError(
            f"{error}. Move {path.name} away, and all commands use the one before it; or pass "
            f"decode.checkpoint={earlier[-1]} to a command that takes settings"
        ) from error


def load_model(config: ExperimentConfig) -> LoadedModel:
    """The model of `config.decode.checkpoint` on the configured device, with adapters merged.

    Raises:
        CheckpointError: no such checkpoint, or one of another model.
        ValueError: the encoder cannot use decode.chunk or decode.left.
    """
    device = pick_device(config.train)
    start_device(device, compiles=not prebuilt.is_installed())
    path, name, values = _read_checkpoint(config.folder, config.decode.checkpoint)
    try:
        saved = from_dict(ExperimentConfig, values["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"{path} has settings that this version of pruned_rnnt does not accept ({error}): use "
            "the version that wrote it"
        ) from error
    tokenizer = run_tokenizer(config.folder)
    if len(tokenizer) != values["vocab_size"]:
        raise CheckpointError(
            f"{path} has {values['vocab_size']} symbols, {config.folder}/tokens {len(tokenizer)}: "
            "they do not come from the same run"
        )
    average = values["average"] if config.decode.use_average else None
    state = average if average is not None else values["model"]

    def make() -> SpeechModel:
        model = build_model(saved.model, values["vocab_size"], saved.loss)
        if saved.finetune.lora.rank > 0:
            add_adapters(model.encoder, saved.finetune.lora)
        return model

    try:
        model = fitted_model(make, state, str(path))
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from error
    merge_adapters(model.encoder)
    set_chunks(model, config.decode)
    return LoadedModel(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        step=values["counters"]["step"],
        name=name,
    )


def _read_checkpoint(folder: Path, which: str) -> tuple[Path, str, dict[str, Any]]:
    """Path, name and values of a checkpoint, as `DecodeConfig.checkpoint` names it."""
    if which != "average":
        path = find_checkpoint(folder, which)
        return path, path.stem, read_checkpoint(path)
    paths = CheckpointFolder(RunFolder(folder).checkpoints).paths()
    if not paths:
        raise CheckpointError(f"{folder / 'checkpoints'} has no checkpoints")
    count = min(AVERAGED_CHECKPOINTS, len(paths))
    chosen, values = _mean_checkpoint(folder, count)
    return chosen[-1], f"{chosen[-1].stem}-average-last-{count}", values


def average_checkpoints(folder: Path, last: int, output: Path) -> list[Path]:
    """Write the mean of a run's newest checkpoints as a checkpoint; returns the averaged paths.

    The parameters themselves are averaged, not their running averages.

    Raises:
        CheckpointError: fewer than `last` checkpoints, or an unreadable one.
    """
    chosen, values = _mean_checkpoint(folder, last)
    save_checkpoint(output, {**values, "is_average": True})
    return chosen


def keeps_mean(folder: Path) -> bool:
    """Whether the newest checkpoint of a run has the mean that `average_span` needs.

    Raises:
        CheckpointError: no checkpoint, or an unreadable one.
    """
    return read_checkpoint(find_checkpoint(folder, "last")).get("mean") is not None


def average_span(folder: Path, last: int, output: Path) -> tuple[list[Path], int]:
    """Write the mean of the parameters of the last spans between checkpoints as a checkpoint.

    Returns:
        The checkpoint before the first of the `last` spans, and the newest one; and how many sets
        of parameters, `train.mean_every` steps apart, are in the mean.

    Raises:
        CheckpointError: fewer than `last` + 1 checkpoints, one without a mean, means that have
            nothing in common, or an unreadable checkpoint.
    """
    paths = CheckpointFolder(RunFolder(folder).checkpoints).paths()
    if last < 1 or len(paths) <= last:
        raise CheckpointError(
            f"{folder / 'checkpoints'} has {len(paths)} checkpoints, and the mean over the last "
            f"{last} spans between checkpoints needs {max(1, last) + 1}: train.keep_last keeps "
            "more of them, and --over checkpoints averages the parameters of the checkpoints alone"
        )
    ends = [paths[-last - 1], paths[-1]]
    start, newest = (read_checkpoint(path) for path in ends)
    for path, values in zip(ends, (start, newest), strict=True):
        if values.get("mean") is None:
            raise CheckpointError(
                f"{path} has no mean over the steps: train with train.mean_every, or pass --over "
                "checkpoints"
            )
    try:
        mean = mean_between(start["mean"], newest["mean"])
    except ValueError as error:
        raise CheckpointError(f"{ends[0]} and {ends[1]}: {error}") from error
    own = {"model": _with_parameters(newest["model"], mean), "average": None, "mean": None}
    save_checkpoint(output, {**newest, **own, "score": None, "is_average": True})
    return ends, mean.count


def _with_parameters(state: dict[str, Any], mean: SpanMean) -> dict[str, Any]:
    """A model's state with other parameters, in its own dtypes; buffers stay."""
    changed = {name: value.to(state[name].dtype) for name, value in mean.parameters.items()}
    return {**state, **changed}


def _mean_checkpoint(folder: Path, last: int) -> tuple[list[Path], dict[str, Any]]:
    """The newest checkpoints of a run, and the values of a checkpoint with their mean."""
    paths = CheckpointFolder(RunFolder(folder).checkpoints).paths()
    if last < 1 or len(paths) < last:
        raise CheckpointError(
            f"cannot average the last {last} checkpoints of {folder / 'checkpoints'}: it has "
            f"{len(paths)}; train.keep_last is how many a training keeps"
        )
    chosen = paths[-last:]
    # Keep only the parameters of earlier ones: the rest of a checkpoint is several times as large.
    states = [read_checkpoint(path)["model"] for path in chosen[:-1]]
    newest = read_checkpoint(chosen[-1])
    mean = mean_of_states([*states, newest["model"]])
    return chosen, {**newest, "model": mean, "average": None, "mean": None, "score": None}


def check_is_new(output: Path) -> None:
    """ValueError if the folder already holds a run."""
    if RunFolder(output).config.exists():
        raise ValueError(f"{output} already holds a run: choose another folder")


def save_run(
    model: SpeechModel, tokenizer: Tokenizer, config: ExperimentConfig, output: Path
) -> None:
    """Write the new folder `output` of a model that was imported, or joined from others.

    It has config.yaml, tokens/ and the checkpoint of step 0 as after training, without the state of
    a training.
    """
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(RunFolder(output).tokens)
    CheckpointFolder(RunFolder(output).checkpoints).save(
        0,
        {
            "config": to_dict(config),
            "vocab_size": model.vocab_size,
            "model": model.state_dict(),
            "average": None,
            "counters": {"step": 0},
            "score": None,
        },
    )
    RunFolder(output).config.write_text(to_yaml(config), encoding="utf-8")
