"""When the words of a stream become final."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pruned_rnnt.config.checks import check_seconds

# Why words are final: a pause (the rules `pause` and `silence`), the length of the text so far (the
# rule `longest`), or the end of the stream.
Reason = Literal["pause", "length", "end"]


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The rules of an endpoint, each in seconds; 0 switches a rule off.

    A pause is the time since the last symbol, which a model emits up to its delay after it was
    spoken. The rules are checked after each chunk.

    pause: after a text.
    silence: since the last endpoint, without any text.
    longest: since the last endpoint. All complete words become final, and the others begin the next
        text.
    """

    pause: float = 1.2
    silence: float = 2.4
    longest: float = 20.0

    def __post_init__(self) -> None:
        for name in ("pause", "silence", "longest"):
            check_seconds(f"endpoints.{name}", getattr(self, name), 0, math.inf)

    def reason(self, *, seconds: float, pause: float, has_text: bool) -> Reason | None:
        """Why there is an endpoint now, if there is one.

        Args:
            seconds: since the last endpoint.
            pause: since the last symbol.
            has_text: whether there are symbols since the last endpoint.
        """
        if has_text and 0 < self.pause <= pause:
            return "pause"
        if not has_text and 0 < self.silence <= seconds:
            return "pause"
        return "length" if 0 < self.longest <= seconds else None
