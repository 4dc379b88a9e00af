"""A change of a public name, argument, default or setting shows as a change of public_api.txt."""

from __future__ import annotations

import difflib

from scripts.public_api import FILE, lines


def test_public_names_have_changed_only_with_their_list() -> None:
    listed = FILE.read_text(encoding="utf-8").splitlines()
    changes = [
        line
        for line in difflib.unified_diff(listed, lines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, (
        "public names differ from tests/public_api.txt; if that is intended, follow 'Public names' "
        "in CONTRIBUTING.md and run `python -m scripts.public_api`"
    )
