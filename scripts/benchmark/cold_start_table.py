"""The table of whole processes, from the rows of `python -m scripts.cold_start --json`."""

from __future__ import annotations

from scripts.benchmark.markdown import markdown, provenance, read_rows

_STEPS = (1, 13, 50, 200)
_AUDIO = {
    "many": "704 files, 15,880 s in all",
    "ten": "ten files of 10 s",
    "one": "one file of 10 s, on the CPU",
}


def cold_start() -> str:
    """A line for each process: seconds of wall clock and of processors, and when steps ended."""
    rows = read_rows("cold_start")
    lines = [
        [
            _described(row["process"]),
            row["run"],
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            ", ".join(f"{row[f'step_{n}_s']:.1f}" for n in _STEPS if f"step_{n}_s" in row) or "-",
        ]
        for row in rows
    ]
    steps = ", ".join(map(str, _STEPS))
    header = ["process", "start", "seconds", "CPU seconds", f"end of step {steps}"]
    return markdown(header, lines) + provenance(rows)


def _described(process: str) -> str:
    command, _, what = process.partition(" ")
    return f"{command}, {_AUDIO.get(what, what)}"
