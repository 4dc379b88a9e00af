"""The settings of the section `train`: the training loop, and the device that it selects.

The command line imports it without torch.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pruned_rnnt.config.checks import check_at_least, check_fractions, check_types
from pruned_rnnt.train.engine.loggers import LOGGERS

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# More is a mistake. The cores of this machine do not count, as it may read runs of a larger one.
_MOST_THREADS = 1024

# Number of checkpoints that `pruned-rnnt average` without --last and decode.checkpoint=average use.
AVERAGED_CHECKPOINTS = 3


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop: length, precision, checkpoints, logs.

    folder: folder of the run, with its checkpoints, logs and results.
    init: trained model to start from, as the first argument of `pruned-rnnt finetune`: a run, an
        exported or imported model, or a repository of the hub. Empty: random parameters.
    steps: total number of optimiser steps.
    seed: for the initial parameters and dropout.
    accumulate: batches whose gradients are summed for one step.
    device: `auto` uses a CUDA device if there is one.
    precision: dtype of matrix products; float16 scales the loss to avoid underflow.
    compile_encoder: compile the encoder (a Conformer) with torch.compile, for any length; the
        first steps then take minutes. Checkpoints are the same with and without it.
    fused_kernels: `auto` computes the encoder's elementwise parts with fused kernels if Triton can
        compile them for the device; `off` with plain torch.
    cuda_graphs: `auto` launches the encoder's passes as CUDA graphs, which frees the GPU from
        waiting for the host; batches are padded to few shapes, for each of which graphs are
        captured. `off` launches each kernel by itself.
    shard: `optimiser` divides the optimiser among the processes: each has the moments, summed
        gradients and averages of a part of the parameters, which it updates and sends to the
        others. `none` keeps all of them in every process. Results and checkpoints are the same.
    average_decay: decay of the running average of parameters; 0 switches it off.
    mean_every: steps between the parameters that a plain mean in float64 is made of, from which
        `pruned-rnnt average` takes that of any epochs between two checkpoints, as icefall's
        `--avg` does; 0 keeps no mean. It takes 8 bytes for each parameter in the memory of the
        first process, and in each checkpoint.
    log_every: steps between lines of the log, at least 1.
    validate_every, save_every: interval in steps; 0 means the end of each epoch. A run also ends
        with a validation. Each validation saves a checkpoint.
    loggers: programs that show metrics, pictures and samples, any of tensorboard (events in the
        run's folder), mlflow (MLFLOW_TRACKING_URI, or the folder mlruns beside the run) and wandb
        (Weights & Biases; offline with WANDB_MODE=offline). A continued run continues there, too.
    picture_every: steps between pictures and decoded samples for the loggers, in addition to those
        of each validation; 0 for none in addition.
    keep_last, keep_best: number of checkpoints kept, the newest and those of lowest error rate on
        the dev set (see decode.metric).
    early_stopping_patience: training stops after this many consecutive validations without a new
        lowest error rate (of language models: perplexity); 0 never stops early.
        decode.checkpoint=best is then the model to use.
    max_bad_steps: training stops after this many consecutive steps were skipped because of
        infinite or NaN values or lack of memory; those that halve the loss scale of float16 do not
        count.
    threads: CPU threads of the training process; 0 leaves the choice to torch.
    """

    folder: str = "exp/synthetic"
    init: str = ""
    steps: int = 1000
    seed: int = 42
    accumulate: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile_encoder: bool = False
    fused_kernels: Literal["auto", "off"] = "auto"
    cuda_graphs: Literal["auto", "off"] = "auto"
    shard: Literal["none", "optimiser"] = "none"
    average_decay: float = 0.99
    mean_every: int = 0
    log_every: int = 20
    loggers: tuple[str, ...] = ("tensorboard",)
    validate_every: int = 0
    save_every: int = 0
    picture_every: int = 0
    keep_last: int = AVERAGED_CHECKPOINTS
    keep_best: int = 1
    early_stopping_patience: int = 0
    max_bad_steps: int = 10
    threads: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not str(self.folder):
            raise ValueError(f"train.folder is {self.folder!r}, needs the path of a folder")
        # Checkpoints hold the settings, and only plain values.
        object.__setattr__(self, "folder", os.fspath(self.folder))
        check_types("train", self)
        for name in ("folder", "init"):
            # A shell leaves the ~ of train.folder=~/x.
            value = os.path.expanduser(getattr(self, name))  # noqa: PTH111 - "" is no path
            object.__setattr__(self, name, value)
        positive = ("steps", "accumulate", "log_every", "keep_last", "max_bad_steps")
        check_at_least("train", self, **dict.fromkeys(positive, 1))
        others = (
            "mean_every",
            "validate_every",
            "save_every",
            "picture_every",
            "keep_best",
            "threads",
        )
        check_at_least("train", self, **dict.fromkeys((*others, "early_stopping_patience"), 0))
        check_fractions("train", self, "average_decay", below_one=True)
        if self.threads > _MOST_THREADS:
            raise ValueError(f"train.threads is {self.threads}, needs at most {_MOST_THREADS}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(
                f"train.seed is {self.seed}, needs to fit into 64 bits (-2**63 to 2**64 - 1)"
            )
        if self.shard != "none" and self.precision == "float16":
            raise ValueError(
                f"train.shard is {self.shard} and train.precision float16, whose scaled gradients "
                "it does not support: use bfloat16"
            )
        for name in self.loggers:
            if name not in LOGGERS:
                raise ValueError(f"train.loggers has {name!r}, needs some of {', '.join(LOGGERS)}")


def pick_device(config: TrainConfig, local_rank: int = 0) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: the device is `cuda` and there is none.
    """
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "train.device is 'cuda', but torch sees no CUDA device: pass train.device=auto, or "
            "check the driver and that torch is a build with CUDA"
        )
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if config.device == "auto" and torch.version.cuda is None:
        # Here, as `pruned-rnnt --help` need not wait for it.
        from pruned_rnnt.system.switched_kernels import driver

        if driver():
            _warn_of_torch_without_cuda(torch.__version__)
    return torch.device("cpu")


@functools.cache  # once in a process
def _warn_of_torch_without_cuda(version: str) -> None:
    logger.warning(
        "this machine has an NVIDIA driver, but torch %s has no CUDA, so the CPU does the work: "
        "install a torch with CUDA, or pass train.device=cpu",
        version,
    )
