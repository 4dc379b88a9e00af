"""Data recipes: one folder for each corpus, with a prepare module and a README.

They are in the folder `recipes` of the project. A wheel holds them inside this package; in a
checkout, `__path__` leads to that folder.
"""

from pathlib import Path

_IN_CHECKOUT = Path(__file__).parents[2] / "recipes"

if _IN_CHECKOUT.is_dir():
    __path__.append(str(_IN_CHECKOUT))
