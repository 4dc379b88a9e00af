"""The version of this package, and the commit if it runs from a git checkout."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt import __version__

_CHECKOUT = Path(__file__).parents[2]
_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class CodeVersion:
    """commit: hash, followed by `+changes` if files differ from it; empty if unknown."""

    version: str
    commit: str = ""

    def __str__(self) -> str:
        commit = f", commit {self.commit}" if self.commit else ""
        return f"pruned_rnnt {self.version}{commit}"


@functools.cache
def code_version() -> CodeVersion:
    """Version and commit of the code that is running."""
    return CodeVersion(version=__version__, commit=_commit(_CHECKOUT))


def _commit(checkout: Path) -> str:
    """The commit of a checkout of this project; empty for an installed package or without git."""
    if not ((checkout / ".git").exists() and (checkout / "pyproject.toml").is_file()):
        return ""
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+changes" if changes else commit


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout.strip()
