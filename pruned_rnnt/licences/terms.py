"""What well-known licences demand of those who share something made from the licensed work, and
their names in the metadata of a model card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = "unknown"
# The identifiers that the hub accepts (hub-docs, repositories-licenses.md); others are `other` with
# a name.
_ACCEPTED = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0
cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl
ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1
lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa
unlicense zlib pddl lgpl-lr llama2 gemma unknown other
"""
_SPELLED_OTHERWISE = {
    "ODC-By-1.0": "odc-by",
    "ODbL-1.0": "odbl",
    "PDDL-1.0": "pddl",
    **{
        f"{name}-{end}": name.lower()
        for name in ("GPL-2.0", "GPL-3.0", "AGPL-3.0")
        for end in ("only", "or-later")
    },
}


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


def hub_metadata(licence: str) -> dict[str, str]:
    """`license` of a card's header, and `license_name` of one that the hub does not list."""
    name = spdx(licence)
    listed = _SPELLED_OTHERWISE.get(name, name.lower())
    if listed in _ACCEPTED.split():
        return {"license": listed}
    plain = re.sub(r"[^a-z0-9.]+", "-", listed).strip("-")
    return {"license": "other", "license_name": plain or "unnamed"}
