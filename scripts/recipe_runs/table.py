"""Prints the lines of `python -m scripts.recipe_runs` as a Markdown table, a row for each variant.

    python -m scripts.recipe_runs.table results.jsonl --split test --select dev

The search is the one of the lowest mean WER on the split of --select, unless --search names one.
Rows with several seeds have the mean over the seeds and the lowest and highest; errors and the 95%
interval (bootstrap over utterances) are those of the seed of the median WER.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.documented_parser import documented_parser

_HEADER = (
    *("variant", "parameters", "steps", "seeds", "search", "dev WER", "WER", "range"),
    *("errors (ins, del, sub)", "interval", "training"),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The results of finished runs.

    Raises:
        ValueError: a line is no result; the message names file and line.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            line["variant"], line["seed"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no result of scripts.recipe_runs") from error
        if "results" in line:
            lines.append(line)
    return lines


def table(
    lines: Iterable[dict[str, Any]], *, split: str, select: str, search: str | None = None
) -> str:
    """The Markdown table; variants in the order of their first line."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        variants.setdefault(line["variant"], []).append(line)
    rows = [_HEADER, ("---",) * len(_HEADER)]
    rows += [_row(name, runs, split, select, search) for name, runs in variants.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(
    name: str, runs: Sequence[dict[str, Any]], split: str, select: str, search: str | None
) -> tuple[str, ...]:
    chosen = search or min(
        runs[0]["results"][select],
        key=lambda found: mean(run["results"][select][found]["wer"] for run in runs),
    )
    ordered = sorted(runs, key=lambda run: run["results"][split][chosen]["wer"])
    rates = [run["results"][split][chosen]["wer"] for run in ordered]
    middle = ordered[(len(ordered) - 1) // 2]["results"][split][chosen]
    insertions, deletions, substitutions = middle["errors"]
    errors = insertions + deletions + substitutions
    lower, upper = middle["interval"]
    unfinished = any(run["steps"] < run["planned_steps"] for run in runs)
    return (
        name,
        f"{runs[0]['parameters'] / 1e6:.2f} M",
        f"{min(run['steps'] for run in runs):,}" + (" (stopped)" if unfinished else ""),
        str(len(runs)),
        chosen,
        f"{mean(run['results'][select][chosen]['wer'] for run in runs):.2%}",
        f"{mean(rates):.2%}",
        f"{rates[0]:.2%} .. {rates[-1]:.2%}" if len(rates) > 1 else "",
        f"{errors:,} ({insertions}, {deletions}, {substitutions})",
        f"{lower:.2%} .. {upper:.2%}",
        f"{mean(run['train_seconds'] for run in runs):.0f} s",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = documented_parser("scripts.recipe_runs.table", __doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--split", default="test", help="(default test)")
    parser.add_argument("--select", default="dev", help="split that selects (default dev)")
    parser.add_argument("--search", help="use this search for all")
    options = parser.parse_args(arguments)
    lines = [line for path in options.results for line in read_lines(path)]
    print(table(lines, split=options.split, select=options.select, search=options.search))


if __name__ == "__main__":
    main()
