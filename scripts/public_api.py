"""Write tests/public_api.txt: every public name with its signature, and every setting.

    python -m scripts.public_api

A name is public if docs/reference documents it. tests/test_public_api.py compares the file with the
package, so a change of a public name shows as a change of this file; CONTRIBUTING.md says what a
change needs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pruned_rnnt.config.files import leaves
from pruned_rnnt.config.load import to_dict
from pruned_rnnt.train.experiment import ExperimentConfig

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests/public_api.txt"


def lines() -> list[str]:
    """The lines of the file."""
    names = sorted(
        {
            name
            for page in (ROOT / "docs/reference").rglob("*.md")
            for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        }
    )
    found = [line for name in names for line in _described(name, _object(name))]
    return [*found, *(f"setting {key}" for key in sorted(leaves(to_dict(ExperimentConfig()))))]


def _object(name: str) -> Any:
    """The object of a dotted name."""
    first, *rest = name.split(".")
    path, found = first, importlib.import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def _described(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{name}{_signature(found)}"
        return
    if issubclass(found, BaseException):
        yield name
        return
    fields = list(getattr(found, "_fields", ()))
    if dataclasses.is_dataclass(found):
        fields = [field.name for field in dataclasses.fields(found)]
    yield f"{name}({', '.join(fields)})" if fields else f"{name}{_signature(found)}"
    for member, value in sorted(vars(found).items()):
        if not member.startswith("_") and member not in fields and callable(value):
            yield f"{name}.{member}{_signature(value)}"


def _signature(found: Any) -> str:
    """Names, kinds and defaults of the arguments; types differ with the version of torch."""
    signature = inspect.signature(found)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
