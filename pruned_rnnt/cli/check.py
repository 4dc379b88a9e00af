"""`pruned-rnnt check`: whether kernels, graphs and training are right on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from pruned_rnnt.cli.command import EXIT_FAILED, Parsers, add_command

_HELP = """\
Compares losses, gradients, encoders, CUDA graphs and a resumed training step with plain torch,
most of them in float64, prints versions and speeds, and says what to do about wrong results. Takes
less than a minute, and needs torch alone.

--write makes later processes of this user run plain torch instead of kernels that are wrong here;
their logs say so. Exit code: 0 all is right, 1 something is wrong.
"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    parser = add_command(parsers, check, _HELP, packages=())
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: the GPU if there is one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--write", action="store_true", help="switch wrong kernels to plain torch from now on"
    )


def check(options: argparse.Namespace, console: object) -> int:
    """Compare the kernels of this machine with plain torch, and say what to do."""
    from pruned_rnnt.system.switched_kernels import ignore_switches

    ignore_switches()  # before the kernels are loaded, as it is them that are checked
    from pruned_rnnt.selfcheck.check_command import pick_device, run_check

    is_right = run_check(pick_device(options.device), write=options.write, report=options.json)
    return 0 if is_right else EXIT_FAILED
