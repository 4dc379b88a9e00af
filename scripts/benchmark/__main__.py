"""Runs cases on systems, each system in a process of its own, and shows or keeps the results.

    python -m scripts.benchmark cpu                          all CPU cases, all systems
    python -m scripts.benchmark cpu --case cpu-full --keep   one case; rows go to results/cpu.jsonl
    python -m scripts.benchmark cpu --system pruned_rnnt --repeats 50

Inputs are made from a fixed seed, so all systems of a run work on the same numbers; the loss is
kept in the row to show that they compute the same. Times are of forward and backward together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import torch

from scripts.benchmark.cases import CASES, Case, make_inputs
from scripts.benchmark.results import Row, append, commit, machine, shown
from scripts.benchmark.systems import System
from scripts.benchmark.systems_ours import OURS
from scripts.benchmark.systems_peers import PEERS
from scripts.benchmark.timing import measure

SYSTEMS = {system.name: system for system in [*OURS, *PEERS]}


def run_one(case: Case, system: System, repeats: int) -> Row:
    """Measures one system on one case in this process."""
    inputs = make_inputs(case)
    step = system.kinds[case.kind](case, inputs)
    loss = float(step())
    measured = measure(step, case.device, repeats)
    return Row(
        case=case.name,
        what=case.describe(),
        system=system.name,
        version=system.version(),
        median_ms=round(1e3 * measured.median, 4),
        p20_ms=round(1e3 * measured.p20, 4),
        p80_ms=round(1e3 * measured.p80, 4),
        peak_mib=round(measured.peak_mib, 1),
        loss=round(loss, 4),
        repeats=repeats,
        machine=machine(case.device),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
    )


def run_in_process_of_its_own(case: Case, system: System, repeats: int) -> Row | None:
    command = [sys.executable, "-m", "scripts.benchmark", "one", case.name, system.name]
    result = subprocess.run(
        [*command, "--repeats", str(repeats)],
        env={**os.environ, **system.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        print(f"{case.name}: {system.name} failed: {reason}", file=sys.stderr)
        return None
    return Row(**json.loads(result.stdout.strip().splitlines()[-1]))


def run_table(arguments: argparse.Namespace) -> int:
    table = arguments.table
    cases = [case for case in CASES.values() if case.device == table]
    if arguments.case:
        cases = [CASES[name] for name in arguments.case.split(",")]
    names = arguments.system.split(",") if arguments.system else list(SYSTEMS)
    systems = []
    for name in names:
        reason = SYSTEMS[name].available() if table in SYSTEMS[name].devices else f"not for {table}"
        if reason is None:
            systems.append(SYSTEMS[name])
        else:
            print(f"left out: {name} ({reason})", file=sys.stderr)
    rows = []
    for case in cases:
        for system in systems:
            if case.kind not in system.kinds:
                continue
            row = run_in_process_of_its_own(case, system, arguments.repeats)
            if row is not None:
                rows.append(row)
                print(shown([row]).splitlines()[-1], file=sys.stderr)
    print(shown(rows))
    if arguments.keep:
        print(f"kept in {append(rows, table)}")
    return 0 if rows else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for table in sorted({case.device for case in CASES.values()}):
        command = commands.add_parser(table, help=f"the cases of the {table} table")
        command.add_argument("--case", help=f"of {', '.join(CASES)}; separated by commas")
        command.add_argument("--system", help=f"of {', '.join(SYSTEMS)}; separated by commas")
        command.add_argument("--keep", action="store_true", help="append the rows to the results")
        command.set_defaults(table=table)
        command.add_argument("--repeats", type=int, default=20)
    one = commands.add_parser("one", help="one case and system in this process, as a JSON row")
    one.add_argument("case", choices=CASES)
    one.add_argument("system", choices=SYSTEMS)
    one.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.command == "one":
        row = run_one(CASES[arguments.case], SYSTEMS[arguments.system], arguments.repeats)
        print(json.dumps(asdict(row)))
        return 0
    return run_table(arguments)


if __name__ == "__main__":
    sys.exit(main())
