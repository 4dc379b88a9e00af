"""Names of licences in the metadata of a model card, which the Hugging Face hub checks."""

from __future__ import annotations

import re

from pruned_rnnt.licences.terms import spdx

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


def hub_metadata(licence: str) -> dict[str, str]:
    """`license` of a card's header, and `license_name` of one that the hub does not list."""
    name = spdx(licence)
    listed = _SPELLED_OTHERWISE.get(name, name.lower())
    if listed in _ACCEPTED.split():
        return {"license": listed}
    plain = re.sub(r"[^a-z0-9.]+", "-", listed).strip("-")
    return {"license": "other", "license_name": plain or "unnamed"}
