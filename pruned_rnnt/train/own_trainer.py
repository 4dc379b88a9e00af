"""Training from Python: the user's own model, batches and loss, without a configuration file."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from pruned_rnnt.config.load import from_dict, to_dict
from pruned_rnnt.model.parameter_values import describe_broken
from pruned_rnnt.model.saved_file import describe_unreadable
from pruned_rnnt.train.engine import trainer as engine
from pruned_rnnt.train.engine.checkpoint import CheckpointFolder
from pruned_rnnt.train.engine.distributed import Ranks, launcher_number
from pruned_rnnt.train.engine.report import BatchSize
from pruned_rnnt.train.engine.train_config import TrainConfig
from pruned_rnnt.train.optim.optimiser import OptimiserConfig
from pruned_rnnt.train.optim.schedule import ScheduleConfig
from pruned_rnnt.train.own_batches import OwnBatches
from pruned_rnnt.train.own_task import LossFunction, OwnExperiment, OwnTask

LogFunction = Callable[[str, int, Mapping[str, float]], None]

# Settings of the commands: here the model and its device are the caller's.
_OF_COMMANDS = ("init", "device", "compile_encoder", "cuda_graphs", "picture_every")


class Trainer:
    """Trains a model of your own, in one process; see docs/tutorials/train_in_python.md.

    It has accumulation, mixed precision, skipped steps, a running average of the parameters, logs
    and checkpoints, and continues the run of its folder from the newest checkpoint, with the same
    result as without the interruption.

    Args:
        model: on its device, the CPU or a GPU. A new run starts from its parameters. Frozen ones
            (without `requires_grad`) must stay so. Of a model in training mode, modules in
            evaluation mode stay in it; a model in evaluation mode is put into training mode.
        batches: each iteration gives the batches of an epoch, of any type: a list, a DataLoader, an
            object with `__iter__`. `set_epoch(epoch)` of the object, or of a DataLoader's samplers
            and dataset, is called before, if there is one. Given the epoch and Python's, numpy's
            and torch's global generators, which the trainer seeds, the batches must be the same
            each time: a continued run reads an epoch from its start.
        loss: `loss(model, batch, step)` -> (N,), the loss of each utterance, or a mapping of names
            to such tensors, the same names for each batch, of which `total` is minimised and the
            others are logged. All parameters that it trains are in the model. It moves the batch to
            the device. step: number of steps done.
        size: `size(batch)` -> the batch's number of utterances N, and of frames: the sum of the
            losses of a step is divided by the sum of its frames. Frames equal to utterances give
            the mean over utterances.
        settings: of the run: folder, steps, precision, log_every, ... `init`, `device`,
            `compile_encoder`, `cuda_graphs` and `picture_every` are for the commands alone.
        optimiser: an optimiser of all trained parameters, or the settings of one of this package;
            default: AdamW with its default settings.
        schedule: factor of the optimiser's learning rates over the steps; by default they warm up
            and fall along a cosine. `ScheduleConfig(kind="constant", warm_up_steps=0)` keeps them.
        clip_norm: limit of the norm of the whole gradient for an optimiser of your own; 0 for none.
            Settings have their own limit.
        validate: `validate(model)` -> a score, lower for better, for the best checkpoints and early
            stopping. The model has its averaged parameters, and is in evaluation mode.
            Python's, numpy's and torch's global generators begin the same each time, and are apart
            from those of the training. Scores of a continued run are compared with the earlier
            ones: a function that measures something else needs another folder.
        log: `log(group, step, values)` gets the metrics of group `train` or `valid`, in addition to
            metrics.jsonl and `settings.loggers`. A continued run repeats the steps since its
            checkpoint.
        ids: `ids(batch)` -> N names, for reports about skipped steps; default: positions.
        allow_changes: continue a run although settings or batches have changed.

    Attributes:
        model: with the newest parameters.
        optimiser: as given, or as built from its settings.
        checkpoints: the checkpoints of the run; `paths()`, and `best()` by the score.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        ConfigError: the folder holds a run with other settings or another model.
        CheckpointError: the folder's checkpoints cannot be read.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        batches: Iterable[Any],
        loss: LossFunction,
        size: Callable[[Any], BatchSize],
        settings: TrainConfig,
        optimiser: torch.optim.Optimizer | OptimiserConfig | None = None,
        schedule: ScheduleConfig | None = None,
        clip_norm: float = 0.0,
        validate: Callable[[Any], float] | None = None,
        log: LogFunction | None = None,
        ids: Callable[[Any], Sequence[str]] | None = None,
        allow_changes: bool = False,
    ) -> None:
        _check_types(
            model=(model, nn.Module),
            batches=(batches, Iterable),
            settings=(settings, TrainConfig),
            optimiser=(optimiser, torch.optim.Optimizer | OptimiserConfig | None),
            schedule=(schedule, ScheduleConfig | None),
        )
        for name, function in (("loss", loss), ("size", size)):
            _check_callable(name, function)
        for name, optional in (("validate", validate), ("log", log), ("ids", ids)):
            _check_callable(name, optional, optional=True)
        if isinstance(batches, Iterator):
            raise ValueError(
                f"batches is a {type(batches).__name__}, which can be read only once; needs an "
                "object whose __iter__ starts an epoch, such as a list or a DataLoader"
            )
        device = _device_of(model)
        _check_settings(settings, has_validation=validate is not None)
        _check_precision(settings, model)
        own_optimiser = ""
        given: list[Any] = []
        if isinstance(optimiser, torch.optim.Optimizer):
            own_optimiser = f"{type(optimiser).__module__}.{type(optimiser).__qualname__}"
            config = _of_own_optimiser(optimiser, model, clip_norm)
            given = [group["lr"] for group in optimiser.param_groups]
        else:
            config = optimiser or OptimiserConfig()
            if clip_norm != 0:
                raise ValueError(
                    f"clip_norm is {clip_norm}, which is for an optimiser of your own; set "
                    "OptimiserConfig.clip_norm"
                )
        given_settings = OwnExperiment(
            train=dataclasses.replace(settings, device="cpu" if device.type == "cpu" else "cuda"),
            optimiser=config,
            schedule=schedule or ScheduleConfig(),
            own_optimiser=own_optimiser,
        )
        # Before anything is written: config.yaml needs plain values, no numbers of numpy.
        experiment = from_dict(OwnExperiment, _plain(to_dict(given_settings)), "settings")
        task = OwnTask(
            model=model,
            batches=OwnBatches(batches, experiment.train.seed, allow_changes=allow_changes),
            loss=loss,
            batch_size=size,
            validation=validate,
            batch_ids=ids,
        )
        self._trainer = engine.Trainer(
            experiment,
            Ranks(local_rank=device.index or 0),
            Console(),
            allow_changes=allow_changes,
            make_task=lambda *_: task,
            optimiser=optimiser if isinstance(optimiser, torch.optim.Optimizer) else None,
            own_log=None if log is None else _OwnLog(log),
            keeps_modes=True,
        )
        self.model = model
        self.optimiser = self._trainer.optimiser
        # Except while it trains, an optimiser of the user's own has the rates that it was given
        # with, because it may be given to another Trainer.
        self._given_rates = given
        self._last_rates = _set_rates(self.optimiser, given)
        self.checkpoints: CheckpointFolder = self._trainer.checkpoints
        self._has_run = False

    @property
    def step(self) -> int:
        """Number of steps done, including skipped ones."""
        return self._trainer.state.counters.step

    def run(self) -> engine.Outcome:
        """Train until `settings.steps` or until validations no longer improve, and save.

        Returns:
            "finished", or "preempted" if a signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) stopped it: a
            new Trainer then continues the run.

        Raises:
            TrainingStopped: training cannot continue, for example because it diverged.
            RuntimeError: this trainer has run before.
        """
        if self._has_run:
            raise RuntimeError("this Trainer has run; a new one continues the run of its folder")
        self._has_run = True
        _set_rates(self.optimiser, self._last_rates)
        try:
            return self._trainer.run()
        finally:
            _set_rates(self.optimiser, self._given_rates)

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the running average of its parameters."""
        average = self._trainer.average
        return nullcontext() if average is None else average.applied()


class _OwnLog:
    """A function as an `engine.loggers.MetricLogger`."""

    def __init__(self, log: LogFunction) -> None:
        self._log = log

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._log(group, step, values)

    def figure(self, name: str, step: int, figure: Any) -> None: ...

    def text(self, name: str, step: int, text: str) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def _plain(value: Any) -> Any:
    """The value with Python's own numbers and texts instead of those of numpy."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _check_types(**arguments: tuple[object, Any]) -> None:
    for name, (value, wanted) in arguments.items():
        if not isinstance(value, wanted):
            needed = getattr(wanted, "__name__", str(wanted))
            raise TypeError(f"{name} is of type {type(value).__name__}, needs {needed}")


