"""The options of commands that take a licence: --license, --license-note and --source."""

from __future__ import annotations

import argparse

from pruned_rnnt.licences.chain import Licence
from pruned_rnnt.licences.terms import TERMS, UNKNOWN, spdx
from pruned_rnnt.system.usage_errors import UsageError


def add_licence_arguments(parser: argparse.ArgumentParser, of: str) -> None:
    """Add them. of: what has the licence."""
    parser.add_argument(
        "--license",
        default=UNKNOWN,
        metavar="SPDX",
        help=f"licence of {of}, such as CC-BY-4.0; model cards show it, and `export` compares the "
        "model's own licence with it (default unknown)",
    )
    parser.add_argument(
        "--license-note",
        default="",
        metavar="TEXT",
        help="what the licence demands, if it is not a well-known one",
    )
    parser.add_argument(
        "--source",
        dest="license_source",
        default="",
        metavar="TEXT",
        help=f"where {of} come from, in words or as an address",
    )


def licence_of(options: argparse.Namespace) -> Licence:
    """The licence that the options name.

    Raises:
        UsageError: its terms are not known, and there is no note.
    """
    name = spdx(options.license)
    if name != UNKNOWN and name not in TERMS and not options.license_note.strip():
        raise UsageError(
            f"--license {name}: its terms are not known here (known are CC0-1.0, CC-BY-4.0, "
            "CC-BY-NC-4.0, Apache-2.0, MIT and others with these SPDX names). Add --license-note "
            "with what it demands, or leave --license out if the licence is unknown"
        )
    return Licence(id=name, source=options.license_source, note=options.license_note)
