"""The systems of a measurement: checkouts of pruned_rnnt, each trained in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmark.results import commit

ROOT = Path(__file__).parents[2]
THIS = "this"
LIBRARY = "PRUNED_RNNT_LIBRARY_DIR"


@dataclass(frozen=True, kw_only=True)
class System:
    """A checkout and its settings.

    paths: the checkout, then further folders for imports.
    library: folder of the compiled libraries; None: as the version finds them.
    overrides: `section.key=value` of this system alone.
    """

    name: str
    paths: tuple[Path, ...]
    library: Path | None
    overrides: tuple[str, ...]

    @property
    def commit(self) -> str:
        """The commit of the checkout, or the system's name in a copy without git."""
        checkout = self.paths[0]
        if checkout == ROOT:
            return commit()
        return commit(checkout) if (checkout / ".git").exists() else self.name


def named(option: str, value: str) -> tuple[str, str]:
    """NAME and VALUE of NAME=VALUE.

    Raises:
        ValueError: one of the two is missing.
    """
    name, _, rest = value.partition("=")
    if not name or not rest:
        raise ValueError(f"{option} is {value!r}, needs NAME=PATH")
    return name, rest


def read_systems(
    others: Sequence[str], libraries: Sequence[str], overrides: Sequence[str]
) -> tuple[list[System], list[str]]:
    """The systems, this version first, and the overrides of all systems.

    Args:
        others: `NAME=PATH[:FURTHER PATH...]`.
        libraries: `NAME=PATH`.
        overrides: `section.key=value`, or `NAME:section.key=value` for one system.

    Raises:
        ValueError: a malformed value, an unknown or repeated name, or a path that does not exist.
    """
    paths: dict[str, tuple[Path, ...]] = {THIS: (ROOT,)}
    for name, value in (named("--other", other) for other in others):
        if name in paths:
            raise ValueError(f"--other names {name!r} twice; {THIS!r} is this version")
        paths[name] = tuple(Path(path).resolve() for path in value.split(os.pathsep))
    folders: dict[str, Path] = {}
    for name, value in (named("--library", library) for library in libraries):
        folders[name] = Path(value).resolve()
    own: dict[str, list[str]] = {}
    common = []
    for override in overrides:
        name, colon, _ = override.partition("=")[0].partition(":")
        if colon:
            own.setdefault(name, []).append(override.removeprefix(f"{name}:"))
        else:
            common.append(override)
    for name in (*folders, *own):
        if name not in paths:
            raise ValueError(f"there is no system {name!r}, only {', '.join(paths)}")
    for path in (*(path for several in paths.values() for path in several), *folders.values()):
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder")
    systems = [
        System(
            name=name,
            paths=several,
            library=folders.get(name),
            overrides=tuple(own.get(name, ())),
        )
        for name, several in paths.items()
    ]
    return systems, common


class Worker:
    """The process of a system. Use it as a context manager, which ends the process."""

    def __init__(self, system: System, overrides: Sequence[str], batches: Path, at_step: int):
        self.system = system
        environment = dict(os.environ)
        if system.library is not None:
            environment[LIBRARY] = str(system.library)
        elif system.paths[0] != ROOT:
            # It names the libraries of this version.
            environment.pop(LIBRARY, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.training_step.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(
            {
                "paths": [str(path) for path in system.paths],
                "overrides": [*overrides, *system.overrides],
                "batches": str(batches),
                "at_step": at_step,
            }
        )

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker's `Session`; tuples come back as lists."""
        self._send({"do": method, **arguments})
        return self.answer()

    def answer(self) -> Any:
        """The answer to the last line.

        Raises:
            RuntimeError: the process has ended; its messages are on stderr.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of system {self.system.name!r} ended with status "
                f"{self.process.wait()}; its messages are above"
            )
        return json.loads(line)

    def _send(self, values: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        # `answer` reports a process that has ended.
        with suppress(BrokenPipeError):
            print(json.dumps(values), file=self.process.stdin, flush=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # At the end of its input the worker removes its files and ends.
        self.process.communicate()
