"""Measure cases on systems, and print or keep the results.

    python -m scripts.benchmark cpu                          all CPU cases, all systems
    python -m scripts.benchmark cpu --case cpu-full --keep   one case; rows go to results/cpu.jsonl
    python -m scripts.benchmark cpu --system pruned_rnnt --repeats 50
    python -m scripts.benchmark cuda --shapes FILE.npz --peer-sources FOLDER --keep
    python -m scripts.benchmark cuda --output new.jsonl      rows go to a file of your choice
    python -m scripts.benchmark compare new.jsonl --tolerance 0.1

Inputs come from a fixed seed, so all systems of a run compute the same numbers; each row has the
loss as a check. Times are of forward and backward together. On the CPU each system runs in its own
process; on CUDA all run in this process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.benchmark.cases import CASES, SHAPES_VARIABLE, Case
from scripts.benchmark.compare import compare, read_rows
from scripts.benchmark.results import Row, append, committed, format_table
from scripts.benchmark.run import run_one, with_call_counts
from scripts.benchmark.systems import System
from scripts.benchmark.systems_ours import OURS
from scripts.benchmark.systems_peers import PEERS

SYSTEMS = {system.name: system for system in [*OURS, *PEERS]}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_in_own_process(case: Case, system: System, repeats: int) -> Row:
    command = [sys.executable, "-m", "scripts.benchmark", "one", case.name, system.name]
    result = subprocess.run(
        [*command, "--repeats", str(repeats)],
        env={**os.environ, **system.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {result.returncode}")
    return Row(**json.loads(result.stdout.strip().splitlines()[-1]))


def compile_peers(archives: str) -> None:
    from scripts.benchmark.peer_sources import compile_all

    begin = time.monotonic()
    for package, reason in compile_all(Path(archives), Path("build/peers").absolute()).items():
        log(f"not compiled: {package}: {reason}")
    log(f"compiling other packages took {time.monotonic() - begin:.0f} s")


def chosen_systems(names: str | None, table: str) -> list[System]:
    systems = []
    for name in names.split(",") if names else SYSTEMS:
        reason = SYSTEMS[name].available() if table in SYSTEMS[name].devices else f"not for {table}"
        if reason is None:
            systems.append(SYSTEMS[name])
        else:
            log(f"left out: {name} ({reason})")
    return systems


def device_is_lost() -> bool:
    """True if an earlier error has made the device unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def measured_rows(
    work: list[tuple[Case, System]], arguments: argparse.Namespace
) -> list[tuple[Row, Case, System]]:
    """Measure all pairs; log the reason for those that fail."""
    on_cuda = arguments.table == "cuda"
    run = run_one if on_cuda else run_in_own_process
    rows = []
    for case, system in work:
        try:
            row = run(case, system, arguments.repeats)
        except Exception as error:  # of any package
            log(f"{case.name}: {system.name} failed: {str(error).splitlines()[:1]}")
            if on_cuda and device_is_lost():
                log("the device is unusable for this process: the rest is left out")
                break
            continue
        rows.append((row, case, system))
        log(format_table([row]).splitlines()[-1])
    return rows


def run_table(arguments: argparse.Namespace) -> int:
    table = arguments.table
    if arguments.shapes:
        os.environ[SHAPES_VARIABLE] = arguments.shapes
    if arguments.peer_sources:
        compile_peers(arguments.peer_sources)
    cases = [case for case in CASES.values() if case.device == table]
    if arguments.case:
        cases = [CASES[name] for name in arguments.case.split(",")]
    # Grouped by system, so that a system that breaks the device does not affect those before it.
    work = [
        (case, system)
        for system in chosen_systems(arguments.system, table)
        for case in cases
        if case.kind in system.kinds
    ]
    measured = measured_rows(work, arguments)
    if table == "cuda":
        measured = with_call_counts(measured, log)
    order = {case.name: i for i, case in enumerate(cases)}
    rows = sorted((row for row, _, _ in measured), key=lambda row: order[row.case])
    print(format_table(rows))
    for path in [committed(table)] * arguments.keep + [arguments.output] * bool(arguments.output):
        append(rows, path)
        print(f"kept in {path}")
    return 0 if rows else 1


def run_compare(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.tolerance < math.inf:
        log(f"--tolerance must be at least 0 and finite, got {arguments.tolerance}")
        return 2
    old = [row for table in _tables() for row in read_rows(committed(table))]
    try:
        comparison = compare(read_rows(arguments.new), old, arguments.tolerance)
    except (OSError, ValueError) as error:
        log(str(error))
        return 2
    print("\n".join(comparison.lines()))
    return 0 if comparison.passed else 1


def _tables() -> list[str]:
    return sorted({case.device for case in CASES.values()})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for table in _tables():
        command = commands.add_parser(table, help=f"the cases of the {table} table")
        names = ", ".join(case.name for case in CASES.values() if case.device == table)
        command.add_argument("--case", help=f"one or more of {names}, separated by commas")
        command.add_argument(
            "--system", help=f"one or more of {', '.join(SYSTEMS)}, separated by commas"
        )
        command.add_argument("--keep", action="store_true", help="append the rows to the results")
        command.add_argument("--output", type=Path, help="append the rows to this file")
        command.add_argument("--shapes", help=".npz file with the lengths of real utterances")
        command.add_argument(
            "--peer-sources", help="folder with .tar.gz sources of packages to compile (CUDA)"
        )
        command.set_defaults(table=table)
        command.add_argument("--repeats", type=int, default=20)
    one = commands.add_parser(
        "one", help="measure one case on one system in this process; print a JSON row"
    )
    one.add_argument("case", choices=CASES)
    one.add_argument("system", choices=SYSTEMS)
    one.add_argument("--repeats", type=int, default=20)
    guard = commands.add_parser(
        "compare", help="compare rows with the committed ones; exit code 1 if any is worse"
    )
    guard.add_argument("new", type=Path, metavar="NEW", help="file of --output")
    guard.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        help="allowed growth of times, memory and launches (default 0.1: by 10%%)",
    )
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return run_compare(arguments)
    if arguments.command == "one":
        row = run_one(CASES[arguments.case], SYSTEMS[arguments.system], arguments.repeats)
        print(json.dumps(asdict(row)))
        return 0
    return run_table(arguments)


if __name__ == "__main__":
    sys.exit(main())