def _check_callable(name: str, function: object, *, optional: bool = False) -> None:
    if not callable(function) and not (optional and function is None):
        raise TypeError(f"{name} is of type {type(function).__name__}, needs a function")


def _check_settings(settings: TrainConfig, *, has_validation: bool) -> None:
    for name in _OF_COMMANDS:
        value, default = getattr(settings, name), getattr(TrainConfig(), name)
        if value != default:
            raise ValueError(
                f"settings.{name} is {value!r}, which is for the commands; needs {default!r}"
            )
    for name in ("validate_every", "early_stopping_patience"):
        if getattr(settings, name) > 0 and not has_validation:
            raise ValueError(
                f"settings.{name} is {getattr(settings, name)}, which needs the argument validate"
            )
    processes = launcher_number("WORLD_SIZE", 1)
    if processes > 1:
        raise ValueError(
            f"WORLD_SIZE is {processes}: this Trainer trains in one process; `pruned-rnnt train` "
            "trains in several"
        )


def _check_precision(settings: TrainConfig, model: nn.Module) -> None:
    if settings.precision != "float16":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"settings.precision is float16 and parameter {name} of model is float16, too, "
                "whose scaled gradients torch cannot unscale: pass the model in float32"
            )


def _device_of(model: nn.Module) -> torch.device:
    """The device of a model that can be trained and saved."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name} of model has no shape yet: call the model on a batch before "
                "building the Trainer"
            )
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"module {name or 'model'} of model has sparse gradients, which cannot be clipped "
                "or scaled: build it with sparse=False"
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("model has no parameter that requires a gradient")
    devices = {each.device for each in (*model.parameters(), *model.buffers())}
    device = trained[0].device
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model is on {names}, needs to be on the CPU or on one CUDA device")
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"model.state_dict() has {name!r} of type {type(value).__name__}, which cannot be "
                "saved safely; needs tensors"
            )
    buffers = [name for name, _ in model.named_buffers()]
    if broken := describe_broken(model.state_dict(), buffers, "model.state_dict():"):
        raise ValueError(
            f"{broken}, which is refused as diverged: start from other values; a constant, such as "
            "a mask, needs register_buffer(..., persistent=False)"
        )
    return device


def _of_own_optimiser(
    optimiser: torch.optim.Optimizer, model: nn.Module, clip_norm: float
) -> OptimiserConfig:
    """The settings that the engine needs for an optimiser; checks that it trains the model."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    optimised = {id(p) for group in optimiser.param_groups for p in group["params"]}
    if missing := [name for key, name in names.items() if key not in optimised]:
        raise ValueError(
            f"optimiser does not train {len(missing)} parameters of model, such as {missing[0]}: "
            "add them, or set their requires_grad to False"
        )
    if foreign := len(optimised - {id(p) for p in model.parameters()}):
        raise ValueError(
            f"optimiser has {foreign} parameters that are not in model: build it from those of "
            "this model"
        )
    closure = inspect.signature(optimiser.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimiser is {type(optimiser).__name__}, whose step needs a closure that computes "
            "the loss again: needs one that updates by the gradients alone, such as "
            "torch.optim.AdamW"
        )
    rates = [float(group["lr"]) for group in optimiser.param_groups]
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate  # as the engine sets it; it may be a number of numpy
    if fault := describe_unreadable(optimiser.state_dict()):
        raise TypeError(
            f"optimiser.state_dict() cannot be saved safely: {fault}; needs tensors and plain "
            "values, so convert it, for example with float()"
        )
    if not max(rates) > 0:
        raise ValueError(f"optimiser has the learning rates {rates}, needs one above 0")
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        # The engine sets each rate to this factor of the largest, times that of the schedule.
        group["rate"] = rate / max(rates)
    return OptimiserConfig(learning_rate=max(rates), clip_norm=clip_norm)


def _set_rates(optimiser: torch.optim.Optimizer, rates: Sequence[Any]) -> list[Any]:
    """Set the learning rates of the first groups; returns those of before."""
    before = []
    for group, rate in zip(optimiser.param_groups, rates, strict=False):
        before.append(group["lr"])
        group["lr"] = rate
    return before
