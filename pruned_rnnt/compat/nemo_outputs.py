"""Which outputs of NeMo's joint are neither symbols nor the blank.

NeMo gives its losses a number of classes and logits, and for every loss name but its own `tdt` that
number counts durations as symbols. Only the joint knows better, so it notes its count in the
autograd node of its logits, where it outlasts what NeMo does to them before the loss.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

_KEY = "pruned_rnnt_joint_extra_outputs"
# Between the joint and the loss NeMo narrows, copies and converts.
_NODES = 5


def mark_outputs() -> None:
    """Make NeMo's joint note with its logits what `extra_outputs` reads. Calling it again is
    harmless."""
    try:
        module = importlib.import_module("nemo.collections.asr.modules.rnnt")
    except ImportError:
        # Models then have joints of other classes, which note nothing.
        return
    own = module.RNNTJoint.joint_after_projection
    # functools.wraps copies this attribute into what another library wraps around ours.
    if not hasattr(own, _KEY):
        module.RNNTJoint.joint_after_projection = _noting(own)


def extra_outputs(acts: Any) -> int | None:
    """Columns of a joint's logits that are durations or big blanks; None if nothing is known, as
    without gradients."""
    node: Any = acts.grad_fn if isinstance(acts, Tensor) else None
    for _ in range(_NODES):
        if node is None:
            break
        if _KEY in node.metadata:
            return int(node.metadata[_KEY])
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def joint_after_projection(self: Any, f: Tensor, g: Tensor) -> Any:
        logits = original(self, f, g)
        node: Any = logits.grad_fn if isinstance(logits, Tensor) else None
        if node is not None:
            node.metadata[_KEY] = self.num_extra_outputs
        return logits

    joint_after_projection.__dict__[_KEY] = True
    return joint_after_projection
