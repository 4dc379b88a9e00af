"""Which licence of a model contradicts which licence of what it was made from."""

from __future__ import annotations

import pytest

from pruned_rnnt.licences.terms import TERMS, contradiction, demands, hub_metadata, spdx


@pytest.mark.parametrize(
    ("licence", "origin", "reason"),
    [
        ("Apache-2.0", "CC-BY-NC-4.0", "commercial"),
        ("MIT", "CC-BY-NC-SA-4.0", "commercial"),
        ("CC-BY-4.0", "CC-BY-ND-4.0", "changed works"),
        ("CC-BY-NC-4.0", "CC-BY-NC-ND-4.0", "changed works"),
        ("Apache-2.0", "CC-BY-SA-4.0", "the same licence"),
        ("CC-BY-NC-SA-4.0", "CC-BY-SA-4.0", "the same licence"),
        ("CC-BY-SA-3.0", "CC-BY-SA-4.0", "the same licence"),
        ("GPL-3.0-or-later", "GPL-2.0-only", "the same licence"),
        ("MIT", "GPL-3.0-or-later", "the same licence"),
        ("CC0-1.0", "CC-BY-4.0", "attribution"),
        ("MyLicence", "CC-BY-NC-4.0", "not known"),
    ],
)
def test_contradictions(licence: str, origin: str, reason: str) -> None:
    assert reason in contradiction(licence, origin)


@pytest.mark.parametrize(
    ("licence", "origin"),
    [
        ("Apache-2.0", "CC-BY-4.0"),
        ("CC-BY-NC-4.0", "CC-BY-4.0"),
        ("CC-BY-NC-ND-4.0", "CC-BY-NC-4.0"),
        ("CC-BY-NC-ND-4.0", "CC-BY-NC-ND-4.0"),
        ("CC-BY-SA-4.0", "CC-BY-SA-3.0"),
        ("GPL-3.0-only", "GPL-2.0-or-later"),
        ("Apache-2.0", "CC0-1.0"),
        ("unknown", "CC-BY-NC-4.0"),
        ("Apache-2.0", "unknown"),
        ("Apache-2.0", "LDC User Agreement"),
        ("MyLicence", "CC-BY-4.0"),
    ],
)
def test_no_contradiction(licence: str, origin: str) -> None:
    assert contradiction(licence, origin) == ""


@pytest.mark.parametrize("name", sorted(TERMS))
def test_every_licence_fits_itself_and_gives_no_more_than_it_has(name: str) -> None:
    assert contradiction(name, name) == ""
    terms = TERMS[name]
    assert bool(contradiction("Apache-2.0", name)) == (
        not terms.commercial or not terms.derivatives or bool(terms.family)
    )
    assert ("no commercial use" in demands(name)) == ("-NC" in name)
    assert ("no changed works" in demands(name)) == ("-ND" in name)


def test_identifiers_have_any_case() -> None:
    assert spdx(" cc-by-4.0") == "CC-BY-4.0"
    assert spdx("LDC User Agreement") == "LDC User Agreement"


@pytest.mark.parametrize(
    ("licence", "metadata"),
    [
        ("cc-by-nc-4.0", {"license": "cc-by-nc-4.0"}),
        ("GPL-3.0-only", {"license": "gpl-3.0"}),
        ("agpl-3.0-or-later", {"license": "agpl-3.0"}),
        ("ODbL-1.0", {"license": "odbl"}),
        ("unknown", {"license": "unknown"}),
        ("CC-BY-SA-2.0", {"license": "other", "license_name": "cc-by-sa-2.0"}),
        ("LDC User Agreement", {"license": "other", "license_name": "ldc-user-agreement"}),
    ],
)
def test_names_that_the_hub_accepts(licence: str, metadata: dict[str, str]) -> None:
    assert hub_metadata(licence) == metadata
