"""The page of docs that prints the table: a section for each family of cells."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from pruned_rnnt import backend_report
from tests.cells.cell import REFUSED, RIGHT, Cell, Outcome

PAGE = Path(__file__).parent.parent.parent / "docs/reference/what_works.md"
# Results of other versions may differ where torch itself refuses something.
TORCH = "2.13"
_HEADER = """\
# What works with what

Each cell behind these tables is one call of a public function, on a small ragged batch, with one
thing changed: a dtype, a layout, a value, a mode, a wrapper. A cell is **right** if the result, and
every gradient, equals that of a plain float64 reference within the rounding of the dtypes. It is
**refused** if the call raises an error that names the argument or the mode. Anything else, such as
another result, an error that does not tell what to change, or the end of the process, fails the
tests.

A line counts the calls for one change; a call is a function with one of its arguments, or with a
variant such as packed rows. The last column shows one error of the most frequent kind.

These are the results of torch {torch} on the CPU. On other devices the values of lengths, targets
and boundaries are not read unless `validate=True`: an utterance that the CPU would refuse has a
loss of +inf there and a gradient of 0. `python -m scripts.what_works` writes this page, and the
tests compare it with what they find.

{total}
"""
# Title and first sentence of each family.
FAMILIES = {
    "dtypes": ("Dtypes", "All floating arguments in one dtype, or one argument in another kind."),
    "mixed dtypes": ("Mixed dtypes", "One floating argument in a dtype of its own."),
    "integer dtypes": ("Dtypes of integers", "Targets, lengths and bands."),
    "layouts": ("Layouts", "Views, storages and subclasses of each tensor."),
    "other tensors": (
        "Other tensors and other objects",
        "Tensors without dense values, of other sizes, and what is no tensor.",
    ),
    "lengths and targets": ("Lengths and targets", "Their values, and how they are given."),
    "unread values": (
        "Values that are not read",
        "In torch.compile and on GPUs: the loss of such an utterance is +inf. Sizes are checked.",
    ),
    "options": ("Options", "Values of the scalar options."),
    "values of options": ("Options that change the result", "Against a reference that knows them."),
    "gradients": ("Gradients", "Which leaves have them, and what is done to the graph."),
    "modes": ("Modes", "Modes of torch around the call."),
    "transforms": ("Transforms", "torch.func, torch.jit and CUDA graphs."),
    "compilers": ("Compilers", "torch.compile with several backends, and torch.export."),
    "wrappers": ("Layers with wrappers", "What users put around the layers of the module."),
    "whole module": (
        "The module as a whole",
        "Copies, files and distributed training. `fully_shard` of the joiner alone is refused.",
    ),
}
_BY_FUNCTION = "## By function\n"
_SHOWN = (RIGHT, REFUSED)
_MOST_NAMES = 12
_MOST = 200  # characters of a message

Results = Mapping[Cell, Outcome]


def not_comparable() -> str | None:
    """Why results here may differ from those of the page."""
    if not torch.__version__.startswith(f"{TORCH}."):
        return f"the page is that of torch {TORCH}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the page is that of Linux on x86-64"
    is_native = re.search(r"^cpu: native", str(backend_report()), flags=re.MULTILINE)
    return None if is_native else "there are no native libraries"


def section(family: str, results: Results) -> str:
    """The text of one family of cells, between its markers: a line for each column."""
    title, sentence = FAMILIES[family]
    own = {cell: found for cell, found in results.items() if cell.family == family}
    lines = [f"## {title}", "", f"{sentence} {_counts(own.values())}.", ""]
    lines += ["| given | right | refused | an error |", "|" + " --- |" * 4]
    for column in dict.fromkeys(cell.column for cell in own):
        lines.append(_line(column, {c: found for c, found in own.items() if c.column == column}))
    return "\n".join(lines)


def _counts(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(found.status for found in outcomes)
    return ", ".join(f"{counts[status]:,} {status}" for status in (RIGHT, REFUSED))


def _line(column: str, own: Results) -> str:
    rows = {status: [c.row for c, x in own.items() if x.status == status] for status in _SHOWN}
    count = len(rows[RIGHT]) + len(rows[REFUSED])
    if not count:
        return f"| {column} | - | - | {next(iter(own.values())).detail} |"
    columns = [_rows(rows[status], count) for status in _SHOWN]
    return f"| {' | '.join([column, *columns, _usual_error(own)])} |"


def _rows(rows: list[str], count: int) -> str:
    """How many of all there are, and which if they are few."""
    if len(rows) in (0, count):
        return f"all {count}" if rows else ""
    arguments: dict[str, list[str]] = {}
    for row in rows:
        function, _, argument = row.partition(": ")
        arguments.setdefault(function, []).append(argument)
    if len(arguments) > _MOST_NAMES or 2 * len(rows) > count:
        return f"{len(rows)} of {count}"
    names = []
    for function, found in arguments.items():
        shown = ", ".join(x for x in found if x)
        names.append(f"`{function}`" + (f": {shown}" if shown else ""))
    return f"{len(rows)} of {count}: {'; '.join(names)}"


def _usual_error(own: Results) -> str:
    """The first of the errors that most cells have, but for names and numbers."""
    alike: dict[str, list[str]] = {}
    for cell, found in own.items():
        if found.status == REFUSED:
            line = found.detail.strip().partition("\n")[0]
            argument = cell.row.partition(": ")[2]
            key = line.replace(argument, "") if argument else line
            alike.setdefault(re.sub(r"\d+", "#", key), []).append(line)
    if not alike:
        return ""
    text = max(alike.values(), key=len)[0]
    text = text if len(text) <= _MOST else f"{text[:_MOST].rstrip()} ..."
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def by_function(results: Results) -> str:
    """The counts of each function."""
    own: dict[str, list[Outcome]] = {}
    for cell, found in results.items():
        own.setdefault(cell.subject.name, []).append(found)
    lines = ["| call | right | refused |", "| --- | --- | --- |"]
    for name, outcomes in own.items():
        counts = Counter(found.status for found in outcomes)
        lines.append(f"| `{name}` | {counts[RIGHT]:,} | {counts[REFUSED]:,} |")
    return "\n".join(lines)


def marked(family: str, text: str) -> str:
    return f"<!-- cells: {family} -->\n{text}\n<!-- end -->\n"


def committed(family: str, page: str) -> str:
    """The section of the committed page."""
    return page.partition(f"<!-- cells: {family} -->\n")[2].partition("\n<!-- end -->")[0]


def rendered(results: Results) -> str:
    """The whole page."""
    total = f"Together {_counts(results.values())}."
    sections = [marked(family, section(family, results)) for family in FAMILIES]
    parts = [_HEADER.format(torch=TORCH, total=total), *sections, _BY_FUNCTION]
    return "\n".join([*parts, by_function(results), ""])
