"""What users do with the module as a whole: copies, files, distribution, its options."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from tests.cells.axes_values import SCALARS
from tests.cells.axes_wrappers import two_steps
from tests.cells.cell import Absent, Cell, Run, unchanged
from tests.cells.judge import Comparison, Upstream, compute, weighted
from tests.cells.module_subjects import OPTIONS, SUBJECTS, criterion
from tests.cells.subject import Arguments, Subject, results_of

Wrap = Callable[[nn.Module], nn.Module]


def pickled(module: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(module))
    return loaded


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def state_dict(module: nn.Module) -> nn.Module:
    """Its values in a module that began with others."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(module.state_dict())
    return other


def from_meta(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module).to("meta").to_empty(device=next(module.parameters()).device)
    other.load_state_dict(module.state_dict())
    return other


def averaged(module: nn.Module) -> nn.Module:
    model = AveragedModel(module)
    model.update_parameters(module)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


def in_eval(module: nn.Module) -> nn.Module:
    return module.eval()


def global_hook(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """Torch's hook of all modules, which changes nothing but counts."""
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, _output: seen.append(type(module).__name__)
    )
    try:
        found = two_steps(subject, given, upstream)
    finally:
        handle.remove()
    if "Linear" not in seen:
        raise AssertionError("no hook ran")
    return found


def _process_group(device: str) -> None:
    if dist.is_initialized():
        return
    if not dist.is_available():
        raise Absent("no torch.distributed")
    store = Path(tempfile.mkdtemp()) / "store"
    kind = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, init_method=f"file://{store}", rank=0, world_size=1)


def distributed(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """DistributedDataParallel of one process."""
    module = given["module"]
    _process_group(given["encoder_out"].device.type)
    wrapped = nn.parallel.DistributedDataParallel(module)
    for _ in range(2):
        module.zero_grad()
        results = results_of(subject.call(**{**given, "module": wrapped}))
        names = [name for name in ("loss",) if name in results]
        for x in (given["encoder_out"], given["predictor_out"]):
            x.grad = None
        weighted(results, names, upstream).backward()
    return _with_accumulated(given, results)


def sharded(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
    """FSDP2 of one process: the layers of the joiner and the rest are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, device = given["module"], given["encoder_out"].device.type
    _process_group(device)
    mesh = init_device_mesh(device, (1,))
    fully_shard(module, mesh=mesh)
    for _ in range(2):
        module.zero_grad()
        results = results_of(subject.call(**given))
        for x in (given["encoder_out"], given["predictor_out"]):
            x.grad = None
        weighted(results, ["loss"], upstream).backward()
    return _with_accumulated(given, results)


def _with_accumulated(given: Arguments, results: dict[str, Tensor]) -> Comparison:
    leaves: dict[str, Tensor] = {k: given[k] for k in ("encoder_out", "predictor_out")}
    leaves |= {f"module.{k}": x for k, x in given["module"].named_parameters()}

    def whole(x: Tensor | None) -> Tensor | None:
        return x.full_tensor() if isinstance(x, DTensor) else x

    losses = [k for k, x in results.items() if x.requires_grad]
    grads = {k: whole(x.grad) for k, x in leaves.items()}
    return Comparison(given, {k: x.detach() for k, x in results.items()}, losses, grads)


WRAPS: dict[str, Wrap] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
    "state_dict": state_dict,
    "to_empty": from_meta,
    "AveragedModel": averaged,
    "eval": in_eval,
}
RUNS: dict[str, Run] = {
    "hook of all modules": global_hook,
    "DistributedDataParallel": distributed,
    "fully_shard": sharded,
}
# Options of the constructor and their kinds.
_OPTIONS = {
    "s_range": "integer",
    "blank": "integer",
    "rnnt_type": "choice",
    "reduction": "choice",
    "lm_only_scale": "scale",
    "am_only_scale": "scale",
    "delay_penalty": "finite",
    "fastemit_lambda": "from 0",
    "simple_scale": "finite",
    "pruned_scale_start": "finite",
    "warm_up_steps": "step",
}
_DEFAULTS = {"blank": 0, "rnnt_type": "regular", **OPTIONS}


def built(option: str, change: Callable[[Any], Any]) -> Run:
    """Another module with that value of an option."""

    def run(subject: Subject, given: Arguments, upstream: Upstream) -> Comparison:
        value = change(_DEFAULTS.get(option, 0.5))
        x = given["encoder_out"]
        given["module"].__dict__.update(criterion(**{option: value}).to(x.device).__dict__)
        return compute(subject, given, results_of(subject.call(**given)), upstream)

    return run


def cells() -> Iterator[Cell]:
    for subject in SUBJECTS:
        for column, wrap in WRAPS.items():
            change = _replaced(wrap)
            options: dict[str, Any] = {"run": two_steps, "reference_change": unchanged}
            yield Cell(subject, "whole module", subject.name, column, change, **options)
        for column, run in RUNS.items():
            yield Cell(
                subject,
                "whole module",
                subject.name,
                column,
                run=run,
                words=("global module hooks",),
            )
    subject = SUBJECTS[0]
    for option, kind in _OPTIONS.items():
        for column, value in SCALARS[kind].items():
            yield Cell(
                subject,
                "options",
                f"PrunedTransducerLoss(...): {option}",
                column,
                run=built(option, value.change),
                words=(option,),
                must_refuse=value.is_bad,
                reference_change=_rebuilt(option, value.change),
            )


def _replaced(wrap: Wrap) -> Callable[[Arguments], Arguments]:
    return lambda given: {**given, "module": wrap(given["module"])}


def _rebuilt(option: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    def build(given: Arguments) -> Arguments:
        value = change(_DEFAULTS.get(option, 0.5))
        return {**given, "module": criterion(**{option: value})}

    return build
