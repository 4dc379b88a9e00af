"""A command line that is explained by the docstring of its module."""

from __future__ import annotations

import argparse


def documented_parser(module: str, docstring: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`; its help has the docstring around the options."""
    description, _, details = (docstring or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
