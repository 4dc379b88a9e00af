"""Rows of results: their fields, the files that keep them, and their table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one case: milliseconds, MiB above the inputs, launches of kernels and waits of
    the host for the device (timing.py; the last two are None on the CPU)."""

    case: str
    what: str
    system: str
    version: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    peak_mib: float
    loss: float
    repeats: int
    machine: str
    torch: str
    commit: str
    date: str
    launches: int | None = None
    waits: int | None = None


def machine(device: str) -> str:
    """Name of the CUDA device, or of the processor with its number of cores."""
    import torch  # here, as processes that time others must not read its files before

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    level = torch.backends.cpu.get_cpu_capability()
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    used = "" if threads == cores else f", {threads} threads used"
    return f"{cores}-core {model} ({level}){used}"


def commit(folder: Path = FOLDER.parent) -> str:
    """The commit of the working tree of `folder`, with `+` if tracked files differ from it. In a
    copy without git, the environment variable GIT_COMMIT."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return os.environ.get("GIT_COMMIT", "unknown")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def committed(table: str) -> Path:
    """results/TABLE.jsonl, which is kept in git."""
    return FOLDER / f"{table}.jsonl"


def append(rows: Iterable[Row], path: Path) -> None:
    """Append rows to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def format_table(rows: Iterable[Row]) -> str:
    """The rows as a plain-text table."""
    header = ("case", "system", "version", "median ms", "p20", "p80", "peak MiB", "loss")
    header += ("launches", "waits")
    cells = [header] + [
        (
            row.case,
            row.system,
            row.version,
            f"{row.median_ms:.3g}",
            f"{row.p20_ms:.3g}",
            f"{row.p80_ms:.3g}",
            f"{row.peak_mib:.0f}",
            f"{row.loss:.4f}",
            "-" if row.launches is None else str(row.launches),
            "-" if row.waits is None else str(row.waits),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
