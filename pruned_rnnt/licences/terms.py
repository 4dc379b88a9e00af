"""What well-known licences demand of those who share something made from the licensed work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a licence demands, and so what it passes on.

    attribution: the authors have to be named.
    commercial: commercial use is allowed.
    derivatives: changed works may be shared.
    family: name without the version if changed works must have the same licence, or a later
        version of it; empty if they need not.
    """

    attribution: bool = True
    commercial: bool = True
    derivatives: bool = True
    family: str = ""


def _creative_commons() -> dict[str, Terms]:
    table = {}
    for name in ("BY", "BY-SA", "BY-NC", "BY-NC-SA", "BY-ND", "BY-NC-ND"):
        for version in ("1.0", "2.0", "2.5", "3.0", "4.0"):
            table[f"CC-{name}-{version}"] = Terms(
                commercial="NC" not in name,
                derivatives="ND" not in name,
                family=f"CC-{name}" if "SA" in name else "",
            )
    return table


# By SPDX identifier. Code licences ask for their notice to be kept, which counts as attribution.
TERMS: Mapping[str, Terms] = {
    **{
        name: Terms(attribution=False)
        for name in ("CC0-1.0", "PDDL-1.0", "Unlicense", "0BSD", "MIT-0", "CDLA-Permissive-2.0")
    },
    **{
        name: Terms()
        for name in ("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "ODC-By-1.0")
    },
    **_creative_commons(),
    **{
        f"{family}-{end}": Terms(family=family.partition("-")[0])
        for family in ("GPL-2.0", "GPL-3.0", "AGPL-3.0")
        for end in ("only", "or-later")
    },
    "ODbL-1.0": Terms(family="ODbL"),
}
_NAMES = {name.lower(): name for name in TERMS}


def spdx(name: str) -> str:
    """The identifier as in TERMS, whatever its case; other names unchanged."""
    return _NAMES.get(name.strip().lower(), name.strip())


def demands(name: str) -> str:
    """What a licence of TERMS demands, in words; empty for no demands or unknown ones."""
    terms = TERMS.get(name)
    if terms is None:
        return ""
    words = {
        "attribution": terms.attribution,
        "no commercial use": not terms.commercial,
        "no changed works": not terms.derivatives,
        "the same licence for changed works": bool(terms.family),
    }
    return ", ".join(word for word, is_demanded in words.items() if is_demanded)


def contradiction(licence: str, origin: str) -> str:
    """What a licence of a model allows that the licence of something it was made from does not.

    Args:
        licence, origin: identifiers. If the terms of `origin` are unknown, nothing is known to
            contradict it. If those of `licence` are, demands beyond attribution contradict it,
            because nobody can tell whether it passes them on.

    Returns:
        The reason in words; empty if there is no contradiction.
    """
    demanded = TERMS.get(origin)
    if demanded is None or licence in (origin, UNKNOWN):
        return ""
    given = TERMS.get(licence)
    if given is None:
        strict = not (demanded.commercial and demanded.derivatives and not demanded.family)
        return f"its terms are not known here, {origin} demands {demands(origin)}" * strict
    reasons = {
        "it allows commercial use": given.commercial and not demanded.commercial,
        "it allows changed works": given.derivatives and not demanded.derivatives,
        f"{origin} demands the same licence, or a later version of it": not _is_same_or_later(
            licence, origin
        ),
        "it does not ask for attribution": demanded.attribution and not given.attribution,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _is_same_or_later(licence: str, origin: str) -> bool:
    """Whether `licence` fulfils the demand of `origin` for the same licence, if there is one."""
    family = TERMS[origin].family
    if not family:
        return True
    if TERMS[licence].family != family:
        return False
    if origin.endswith("-only"):
        return _version(licence) == _version(origin)
    return _version(licence) >= _version(origin)


def _version(name: str) -> float:
    found = re.search(r"\d+\.\d+", name)
    return float(found[0]) if found else 0.0
