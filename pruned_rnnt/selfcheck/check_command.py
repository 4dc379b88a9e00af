"""`pruned-rnnt check`: all comparisons, what to do about wrong ones, and the switch of kernels."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pruned_rnnt import __version__
from pruned_rnnt.ops.common.native import backend_report, backend_summary, library_file
from pruned_rnnt.selfcheck.encoders import check_encoders, check_graphs
from pruned_rnnt.selfcheck.losses import check_losses
from pruned_rnnt.selfcheck.problem import Finding, first_line
from pruned_rnnt.selfcheck.resumed import PART as TRAINING
from pruned_rnnt.selfcheck.resumed import check_resumed
from pruned_rnnt.selfcheck.speed import Speed, cpu_name, measure_speeds
from pruned_rnnt.system.device import missing_device
from pruned_rnnt.system.switched_kernels import (
    ENCODERS,
    GRAPHS,
    LOSSES,
    Switch,
    current_switches,
    driver,
    installed_version,
    read_switches,
    switch_file,
    write_switches,
)
from pruned_rnnt.system.usage_errors import UsageError

_INSTEAD = {
    LOSSES: (
        "the losses on {device} run in plain torch, several times slower, with "
        "PRUNED_RNNT_BACKEND=fallback in the environment"
    ),
    ENCODERS: (
        "train.fused_kernels=off and decode.fused_kernels=off run the encoder in plain torch; it "
        "then has no CUDA graphs in training either"
    ),
    GRAPHS: "train.cuda_graphs=off and decode.cuda_graphs=off run the encoder without graphs",
}
_REBUILD = (
    "Built from source, the kernels may be of another torch or GPU: rebuild them (docs/faq.md), "
    "then check again"
)
_NOT_A_KERNEL = (
    "no kernel of this package is the reason, or it left the device unusable. Check with "
    "PRUNED_RNNT_BACKEND=fallback, then with another version of torch and of the driver; if the "
    "result stays wrong, test the memory of the machine"
)
_RESUMED = (
    "a training that is interrupted here continues from its checkpoint, but gives other bits than "
    "one without an interruption"
)


def pick_device(name: str | None) -> torch.device:
    """The device of an option, the GPU if there is one by default.

    Raises:
        UsageError: no such device.
    """
    has_cuda = torch.cuda.is_available()
    wanted = name or ("cuda" if has_cuda else "cpu")
    kind, _, index = wanted.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"--device is {wanted!r}, needs cpu, cuda or cuda:N")
    if missing := missing_device(int(index or 0)):
        raise UsageError(f"--device is {wanted!r}, but {missing}")
    device = torch.device("cuda", int(index or torch.cuda.current_device()))
    torch.cuda.set_device(device)  # kernels of Triton run on the current device
    return device


def run_check(device: torch.device, *, write: bool, report: Path | None) -> bool:
    """Print all results; True if everything is right.

    Args:
        write: switch wrong kernels to plain torch for later processes of this user, and kernels
            that are right now back.
        report: JSON file to write.

    Raises:
        UsageError: there is no folder for the report.
        ValueError: the file of switched kernels is damaged.
        OSError: a file cannot be written.
    """
    if report is not None and not report.parent.is_dir():
        raise UsageError(f"--json {report}: there is no folder {report.parent}")
    machine = _describe_machine(device)
    width = max(map(len, machine)) + 2
    print("\n".join(f"{name.ljust(width)}{value}" for name, value in machine.items()))
    for switch in read_switches():
        print(f"{switch_file()}: plain torch instead of the {switch.part} on {switch.name}")
    findings: list[Finding] = []
    for title, check in _checks(device).items():
        print(f"\n{title}", flush=True)
        for finding in _findings(title, check):
            print(finding.line(), flush=True)
            findings.append(finding)
    print("\nSpeed", flush=True)
    speeds: list[Speed] = []
    try:
        for speed in measure_speeds(device):
            print(speed.line(), flush=True)
            speeds.append(speed)
    except Exception as error:
        print(f"  not measured: {first_line(error)}")
    wrong = [finding for finding in findings if finding.failure]
    done = sum(finding.error is not None or bool(finding.failure) for finding in findings)
    print(f"\n{len(wrong)} of {done} comparisons are wrong" if wrong else f"\nAll {done} are right")
    for advice in _advice(wrong, device):
        print(f"- {advice}")
    if write:
        print(_written(findings, device))
    elif any(finding.plain_is_right for finding in wrong):
        print("- `pruned-rnnt check --write` switches these kernels for all later processes")
    if report is not None:
        report.write_text(json.dumps(_as_json(machine, findings, speeds), indent=2) + "\n")
    return not wrong


def _describe_machine(device: torch.device) -> dict[str, str]:
    """Versions and devices that results depend on, in the order in which they are printed."""
    triton = installed_version("triton") or installed_version("pytorch-triton")
    found = {
        "pruned_rnnt": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda or "none"),
        "NVIDIA driver": driver() or "none",
        "Triton": triton or "not installed",
        "system": platform.platform(),
        "processor": cpu_name(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["GPU"] = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    # The lines of the ops follow those of the libraries and end with the first header of a table.
    libraries = backend_report().partition("\nop ")[0].splitlines()
    found["backend"] = libraries[0].partition(", ")[2]
    return found | {f"kernels on {x}": y for x, _, y in (x.partition(": ") for x in libraries[1:])}


def _checks(device: torch.device) -> dict[str, Callable[[], Iterator[Finding]]]:
    """The groups of comparisons by their titles."""
    return {
        f"Losses, bounds and gradients on {device}, against plain torch in float64": (
            lambda: check_losses(device)
        ),
        f"Encoders on {device}, against plain torch": lambda: check_encoders(device),
        "CUDA graphs, against passes without": lambda: check_graphs(device),
        "Training": lambda: iter([check_resumed(device)]),
    }


def _findings(title: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A group of comparisons; one that cannot go on, as on an unusable device, is a finding."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(part="device", what=title, failure=first_line(error))


def _advice(wrong: Sequence[Finding], device: torch.device) -> Iterator[str]:
    """What to do, once for each part."""
    for part in dict.fromkeys(finding.part for finding in wrong):
        of_part = [finding for finding in wrong if finding.part == part]
        if part == TRAINING:
            yield f"{part}: {_RESUMED}"
        elif part in _INSTEAD and any(finding.plain_is_right for finding in of_part):
            yield f"{part}: {_INSTEAD[part].format(device=device.type)}. {_REBUILD}"
        else:
            yield f"{part}: {_NOT_A_KERNEL}"


def _written(findings: Sequence[Finding], device: torch.device) -> str:
    """Write which kernels are switched; returns what was done."""
    checked: list[Switch] = []
    wrong: list[Switch] = []
    for part in (LOSSES, ENCODERS, GRAPHS):
        of_part = [x for x in findings if x.part == part and (x.error is not None or x.failure)]
        library = library_file(device.type) if part == LOSSES else None
        if not of_part or (part == LOSSES and not backend_summary(device.type).startswith("nat")):
            continue  # no kernel of this part ran
        # Of several kinds of GPUs, one was checked.
        current = [
            x
            for x in current_switches(part, device.type, library)
            if device.type == "cpu" or x.name == torch.cuda.get_device_name(device)
        ]
        checked += current
        failed = [x for x in of_part if x.failure and x.plain_is_right]
        if failed:
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            reason = f"{failed[0].what}: {failed[0].failure}{others}"
            wrong += [x.because(reason) for x in current]
    if not wrong and not switch_file().is_file():
        return "- nothing to switch"
    path = write_switches(checked, wrong)
    parts = ", ".join(sorted({x.part for x in wrong}))
    if not wrong:
        return f"- wrote {path}: all kernels checked here are on"
    return (
        f"- wrote {path}: {parts} on {device.type} run in plain torch in later processes, until "
        "a version changes or a check with --write finds them right"
    )


def _as_json(
    machine: dict[str, str], findings: Sequence[Finding], speeds: Sequence[Speed]
) -> dict[str, Any]:
    of_findings = [asdict(finding) for finding in findings]
    for finding in of_findings:
        if finding["error"] is not None and not math.isfinite(finding["error"]):
            # JSON has no such numbers.
            finding["error"] = "NaN" if math.isnan(finding["error"]) else "infinite"
    return {
        "machine": machine,
        "comparisons": of_findings,
        "speeds": [speed._asdict() for speed in speeds],
        "wrong": sum(bool(finding.failure) for finding in findings),
    }
