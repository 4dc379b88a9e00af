"""Protects a finished folder: only the same command, or --replace, replaces it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pruned_rnnt.data.input.prepared_folder import REPORT_NAME, check_output
from pruned_rnnt.system.json_file import read_json

# Options that do not change the contents of the folder.
_WITHOUT_EFFECT = frozenset(
    {"output", "num_jobs", "replace", "license", "license_note", "license_source"}
)
# An error message lists at most this many differences.
_MAX_DIFFERENCES = 3


def add_replace_argument(parser: argparse.ArgumentParser) -> None:
    """--replace, the same in every recipe."""
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace a finished folder at --output even if it was prepared by another recipe, "
        "from another source, or with other options",
    )


def check_replaceable(recipe: str, options: argparse.Namespace) -> None:
    """Checks that `options.output` may be written.

    Raises:
        ValueError: it contains files other than prepared data; or, without `options.replace`, data
            prepared by another recipe, from another source, or with other options.
    """
    output: Path = options.output
    check_output(output)
    if options.replace or not (output / REPORT_NAME).is_file():
        return
    differences = _differences(output / REPORT_NAME, recipe, options_for_json(options))
    if differences:
        raise ValueError(
            f"output {output} contains data prepared differently ({differences}); choose another "
            "--output, or add --replace to replace them"
        )


def options_for_json(options: argparse.Namespace) -> dict[str, Any]:
    """Parsed options as JSON values; paths become absolute."""
    return {name: _plain(value) for name, value in vars(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, range):
        return f"{value.start}-{value.stop - 1}"
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _differences(report_path: Path, recipe: str, options: Mapping[str, Any]) -> str:
    """Describes how a new command differs from a report; "" for no difference.

    Options that the report does not have were added in a later version and are ignored.
    """
    try:
        report = read_json(report_path)
        old_recipe, old = report["recipe"], report.get("options", {})
    except (ValueError, KeyError):
        return f"{REPORT_NAME} cannot be read"
    if old_recipe != recipe:
        return f"recipe {old_recipe}, now {recipe}"
    changed = [
        f"{name} {_shown(old[name])}, now {_shown(value)}"
        for name, value in options.items()
        if name not in _WITHOUT_EFFECT and name in old and old[name] != value
    ]
    more = len(changed) - _MAX_DIFFERENCES
    return "; ".join(changed[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) and value != "" else json.dumps(value)
