"""Tables of training steps, of loading their data, and of whole processes.

Training steps are rows of scripts/training_step.
"""

from __future__ import annotations

from typing import Any

from scripts.benchmark.markdown import FOLDER, Row, markdown, provenance, read_rows

# GB/s at which NCCL sums between two GPUs: a small share of NVLink's speed, and most of it.
LINK_SPEEDS = (100, 300)


def training_step() -> str:
    """A table of whole training steps."""
    rows = [row for row in read_rows("training_step", FOLDER) if "world_size" not in row]
    newest = {(*_case(row), row["system"]): row for row in rows if not _is_earlier(row)}
    header = ["GPU", "model", "system", "audio", "step", "real time", "GPU busy", "kernels"]
    header += ["peak memory"]
    lines = [
        [
            _gpu(row["device"]),
            _model(row),
            row["system"].replace("this", "pruned_rnnt"),
            f"{row['audio_seconds']:.0f} s",
            f"{row['step_ms']:.0f} ms",
            f"{row['times_real_time']:,.0f}x",
            _known(row["gpu_busy_ms"], ".0f", " ms"),
            _known(row["kernels"], ",.0f", ""),
            _known(row["peak_allocated_gib"], ".1f", " GiB"),
        ]
        for row in newest.values()
    ]
    return markdown(header, lines) + provenance(newest.values())


def training_processes() -> str:
    """A table of steps of several processes."""
    rows = [row for row in read_rows("training_step", FOLDER) if "world_size" in row]
    newest = {(*_case(row), row["world_size"], row["gpus"]): row for row in rows}
    header = ["GPU", "model", "processes", "GPUs", "audio a step and process", "alone"]
    header += ["side by side", "efficiency", "alone with exchange", "together", "efficiency"]
    lines = [
        [
            _gpu(row["device"]),
            _model(row),
            str(row["world_size"]),
            _known(row["gpus"], "d", ""),
            f"{row['audio_seconds']:.0f} s",
            f"{row['alone_step_ms']:.1f} ms",
            f"{row['side_by_side_step_ms']:.1f} ms",
            f"{row['side_by_side_efficiency']:.3f}",
            _known(row.get("exchange_step_ms"), ".1f", " ms"),
            *_together(row),
        ]
        for row in newest.values()
    ]
    return markdown(header, lines) + provenance(newest.values())


def _together(row: Row) -> list[str]:
    """The step of all processes and its efficiency: measured, or a model of one GPU a process."""
    if row["gpus"] in (None, row["world_size"]):
        return [f"{row['together_step_ms']:.1f} ms", f"{row['together_efficiency']:.3f}"]
    # An all-reduce sends and receives 2 (n - 1) / n times the gradients of each process.
    sent = row["gradient_bytes"] * 2 * (row["world_size"] - 1) / row["world_size"]
    steps = [row["exchange_step_ms"] + 1000 * sent / (1e9 * speed) for speed in LINK_SPEEDS]
    return [
        "model: " + ", ".join(f"{step:.1f}" for step in steps) + " ms",
        ", ".join(f"{row['alone_step_ms'] / step:.3f}" for step in steps),
    ]


def cold_start() -> str:
    """A table of whole processes: seconds from start to end, at first and again."""
    seconds: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in read_rows("cold_start"):
        key = row["machine"], row["process"], row["system"]
        if not _is_earlier(row):
            seconds.setdefault(key, {})[row["run"]] = row
    lines = [
        [
            _gpu(machine),
            process,
            system.replace("this", "pruned_rnnt"),
            *(_known(runs[run]["wall_s"], ".1f", " s") for run in ("first", "second")),
            _known(runs["second"].get("step_1_s"), ".1f", " s"),
        ]
        for (machine, process, system), runs in seconds.items()
    ]
    header = ["GPU", "process", "system", "first start", "second start", "its first step after"]
    found = [row for runs in seconds.values() for row in runs.values()]
    return markdown(header, lines) + provenance(found)


def loader() -> str:
    """A table of the workers and cores that load a number of times real time."""
    rows = read_rows("loader")
    newest = {(row["storage"], row["features"], row["augmentation"]): row for row in rows}
    header = ["storage", "features", "augmentation", "a worker", "training process"]
    header += ["workers", "cores"]
    lines = [
        [
            *case,
            f"{row['worker']:,.0f}x",
            f"{row['main']:,.0f}x",
            f"{row['workers']} for {row['target']:,.0f}x",
            f"{row['cores']:.1f}",
        ]
        for case, row in newest.items()
    ]
    return markdown(header, lines) + provenance(newest.values())


def _is_earlier(row: Row) -> bool:
    """Whether the system is an earlier version of this package, which its commit names."""
    return bool(row["system"] == row["commit"])


def _case(row: Row) -> tuple[Any, ...]:
    names = ("device", "model", "causal", "ctc", "precision", "max_seconds")
    return *(row[name] for name in names), *row["overrides"]


def _model(row: Row) -> str:
    kinds = {"causal": row["causal"], "CTC head": row["ctc"]}
    words = [row["model"], *(kind for kind, has in kinds.items() if has), row["precision"]]
    return ", ".join((*words, *row["overrides"]))


def _gpu(name: str) -> str:
    """H100 of NVIDIA H100 80GB HBM3."""
    return name.removeprefix("NVIDIA ").split()[0]


def _known(value: float | None, form: str, unit: str) -> str:
    return "-" if value is None else format(value, form) + unit
