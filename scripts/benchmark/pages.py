"""Tables and pictures of pages of docs, from the committed rows in results/*.jsonl.

`python -m scripts.benchmark.pages` writes them; run it after adding rows. In a page each table is
between `<!-- rows: NAME -->` and `<!-- end -->`, where NAME is a key of TABLES; the text around the
tables is written by hand and contains no measured number. The tables show the newest run of each
case: all rows with the commit of pruned_rnnt's last row, which were measured in one run. If that
run had no other system, comparisons also show the last one that had.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.benchmark import lost_speech_tables
from scripts.benchmark.finetune_table import finetune_nemo
from scripts.benchmark.markdown import Row, markdown, provenance, read_rows
from scripts.benchmark.quantised_table import quantised
from scripts.benchmark.training_tables import (
    cold_start,
    loader,
    training_processes,
    training_step,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "performance.md", DOCS / "lost_speech.md")
OURS = "pruned_rnnt"
_BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def runs_of(rows: Iterable[Row], case: str) -> list[dict[str, Row]]:
    """For each commit with a row of ours, the newest first, the last row of each system; ours come
    first."""
    of_case = [row for row in rows if row["case"] == case]
    commits = dict.fromkeys(row["commit"] for row in reversed(of_case) if row["system"] == OURS)
    runs = [{row["system"]: row for row in of_case if row["commit"] == each} for each in commits]
    return [
        dict(sorted(run.items(), key=lambda item: not item[0].startswith(OURS))) for run in runs
    ]


def newest_run(rows: Iterable[Row], case: str) -> dict[str, Row]:
    """The run of our last row."""
    return next(iter(runs_of(rows, case)), {})


def compared_runs(rows: Iterable[Row], case: str) -> list[dict[str, Row]]:
    """The newest run; and if it has no other system, the newest one that has."""
    runs = runs_of(rows, case)
    with_peers = [run for run in runs if not all(system.startswith(OURS) for system in run)]
    return runs[:1] if not with_peers or with_peers[0] is runs[0] else [runs[0], with_peers[0]]


def cases_of(rows: Iterable[Row], kinds: Sequence[str]) -> list[str]:
    """Names of the cases whose `what` begins with one of the kinds, in the order of the rows."""
    names = [row["case"] for row in rows if row["what"].split()[0] in kinds]
    return list(dict.fromkeys(names))


def label(row: Row) -> str:
    """The description of a row without the words that are in the table's heading."""
    kind, _, sizes = row["what"].partition(" forward+backward, ")
    for text in (" cuda", " cpu", "autocast "):
        sizes = sizes.replace(text, "")
    sizes = sizes.replace(" of real utterances", ", real lengths,")
    if "bfloat16" in sizes or "tf32" in sizes:
        sizes = sizes.replace(" float32", "")
    return f"{kind.replace('_', ' ')}, {sizes}"


def comparison(table: str, kinds: Sequence[str]) -> str:
    """A table with a line for each run of a case, a column for each system: milliseconds / MiB."""
    rows = read_rows(table)
    runs = [run for case in cases_of(rows, kinds) for run in compared_runs(rows, case)]
    lines_of = Counter(run[OURS]["case"] for run in runs)
    systems = list(dict.fromkeys(system for run in runs for system in run))
    systems.sort(key=lambda system: not system.startswith(OURS))
    versions = {s: next(run[s]["version"] for run in runs if s in run) for s in systems}
    header = ["case", *(s if s.startswith(OURS) else f"{s} {versions[s]}" for s in systems)]
    lines = [
        [
            label(run[OURS])
            + (f" (commit {run[OURS]['commit']})" if lines_of[run[OURS]["case"]] > 1 else ""),
            *(
                f"{run[s]['median_ms']:.3g} / {run[s]['peak_mib']:.0f}" if s in run else "-"
                for s in systems
            ),
        ]
        for run in runs
    ]
    return markdown(header, lines) + provenance(row for run in runs for row in run.values())


def launches() -> str:
    """A table of kernels launched by a step, and of waits of the host for the GPU."""
    rows = read_rows("cuda")
    runs = [newest_run(rows, case) for case in cases_of(rows, ["step", "simple", "full"])]
    lines = [
        [label(row), row["system"], str(row["launches"]), str(row["waits"])]
        for run in runs
        for row in run.values()
        if row["launches"] is not None and "graph" not in row["system"]
    ]
    return markdown(["case", "system", "launches", "waits"], lines)


