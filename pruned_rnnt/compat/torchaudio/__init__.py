"""torchaudio with the transducer loss of this package.

`from pruned_rnnt.compat import torchaudio`, or its modules `functional` and `transforms`:
`functional.rnnt_loss` and `transforms.RNNTLoss` are those of this package. Other names come from
the installed torchaudio, which is imported at the first use of one.
"""

from __future__ import annotations

from typing import Any

from pruned_rnnt.compat.package_names import attribute_of
from pruned_rnnt.compat.torchaudio import functional, transforms

__all__ = ["functional", "transforms"]


def __getattr__(name: str) -> Any:
    return attribute_of("torchaudio", name, __name__)
