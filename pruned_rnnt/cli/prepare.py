"""`pruned-rnnt prepare`: make a data folder."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)

if TYPE_CHECKING:
    from rich.console import Console


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    from pruned_rnnt import recipes

    packages = pkgutil.iter_modules(recipes.__path__)
    names = sorted(module.name for module in packages if module.ispkg)
    parser = add_command(
        parsers,
        prepare,
        f"Recipes: {', '.join(names)}.\n"
        "`pruned-rnnt prepare RECIPE --help` shows the options of a recipe.",
    )
    parser.add_argument("recipe", metavar="RECIPE", choices=names, help="one of those below")
    parser.add_argument(
        "recipe_options", nargs=argparse.REMAINDER, metavar="...", help="options of the recipe"
    )


def prepare(options: argparse.Namespace, console: Console) -> int:
    """Make a data folder: manifests, features and tokens from audio and texts."""
    module = importlib.import_module(f"pruned_rnnt.recipes.{options.recipe}.prepare")
    code: int | None = module.main(options.recipe_options)
    return code or 0