def decoding() -> str:
    rows = read_rows("decoding")

    def case(row: Row) -> tuple[str, str, int, int, float]:
        precision = row.get("precision", "float32")
        size, seconds = row["batch_size"], row["utterance_seconds"]
        return row["device"], precision, row["parameters"], size, seconds

    cells = {(*case(row), row["method"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for each in sorted(
        set(map(case, rows)), key=lambda each: (each[0], each[1] != "float32", each)
    ):
        device, precision, parameters, size, seconds = each
        name = [device, f"{parameters / 1e6:.0f} M", precision, f"{size} of {seconds:g} s"]
        lines.append([*name, *(_factor(cells.get((*each, method))) for method in methods)])
    header = ["device", "parameters", "encoder", "batch", *methods]
    return markdown(header, lines) + provenance(cells.values())


def _factor(row: Row | None) -> str:
    return _times(None if row is None else row["times_real_time"])


def _times(real_time: float | None) -> str:
    return "-" if real_time is None else f"{real_time:,.0f}x"


def transcribe() -> str:
    rows = read_rows("transcribe")
    lines = [
        [
            row["machine"].partition(" (")[0],
            f"{row['parameters'] / 1e6:.0f} M, {row.get('model', 'random')}",
            row.get("audio", "noise"),
            " ".join(row["settings"]) or "defaults",
            row["method"],
            row.get("format", "text"),
            f"{row['files']:,}",
            _times(row.get("first_times_real_time")),
            _times(row["times_real_time"]),
            _times(row["reading_times_real_time"]),
        ]
        for row in rows
    ]
    header = ["machine", "parameters", "audio", "settings", "search", "transcripts", "files"]
    header += ["first pass", "later passes", "reading alone"]
    return markdown(header, lines) + provenance(rows)


def export() -> str:
    rows = read_rows("export")
    header = ["model, decoding", "search", "system", "precision", "threads", "real time"]
    lines = [
        [
            f"{row['model']}, {row['decoding']}",
            row.get("search", "greedy"),
            row["system"],
            row["precision"],
            str(row["threads"]),
            f"{1 / row['real_time_factor']:,.0f}x",
        ]
        for row in rows
    ]
    return markdown(header, lines) + provenance(rows)


def turns(table: str) -> str:
    """A table of rows that were measured in turns; each has the columns by name."""
    rows = [row for row in read_rows("turns") if row["table"] == table]
    lines = [list(row["columns"].values()) for row in rows]
    return markdown(list(rows[0]["columns"]), lines) + provenance(rows)


TABLES: dict[str, Callable[[], str]] = {
    "cuda_step": lambda: comparison("cuda", ["step"]),
    "cuda_exact_step": lambda: comparison("cuda", ["exact_step"]),
    "cuda_tdt": lambda: comparison("cuda", ["tdt_step", "tdt_exact_step"]),
    "cuda_losses": lambda: comparison("cuda", ["simple", "full"]),
    "cuda_parts": lambda: comparison("cuda", ["lattice", "bounds"]),
    "cuda_log_probs": lambda: comparison("cuda", ["log_probs"]),
    "cuda_log_probs_in_turns": lambda: turns("log_probs"),
    "cuda_launches": launches,
    "cpu": lambda: comparison("cpu", ["step", "full", "simple"]),
    "cold_start": cold_start,
    "training_step": training_step,
    "training_processes": training_processes,
    "exchange": lambda: turns("exchange"),
    "loader": loader,
    "decoding": decoding,
    "transcribe": transcribe,
    "export": export,
    "quantised": quantised,
    "finetune_nemo": finetune_nemo,
    "streams": lambda: turns("streams"),
    "lost_totals": lost_speech_tables.totals,
    "lost_conditions": lost_speech_tables.conditions,
    "lost_cost": lost_speech_tables.cost,
    "lost_chunks": lost_speech_tables.chunks,
    "lost_delays": lost_speech_tables.delays,
    "first_chunks": lost_speech_tables.first_chunks,
    "chunk_seeds": lost_speech_tables.chunk_seeds,
    "delay_target": lost_speech_tables.delay_target,
}


def rendered(page: str) -> str:
    """The page with the tables of the committed rows.

    Raises:
        ValueError: the page names a table that is not in TABLES.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"a page names rows {name!r}, needs one of {sorted(TABLES)}")
        return begin + TABLES[name]() + end

    return _BLOCK.sub(block, page)


def text_outside(page: str) -> str:
    """The page without its tables."""
    return _BLOCK.sub("", page)


class Picture(NamedTuple):
    """A bar chart of one column, for each case and system of a table's newest runs."""

    name: str
    table: str
    kinds: Sequence[str]
    column: str
    unit: str


PICTURES = [
    Picture("cuda_step_time", "cuda", ["step"], "median_ms", "milliseconds"),
    Picture("cuda_step_memory", "cuda", ["step"], "peak_mib", "MiB above the inputs"),
    Picture("cuda_losses_time", "cuda", ["simple", "full"], "median_ms", "milliseconds"),
    Picture("cpu_time", "cpu", ["step", "full"], "median_ms", "milliseconds"),
    Picture("cpu_memory", "cpu", ["step", "full"], "peak_mib", "MiB above the inputs"),
]


def values_of(picture: Picture) -> dict[str, dict[str, float]]:
    """Numbers by case and system."""
    rows = read_rows(picture.table)
    values = {}
    for case in cases_of(rows, picture.kinds):
        run = newest_run(rows, case)
        if run:
            values[label(run[OURS])] = {s: row[picture.column] for s, row in run.items()}
    return values


def path_of(picture: Picture) -> Path:
    return DOCS / "pictures" / f"{picture.name}.svg"


def description(picture: Picture) -> str:
    """The numbers that a picture shows; stored in its file, to check that it is up to date."""
    return json.dumps(values_of(picture)).replace('"', "'")


def draw(picture: Picture) -> None:
    """Draw a panel of horizontal bars for each case, each with its own axis from 0."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pruned_rnnt"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    values = values_of(picture)
    systems = list(dict.fromkeys(system for run in values.values() for system in run))
    colours = dict(zip(systems, pyplot.get_cmap("tab10").colors, strict=False))
    heights = [len(run) + 1.5 for run in values.values()]
    figure, panels = pyplot.subplots(
        len(values),
        squeeze=False,
        figsize=(8, 0.27 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for axes, (case, run) in zip(panels[:, 0], values.items(), strict=True):
        for place, (system, value) in enumerate(run.items()):
            axes.barh(place, value, color=colours[system], height=0.85)
            axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
        axes.set_title(f"{case}: {picture.unit}", fontsize=9, loc="left")
        axes.set_yticks(range(len(run)), list(run), fontsize=8)
        axes.set_xticks([])
        axes.set_xlim(0, 1.1 * max(run.values()))
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    path = path_of(picture)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": description(picture)})
    pyplot.close(figure)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    for picture in PICTURES:
        draw(picture)
    print(f"wrote {len(PAGES)} pages and {len(PICTURES)} pictures")


if __name__ == "__main__":
    main()
